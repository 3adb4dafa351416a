//! Builds a container's root file system in the launcher's mount namespace, as the host's root user.
//!
//! Everything is attached through descriptors resolved inside the new root (`RESOLVE_IN_ROOT`), so that no symlink of an
//! image or a volume can make the launcher touch the host. Mounts created here are locked once the container's user
//! namespace copies them: a process inside cannot remove a mask or a read-only flag.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dev, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags};
use shim_protocol::{BindSource, Launch, Mount, MountKind, Outside, UidRange};

use crate::failure::{During, Failure};
use crate::sub_path::{self, Missing};
use crate::syscalls;
use crate::view::{Views, by_descriptor, open_path};

/// The finished root: a mount whose attributes can still be changed, at a path of the launcher's mount namespace.
#[derive(Debug)]
pub struct BuiltRoot {
    pub path: PathBuf,
}

struct Builder<'a> {
    launch: &'a Launch,
    root: OwnedFd,
    user_namespace: BorrowedFd<'a>,
    shared_memory: Option<OwnedFd>,
    /// Mounts that become read-only when everything below them is mounted.
    seal: Vec<OwnedFd>,
    views: Views,
}

/// Opens a detached mount of the shared memory of a pod with several containers.
pub fn open_shared_memory(launch: &Launch) -> Result<Option<OwnedFd>, Failure> {
    let open = |path: &PathBuf| clone_tree(CWD, path, false);
    launch
        .shared_memory
        .as_ref()
        .map(open)
        .transpose()
        .during("opening the pod's shared memory")
}

/// Builds the root of `launch`. The current directory becomes the stage.
pub fn build(
    launch: &Launch,
    user_namespace: BorrowedFd<'_>,
    shared_memory: Option<OwnedFd>,
) -> Result<BuiltRoot, Failure> {
    let root = mount_root(launch, user_namespace)?;
    let mut builder = Builder {
        launch,
        root,
        user_namespace,
        shared_memory,
        seal: Vec::new(),
        views: Views::default(),
    };
    builder.mount_devices()?;
    builder.target(Path::new("proc"), FileType::Directory)?;
    for mount in &launch.mounts {
        builder.mount(mount)?;
    }
    // An image may set a working directory that does not exist; the container starts nevertheless.
    let _ = builder.open_target(
        Path::new(&launch.process.working_directory),
        FileType::Directory,
    );
    builder.seal()?;
    if let Some(outside) = &launch.outside {
        builder.stage_bundle(outside)?;
    }
    Ok(BuiltRoot {
        path: launch.stage.join("root"),
    })
}

fn mount_root(launch: &Launch, user_namespace: BorrowedFd<'_>) -> Result<OwnedFd, Failure> {
    let stage = match launch.outside {
        None => memory_file_system(64 << 10, 0o700, None),
        // Another runtime finds its bundle here, and keeps its state here for the life of the container.
        Some(_) => memory_file_system(4 << 20, 0o700, Some(launch.uid_range)),
    }
    .during("making the stage")?;
    attach(stage.as_fd(), CWD, &launch.stage).during("mounting the stage")?;
    rustix::process::chdir(&launch.stage).during("entering the stage")?;
    let mut lower = Vec::new();
    for (index, layer) in launch.root.layers.iter().enumerate() {
        let name = format!("l{index}");
        rustix::fs::mkdir(&name, Mode::from_raw_mode(0o700))
            .during("making a layer's mount point")?;
        let tree = clone_tree(CWD, &layer.path, true)
            .during(format_args!("opening layer {}", layer.path.display()))?;
        map_ids(
            tree.as_fd(),
            Some(user_namespace).filter(|_| !launch.uid_range.is_single()),
            READ_ONLY,
        )
        .during(format_args!("mapping layer {}", layer.path.display()))?;
        attach(tree.as_fd(), CWD, Path::new(&name)).during("mounting a layer")?;
        lower.push(name);
    }
    rustix::fs::mkdir("root", Mode::from_raw_mode(0o700))
        .during("making the root's mount point")?;
    let overlay = overlay(launch, &lower).during("mounting the overlay")?;
    attach(overlay.as_fd(), CWD, Path::new("root")).during("attaching the overlay")?;
    Ok(overlay)
}

/// The largest parameter that a kernel before 6.5 accepts in one `fsconfig` call.
const PARAMETER_BYTES_MAX: usize = 255;

