//! The files below the base directory, confined by the kernel: every path is resolved with `openat2` and
//! `RESOLVE_BENEATH` from one directory handle, so neither `..`, nor a symbolic link, nor a rename during the walk (TOCTOU)
//! leads outside. If `openat2` is missing (older kernels, some seccomp profiles, gVisor), a walk over directory handles
//! applies the same rules.
//!
//! Blocking; callers run long operations off the async threads. Independent of HTTP.

use std::collections::VecDeque;
use std::ffi::{CStr, OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::path::BelowBase;

/// How often a resolution that lost a race against a rename is retried.
const RACE_RETRIES: usize = 64;
/// The number of links that the kernel follows on one path.
const MAX_LINKS: usize = 40;

#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    #[error("the path leaves the base directory")]
    Escapes,
    #[error("there is no such file or directory")]
    NotFound,
    #[error("it is not a regular file")]
    NotAFile,
    #[error("it is not a directory")]
    NotADirectory,
    #[error("the directory is not empty")]
    NotEmpty,
    #[error("permission denied")]
    Denied,
    #[error("a directory cannot be moved into itself")]
    IntoItself,
    #[error("it cannot be moved to another volume: copy it, then delete it")]
    OtherVolume,
    #[error("cannot {operation}")]
    Io {
        operation: &'static str,
        #[source]
        source: io::Error,
    },
}

