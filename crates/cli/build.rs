//! Hands the commit and its date to the program, for `--version` and `agent_sandbox_build_info`.
//!
//! Both come from git, so that the same commit always gives the same program. A build without a repository, such as that of an image, is given them by
//! `AGENT_SANDBOX_GIT_COMMIT` and `AGENT_SANDBOX_BUILD_DATE`. This is the last crate that is built: a new commit compiles no other one again.

use std::path::Path;
use std::process::Command;

const UNKNOWN: &str = "unknown";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    hand_over("AGENT_SANDBOX_GIT_COMMIT", &["rev-parse", "HEAD"]);
    hand_over("AGENT_SANDBOX_BUILD_DATE", &["log", "-1", "--format=%cI"]);
    // The log of HEAD grows with every commit, checkout and merge; a clone that has none has a HEAD that changes.
    for file in ["logs/HEAD", "HEAD"] {
        let path = git(&["rev-parse", "--git-path", file]);
        if let Some(path) = path.filter(|path| Path::new(path).exists()) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
}

/// Sets the variable for the compiler: to what the environment says, else to what git says.
fn hand_over(variable: &str, question: &[&str]) {
    println!("cargo::rerun-if-env-changed={variable}");
    let given = std::env::var(variable)
        .ok()
        .filter(|value| !value.is_empty());
    let value = given.or_else(|| git(question));
    println!(
        "cargo::rustc-env={variable}={}",
        value.as_deref().unwrap_or(UNKNOWN)
    );
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.trim();
    (output.status.success() && !line.is_empty()).then(|| line.to_owned())
}