fn overlay(launch: &Launch, lower: &[String]) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&context, "source", "overlay")?;
    let joined = lower.join(":");
    if joined.len() <= PARAMETER_BYTES_MAX {
        rustix::mount::fsconfig_set_string(&context, "lowerdir", joined.as_str())?;
    } else {
        for layer in lower {
            rustix::mount::fsconfig_set_string(&context, "lowerdir+", layer.as_str())?;
        }
    }
    // The container can read these options in its list of mounts, so they must not reveal where the directories are.
    let upper = open_path(&launch.root.upper)?;
    rustix::mount::fsconfig_set_string(&context, "upperdir", by_descriptor(&upper).as_str())?;
    let work = open_path(&launch.root.work)?;
    rustix::mount::fsconfig_set_string(&context, "workdir", by_descriptor(&work).as_str())?;
    if launch.uid_range.is_single() {
        // Without root, overlayfs keeps its metadata in user extended attributes.
        rustix::mount::fsconfig_set_flag(&context, "userxattr")?;
    }
    // The layer is deleted with the container, so it need not survive a crash of the machine.
    rustix::mount::fsconfig_set_flag(&context, "volatile")?;
    rustix::mount::fsconfig_create(&context)?;
    // Set-user-ID programs of the image and of the container's layer work if privileges may be gained. Their owners are within the
    // pod's UID range: the mode of a file with another owner changes no process' user.
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NODEV;
    if launch.process.no_new_privileges {
        attributes |= MountAttrFlags::MOUNT_ATTR_NOSUID;
    }
    rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

const READ_ONLY: u64 = libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;

/// Maps IDs if the file system supports it. Otherwise its files appear as owned by the overflow UID, and stay readable.
fn map_ids(
    tree: BorrowedFd<'_>,
    user_namespace: Option<BorrowedFd<'_>>,
    attributes: u64,
) -> std::io::Result<()> {
    match syscalls::mount_set_attributes(tree, false, attributes, user_namespace) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            syscalls::mount_set_attributes(tree, true, attributes, None)
        }
        other => other,
    }
}

pub fn clone_tree(
    directory: BorrowedFd<'_>,
    path: &Path,
    recursive: bool,
) -> rustix::io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    if path.as_os_str().is_empty() {
        flags |= OpenTreeFlags::AT_EMPTY_PATH;
    }
    rustix::mount::open_tree(directory, path, flags)
}

/// Attaches a detached mount; an empty path means the directory itself.
pub fn attach(
    mount: BorrowedFd<'_>,
    directory: BorrowedFd<'_>,
    path: &Path,
) -> rustix::io::Result<()> {
    let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if path.as_os_str().is_empty() {
        flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    }
    rustix::mount::move_mount(mount, "", directory, path, flags)
}

/// Creates a detached tmpfs, owned by the container's root if a UID range is given.
pub fn memory_file_system(
    size_bytes: u64,
    mode: u32,
    owner: Option<UidRange>,
) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&context, "source", "tmpfs")?;
    rustix::mount::fsconfig_set_string(&context, "size", size_bytes.to_string().as_str())?;
    rustix::mount::fsconfig_set_string(&context, "mode", format!("{mode:o}").as_str())?;
    if let Some(uid_range) = owner {
        let base = uid_range.base.to_string();
        rustix::mount::fsconfig_set_string(&context, "uid", base.as_str())?;
        rustix::mount::fsconfig_set_string(&context, "gid", base.as_str())?;
    }
    rustix::mount::fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID;
    rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

