//! Extracts one layer into a directory that can be a lower directory of an overlay mount.
//!
//! # Guarantees
//! Whatever the archive contains, nothing outside the directory is read, written, linked or removed (no path traversal): the
//! kernel resolves every path inside it (`RESOLVE_IN_ROOT`), and the last component of a path is never followed as a symlink. The
//! size and the number of entries are limited. No device nodes are created, and no extended attributes that overlayfs or the
//! kernel would interpret.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;

use crate::tar_stream::{Entry, EntryKind, TarError, TarReader};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// The prefix of AUFS metadata files, which are ignored.
const RESERVED: &[u8] = b".wh..wh.";
const COPY_BYTES: usize = 128 << 10;

#[derive(Debug, thiserror::Error)]
pub enum ExtractError {
    #[error(transparent)]
    Tar(#[from] TarError),
    #[error("the layer's entry {path:?} {problem}")]
    Entry { path: String, problem: &'static str },
    #[error("unpacking {path:?}")]
    Io {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("the unpacked image is larger than {0} bytes")]
    TooLarge(u64),
    #[error("the image has more than {0} files")]
    TooMany(u64),
}

/// The limits of an unpacked image.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    pub bytes: u64,
    pub entries: u64,
}

/// The owner of the extracted files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// The owners that the layer names. Requires root.
    Preserved,
    /// The current user owns all files, because an unprivileged process cannot change owners.
    CurrentUser,
}

impl Ownership {
    /// The mode that this process has the privileges for.
    pub fn possible() -> Self {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let whole = map
            .split_whitespace()
            .nth(2)
            .and_then(|count| count.parse::<u32>().ok())
            .is_some_and(|count| count > 1);
        if rustix::process::geteuid().is_root() && whole {
            Self::Preserved
        } else {
            Self::CurrentUser
        }
    }

    /// The extended attribute that marks a directory as opaque, for an overlay that this process can mount.
    fn opaque_attribute(self) -> &'static str {
        match self {
            Self::Preserved => "trusted.overlay.opaque",
            Self::CurrentUser => "user.overlay.opaque",
        }
    }
}

/// The size of an extracted layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Extracted {
    pub bytes: u64,
    pub entries: u64,
}

/// Extracts the archive into `root`, an empty directory.
pub fn extract<R: Read>(
    reader: R,
    root: &Path,
    budget: Budget,
    ownership: Ownership,
) -> Result<(Extracted, R), ExtractError> {
    let directory = rustix::fs::open(
        root,
        OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY,
        Mode::empty(),
    )
    .map_err(|source| ExtractError::Io {
        path: root.display().to_string(),
        source: source.into(),
    })?;
    let mut extraction = Extraction {
        root: directory,
        budget,
        ownership,
        done: Extracted::default(),
        directories: Vec::new(),
    };
    let mut reader = TarReader::new(reader);
    while let Some(entry) = reader.next_entry()? {
        extraction.count(&entry)?;
        let path = normalize(&entry.path).map_err(|problem| ExtractError::Entry {
            path: shown(&entry.path),
            problem,
        })?;
        extraction.extract_entry(&entry, &path, &mut reader)?;
    }
    extraction.set_directory_times();
    Ok((extraction.done, reader.into_inner()))
}

fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// Makes a path relative to the root. Refuses paths that contain "..".
fn normalize(path: &[u8]) -> Result<PathBuf, &'static str> {
    if path.contains(&0) {
        return Err("has a NUL in its name");
    }
    let mut relative = PathBuf::new();
    for part in Path::new(OsStr::from_bytes(path)).components() {
        match part {
            Component::Normal(name) => relative.push(name),
            Component::RootDir | Component::CurDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err("leads out of the image with \"..\"");
            }
        }
    }
    Ok(relative)
}

struct Extraction {
    root: OwnedFd,
    budget: Budget,
    ownership: Ownership,
    done: Extracted,
    /// Directories and their modification times, which are set at the end because extraction changes them.
    directories: Vec<(PathBuf, i64)>,
}

