//! Read-only overlay views of host files, so that a container gets its own inodes.
//!
//! On the host's inodes a container could watch which files others open (`inotify`), and lock files that others want to lock
//! (`flock`). The page cache stays shared, because an overlay reads through the lower inodes.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use crate::failure::{During, Failure};
use crate::mounts::{attach, clone_tree};

/// An empty directory in the stage.
const EMPTY: &str = "empty";

/// The views of one container. The current directory must be the stage.
#[derive(Debug, Default)]
pub struct Views {
    made: u32,
}

impl Views {
    /// Creates a detached view of a file or directory. A path that cannot be an overlay layer, because of its file system or without
    /// root, is bind-mounted directly.
    pub fn open(&mut self, path: &Path) -> Result<(OwnedFd, FileType), Failure> {
        let opening = format!("opening {}", path.display());
        let mode = rustix::fs::stat(path).during(&opening)?.st_mode;
        let kind = FileType::from_raw_mode(mode);
        let tree = self.make(path, kind).or_else(|error| {
            eprintln!(
                "{} is mounted without an overlay, so containers can watch and lock it for each other: {error}",
                path.display()
            );
            clone_tree(CWD, path, true)
        });
        Ok((tree.during(&opening)?, kind))
    }

    fn make(&mut self, path: &Path, kind: FileType) -> rustix::io::Result<OwnedFd> {
        if self.made == 0 {
            rustix::fs::mkdir(EMPTY, Mode::from_raw_mode(0o755))?;
        }
        self.made += 1;
        if kind == FileType::Directory {
            return of_directory(path);
        }
        // A file is cloned from a view of its directory, which must be mounted for that.
        let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Errno::INVAL);
        };
        let place = format!("view{}", self.made);
        rustix::fs::mkdir(&place, Mode::from_raw_mode(0o700))?;
        let view = of_directory(directory)?;
        attach(view.as_fd(), CWD, Path::new(&place))?;
        clone_tree(CWD, &Path::new(&place).join(name), false)
    }
}

fn of_directory(directory: &Path) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&context, "source", "overlay")?;
    // An overlay without a writable layer needs two lower layers. The first provides the owner and mode of the root.
    let shown = open_path(directory)?;
    let layers = format!("{}:{EMPTY}", by_descriptor(&shown));
    rustix::mount::fsconfig_set_string(&context, "lowerdir", layers.as_str())?;
    rustix::mount::fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV;
    rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

pub fn open_path(path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

/// The `/proc/self/fd` path of a descriptor. A container can read its mount options, and such a path
/// does not reveal where the directory is.
pub fn by_descriptor(descriptor: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", descriptor.as_raw_fd())
}