impl Builder<'_> {
    fn mount(&mut self, mount: &Mount) -> Result<(), Failure> {
        let shown = mount.target.display();
        match &mount.kind {
            MountKind::Bind(source) => {
                let (tree, kind) = self.open_source(source)?;
                let mut attributes = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV;
                if mount.read_only {
                    attributes |= libc::MOUNT_ATTR_RDONLY;
                }
                if mount.no_exec {
                    attributes |= libc::MOUNT_ATTR_NOEXEC;
                }
                if source.id_mapped && !self.launch.uid_range.is_single() {
                    syscalls::mount_set_attributes(
                        tree.as_fd(),
                        false,
                        attributes,
                        Some(self.user_namespace),
                    )
                    .during(format_args!("mapping IDs of {}", source.path.display()))?;
                } else {
                    syscalls::mount_set_attributes(
                        tree.as_fd(),
                        source.recursive,
                        attributes,
                        None,
                    )
                    .during(format_args!(
                        "setting attributes of {}",
                        source.path.display()
                    ))?;
                }
                let target = self.target(&mount.target, kind)?;
                attach(tree.as_fd(), target.as_fd(), Path::new(""))
                    .during(format_args!("mounting {shown}"))
            }
            MountKind::View { path } => {
                let (tree, kind) = self.views.open(path)?;
                let mut attributes = READ_ONLY;
                if mount.no_exec {
                    attributes |= libc::MOUNT_ATTR_NOEXEC;
                }
                syscalls::mount_set_attributes(tree.as_fd(), true, attributes, None)
                    .during(format_args!("setting attributes of {shown}"))?;
                let target = self.target(&mount.target, kind)?;
                attach(tree.as_fd(), target.as_fd(), Path::new(""))
                    .during(format_args!("mounting {shown}"))
            }
            MountKind::Memory { size_bytes, mode } => {
                let tree = memory_file_system(*size_bytes, *mode, Some(self.launch.uid_range))
                    .during(format_args!("making a tmpfs for {shown}"))?;
                let mut attributes = libc::MOUNT_ATTR_NODEV;
                if mount.no_exec {
                    attributes |= libc::MOUNT_ATTR_NOEXEC;
                }
                syscalls::mount_set_attributes(tree.as_fd(), false, attributes, None)
                    .during(format_args!("setting attributes of {shown}"))?;
                let target = self.target(&mount.target, FileType::Directory)?;
                attach(tree.as_fd(), target.as_fd(), Path::new(""))
                    .during(format_args!("mounting {shown}"))?;
                if mount.read_only {
                    self.seal.push(tree);
                }
                Ok(())
            }
        }
    }

    fn open_source(&self, source: &BindSource) -> Result<(OwnedFd, FileType), Failure> {
        let shown = source.path.display();
        let base = rustix::fs::open(&source.path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
            .during(format_args!("opening {shown}"))?;
        let opened = match &source.sub_path {
            None => base,
            Some(sub_path) => {
                sub_path::open(base.as_fd(), sub_path, self.missing_policy(source))
                    .during(format_args!("opening {} below {shown}", sub_path.display()))?
            }
        };
        let kind = FileType::from_raw_mode(
            rustix::fs::fstat(&opened)
                .during(format_args!("reading {shown}"))?
                .st_mode,
        );
        let tree = clone_tree(opened.as_fd(), Path::new(""), source.recursive)
            .during(format_args!("cloning {shown}"))?;
        Ok((tree, kind))
    }

    fn missing_policy(&self, source: &BindSource) -> Missing {
        let uid_range = self.launch.uid_range;
        match (source.create_sub_path, source.id_mapped) {
            (false, _) => Missing::IsAnError,
            // With an ID-mapped mount, the container's IDs are on the disk unmapped.
            (true, true) if !uid_range.is_single() => Missing::CreateFor(0),
            (true, _) => Missing::CreateFor(uid_range.base),
        }
    }

    /// Opens a mount target inside the root and creates its missing directories.
    fn target(&self, path: &Path, kind: FileType) -> Result<OwnedFd, Failure> {
        self.open_target(path, kind)
            .during(format_args!("making mount point {}", path.display()))
    }

    fn open_target(&self, path: &Path, kind: FileType) -> rustix::io::Result<OwnedFd> {
        let open = |path: &Path| {
            let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            rustix::fs::openat2(
                &self.root,
                path,
                OFlags::PATH | OFlags::CLOEXEC,
                Mode::empty(),
                resolve,
            )
        };
        let relative: PathBuf = path
            .components()
            .filter(|part| matches!(part, Component::Normal(_)))
            .collect();
        match open(&relative) {
            Err(Errno::NOENT) => {}
            other => return other,
        }
        let mut parent = rustix::io::dup(&self.root)?;
        let mut prefix = PathBuf::new();
        let count = relative.components().count();
        for (index, name) in relative.components().enumerate() {
            prefix.push(name);
            parent = match open(&prefix) {
                Err(Errno::NOENT) => {
                    if index + 1 == count && kind != FileType::Directory {
                        let flags = OFlags::CREATE
                            | OFlags::EXCL
                            | OFlags::NOFOLLOW
                            | OFlags::CLOEXEC
                            | OFlags::WRONLY;
                        let file = rustix::fs::openat(
                            &parent,
                            name.as_os_str(),
                            flags,
                            Mode::from_raw_mode(0o644),
                        )?;
                        self.give_to_container(file.as_fd(), Path::new(""))?;
                    } else {
                        self.make_directory(parent.as_fd(), Path::new(name.as_os_str()))?;
                    }
                    open(&prefix)?
                }
                other => other?,
            };
        }
        Ok(parent)
    }

    fn make_directory(&self, parent: BorrowedFd<'_>, name: &Path) -> rustix::io::Result<()> {
        rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(0o755))?;
        self.give_to_container(parent, name)
    }

    fn give_to_container(&self, directory: BorrowedFd<'_>, name: &Path) -> rustix::io::Result<()> {
        let base = self.launch.uid_range.base;
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
        rustix::fs::chownat(
            directory,
            name,
            Some(Uid::from_raw(base)),
            Some(Gid::from_raw(base)),
            flags,
        )
    }

    /// Mounts a `/dev` with the devices that every program expects and no others.
    fn mount_devices(&mut self) -> Result<(), Failure> {
        let devices = memory_file_system(64 << 10, 0o755, Some(self.launch.uid_range))
            .during("making /dev")?;
        self.populate_devices(devices.as_fd())
            .during("filling /dev")?;
        let target = self.target(Path::new("dev"), FileType::Directory)?;
        attach(devices.as_fd(), target.as_fd(), Path::new("")).during("mounting /dev")?;
        if self.launch.uid_range.is_single() {
            show_devices(devices.as_fd()).during("showing the machine's devices")?;
        }

        let terminals = self.terminal_file_system().during("making /dev/pts")?;
        attach(terminals.as_fd(), devices.as_fd(), Path::new("pts")).during("mounting /dev/pts")?;
        let queues = plain_file_system("mqueue").during("making /dev/mqueue")?;
        attach(queues.as_fd(), devices.as_fd(), Path::new("mqueue"))
            .during("mounting /dev/mqueue")?;
        let shared_memory = match self.shared_memory.take() {
            Some(tree) => tree,
            None => memory_file_system(
                self.launch.shared_memory_bytes,
                0o1777,
                Some(self.launch.uid_range),
            )
            .during("making /dev/shm")?,
        };
        let attributes = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV | libc::MOUNT_ATTR_NOEXEC;
        syscalls::mount_set_attributes(shared_memory.as_fd(), false, attributes, None)
            .during("setting attributes of /dev/shm")?;
        attach(shared_memory.as_fd(), devices.as_fd(), Path::new("shm")).during("mounting /dev/shm")
    }

    fn populate_devices(&self, devices: BorrowedFd<'_>) -> rustix::io::Result<()> {
        const LINKS: [(&str, &str); 5] = [
            ("/proc/self/fd", "fd"),
            ("/proc/self/fd/0", "stdin"),
            ("/proc/self/fd/1", "stdout"),
            ("/proc/self/fd/2", "stderr"),
            ("pts/ptmx", "ptmx"),
        ];
        for (name, major, minor) in NODES {
            if self.launch.uid_range.is_single() {
                continue;
            }
            let device: Dev = rustix::fs::makedev(major, minor);
            rustix::fs::mknodat(
                devices,
                name,
                FileType::CharacterDevice,
                Mode::from_raw_mode(0o666),
                device,
            )?;
        }
        for (to, name) in LINKS {
            rustix::fs::symlinkat(to, devices, name)?;
        }
        for name in ["pts", "shm", "mqueue"] {
            self.make_directory(devices, Path::new(name))?;
        }
        Ok(())
    }

    fn terminal_file_system(&self) -> rustix::io::Result<OwnedFd> {
        const TERMINAL_GROUP: u32 = 5;
        let context = rustix::mount::fsopen("devpts", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_set_flag(&context, "newinstance")?;
        let most = self.launch.terminals.to_string();
        rustix::mount::fsconfig_set_string(&context, "max", most.as_str())?;
        rustix::mount::fsconfig_set_string(&context, "ptmxmode", "0666")?;
        rustix::mount::fsconfig_set_string(&context, "mode", "0620")?;
        let group = if self.launch.uid_range.is_single() {
            self.launch.uid_range.base
        } else {
            self.launch.uid_range.base + TERMINAL_GROUP
        }
        .to_string();
        rustix::mount::fsconfig_set_string(&context, "gid", group.as_str())?;
        rustix::mount::fsconfig_create(&context)?;
        let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    }

    /// Creates a bundle around the finished root. An image decides where a path in its root leads, so paths that another runtime
    /// must find are mounted a second time, outside the image's control.
    fn stage_bundle(&self, outside: &Outside) -> Result<(), Failure> {
        let path = Path::new("config.json");
        std::fs::write(path, &outside.configuration).during("writing the bundle")?;
        rustix::fs::chmod(path, Mode::from_raw_mode(0o644)).during("writing the bundle")?;
        rustix::fs::mkdir("staged", Mode::from_raw_mode(0o755)).during("making the bundle")?;
        for (index, target) in outside.staged.iter().enumerate() {
            let staging = format!("staging {}", target.display());
            let source = self
                .open_target(target, FileType::Directory)
                .during(&staging)?;
            let mode = rustix::fs::fstat(&source).during(&staging)?.st_mode;
            let name = Path::new("staged").join(index.to_string());
            if FileType::from_raw_mode(mode) == FileType::Directory {
                rustix::fs::mkdir(&name, Mode::from_raw_mode(0o755)).during(&staging)?;
            } else {
                std::fs::write(&name, "").during(&staging)?;
            }
            let tree = clone_tree(source.as_fd(), Path::new(""), true).during(&staging)?;
            attach(tree.as_fd(), CWD, &name).during(&staging)?;
        }
        Ok(())
    }

    fn seal(&mut self) -> Result<(), Failure> {
        for mount in self.seal.drain(..) {
            syscalls::mount_set_attributes(mount.as_fd(), false, libc::MOUNT_ATTR_RDONLY, None)
                .during("sealing a tmpfs")?;
        }
        if self.launch.root.read_only {
            syscalls::mount_set_attributes(self.root.as_fd(), false, libc::MOUNT_ATTR_RDONLY, None)
                .during("sealing the root")?;
        }
        Ok(())
    }
}