impl Extraction {
    fn count(&mut self, entry: &Entry) -> Result<(), ExtractError> {
        self.done.entries += 1;
        self.done.bytes = self.done.bytes.saturating_add(entry.size);
        if self.done.entries > self.budget.entries {
            return Err(ExtractError::TooMany(self.budget.entries));
        }
        if self.done.bytes > self.budget.bytes {
            return Err(ExtractError::TooLarge(self.budget.bytes));
        }
        Ok(())
    }

    fn extract_entry(
        &mut self,
        entry: &Entry,
        path: &Path,
        content: &mut impl Read,
    ) -> Result<(), ExtractError> {
        let failed = |source: io::Error| ExtractError::Io {
            path: path.display().to_string(),
            source,
        };
        let refused = |problem| ExtractError::Entry {
            path: path.display().to_string(),
            problem,
        };
        let Some(name) = path.file_name() else {
            // The root entry sets the mode and the owner of the root directory. It must be a directory.
            return if entry.kind == EntryKind::Directory {
                let root = rustix::io::dup(&self.root).map_err(|e| failed(e.into()))?;
                self.set_metadata(root.as_fd(), entry).map_err(failed)
            } else {
                Err(refused("would replace the root"))
            };
        };
        let parent = self
            .parent(path.parent().unwrap_or(Path::new("")))
            .map_err(failed)?;
        if name.as_bytes().starts_with(WHITEOUT) {
            return match self.whiteout(parent.as_fd(), name) {
                Ok(Some(problem)) => Err(refused(problem)),
                other => other.map(drop).map_err(failed),
            };
        }
        match entry.kind {
            // Device nodes are skipped: the node gives every container its own /dev, and containers do not use device nodes of the
            // image.
            EntryKind::Device => Ok(()),
            EntryKind::HardLink => match self.hard_link(entry, parent.as_fd(), name) {
                Ok(Some(problem)) => Err(refused(problem)),
                other => other.map(drop).map_err(failed),
            },
            EntryKind::Directory => {
                self.make_directory(entry, parent.as_fd(), name)
                    .map_err(failed)?;
                self.directories.push((path.to_owned(), entry.modified));
                Ok(())
            }
            EntryKind::File => self
                .make_file(entry, parent.as_fd(), name, content)
                .map_err(failed),
            EntryKind::Symlink => self
                .make_symlink(entry, parent.as_fd(), name)
                .map_err(failed),
            EntryKind::Fifo => self.make_fifo(entry, parent.as_fd(), name).map_err(failed),
        }
    }

    /// Opens a directory of the layer and creates missing components. Symlinks on the way are resolved inside the layer.
    fn parent(&self, path: &Path) -> io::Result<OwnedFd> {
        match self.open(path) {
            Err(Errno::NOENT) => {}
            other => return Ok(other?),
        }
        let mut parent = rustix::io::dup(&self.root)?;
        let mut prefix = PathBuf::new();
        for part in path.components() {
            prefix.push(part);
            parent = match self.open(&prefix) {
                Err(Errno::NOENT) => {
                    let name = part.as_os_str();
                    // A dangling symlink occupies the name of a directory that the archive expects to exist.
                    remove_existing(parent.as_fd(), name)?;
                    make_directory_in(parent.as_fd(), name, 0o755)?;
                    self.open(&prefix)?
                }
                other => other?,
            };
        }
        Ok(parent)
    }

    fn open(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        rustix::fs::openat2(
            &self.root,
            path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
        )
    }

    /// Creates the whiteout that hides a file of the lower layers. Returns the problem if the entry is invalid.
    fn whiteout(&self, parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<&'static str>> {
        let name = name.as_bytes();
        if name == OPAQUE {
            self.make_opaque(parent)?;
            return Ok(None);
        }
        if name.starts_with(RESERVED) {
            return Ok(None);
        }
        let hidden = &name[WHITEOUT.len()..];
        if hidden.is_empty() || hidden == b"." || hidden == b".." {
            return Ok(Some("removes a name that no file can have"));
        }
        // A whiteout applies only to lower layers; a file of the same layer stays.
        match make_whiteout(parent, OsStr::from_bytes(hidden)) {
            Err(Errno::EXIST) => Ok(None),
            other => Ok(other.map(|()| None)?),
        }
    }

