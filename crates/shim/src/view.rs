//! Views of files of the host: read-only overlays, whose inodes are the container's own.
//!
//! On the inodes of the host a container could watch what others open (`inotify`), and lock what others want to lock (`flock`).
//! Pages in memory stay shared, because an overlay reads through the inodes below.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use crate::failure::{During, Failure};
use crate::mounts::{attach, clone_tree};

/// An empty directory of the stage.
const EMPTY: &str = "empty";

/// The views of one container. The current directory has to be the stage.
#[derive(Debug, Default)]
pub struct Views {
    made: u32,
}

impl Views {
    /// Detaches a view of a file or directory. What no overlay can be made of, by its file system or without root, is shown as it
    /// is.
    pub fn open(&mut self, path: &Path) -> Result<(OwnedFd, FileType), Failure> {
        let opening = format!("opening {}", path.display());
        let mode = rustix::fs::stat(path).during(&opening)?.st_mode;
        let kind = FileType::from_raw_mode(mode);
        let tree = self.make(path, kind).or_else(|error| {
            eprintln!(
                "{} is shown as it is, and containers can watch and lock it for each other: {error}",
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
        // A file is taken out of a view of its directory, which has to be mounted for that.
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
    // Without a writable layer there have to be two others. The first one lends the root its owner and mode.
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

/// A path to what a descriptor of this process stands for. Options of a mount can be read in the container, and such a path
/// does not tell where the directory is.
pub fn by_descriptor(descriptor: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", descriptor.as_raw_fd())
}
