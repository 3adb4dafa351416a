//! The ranges of a node: every node of a machine has its own UID ranges, pod addresses and priorities of routing rules. They follow
//! from the node's index, which it claims in a registry that all nodes of the machine share.
//!
//! A claim is a file with the path of the node's data directory. It outlives the node's process, as the pods do. The process holds
//! a lock on the file, so that a claim whose process has died can be recognized.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::privileges::Privileges;
use pod_network::names::NODES_MAX;

/// Counts the claims of this process, so that concurrent ones have different temporary names.
static CLAIMS: AtomicU32 = AtomicU32::new(0);

#[derive(Debug, thiserror::Error)]
pub enum NodeRangesError {
    #[error("claiming ranges of UIDs and addresses in {}", registry.display())]
    Io {
        registry: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("another process is the node of {}", .0.display())]
    InUse(PathBuf),
    #[error(
        "a machine can have {NODES_MAX} nodes, and has them, of these data directories: {}; delete the pods of one and stop it, or \
         give back what one whose process is gone has left, with `agent-sandbox reset --data-dir DIRECTORY`",
        list(.0)
    )]
    AllTaken(Vec<PathBuf>),
}

fn list(directories: &[PathBuf]) -> String {
    let shown: Vec<String> = directories
        .iter()
        .map(|directory| directory.display().to_string())
        .collect();
    shown.join(", ")
}

/// The directory of claims. A node without root has a network and a user namespace of its own, so its registry is its own, too.
pub fn registry(data_dir: &Path) -> PathBuf {
    match Privileges::current() {
        Privileges::Root => PathBuf::from("/run/agent-sandbox/shares"),
        Privileges::Rootless | Privileges::None => data_dir.join("shares"),
    }
}

/// The file that all nodes of a machine lock while they change its routing rules.
pub fn rules_lock(registry: &Path) -> PathBuf {
    registry.join("routing-rules.lock")
}

/// The claimed ranges of a node.
#[derive(Debug)]
pub struct NodeRanges {
    index: u32,
    path: PathBuf,
    /// Locked while this process is the node.
    file: Mutex<Option<File>>,
}

impl NodeRanges {
    /// The node's index on this machine, below [`NODES_MAX`].
    pub fn index(&self) -> u32 {
        self.index
    }

    /// Unlocks the claim: this process is no longer the node. Its pods continue and keep the ranges.
    pub fn unlock(&self) {
        self.file
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    /// Removes the claim. Nothing of the node may be left.
    pub fn release(&self) {
        let _ = fs::remove_file(&self.path);
        self.unlock();
    }
}

/// A claim in the registry.
struct Claim {
    index: u32,
    path: PathBuf,
    owner: PathBuf,
    file: File,
}

fn claims(registry: &Path) -> Vec<Claim> {
    (0..NODES_MAX)
        .filter_map(|index| {
            let path = registry.join(index.to_string());
            let owner = PathBuf::from(std::ffi::OsString::from_vec(fs::read(&path).ok()?));
            let file = File::open(&path).ok()?;
            Some(Claim {
                index,
                path,
                owner,
                file,
            })
        })
        .collect()
}

impl Claim {
    /// Whether the node's process is running.
    fn is_locked(&self) -> bool {
        let found = self.file.try_lock_shared();
        let _ = self.file.unlock();
        matches!(found, Err(TryLockError::WouldBlock))
    }

    /// Whether the opened file is still the one at its path.
    fn is_in_place(&self) -> bool {
        let named = fs::metadata(&self.path).map(|found| found.ino());
        let opened = self.file.metadata().map(|found| found.ino());
        matches!((named, opened), (Ok(named), Ok(opened)) if named == opened)
    }
}

/// Locks the existing claim of a data directory. Fails if another process is the node there.
pub fn take_over(registry: &Path, data_dir: &Path) -> Result<Option<NodeRanges>, NodeRangesError> {
    loop {
        let mut known = claims(registry).into_iter();
        let Some(own) = known.find(|claim| claim.owner == data_dir) else {
            return Ok(None);
        };
        match lock(&own.file) {
            // The previous process has removed it in the meantime.
            Ok(()) if !own.is_in_place() => {}
            Ok(()) => {
                return Ok(Some(NodeRanges {
                    index: own.index,
                    path: own.path,
                    file: Mutex::new(Some(own.file)),
                }));
            }
            Err(TryLockError::WouldBlock) => {
                return Err(NodeRangesError::InUse(data_dir.to_owned()));
            }
            Err(TryLockError::Error(source)) => {
                let registry = registry.to_owned();
                return Err(NodeRangesError::Io { registry, source });
            }
        }
    }
}

/// Claims ranges for a data directory: those that it has, the preferred index (the one from before a reboot), or the next free one.
pub fn claim(
    registry: &Path,
    data_dir: &Path,
    preferred: u32,
) -> Result<NodeRanges, NodeRangesError> {
    let failed = |source| NodeRangesError::Io {
        registry: registry.to_owned(),
        source,
    };
    fs::create_dir_all(registry).map_err(failed)?;
    if let Some(ranges) = take_over(registry, data_dir)? {
        return Ok(ranges);
    }
    // Written and locked under a temporary name, so that a claim is never visible incomplete or unlocked.
    let temporary = registry.join(format!(
        ".{}-{}",
        std::process::id(),
        CLAIMS.fetch_add(1, Ordering::Relaxed)
    ));
    let placed = write_claim(&temporary, data_dir)
        .and_then(|file| Ok((place(registry, &temporary, preferred)?, file)));
    let _ = fs::remove_file(&temporary);
    let (Some(index), file) = placed.map_err(failed)? else {
        let owners = claims(registry).into_iter();
        let owners = owners.map(|claim| claim.owner).collect();
        return Err(NodeRangesError::AllTaken(owners));
    };
    Ok(NodeRanges {
        index,
        path: registry.join(index.to_string()),
        file: Mutex::new(Some(file)),
    })
}

/// Locks a claim, with retries. [`Claim::is_locked`] holds the lock for a short time, and so does a child that the previous process
/// is just starting (between fork and exec); on a busy machine that may take long.
fn lock(file: &File) -> Result<(), TryLockError> {
    const ATTEMPTS: u32 = 400;
    const PAUSE: Duration = Duration::from_millis(5);
    for _ in 1..ATTEMPTS {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            other => return other,
        }
    }
    file.try_lock()
}