    fn make_opaque(&self, directory: BorrowedFd<'_>) -> io::Result<()> {
        let name = self.ownership.opaque_attribute();
        Ok(rustix::fs::fsetxattr(
            directory,
            name,
            b"y",
            XattrFlags::empty(),
        )?)
    }

    fn make_directory(
        &self,
        entry: &Entry,
        parent: BorrowedFd<'_>,
        name: &OsStr,
    ) -> io::Result<()> {
        let existing = kind_of(parent, name)?;
        if existing != Some(FileType::Directory) {
            remove_existing(parent, name)?;
            make_directory_in(parent, name, 0o700)?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(parent, name, flags, Mode::empty())?;
        if existing == Some(FileType::CharacterDevice) {
            // The directory was deleted and created again, so the content of the lower one must stay hidden.
            self.make_opaque(directory.as_fd())?;
        }
        self.set_metadata(directory.as_fd(), entry)
    }

    fn make_file(
        &self,
        entry: &Entry,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        content: &mut impl Read,
    ) -> io::Result<()> {
        remove_existing(parent, name)?;
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::WRONLY | OFlags::CLOEXEC;
        let mut file = File::from(rustix::fs::openat(
            parent,
            name,
            flags,
            Mode::from_raw_mode(0o600),
        )?);
        let mut buffer = vec![0; COPY_BYTES.min(usize::try_from(entry.size).unwrap_or(COPY_BYTES))];
        loop {
            match content.read(&mut buffer)? {
                0 => break,
                count => file.write_all(&buffer[..count])?,
            }
        }
        self.set_metadata(file.as_fd(), entry)?;
        set_time(file.as_fd(), entry.modified)
    }

    fn make_symlink(&self, entry: &Entry, parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
        remove_existing(parent, name)?;
        rustix::fs::symlinkat(OsStr::from_bytes(&entry.link), parent, name)?;
        self.set_owner(parent, name, entry)
    }

    fn make_fifo(&self, entry: &Entry, parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
        remove_existing(parent, name)?;
        let mode = Mode::from_raw_mode(entry.mode);
        rustix::fs::mknodat(parent, name, FileType::Fifo, mode, 0)?;
        self.set_owner(parent, name, entry)
    }

    /// Creates a hard link to a file of this layer. The kernel links to the file itself and does not follow a symlink in its
    /// place.
    fn hard_link(
        &self,
        entry: &Entry,
        parent: BorrowedFd<'_>,
        name: &OsStr,
    ) -> io::Result<Option<&'static str>> {
        let Ok(target) = normalize(&entry.link) else {
            return Ok(Some(
                "is a hard link that leads out of the image with \"..\"",
            ));
        };
        let Some(target_name) = target.file_name() else {
            return Ok(Some("is a hard link to the root"));
        };
        let missing = Ok(Some("is a hard link to a file that is not in its layer"));
        let target_parent = match self.open(target.parent().unwrap_or(Path::new(""))) {
            Err(Errno::NOENT | Errno::NOTDIR) => return missing,
            other => other?,
        };
        match kind_of(target_parent.as_fd(), target_name)? {
            None | Some(FileType::CharacterDevice) => return missing,
            Some(FileType::Directory) => return Ok(Some("is a hard link to a directory")),
            Some(_) => {}
        }
        let same = |a: &rustix::fs::Stat, b: &rustix::fs::Stat| {
            (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
        };
        let stat = |directory: BorrowedFd<'_>, name: &OsStr| {
            rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
        };
        let target_stat = stat(target_parent.as_fd(), target_name)?;
        if stat(parent, name).is_ok_and(|existing| same(&existing, &target_stat)) {
            return Ok(None);
        }
        remove_existing(parent, name)?;
        rustix::fs::linkat(&target_parent, target_name, parent, name, AtFlags::empty())?;
        Ok(None)
    }