impl TreeError {
    fn of(operation: &'static str, errno: Errno) -> Self {
        match errno {
            // `RESOLVE_BENEATH` reports an escape as EXDEV, and a forbidden or endless link as ELOOP.
            Errno::XDEV | Errno::LOOP => TreeError::Escapes,
            Errno::NOENT => TreeError::NotFound,
            Errno::NOTDIR => TreeError::NotADirectory,
            Errno::ISDIR => TreeError::NotAFile,
            Errno::NOTEMPTY => TreeError::NotEmpty,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => TreeError::Denied,
            errno => TreeError::Io {
                operation,
                source: errno.into(),
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    File,
    Directory,
}

/// A directory entry with its metadata.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: OsString,
    pub kind: EntryKind,
    pub size: u64,
    pub modified_seconds: i64,
    pub modified_nanoseconds: u32,
    pub mode: u32,
    pub inode: u64,
}

/// An opened file, or a directory.
#[derive(Debug)]
pub enum Node {
    File { file: File, entry: Entry },
    Directory,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resolution {
    Kernel,
    Walk,
}

/// The base directory.
#[derive(Debug)]
pub struct Tree {
    base: PathBuf,
    root: OwnedFd,
    resolution: Resolution,
}

impl Tree {
    /// Opens the base directory, creating it if it is missing.
    pub fn open(base: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(base)?;
        let base = base.canonicalize()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&base, flags, Mode::empty())?;
        let resolution =
            match rustix::fs::openat2(&root, ".", flags, Mode::empty(), ResolveFlags::BENEATH) {
                Ok(_) => Resolution::Kernel,
                Err(Errno::NOSYS | Errno::PERM | Errno::INVAL) => Resolution::Walk,
                Err(errno) => return Err(errno.into()),
            };
        Ok(Self {
            base,
            root,
            resolution,
        })
    }

    /// The base directory's path, with symbolic links resolved.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// Opens a regular file for reading, or reports that the path is a directory.
    pub fn read(&self, path: &BelowBase) -> Result<Node, TreeError> {
        // NONBLOCK, because opening a FIFO would otherwise wait for a writer.
        let opened = self.resolve(
            path.as_path(),
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY,
            Mode::empty(),
        );
        let opened = opened.map_err(|errno| match errno {
            Errno::NXIO => TreeError::NotAFile,
            errno => TreeError::of("open the file", errno),
        })?;
        let stat =
            rustix::fs::fstat(&opened).map_err(|errno| TreeError::of("inspect the file", errno))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Ok(Node::Directory),
            FileType::RegularFile => {
                let name = path
                    .parent_and_name()
                    .map(|(_, name)| name)
                    .unwrap_or_default();
                Ok(Node::File {
                    file: File::from(opened),
                    entry: entry(name, &stat),
                })
            }
            _ => Err(TreeError::NotAFile),
        }
    }

    /// Whether the path exists.
    pub fn exists(&self, path: &BelowBase) -> Result<bool, TreeError> {
        match self.resolve(path.as_path(), OFlags::PATH, Mode::empty()) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT | Errno::NOTDIR) => Ok(false),
            Err(errno) => Err(TreeError::of("look the path up", errno)),
        }
    }

    /// The entries of a directory, sorted by name.
    pub fn list(&self, path: &BelowBase) -> Result<Vec<Entry>, TreeError> {
        let directory = self
            .resolve(
                path.as_path(),
                OFlags::RDONLY | OFlags::DIRECTORY,
                Mode::empty(),
            )
            .map_err(|errno| TreeError::of("open the directory", errno))?;
        let mut entries = Vec::new();
        for found in Dir::read_from(&directory)
            .map_err(|errno| TreeError::of("read the directory", errno))?
        {
            let found = found.map_err(|errno| TreeError::of("read the directory", errno))?;
            if is_dot(found.file_name()) {
                continue;
            }
            let name = OsStr::from_bytes(found.file_name().to_bytes());
            // The entry was removed since the directory was read.
            let Ok(mut stat) =
                rustix::fs::statat(&directory, found.file_name(), AtFlags::SYMLINK_NOFOLLOW)
            else {
                continue;
            };
            if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
                // The target of a link is reported only if it is inside the base directory, too.
                let target = self.resolve(path.join(name).as_path(), OFlags::PATH, Mode::empty());
                if let Some(target) = target
                    .ok()
                    .and_then(|target| rustix::fs::fstat(target).ok())
                {
                    stat = target;
                }
            }
            entries.push(entry(name.to_owned(), &stat));
        }
        entries.sort_by(|left, right| left.name.cmp(&right.name));
        Ok(entries)
    }

    /// Starts a file that appears at `path`, complete, when it is committed. Missing directories are created.
    pub fn create(&self, path: &BelowBase) -> Result<PendingFile, TreeError> {
        let (parent, name) = path.parent_and_name().ok_or(TreeError::NotAFile)?;
        let directory = self.make_directories(&parent)?;
        let existing = rustix::fs::statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW).ok();
        if existing.is_some_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory)
        {
            return Err(TreeError::NotAFile);
        }
        let replaced_mode = existing
            .filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
            .map(|stat| Mode::from_raw_mode(stat.st_mode & 0o777));
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        loop {
            let temporary = OsString::from(format!(".sandboxd-{:016x}.partial", unique_number()));
            match rustix::fs::openat(&directory, &temporary, flags, Mode::from_raw_mode(0o666)) {
                Ok(file) => {
                    let mut pending = PendingFile {
                        directory,
                        temporary: Some(temporary),
                        name,
                        file: File::from(file),
                    };
                    if let Some(mode) = replaced_mode {
                        pending.set_mode(mode.as_raw_mode())?;
                    }
                    return Ok(pending);
                }
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(TreeError::of("create a temporary file", errno)),
            }
        }
    }

    /// Removes a file, an empty directory, or with `recursive` a directory and its contents. A link itself is
    /// removed, never its target.
    pub fn remove(&self, path: &BelowBase, recursive: bool) -> Result<(), TreeError> {
        let (parent, name) = path.parent_and_name().ok_or(TreeError::Denied)?;
        let directory = self
            .resolve(
                parent.as_path(),
                OFlags::PATH | OFlags::DIRECTORY,
                Mode::empty(),
            )
            .map_err(|errno| TreeError::of("open the directory", errno))?;
        remove_at(&directory, &name, recursive).map_err(|errno| TreeError::of("remove it", errno))
    }

    /// The metadata of the path. Links are followed.
    pub fn stat(&self, path: &BelowBase) -> Result<Entry, TreeError> {
        let opened = self
            .resolve(path.as_path(), OFlags::PATH, Mode::empty())
            .map_err(|errno| TreeError::of("look the path up", errno))?;
        let stat =
            rustix::fs::fstat(&opened).map_err(|errno| TreeError::of("inspect the file", errno))?;
        let name = path.parent_and_name().map(|(_, name)| name);
        Ok(entry(name.unwrap_or_else(|| ".".into()), &stat))
    }

    /// Moves a file, a directory or a link to another name, atomically. A file there is replaced, and missing parent directories
    /// are created.
    pub fn rename(&self, from: &BelowBase, to: &BelowBase) -> Result<(), TreeError> {
        let (parent, name) = from.parent_and_name().ok_or(TreeError::Denied)?;
        let (new_parent, new_name) = to.parent_and_name().ok_or(TreeError::Denied)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let directory = self
            .resolve(parent.as_path(), flags, Mode::empty())
            .map_err(|errno| TreeError::of("open the directory", errno))?;
        rustix::fs::statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| TreeError::of("look the path up", errno))?;
        if to.as_path() != from.as_path() && to.as_path().starts_with(from.as_path()) {
            return Err(TreeError::IntoItself);
        }
        let new_directory = self.make_directories(&new_parent)?;
        rustix::fs::renameat(&directory, &name, &new_directory, &new_name).map_err(|errno| {
            match errno {
                Errno::INVAL => TreeError::IntoItself,
                Errno::XDEV => TreeError::OtherVolume,
                Errno::EXIST => TreeError::NotEmpty,
                errno => TreeError::of("move it", errno),
            }
        })
    }

    /// Creates a directory and its missing parents.
    pub fn make_directory(&self, path: &BelowBase) -> Result<(), TreeError> {
        self.make_directories(path).map(drop)
    }

    fn make_directories(&self, path: &BelowBase) -> Result<OwnedFd, TreeError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        match self.resolve(path.as_path(), flags, Mode::empty()) {
            Err(Errno::NOENT) => {}
            result => return result.map_err(|errno| TreeError::of("open the directory", errno)),
        }
        let mut current = rustix::io::fcntl_dupfd_cloexec(&self.root, 0)
            .map_err(|errno| TreeError::of("open the base directory", errno))?;
        for prefix in path.prefixes() {
            if let Some((_, name)) = prefix.parent_and_name() {
                match rustix::fs::mkdirat(&current, name, Mode::from_raw_mode(0o777)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(TreeError::of("make a directory", errno)),
                }
            }
            current = self
                .resolve(prefix.as_path(), flags, Mode::empty())
                .map_err(|errno| TreeError::of("open the directory", errno))?;
        }
        Ok(current)
    }

    fn resolve(&self, path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::CLOEXEC;
        for _ in 0..RACE_RETRIES {
            let opened = match self.resolution {
                Resolution::Kernel => {
                    let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
                    rustix::fs::openat2(&self.root, path, flags, mode, beneath)
                }
                Resolution::Walk => walk(&self.root, path, flags, mode),
            };
            match opened {
                Err(Errno::AGAIN | Errno::INTR) => {}
                opened => return opened,
            }
        }
        Err(Errno::AGAIN)
    }
}

