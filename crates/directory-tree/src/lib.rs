//! Measures directory trees that a container created, gives them to a group, and removes them.
//!
//! The container may be hostile. A path may be longer than the kernel accepts, a tree deeper than any stack, and a symlink may point
//! anywhere, or replace a directory at any time (TOCTOU). So this crate does not recurse, follows no symlink, and opens each file by
//! its last component, relative to the descriptor of its directory.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};

/// The size of a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: u64,
    pub inodes: u64,
    /// Whether the tree was too deep to be measured completely.
    pub unfathomable: bool,
}

impl Usage {
    pub fn include(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.inodes = self.inodes.saturating_add(other.inodes);
        self.unfathomable |= other.unfathomable;
    }
}

/// The maximum depth: more than any legitimate program needs, and few enough open descriptors.
const DEEPEST: usize = 200;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty())?)
}

/// Measures `path` and everything below it; zero if it does not exist. Stops once there are more than `enough` bytes.
pub fn measure(path: &Path, enough: u64) -> io::Result<Usage> {
    const BLOCK: u64 = 512;
    let mut usage = Usage::default();
    let root = match open(path) {
        Ok(root) => root,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(usage),
        // `path` is a file.
        Err(_) => {
            let found = std::fs::symlink_metadata(path)?;
            usage.inodes = 1;
            usage.bytes = std::os::unix::fs::MetadataExt::blocks(&found) * BLOCK;
            return Ok(usage);
        }
    };
    let mut open_directories = vec![(Dir::read_from(&root)?, root)];
    usage.inodes = 1;
    loop {
        let depth = open_directories.len();
        let Some((entries, directory)) = open_directories.last_mut() else {
            break;
        };
        let Some(entry) = entries.next() else {
            open_directories.pop();
            continue;
        };
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let Ok(found) = rustix::fs::statat(&*directory, name, AtFlags::SYMLINK_NOFOLLOW) else {
            // Removed in the meantime.
            continue;
        };
        usage.inodes += 1;
        usage.bytes += u64::try_from(found.st_blocks).unwrap_or(0) * BLOCK;
        if usage.bytes > enough {
            break;
        }
        if FileType::from_raw_mode(found.st_mode) != FileType::Directory {
            continue;
        }
        if depth >= DEEPEST {
            usage.unfathomable = true;
            continue;
        }
        if let Ok(below) = rustix::fs::openat(&*directory, name, DIRECTORY, Mode::empty()) {
            open_directories.push((Dir::read_from(&below)?, below));
        }
    }
    Ok(usage)
}

/// Gives a tree to a group, unless its root belongs to the group already. The root comes last, so that an interrupted walk is
/// repeated.
pub fn share_with_group(path: &Path, group: u32) -> io::Result<()> {
    let root = open(path)?;
    if rustix::fs::fstat(&root)?.st_gid == group {
        return Ok(());
    }
    let mut open_directories = vec![(Dir::read_from(&root)?, root)];
    while let Some((entries, directory)) = open_directories.last_mut() {
        let Some(entry) = entries.next() else {
            if let Some((_, directory)) = open_directories.pop() {
                give_to_group(&directory, group)?;
            }
            continue;
        };
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        // The descriptor stays valid for this file, even if another one takes its name.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = match rustix::fs::openat(&*directory, name, flags, Mode::empty()) {
            Err(rustix::io::Errno::NOENT) => continue,
            other => other?,
        };
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode);
        if kind != FileType::Directory {
            give_to_group(&found, group)?;
            continue;
        }
        if open_directories.len() >= DEEPEST {
            give_to_group(&found, group)?;
            tracing::warn!(
                path = %path.display(),
                "a volume is too deep to be given to a group whole"
            );
            continue;
        }
        let below = rustix::fs::openat(&found, c".", DIRECTORY, Mode::empty())?;
        open_directories.push((Dir::read_from(&below)?, below));
    }
    Ok(())
}