    /// Sets owner, mode and extended attributes. The owner comes first, because `chown` clears the set-user-ID bits.
    fn set_metadata(&self, file: BorrowedFd<'_>, entry: &Entry) -> io::Result<()> {
        if self.ownership == Ownership::Preserved {
            rustix::fs::fchown(
                file,
                Some(Uid::from_raw(entry.uid)),
                Some(Gid::from_raw(entry.gid)),
            )?;
        }
        let mode = match self.ownership {
            Ownership::Preserved => entry.mode,
            // Without privileges, all files belong to the current user, who must at least be able to read them.
            Ownership::CurrentUser => {
                (entry.mode & 0o777)
                    | 0o400
                    | if entry.kind == EntryKind::Directory {
                        0o300
                    } else {
                        0
                    }
            }
        };
        rustix::fs::fchmod(file, Mode::from_raw_mode(mode))?;
        for (name, value) in &entry.attributes {
            if name.starts_with("user.") && !name.starts_with("user.overlay.") {
                match rustix::fs::fsetxattr(file, name.as_str(), value, XattrFlags::empty()) {
                    Err(Errno::OPNOTSUPP) | Ok(()) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }

    fn set_owner(&self, parent: BorrowedFd<'_>, name: &OsStr, entry: &Entry) -> io::Result<()> {
        if self.ownership == Ownership::CurrentUser {
            return Ok(());
        }
        rustix::fs::chownat(
            parent,
            name,
            Some(Uid::from_raw(entry.uid)),
            Some(Gid::from_raw(entry.gid)),
            AtFlags::SYMLINK_NOFOLLOW,
        )?;
        Ok(())
    }

    /// Sets the modification times of directories after all entries are extracted. Directories that a later entry replaced are
    /// skipped.
    fn set_directory_times(&self) {
        for (path, modified) in &self.directories {
            if let Ok(directory) = self.open(path) {
                let _ = set_time(directory.as_fd(), *modified);
            }
        }
    }
}

/// Creates a directory, unless its path would be longer than a program can name. Otherwise, symlinks could be used to nest
/// directories so deep that they cannot be removed.
fn make_directory_in(parent: BorrowedFd<'_>, name: &OsStr, mode: u32) -> io::Result<()> {
    const PATH_BYTES_MAX: usize = 3072;
    let shown = format!("/proc/self/fd/{}", parent.as_raw_fd());
    if fs::read_link(shown)?.as_os_str().len() > PATH_BYTES_MAX {
        return Err(Errno::NAMETOOLONG.into());
    }
    Ok(rustix::fs::mkdirat(
        parent,
        name,
        Mode::from_raw_mode(mode),
    )?)
}

fn make_whiteout(parent: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<()> {
    rustix::fs::mknodat(parent, name, FileType::CharacterDevice, Mode::empty(), 0)
}

/// Removes what an earlier entry created under this name.
fn remove_existing(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match kind_of(parent, name)? {
        None => Ok(()),
        Some(FileType::Directory) => remove_tree(parent, name),
        Some(_) => Ok(rustix::fs::unlinkat(parent, name, AtFlags::empty())?),
    }
}

fn kind_of(parent: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<Option<FileType>> {
    match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) => Ok(Some(FileType::from_raw_mode(found.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

fn set_time(file: BorrowedFd<'_>, seconds: i64) -> io::Result<()> {
    let time = Timespec {
        tv_sec: seconds,
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    match rustix::fs::futimens(file, &times) {
        // A time that the file system cannot represent does not make the image invalid.
        Err(Errno::INVAL | Errno::OVERFLOW) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Removes a directory and its content without following symlinks.
pub(crate) fn remove_tree(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    for child in Dir::read_from(&directory)? {
        let child = OsString::from_vec(child?.file_name().to_bytes().to_vec());
        if child == "." || child == ".." {
            continue;
        }
        if kind_of(directory.as_fd(), &child)? == Some(FileType::Directory) {
            remove_tree(directory.as_fd(), &child)?;
        } else {
            rustix::fs::unlinkat(&directory, &child, AtFlags::empty())?;
        }
    }
    Ok(rustix::fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}

/// Opens a directory for use as the root in this module.
pub(crate) fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
}

#[cfg(test)]
#[path = "extract_tests.rs"]
mod tests;
