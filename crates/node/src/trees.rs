//! Directory trees that a container made: how much they hold, and removing them.
//!
//! Whoever made them may mean harm. A path may be longer than the kernel takes, a tree deeper than any stack, and a symlink may
//! point anywhere. So nothing here recurses, follows a link, or names a file by more than its last component.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};

/// What a tree holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: u64,
    pub inodes: u64,
    /// The tree is too deep to be looked at whole.
    pub unfathomable: bool,
}

impl Usage {
    pub fn include(&mut self, other: Self) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.inodes = self.inodes.saturating_add(other.inodes);
        self.unfathomable |= other.unfathomable;
    }
}

/// Deeper than any honest program goes, and few enough descriptors.
const DEEPEST: usize = 200;

const DIRECTORY: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::openat(CWD, path, DIRECTORY, Mode::empty())?)
}

/// What is below `path`, itself included; nothing when it does not exist. Stops looking once there are more than `enough` bytes.
pub fn measure(path: &Path, enough: u64) -> io::Result<Usage> {
    const BLOCK: u64 = 512;
    let mut usage = Usage::default();
    let root = match open(path) {
        Ok(root) => root,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(usage),
        // A file by itself.
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

/// Removes a tree, if it is there. Directories inside are moved to its top before they are emptied, so that depth costs nothing.
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

/// Removes the files of a directory, and moves its directories to the top of the tree.
fn empty(
    directory: &OwnedFd,
    root: &OwnedFd,
    moved: &mut u64,
    waiting: &mut Vec<String>,
) -> io::Result<()> {
    // Entries are collected first, since removing while reading may skip some.
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
            // The tree had that name already.
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

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
    fn depth_neither_hides_a_tree_nor_keeps_it() {
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
}
