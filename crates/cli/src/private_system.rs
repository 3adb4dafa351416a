//! A complete system for one command, in a temporary data directory, removed afterwards.
//!
//! A process that was killed leaves its directory behind; the next process to start removes it. A file in each directory is locked
//! while its process runs, and the parent directory is locked while a directory is created or taken over. A directory without that
//! file belongs to another program, whatever its name.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use container_runtime::privileges::{Privileges, ROOTLESS_LIMITS};
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use crate::output::chain;
use crate::up::{Options, Quickstart, Up};
use crate::{data_directory, rootless};

/// How the directories are named.
const PREFIX: &str = "run-";
/// The file that is locked as long as the directory is in use.
const IN_USE: &str = "private-system";

pub struct PrivateSystem {
    pub up: Up,
    _directory: Directory,
}

impl PrivateSystem {
    pub async fn start() -> anyhow::Result<Self> {
        let parent = data_directory::default_path()?;
        data_directory::create(&parent)?;
        rootless::enter(&parent.join("bin"), &[])?;
        if Privileges::current() == Privileges::Rootless {
            eprintln!("{ROOTLESS_LIMITS}");
        }
        sweep(&parent).await;
        let directory = Directory::create(parent).await?;
        let up = Up::start(Options {
            quickstart: Quickstart::Template,
            ..Options::new(directory.path.path())
        })
        .await?;
        if up.unenforced_policies().is_some() {
            eprintln!(
                "without nft the sandbox has no network but its resolver: it reaches neither this machine nor anything beyond; \
                 install nftables"
            );
        }
        Ok(Self {
            up,
            _directory: directory,
        })
    }

    pub async fn stop(self) -> anyhow::Result<()> {
        self.up.stop_with_sandboxes().await
    }
}

/// A directory that is locked as long as it is in use.
struct Directory {
    path: TempDir,
    _in_use: File,
}

impl Directory {
    async fn create(parent: PathBuf) -> anyhow::Result<Self> {
        let created = tokio::task::spawn_blocking(move || {
            let _alone = lock(&parent, FlockOperation::LockExclusive)?;
            // Only its owner may enter a data directory, whatever the umask.
            let path = tempfile::Builder::new()
                .prefix(PREFIX)
                .permissions(fs::Permissions::from_mode(0o700))
                .tempdir_in(parent)?;
            let in_use = File::create(path.path().join(IN_USE))?;
            flock(&in_use, FlockOperation::NonBlockingLockExclusive)?;
            Ok::<_, io::Error>(Self {
                path,
                _in_use: in_use,
            })
        });
        created
            .await?
            .context("cannot make a directory for the system of this call")
    }
}

fn lock(path: &Path, operation: FlockOperation) -> io::Result<File> {
    let file = File::open(path)?;
    flock(&file, operation)?;
    Ok(file)
}

/// Removes what killed processes have left in `parent`: cgroups, mounts, links and files. A directory that cannot be removed stays for
/// the next process to try.
pub async fn sweep(parent: &Path) {
    for directory in left_behind(parent) {
        let Some(_alone) = claim(parent, &directory).await else {
            continue;
        };
        if let Err(error) = give_back(&directory).await {
            tracing::warn!(
                directory = %directory.display(),
                error = chain(&error),
                "cannot remove what a killed run has left"
            );
        }
    }
}

fn left_behind(parent: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            entry
                .file_name()
                .as_encoded_bytes()
                .starts_with(PREFIX.as_bytes())
        })
        .map(|entry| entry.path())
        .filter(|path| path.join(IN_USE).is_file())
        .collect()
}

/// Locks a directory that no process uses. A directory that is being created is not locked yet, but its parent is.
async fn claim(parent: &Path, directory: &Path) -> Option<File> {
    let (parent, directory) = (parent.to_owned(), directory.to_owned());
    let claimed = tokio::task::spawn_blocking(move || {
        let _alone = lock(&parent, FlockOperation::LockExclusive)?;
        lock(
            &directory.join(IN_USE),
            FlockOperation::NonBlockingLockExclusive,
        )
    });
    claimed.await.ok()?.ok()
}

async fn give_back(directory: &Path) -> anyhow::Result<()> {
    // Without root only files are left: mounts and links went with the namespaces of the process.
    if Privileges::current() == Privileges::Root {
        let node = directory.canonicalize()?.join("node");
        container_runtime::reclaim::reclaim(&node).await?;
    }
    fs::remove_dir_all(directory)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn directories_of_processes_that_are_gone_are_removed_and_others_stay() {
        let parent = tempfile::tempdir().unwrap();
        let in_use = Directory::create(parent.path().to_owned()).await.unwrap();
        let Directory {
            path,
            _in_use: in_use_by_another,
        } = Directory::create(parent.path().to_owned()).await.unwrap();
        let left = path.keep();
        fs::write(left.join("file"), "").unwrap();
        let other = parent.path().join("run-of-another-program");
        fs::create_dir(&other).unwrap();
        sweep(parent.path()).await;
        assert!(left.exists(), "its process still runs");
        drop(in_use_by_another);
        sweep(parent.path()).await;
        assert!(!left.exists());
        assert!(in_use.path.path().exists() && other.exists());
    }
}