fn write_claim(path: &Path, data_dir: &Path) -> io::Result<File> {
    let mut file = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    file.write_all(data_dir.as_os_str().as_bytes())?;
    file.try_lock()?;
    Ok(file)
}

/// Links a claim to the first free index, starting with the preferred one.
fn place(registry: &Path, claim: &Path, preferred: u32) -> io::Result<Option<u32>> {
    for offset in 0..NODES_MAX {
        let index = (preferred % NODES_MAX + offset) % NODES_MAX;
        match fs::hard_link(claim, registry.join(index.to_string())) {
            Ok(()) => return Ok(Some(index)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Whether the node of `data_dir` is running.
pub fn is_running(registry: &Path, data_dir: &Path) -> bool {
    claims(registry)
        .iter()
        .any(|claim| claim.owner == data_dir && claim.is_locked())
}

/// The data directories whose node has claimed ranges and is not running. Their pods may be running.
pub fn stopped(registry: &Path) -> Vec<PathBuf> {
    claims(registry)
        .into_iter()
        .filter(|claim| !claim.is_locked())
        .map(|claim| claim.owner)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits until a condition holds: a child that another test is just starting holds a copy of the lock until its exec.
    fn soon(what: &str, holds: impl Fn() -> bool) {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(std::time::Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn two_data_directories_get_different_ranges_and_keep_them() {
        let registry = tempfile::tempdir().unwrap();
        let (first, second) = (Path::new("/data/one"), Path::new("/data/two"));
        let one = claim(registry.path(), first, 7).unwrap();
        let two = claim(registry.path(), second, 7).unwrap();
        assert_ne!(one.index(), two.index());
        let index = one.index();
        one.unlock();
        assert_eq!(claim(registry.path(), first, 7).unwrap().index(), index);
        assert_eq!(
            fs::read_dir(registry.path()).unwrap().count(),
            2,
            "nothing but the claims is left"
        );
    }

    #[test]
    fn concurrent_claims_of_one_process_all_succeed() {
        let registry = tempfile::tempdir().unwrap();
        for _ in 0..50 {
            let start = std::sync::Barrier::new(4);
            let claimed: Vec<NodeRanges> = std::thread::scope(|scope| {
                let claiming: Vec<_> = (0..4)
                    .map(|number| {
                        let (start, registry) = (&start, registry.path());
                        scope.spawn(move || {
                            start.wait();
                            claim(registry, &PathBuf::from(format!("/data/{number}")), 0).unwrap()
                        })
                    })
                    .collect();
                claiming
                    .into_iter()
                    .map(|claiming| claiming.join().unwrap())
                    .collect()
            });
            let mut owners: Vec<PathBuf> = claims(registry.path())
                .into_iter()
                .map(|claim| claim.owner)
                .collect();
            owners.sort();
            let expected: Vec<PathBuf> = (0..4)
                .map(|number| format!("/data/{number}").into())
                .collect();
            assert_eq!(owners, expected);
            claimed.iter().for_each(NodeRanges::release);
        }
    }

    #[test]
    fn one_process_is_the_node_of_a_data_directory() {
        let registry = tempfile::tempdir().unwrap();
        let directory = Path::new("/data/one");
        let held = claim(registry.path(), directory, 0).unwrap();
        assert!(is_running(registry.path(), directory));
        assert!(stopped(registry.path()).is_empty());
        let refused = claim(registry.path(), directory, 0).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "another process is the node of /data/one"
        );
        held.unlock();
        soon("no process is the node", || {
            !is_running(registry.path(), directory) && stopped(registry.path()) == [directory]
        });
    }

    #[test]
    fn a_claim_that_is_removed_while_another_process_waits_for_it_is_made_again() {
        let registry = tempfile::tempdir().unwrap();
        let directory = Path::new("/data/one");
        let held = claim(registry.path(), directory, 0).unwrap();
        let waiting = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                loop {
                    match claim(registry.path(), directory, 0) {
                        Ok(ranges) => break ranges,
                        Err(NodeRangesError::InUse(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
            held.release();
            waiting.join().unwrap()
        });
        assert!(is_running(registry.path(), directory));
        waiting.unlock();
        soon("the claim is still there", || {
            stopped(registry.path()) == [directory]
        });
    }

    #[test]
    fn a_machine_with_too_many_nodes_lists_them_and_the_command_that_frees_one() {
        let registry = tempfile::tempdir().unwrap();
        let name = |number: u32| PathBuf::from(format!("/data/{number}"));
        let held: Vec<NodeRanges> = (0..NODES_MAX)
            .map(|number| claim(registry.path(), &name(number), 3).unwrap())
            .collect();
        let refused = claim(registry.path(), Path::new("/data/more"), 3).unwrap_err();
        let text = refused.to_string();
        for number in 0..NODES_MAX {
            assert!(text.contains(&format!("/data/{number}")), "{text}");
        }
        assert!(
            text.contains("agent-sandbox reset --data-dir DIRECTORY"),
            "{text}"
        );
        held[4].release();
        assert!(claim(registry.path(), Path::new("/data/more"), 3).is_ok());
    }
}
