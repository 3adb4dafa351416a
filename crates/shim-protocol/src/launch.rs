//! Requests to the short-lived launcher: create the namespaces of a pod, and start a container in them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The UID and GID range of a pod's user namespace: container ID 0 maps to host ID `base`, and the range has `count` IDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct UidRange {
    pub base: u32,
    pub count: u32,
}

impl UidRange {
    /// Whether the range has only one ID, as on a node that runs without root.
    pub fn is_single(self) -> bool {
        self.count == 1
    }
}

/// Files onto which the namespaces of a pod are bind-mounted, so that they exist without any process in them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespacePins {
    pub network: PathBuf,
    pub ipc: PathBuf,
    pub hostname: PathBuf,
    pub user: PathBuf,
}

/// Asks `shim namespaces` to create and pin the namespaces of a pod.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NamespacesRequest {
    pub pins: NamespacePins,
    pub uid_range: UidRange,
}

/// The response to a [`NamespacesRequest`]: one JSON value on standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NamespacesAnswer {
    Pinned,
    Failed(String),
}

/// A read-only layer of an image. [`RootFilesystem::layers`] lists the uppermost first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Layer {
    pub path: PathBuf,
}

/// The container's root file system: an overlay of read-only layers and a private writable directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RootFilesystem {
    pub layers: Vec<Layer>,
    pub upper: PathBuf,
    pub work: PathBuf,
    pub read_only: bool,
}

/// The source of a bind mount.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BindSource {
    /// A path on the host, created by the node.
    pub path: PathBuf,
    /// A path below `path` that the pod chose. It must not leave `path`, not even through symlinks.
    pub sub_path: Option<PathBuf>,
    /// Whether a missing `sub_path` is created as a directory.
    pub create_sub_path: bool,
    /// Whether the mount is ID-mapped: files have the container's IDs on disk. Otherwise they have host IDs of the pod's range.
    pub id_mapped: bool,
    /// Whether submounts of `path` are included.
    pub recursive: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountKind {
    Bind(BindSource),
    /// A read-only view of a file or directory of the host with inodes that only this container has, so that watches and locks do
    /// not affect others. Submounts are not included.
    View {
        path: PathBuf,
    },
    /// A private tmpfs with this maximum size.
    Memory {
        size_bytes: u64,
        mode: u32,
    },
}

/// A mount in the container. Targets are resolved inside the new root, so an image's symlinks cannot escape it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Mount {
    pub target: PathBuf,
    pub kind: MountKind,
    pub read_only: bool,
    pub no_exec: bool,
}

/// The user that the container runs as, in container IDs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// A resource limit, identified by its Linux number.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ResourceLimit {
    pub resource: u32,
    pub soft: u64,
    pub hard: u64,
}

/// The container's command. The agent runs it, and every later exec, with the same user and the same confinement.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a field of its own in a pod's specification"
)]
pub struct Process {
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub working_directory: String,
    pub user: User,
    /// Bounding set of capabilities, as bits. Root has all of them; another user has none, until it executes a program that gives
    /// it some.
    pub capabilities: u64,
    /// Whether no program may give its user more than it has (`no_new_privs`): neither set-user-ID bits nor file capabilities count.
    pub no_new_privileges: bool,
    pub limits: Vec<ResourceLimit>,
    pub terminal: bool,
    /// Whether standard input stays open for attach. Otherwise the command reads end of file.
    pub stdin: bool,
    pub stdin_once: bool,
    /// Set if another runtime runs the container and the agent is outside of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrance: Option<Entrance>,
}

/// How to run commands in a container that another runtime runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entrance {
    /// The runtime's command line for an exec, without the last argument: the file that describes the process.
    pub exec: Vec<String>,
    /// The runtime's command line that prints the state of the container.
    pub state: Vec<String>,
    /// The container's ID in the other runtime.
    pub identifier: String,
    /// The process description without its arguments: `process` of the bundle's configuration.
    pub process: String,
    /// The directory for process descriptions. The runtime writes `pid` there when it has created the container.
    pub directory: PathBuf,
}

/// Another runtime creates the container, from a bundle whose root file system the launcher has built. The runtime and the agent
/// run in the pod's namespaces, including its user namespace, but not in the container's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outside {
    /// The bundle's `config.json`, which the launcher writes to the stage directory.
    pub configuration: String,
    /// Paths of the container that the bundle refers to, available as `staged/<index>` beside `config.json`.
    pub staged: Vec<PathBuf>,
    /// The command line of the other runtime, which the agent runs instead of the container's command.
    pub process: Process,
}

/// The container's files on the host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerFiles {
    /// The directory of this run of the container. `agent.sock` is created in it.
    pub directory: PathBuf,
    pub log: PathBuf,
    /// The agent writes a [`ContainerExit`] here when the command exits.
    pub exit: PathBuf,
}

/// The work of `shim launch` before it knows which container to start: one line of JSON, the first line of its standard input.
///
/// Joining cgroups takes longer in the kernel than everything else together. So a launcher can be started before there is a
/// request for it, and do this in advance.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Preparation {
    pub pins: NamespacePins,
    /// The directories of the cgroups to start in.
    pub cgroups: Vec<PathBuf>,
    pub out_of_memory_score: i32,
}

/// Asks a prepared `shim launch` to start a container: the rest of its standard input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Launch {
    pub uid_range: UidRange,
    pub hostname: String,
    /// The PID namespace of another container of the pod to join, instead of creating a new one.
    pub pid_namespace: Option<PathBuf>,
    /// An empty directory under which the launcher builds the root file system in its own mount namespace.
    pub stage: PathBuf,
    /// A directory whose mounts are unmounted from the container's view of the host first.
    pub hide: PathBuf,
    pub root: RootFilesystem,
    pub mounts: Vec<Mount>,
    pub shared_memory: Option<PathBuf>,
    pub shared_memory_bytes: u64,
    /// The maximum number of open terminals in the container.
    pub terminals: u32,
    pub masked_paths: Vec<PathBuf>,
    pub read_only_paths: Vec<PathBuf>,
    /// Files with compiled seccomp filters, installed in this order.
    pub seccomp_programs: Vec<PathBuf>,
    /// The shim's own binary, which becomes the container's PID 1.
    pub agent: PathBuf,
    pub process: Process,
    pub files: ContainerFiles,
    /// Set if another runtime runs the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outside: Option<Outside>,
}

impl Launch {
    /// The process that the agent runs: the container's command, or the other runtime.
    pub fn agent_process(&self) -> &Process {
        self.outside
            .as_ref()
            .map_or(&self.process, |outside| &outside.process)
    }
}

/// The response to a [`Launch`]: one JSON value on standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchAnswer {
    /// The command is running. `pid` is the PID of its agent in the launcher's PID namespace.
    Started { pid: i32 },
    /// The container could not be created. If its first process exists nevertheless, the caller must reap it.
    Failed { message: String, pid: Option<i32> },
    /// The container was created, but its command could not be executed. `code` is the exit code that a shell would return.
    CommandFailed {
        message: String,
        code: i32,
        pid: i32,
    },
}

/// The record that the agent writes when the container's command has exited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerExit {
    pub code: i32,
    pub signal: Option<i32>,
    /// Nanoseconds since the Unix epoch.
    pub finished_at_ns: u64,
}
