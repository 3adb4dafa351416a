//! Opens a `subPath` of a volume, which containers may change concurrently (TOCTOU).
//!
//! Symlinks may point anywhere inside the volume and nowhere else.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;

/// What to do with a path that does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    IsAnError,
    /// Create directories with this owner.
    CreateFor(u32),
}

/// Opens a path below `base`.
pub fn open(base: BorrowedFd<'_>, path: &Path, missing: Missing) -> rustix::io::Result<OwnedFd> {
    let open = |path: &Path| {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(base, path, flags, Mode::empty(), resolve)
    };
    let owner = match (open(path), missing) {
        (Err(Errno::NOENT), Missing::CreateFor(owner)) => owner,
        (opened, _) => return opened,
    };
    let mut prefix = PathBuf::new();
    for component in path.components() {
        prefix.push(component);
        match open(&prefix) {
            Err(Errno::NOENT) => {
                let parent = match prefix.parent() {
                    Some(parent) if !parent.as_os_str().is_empty() => open(parent)?,
                    _ => rustix::io::dup(base)?,
                };
                let name = prefix.file_name().ok_or(Errno::INVAL)?;
                make_like_parent(parent.as_fd(), Path::new(name), owner)?;
            }
            other => drop(other?),
        }
    }
    open(path)
}

/// Creates a directory with the permissions and group of its parent, so that containers may use it in the same way.
fn make_like_parent(parent: BorrowedFd<'_>, name: &Path, owner: u32) -> rustix::io::Result<()> {
    let above = rustix::fs::fstat(parent)?;
    match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o700)) {
        // Another container of the pod created it first.
        Err(Errno::EXIST) => return Ok(()),
        other => other?,
    }
    // The pod may have replaced the directory; no link is followed to anything else.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made = rustix::fs::openat(parent, name, flags, Mode::empty())?;
    let group = Gid::from_raw(above.st_gid);
    rustix::fs::fchown(&made, Some(Uid::from_raw(owner)), Some(group))?;
    rustix::fs::fchmod(&made, Mode::from_raw_mode(above.st_mode & 0o7777))
}
