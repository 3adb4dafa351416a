//! `agent-sandbox bench` executes `agent-sandbox-bench`. A script stands in for it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::support::run;

const SCRIPT: &str = "#!/bin/sh\necho \"$0: $*\"\nexit 7\n";

/// A directory with this program, but without `agent-sandbox-bench`.
fn installation() -> (TempDir, PathBuf) {
    // A hard link, which needs the file system of the program: a symbolic link would be resolved.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let program = directory.path().join("agent-sandbox");
    fs::hard_link(env!("CARGO_BIN_EXE_agent-sandbox"), &program).unwrap();
    (directory, program)
}

fn install_script(directory: &Path) -> PathBuf {
    let script = directory.join("agent-sandbox-bench");
    fs::write(&script, SCRIPT).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    script
}

fn bench(program: &Path, path: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("bench").env("PATH", path).stdin(Stdio::null());
    command
}

#[test]
fn arguments_and_exit_code_pass_through_the_bench_command() {
    let (directory, program) = installation();
    let in_path = tempfile::tempdir().unwrap();
    let other = install_script(in_path.path());
    let arguments = ["load", "--claims=3", "--", "-x", "--help"];
    let output = run(bench(&program, in_path.path()).args(arguments));
    assert_eq!(output.status.code(), Some(7));
    let printed = String::from_utf8(output.stdout).unwrap();
    let expected = format!("{}: load --claims=3 -- -x --help\n", other.display());
    assert_eq!(printed, expected, "the program in PATH");

    let beside = install_script(directory.path());
    let output = run(bench(&program, in_path.path()).arg("--help"));
    assert_eq!(output.status.code(), Some(7));
    let printed = String::from_utf8(output.stdout).unwrap();
    let expected = format!("{}: --help\n", beside.display());
    assert_eq!(printed, expected, "the program beside comes first");
}

#[test]
fn a_missing_bench_program_is_one_line_with_the_remedy() {
    let (_directory, program) = installation();
    let nowhere = tempfile::tempdir().unwrap();
    let output = run(bench(&program, nowhere.path()).arg("leaks"));
    assert_eq!(output.status.code(), Some(1));
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert_eq!(complaint.lines().count(), 1, "{complaint}");
    let remedy = "cargo build --release -p agent-sandbox-bench";
    assert!(complaint.contains(remedy), "{complaint}");
}
