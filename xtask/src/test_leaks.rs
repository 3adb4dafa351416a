//! `cargo xtask test-leaks`: a thousand pods in random states, with the node killed in between, and nothing left of them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use clap::Args;

#[derive(Debug, Args)]
pub struct Arguments {
    /// How many pods come and go
    #[arg(long, default_value_t = 1_000)]
    pods: u32,

    /// Repeats a run; the run prints it
    #[arg(long)]
    seed: Option<u64>,
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    let mut command = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    command.current_dir(root).args([
        "test",
        "--package",
        "agent-sandbox-node",
        "--test",
        "leaks",
        "--",
        "--pods",
        &arguments.pods.to_string(),
    ]);
    if let Some(seed) = arguments.seed {
        command.args(["--seed", &seed.to_string()]);
    }
    let status = command.status().context("cannot run cargo")?;
    if !status.success() {
        bail!("something is left of the pods, or a pod never went; the output above says what");
    }
    Ok(())
}