/// Gives the file of a descriptor to a group, with the permissions of its owner. Directories get the set-group-ID bit, so that new
/// files in them belong to the group, too.
fn give_to_group(found: &OwnedFd, group: u32) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::PermissionsExt;
    let mode = rustix::fs::fstat(found)?.st_mode;
    let (whose, here) = (rustix::fs::Gid::from_raw(group), AtFlags::EMPTY_PATH);
    rustix::fs::chownat(found, c"", None, Some(whose), here)?;
    let bits = match FileType::from_raw_mode(mode) {
        // Symlinks have no permissions.
        FileType::Symlink => return Ok(()),
        FileType::Directory => 0o2070,
        _ => 0o060,
    };
    // The link in /proc leads to the file of the descriptor, even if the file cannot be opened.
    let own = format!("/proc/self/fd/{}", found.as_raw_fd());
    std::fs::set_permissions(own, std::fs::Permissions::from_mode((mode & 0o7777) | bits))
}

/// Removes a tree, if it exists. Inner directories are moved to its root before they are emptied, so that depth does not matter.
pub fn remove(path: &Path) -> io::Result<()> {
    let root = match open(path) {
        Ok(root) => root,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(_) => return std::fs::remove_file(path),
    };
    let mut moved: u64 = 0;
    let mut waiting: Vec<String> = Vec::new();
    empty(&root, &root, &mut moved, &mut waiting)?;
    while let Some(name) = waiting.pop() {
        let directory = rustix::fs::openat(&root, name.as_str(), DIRECTORY, Mode::empty())?;
        empty(&directory, &root, &mut moved, &mut waiting)?;
        rustix::fs::unlinkat(&root, name.as_str(), AtFlags::REMOVEDIR)?;
    }
    std::fs::remove_dir(path)
}

