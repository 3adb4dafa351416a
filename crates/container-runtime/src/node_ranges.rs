//! Shares of the machine: each node has a range of addresses and identities of its own, by a number written down where every
//! node of the machine looks.
//!
//! A claim outlives its process, as the pods do. A lock on its file says whether the process is there, so that what a dead
//! one left can be told from what is in use.

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

/// How many claims this process has made: their names differ, even if two are made at the same moment.
static CLAIMS: AtomicU32 = AtomicU32::new(0);

#[derive(Debug, thiserror::Error)]
pub enum NodeRangesError {
    #[error("claiming a share of this machine in {}", registry.display())]
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

/// Where nodes with root keep their claims. Without root the network is the node's own, and there is nobody to share with.
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

/// A claimed share.
#[derive(Debug)]
pub struct NodeRanges {
    number: u32,
    path: PathBuf,
    /// Locked while the process is the node.
    file: Mutex<Option<File>>,
}

impl NodeRanges {
    pub fn index(&self) -> u32 {
        self.number
    }

    /// The process is no longer the node; its pods are, and keep the share.
    pub fn let_go(&self) {
        self.file
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    /// Nothing of the node is left that needs the share.
    pub fn give_back(&self) {
        let _ = fs::remove_file(&self.path);
        self.let_go();
    }
}

/// What the registry says of one share.
struct Claim {
    number: u32,
    path: PathBuf,
    owner: PathBuf,
    file: File,
}

fn claims(registry: &Path) -> Vec<Claim> {
    (0..NODES_MAX)
        .filter_map(|number| {
            let path = registry.join(number.to_string());
            let owner = PathBuf::from(std::ffi::OsString::from_vec(fs::read(&path).ok()?));
            let file = File::open(&path).ok()?;
            Some(Claim {
                number,
                path,
                owner,
                file,
            })
        })
        .collect()
}

impl Claim {
    /// Whether its process is there.
    fn is_attended(&self) -> bool {
        let found = self.file.try_lock_shared();
        let _ = self.file.unlock();
        matches!(found, Err(TryLockError::WouldBlock))
    }

    /// Whether this is still what its name leads to.
    fn is_in_place(&self) -> bool {
        let named = fs::metadata(&self.path).map(|found| found.ino());
        let opened = self.file.metadata().map(|found| found.ino());
        matches!((named, opened), (Ok(named), Ok(opened)) if named == opened)
    }
}

/// Takes the share that a data directory has, if it has one and no process is the node there.
pub fn take_over(registry: &Path, data_dir: &Path) -> Result<Option<NodeRanges>, NodeRangesError> {
    loop {
        let mut known = claims(registry).into_iter();
        let Some(own) = known.find(|claim| claim.owner == data_dir) else {
            return Ok(None);
        };
        match lock(&own.file) {
            // Whoever had it gave it back meanwhile.
            Ok(()) if !own.is_in_place() => {}
            Ok(()) => {
                return Ok(Some(NodeRanges {
                    number: own.number,
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

/// Claims a share for a data directory: the one it has, the one it had before the machine was started, or another.
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
    if let Some(share) = take_over(registry, data_dir)? {
        return Ok(share);
    }
    // A claim appears whole and locked: it is written under another name first.
    let first_name = registry.join(format!(
        ".{}-{}",
        std::process::id(),
        CLAIMS.fetch_add(1, Ordering::Relaxed)
    ));
    let placed = write_claim(&first_name, data_dir)
        .and_then(|file| Ok((place(registry, &first_name, preferred)?, file)));
    let _ = fs::remove_file(&first_name);
    let (Some(number), file) = placed.map_err(failed)? else {
        let owners = claims(registry).into_iter();
        let owners = owners.map(|claim| claim.owner).collect();
        return Err(NodeRangesError::AllTaken(owners));
    };
    Ok(NodeRanges {
        number,
        path: registry.join(number.to_string()),
        file: Mutex::new(Some(file)),
    })
}

/// Locks a claim. Somebody who only looks whether it is locked holds it for a moment, and so does a process that is just being
/// started by the one that had it; on a busy machine the moment may be long.
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

/// Gives a claim the name of the first share that nobody has.
fn place(registry: &Path, claim: &Path, preferred: u32) -> io::Result<Option<u32>> {
    for offset in 0..NODES_MAX {
        let number = (preferred % NODES_MAX + offset) % NODES_MAX;
        match fs::hard_link(claim, registry.join(number.to_string())) {
            Ok(()) => return Ok(Some(number)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Whether a process is the node of `data_dir` now.
pub fn is_attended(registry: &Path, data_dir: &Path) -> bool {
    claims(registry)
        .iter()
        .any(|claim| claim.owner == data_dir && claim.is_attended())
}

/// Data directories that have a share and no process. Their pods may well run.
pub fn unattended(registry: &Path) -> Vec<PathBuf> {
    claims(registry)
        .into_iter()
        .filter(|claim| !claim.is_attended())
        .map(|claim| claim.owner)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for what holds unless another test just starts a process, which has the lock until it is one of its own.
    fn soon(what: &str, holds: impl Fn() -> bool) {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(std::time::Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn two_data_directories_get_different_shares_and_keep_them() {
        let registry = tempfile::tempdir().unwrap();
        let (first, second) = (Path::new("/data/one"), Path::new("/data/two"));
        let one = claim(registry.path(), first, 7).unwrap();
        let two = claim(registry.path(), second, 7).unwrap();
        assert_ne!(one.index(), two.index());
        let number = one.index();
        one.let_go();
        assert_eq!(claim(registry.path(), first, 7).unwrap().index(), number);
        assert_eq!(
            fs::read_dir(registry.path()).unwrap().count(),
            2,
            "nothing but the claims is left"
        );
    }

    #[test]
    fn nodes_of_one_process_do_not_get_in_each_others_way() {
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
            claimed.iter().for_each(NodeRanges::give_back);
        }
    }

    #[test]
    fn one_process_is_the_node_of_a_data_directory() {
        let registry = tempfile::tempdir().unwrap();
        let directory = Path::new("/data/one");
        let held = claim(registry.path(), directory, 0).unwrap();
        assert!(is_attended(registry.path(), directory));
        assert!(unattended(registry.path()).is_empty());
        let refused = claim(registry.path(), directory, 0).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "another process is the node of /data/one"
        );
        held.let_go();
        soon("nobody is the node", || {
            !is_attended(registry.path(), directory) && unattended(registry.path()) == [directory]
        });
    }

    #[test]
    fn a_share_that_is_given_back_while_another_waits_for_it_is_claimed_anew() {
        let registry = tempfile::tempdir().unwrap();
        let directory = Path::new("/data/one");
        let held = claim(registry.path(), directory, 0).unwrap();
        let waiting = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                loop {
                    match claim(registry.path(), directory, 0) {
                        Ok(share) => break share,
                        Err(NodeRangesError::InUse(_)) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
            held.give_back();
            waiting.join().unwrap()
        });
        assert!(is_attended(registry.path(), directory));
        waiting.let_go();
        soon("it is still there", || {
            unattended(registry.path()) == [directory]
        });
    }

    #[test]
    fn a_full_machine_names_who_fills_it_and_how_to_make_room() {
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
        held[4].give_back();
        assert!(claim(registry.path(), Path::new("/data/more"), 3).is_ok());
    }
}