/// A file being written under a temporary name. Dropping it without [`PendingFile::commit`] removes it.
#[derive(Debug)]
pub struct PendingFile {
    directory: OwnedFd,
    temporary: Option<OsString>,
    name: OsString,
    file: File,
}

impl PendingFile {
    /// A second handle to write through.
    pub fn writer(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    pub fn set_mode(&mut self, mode: u32) -> Result<(), TreeError> {
        rustix::fs::fchmod(&self.file, Mode::from_raw_mode(mode & 0o777))
            .map_err(|errno| TreeError::of("set the file's mode", errno))
    }

    /// Syncs the content to disk, and renames the file into place atomically.
    pub fn commit(mut self) -> Result<(), TreeError> {
        self.file.sync_all().map_err(|source| TreeError::Io {
            operation: "write the file to disk",
            source,
        })?;
        let Some(temporary) = self.temporary.as_ref() else {
            return Ok(());
        };
        rustix::fs::renameat(&self.directory, temporary, &self.directory, &self.name)
            .map_err(|errno| TreeError::of("put the file in place", errno))?;
        self.temporary = None;
        Ok(())
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = rustix::fs::unlinkat(&self.directory, temporary, AtFlags::empty());
        }
    }
}

/// Opens `path` below `root` by following it one name at a time over open handles. A `..` returns to the handle it
/// came from, so a directory that is moved meanwhile cannot lead outside, and an absolute link is refused.
fn walk(root: &OwnedFd, path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let step_flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut handles = vec![rustix::io::fcntl_dupfd_cloexec(root, 0)?];
    let mut remaining: VecDeque<OsString> = VecDeque::new();
    prepend(&mut remaining, path)?;
    let mut links = 0;
    while let Some(name) = remaining.pop_front() {
        let here = handles.last().ok_or(Errno::XDEV)?;
        if name == ".." {
            if handles.len() == 1 {
                return Err(Errno::XDEV);
            }
            handles.pop();
            continue;
        }
        match rustix::fs::readlinkat(here, &name, Vec::new()) {
            Ok(target) => {
                links += 1;
                if links > MAX_LINKS {
                    return Err(Errno::LOOP);
                }
                prepend(
                    &mut remaining,
                    Path::new(OsStr::from_bytes(target.to_bytes())),
                )?;
                continue;
            }
            Err(Errno::INVAL | Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
        if remaining.is_empty() {
            let opened = rustix::fs::openat(here, &name, flags | OFlags::NOFOLLOW, mode)?;
            // With PATH and NOFOLLOW, a link that was swapped in since the check is opened as the link itself.
            let is_link =
                FileType::from_raw_mode(rustix::fs::fstat(&opened)?.st_mode) == FileType::Symlink;
            return if is_link {
                Err(Errno::AGAIN)
            } else {
                Ok(opened)
            };
        }
        let next = rustix::fs::openat(here, &name, step_flags, Mode::empty())?;
        handles.push(next);
    }
    let here = handles.last().ok_or(Errno::XDEV)?;
    rustix::fs::openat(here, ".", flags | OFlags::NOFOLLOW, mode)
}

fn prepend(remaining: &mut VecDeque<OsString>, path: &Path) -> Result<(), Errno> {
    for component in path.components().rev() {
        match component {
            Component::Prefix(_) | Component::RootDir => return Err(Errno::XDEV),
            Component::CurDir => {}
            Component::ParentDir => remaining.push_front("..".into()),
            Component::Normal(name) => remaining.push_front(name.to_owned()),
        }
    }
    Ok(())
}

fn remove_at(directory: impl AsFd, name: &OsStr, recursive: bool) -> Result<(), Errno> {
    match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        result => return result,
    }
    match rustix::fs::unlinkat(&directory, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) if recursive => {}
        Err(Errno::EXIST) => return Err(Errno::NOTEMPTY),
        result => return result,
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let inside = rustix::fs::openat(&directory, name, flags, Mode::empty())?;
    for found in Dir::read_from(&inside)? {
        let found = found?;
        if is_dot(found.file_name()) {
            continue;
        }
        match remove_at(
            &inside,
            OsStr::from_bytes(found.file_name().to_bytes()),
            true,
        ) {
            Err(Errno::NOENT) => {}
            result => result?,
        }
    }
    rustix::fs::unlinkat(&directory, name, AtFlags::REMOVEDIR)
}

fn entry(name: OsString, stat: &Stat) -> Entry {
    let kind = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => EntryKind::Directory,
        _ => EntryKind::File,
    };
    Entry {
        name,
        kind,
        size: u64::try_from(stat.st_size).unwrap_or_default(),
        modified_seconds: stat.st_mtime,
        modified_nanoseconds: u32::try_from(stat.st_mtime_nsec).unwrap_or_default(),
        mode: stat.st_mode & 0o7777,
        inode: stat.st_ino,
    }
}

fn is_dot(name: &CStr) -> bool {
    matches!(name.to_bytes(), b"." | b"..")
}

/// A number that is unlikely to be in use: the temporary file is created exclusively, so a collision costs a retry.
fn unique_number() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::Instant::now())
}

#[cfg(test)]
#[path = "directory_tree_tests.rs"]
mod tests;