/// Removes the files of a directory, and moves its directories to the root of the tree.
fn empty(
    directory: &OwnedFd,
    root: &OwnedFd,
    moved: &mut u64,
    waiting: &mut Vec<String>,
) -> io::Result<()> {
    // Entries are collected first, because removing while reading may skip some.
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            names.push(name.to_owned());
        }
    }
    for name in names {
        match rustix::fs::unlinkat(directory, name.as_c_str(), AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => {}
            Err(rustix::io::Errno::ISDIR | rustix::io::Errno::PERM) => {
                let own = move_to_top(directory, name.as_c_str(), root, moved)?;
                waiting.push(own);
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn move_to_top(
    directory: &OwnedFd,
    name: &std::ffi::CStr,
    root: &OwnedFd,
    moved: &mut u64,
) -> io::Result<String> {
    loop {
        *moved += 1;
        let own = format!(".removing-{moved}");
        let renamed = rustix::fs::renameat_with(
            directory,
            name,
            root,
            own.as_str(),
            rustix::fs::RenameFlags::NOREPLACE,
        );
        match renamed {
            Ok(()) => return Ok(own),
            // The name is in use.
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_measured_and_removed_without_following_links() {
        let directory = tempfile::tempdir().unwrap();
        let outside = directory.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("kept"), vec![1; 100_000]).unwrap();
        let tree = directory.path().join("tree");
        std::fs::create_dir_all(tree.join("a/b/c")).unwrap();
        std::fs::create_dir_all(tree.join(".removing-1/x")).unwrap();
        std::fs::write(tree.join("a/b/file"), vec![1; 10_000]).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("a/link")).unwrap();
        let usage = measure(&tree, u64::MAX).unwrap();
        assert_eq!((usage.inodes, usage.unfathomable), (8, false));
        assert!(usage.bytes >= 10_000 && usage.bytes < 100_000, "{usage:?}");
        assert!(measure(&tree, 1).unwrap().bytes <= usage.bytes);
        remove(&tree).unwrap();
        assert!(!tree.exists());
        assert!(outside.join("kept").exists());
        remove(&tree).unwrap();
        assert_eq!(measure(&tree, 1).unwrap(), Usage::default());
    }

    #[test]
    fn a_very_deep_tree_is_measured_and_removed() {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("deep");
        std::fs::create_dir(&tree).unwrap();
        let mut at = open(&tree).unwrap();
        for _ in 0..1500 {
            rustix::fs::mkdirat(&at, "a-name-that-makes-paths-long", Mode::RWXU).unwrap();
            at = rustix::fs::openat(
                &at,
                "a-name-that-makes-paths-long",
                DIRECTORY,
                Mode::empty(),
            )
            .unwrap();
        }
        drop(at);
        assert!(measure(&tree, u64::MAX).unwrap().unfathomable);
        remove(&tree).unwrap();
        assert!(!tree.exists());
    }

    fn mode_and_group(path: &Path) -> (u32, u32) {
        use std::os::unix::fs::MetadataExt;
        let found = std::fs::symlink_metadata(path).unwrap();
        (found.mode() & 0o7777, found.gid())
    }

    fn assert_root() {
        assert!(
            rustix::process::geteuid().is_root(),
            "giving files to other groups needs root"
        );
    }

    #[test]
    fn a_group_gets_a_whole_tree_but_no_targets_of_symlinks() {
        use std::os::unix::fs::PermissionsExt;
        assert_root();
        let directory = tempfile::tempdir().unwrap();
        let outside = directory.path().join("outside");
        std::fs::write(&outside, "").unwrap();
        let before = mode_and_group(&outside);
        let tree = directory.path().join("tree");
        std::fs::create_dir_all(tree.join("a/b")).unwrap();
        std::fs::write(tree.join("a/b/file"), "").unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();
        for (path, mode) in [
            ("", 0o700),
            ("a", 0o755),
            ("a/b", 0o500),
            ("a/b/file", 0o600),
        ] {
            let mode = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(tree.join(path), mode).unwrap();
        }
        share_with_group(&tree, 4321).unwrap();
        for (path, mode) in [
            ("", 0o2770),
            ("a", 0o2775),
            ("a/b", 0o2570),
            ("a/b/file", 0o660),
        ] {
            assert_eq!(mode_and_group(&tree.join(path)), (mode, 4321), "{path:?}");
        }
        assert_eq!(mode_and_group(&tree.join("link")).1, 4321);
        assert_eq!(mode_and_group(&tree.join("socket")).1, 4321);
        assert_eq!(mode_and_group(&outside), before);
        // A tree whose root belongs to the group is not walked again.
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(tree.join("a/b/file"), mode).unwrap();
        share_with_group(&tree, 4321).unwrap();
        assert_eq!(mode_and_group(&tree.join("a/b/file")), (0o600, 4321));
    }

    #[test]
    fn no_race_against_a_swapped_directory_reaches_a_file_outside() {
        use std::sync::atomic::{AtomicBool, Ordering};
        const ROUNDS: u32 = 400;
        const FILES: usize = 20;
        assert_root();
        let directory = tempfile::tempdir().unwrap();
        let outside = directory.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        let name = |index: usize| format!("file{index}");
        let tree = directory.path().join("tree");
        std::fs::create_dir_all(tree.join("swapped")).unwrap();
        for index in 0..FILES {
            std::fs::write(outside.join(name(index)), "").unwrap();
            std::fs::write(tree.join("swapped").join(name(index)), "").unwrap();
        }
        let before = mode_and_group(&outside.join("file0"));
        let of_outside = mode_and_group(&outside);
        std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let swapping = scope.spawn(|| {
                let at = open(&tree).unwrap();
                let exchange = rustix::fs::RenameFlags::EXCHANGE;
                let mut swaps = 0_u64;
                while !over.load(Ordering::Relaxed) {
                    rustix::fs::renameat_with(&at, "swapped", &at, "link", exchange).unwrap();
                    swaps += 1;
                }
                swaps
            });
            for round in 0..ROUNDS {
                share_with_group(&tree, 5000 + round).unwrap();
            }
            over.store(true, Ordering::Relaxed);
            let swaps = swapping.join().unwrap();
            assert!(swaps > u64::from(ROUNDS), "only {swaps} swaps");
        });
        assert_eq!(mode_and_group(&outside), of_outside);
        for index in 0..FILES {
            assert_eq!(mode_and_group(&outside.join(name(index))), before);
        }
    }
}
