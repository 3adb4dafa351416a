//! `agent-sandbox bench`: executes `agent-sandbox-bench`, a program of its own, so that no code that only measures is in this one.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, anyhow};
use clap::Args;

const PROGRAM: &str = "agent-sandbox-bench";

/// Measure the parts and the whole, with the program agent-sandbox-bench
#[derive(Debug, Args)]
// The other program prints its help.
#[command(disable_help_flag = true)]
pub struct Arguments {
    /// Arguments of agent-sandbox-bench; --help lists the measurements
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGUMENT"
    )]
    arguments: Vec<OsString>,
}

/// Replaces this process by `agent-sandbox-bench`, whose exit code becomes that of the command. Returns only an error.
pub fn execute(arguments: &Arguments) -> anyhow::Error {
    match find() {
        Ok(program) => {
            let error = Command::new(&program)
                // For the usage lines of its help.
                .arg0("agent-sandbox bench")
                .args(&arguments.arguments)
                .exec();
            anyhow!(error).context(format!("cannot execute {}", program.display()))
        }
        Err(error) => error,
    }
}

/// The program beside this one, else the one in `PATH`.
fn find() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program")?;
    let path = std::env::var_os("PATH").unwrap_or_default();
    find_in(&own, &path).with_context(|| {
        format!(
            "there is no {PROGRAM} beside {} or in PATH; build it with `cargo build --release -p {PROGRAM}`",
            own.display()
        )
    })
}

fn find_in(own: &Path, path: &OsStr) -> Option<PathBuf> {
    let beside = own.with_file_name(PROGRAM);
    let in_path = std::env::split_paths(path).map(|directory| directory.join(PROGRAM));
    std::iter::once(beside)
        .chain(in_path)
        .find(|candidate| candidate.is_file())
}