/// Devices every program expects, with their numbers.
const NODES: [(&str, u32, u32); 6] = [
    ("null", 1, 3),
    ("zero", 1, 5),
    ("full", 1, 7),
    ("random", 1, 8),
    ("urandom", 1, 9),
    ("tty", 5, 0),
];

/// Bind-mounts the host's devices if device nodes cannot be created, as without root.
fn show_devices(devices: BorrowedFd<'_>) -> rustix::io::Result<()> {
    for (name, ..) in NODES {
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        rustix::fs::openat(devices, name, flags, Mode::from_raw_mode(0o666))?;
        let device = clone_tree(CWD, &Path::new("/dev").join(name), false)?;
        attach(device.as_fd(), devices, Path::new(name))?;
    }
    Ok(())
}

/// Creates a detached instance of a file system without options, for this process' namespaces.
pub fn plain_file_system(name: &str) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&context, "source", name)?;
    rustix::mount::fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    rustix::mount::fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// Mounts of one empty directory. The first is attached directly and the others are its clones: closing a mount that was
/// never attached makes the kernel wait for all CPUs.
#[derive(Debug, Default)]
struct EmptyDirectory {
    first: Option<OwnedFd>,
}

impl EmptyDirectory {
    fn next(&mut self) -> rustix::io::Result<OwnedFd> {
        if let Some(first) = &self.first {
            return clone_tree(first.as_fd(), Path::new(""), false);
        }
        let made = memory_file_system(4 << 10, 0o555, None)?;
        syscalls::mount_set_attributes(made.as_fd(), false, READ_ONLY, None)
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let first = rustix::io::fcntl_dupfd_cloexec(&made, 3)?;
        self.first = Some(first);
        Ok(made)
    }
}

