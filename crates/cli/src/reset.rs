//! `reset`: removes what a system that no longer runs has left on this machine.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use container_runtime::reclaim::{Reclaimed, reclaim};

use crate::data_directory::{self, Running};

/// End the sandboxes of a system that no longer runs, and give back what it holds of this machine
///
/// Sandboxes outlive `up` and `node`, so that these can be restarted. When they will not be, this ends what still runs and
/// removes mounts, network links, rules, cgroups and the reservation of addresses and UIDs. Files stay; delete the data
/// directory if nothing in it is needed.
#[derive(Debug, Args)]
pub struct Arguments {
    /// The data directory of the `up` or the `node` that is gone; it may be gone as well
    #[arg(long, value_name = "DIRECTORY")]
    data_dir: Option<PathBuf>,
}

pub async fn execute(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let given = match arguments.data_dir {
        Some(directory) => directory,
        None => data_directory::default_path()?,
    };
    let directory = absolute(&given)?;
    if let Some(running) = Running::find(&directory) {
        bail!(
            "`up` is running from {} with process {}; stop it first",
            directory.display(),
            running.pid
        );
    }
    let mut nothing = true;
    // That of `up`, whose node has a folder of its own in it, or that of a node.
    for directory in [directory.join("node"), directory.clone()] {
        let reclaimed = reclaim(&directory)
            .await
            .with_context(|| format!("cannot give back what {} holds", directory.display()))?;
        if !reclaimed.is_nothing() {
            nothing = false;
            println!("{}: {}", directory.display(), described(&reclaimed));
        }
    }
    if nothing {
        println!("nothing of {} was left", directory.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// The path by which a node knew its directory, also when it is gone.
fn absolute(directory: &Path) -> anyhow::Result<PathBuf> {
    match directory.canonicalize() {
        Ok(found) => Ok(found),
        Err(_) => std::path::absolute(directory)
            .with_context(|| format!("{} is no path", directory.display())),
    }
}

fn described(reclaimed: &Reclaimed) -> String {
    let count = |number: usize, one: &str| match number {
        1 => format!("1 {one}"),
        more => format!("{more} {one}s"),
    };
    let mut parts = vec![
        count(reclaimed.groups, "cgroup"),
        count(reclaimed.mounts, "mount"),
        count(reclaimed.links, "network link"),
    ];
    if reclaimed.ranges {
        parts.push("its addresses and UIDs".to_owned());
    }
    format!("gave back {}", parts.join(", "))
}
