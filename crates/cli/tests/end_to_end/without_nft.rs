//! A machine without nftables. Needs root: it starts containers.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{agent_sandbox, require_root, run};

/// Hides `nft` from a program in a mount namespace: the node does not search `PATH` for it.
const HIDE: &str = "for directory in /usr/sbin /sbin; do \
    if [ -e $directory/nft ]; then mount -t tmpfs none $directory; fi; done; exec \"$@\"";

fn without_nft(home: &Path) -> Command {
    require_root();
    let program = agent_sandbox(home);
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", HIDE, "sh"])
        .arg(program.get_program())
        .env("AGENT_SANDBOX_HOME", home)
        .env_remove("KUBECONFIG")
        .stdin(Stdio::null());
    command
}

#[test]
fn a_command_runs_and_prints_what_is_weaker() {
    let home = tempfile::tempdir().unwrap();
    let output = run(without_nft(home.path()).args(["run", "--", "echo", "hi"]));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.stdout, b"hi\n", "{stderr}");
    assert!(output.status.success());
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains("install nftables"), "{stderr}");
}

#[test]
fn a_system_says_what_waits_and_what_to_install() {
    let home = tempfile::tempdir().unwrap();
    let mut up = without_nft(home.path())
        .args(["up", "--no-quickstart", "--api-listen=127.0.0.1:0"])
        .args(["--router-listen=127.0.0.1:0"])
        .args(["--metrics-bind-address=127.0.0.1:0"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let greeting = BufReader::new(up.stdout.take().unwrap()).lines();
    let greeted = greeting
        .map_while(Result::ok)
        .any(|line| line.contains("--help"));
    // The warning follows the greeting, so it has been printed when `up` has stopped.
    let _ = kill_process(Pid::from_child(&up), Signal::TERM);
    let output = up.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(greeted && output.status.success(), "{stderr}");
    let warning = stderr.lines().find(|line| line.starts_with("warning: "));
    let warning = warning.unwrap_or_else(|| panic!("it does not warn: {stderr}"));
    assert!(
        warning.contains("NetworkPolicyNotEnforced") && warning.contains("install nftables"),
        "{warning}"
    );
}