/// Masks what the kernel exposes of the host in a new `/proc`. Runs inside the container's namespaces, in its root.
pub fn mask<'a>(
    masked: &[PathBuf],
    read_only: impl Iterator<Item = &'a PathBuf>,
) -> Result<(), Failure> {
    let open = |path: &Path| {
        let relative = path.strip_prefix("/").unwrap_or(path);
        rustix::fs::open(
            relative,
            OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW,
            Mode::empty(),
        )
    };
    let mut empty = EmptyDirectory::default();
    for path in masked {
        let target = match open(path) {
            Err(Errno::NOENT) => continue,
            other => other.during(format_args!("opening {}", path.display()))?,
        };
        let kind = FileType::from_raw_mode(
            rustix::fs::fstat(&target)
                .during("reading a masked path")?
                .st_mode,
        );
        let cover = if kind == FileType::Directory {
            empty.next()
        } else {
            clone_tree(CWD, Path::new("dev/null"), false)
        };
        let cover = cover.during(format_args!("covering {}", path.display()))?;
        attach(cover.as_fd(), target.as_fd(), Path::new(""))
            .during(format_args!("masking {}", path.display()))?;
    }
    for path in read_only {
        let target = match open(path) {
            Err(Errno::NOENT) => continue,
            other => other.during(format_args!("opening {}", path.display()))?,
        };
        let tree = clone_tree(target.as_fd(), Path::new(""), true)
            .during(format_args!("cloning {}", path.display()))?;
        syscalls::mount_set_attributes(tree.as_fd(), true, libc::MOUNT_ATTR_RDONLY, None)
            .during(format_args!("sealing {}", path.display()))?;
        attach(tree.as_fd(), target.as_fd(), Path::new(""))
            .during(format_args!("protecting {}", path.display()))?;
    }
    Ok(())
}
