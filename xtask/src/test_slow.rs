//! `cargo xtask test-slow`: what takes too long for `.ci/run`. Whoever runs it notes date and result in `docs/benchmarks.md`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Args;

use crate::test_clients;

#[derive(Debug, Args)]
pub struct Arguments {
    /// The binary to test [default: it is built]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,

    /// Use the image archives that `cargo xtask dist` wrote there [default: images are made of the binary]
    #[arg(long, value_name = "DIRECTORY")]
    images: Option<PathBuf>,
}

pub fn run(root: &Path, arguments: &Arguments) -> anyhow::Result<()> {
    let binary = match &arguments.binary {
        Some(binary) => std::path::absolute(binary)?,
        None => test_clients::build_binary_with_bench(root)?,
    };
    let xtask = std::env::current_exe()?;
    let mut cluster = Command::new(&xtask);
    cluster.arg("test-cluster").arg("--binary").arg(&binary);
    if let Some(images) = &arguments.images {
        cluster.arg("--images").arg(images);
    }
    let mut attacks = Command::new(&xtask);
    attacks.arg("test-attacks");
    // As many claims as its default, of which `.ci/run` makes a twentieth.
    let mut leaks = Command::new(binary.with_file_name("agent-sandbox-bench"));
    leaks.arg("leaks");
    let mut failed = Vec::new();
    for (name, command) in [
        ("test-cluster", &mut cluster),
        ("test-attacks", &mut attacks),
        ("leaks", &mut leaks),
    ] {
        println!("== {name}");
        let begin = Instant::now();
        let status = command
            .current_dir(root)
            .status()
            .with_context(|| format!("cannot start {command:?}"))?;
        println!("-- {name}: {status}, {} s", begin.elapsed().as_secs());
        if !status.success() {
            failed.push(name);
        }
    }
    if !failed.is_empty() {
        bail!("these failed: {}", failed.join(", "));
    }
    Ok(())
}
