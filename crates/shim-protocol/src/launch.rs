//! Requests to the short-lived launcher: make a pod's namespaces, start a container in them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The host identities a pod's user namespace maps to: container id 0 is host id `base`, and `count` ids follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdentityRange {
    pub base: u32,
    pub count: u32,
}

impl IdentityRange {
    /// Whether there is but one identity, as where the node itself runs without root.
    pub fn is_single(self) -> bool {
        self.count == 1
    }
}

/// Files onto which a pod's namespaces are bind-mounted, so that they outlive every process in them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespacePins {
    pub network: PathBuf,
    pub ipc: PathBuf,
    pub hostname: PathBuf,
    pub user: PathBuf,
}

/// Asks `shim namespaces` to make and pin a pod's namespaces.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NamespacesRequest {
    pub pins: NamespacePins,
    pub identities: IdentityRange,
}

/// The answer to a [`NamespacesRequest`], one JSON value on standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NamespacesAnswer {
    Pinned,
    Failed(String),
}

/// One read-only layer of an image, uppermost first in [`RootFilesystem::layers`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Layer {
    pub path: PathBuf,
}

/// The container's root: an overlay of read-only layers under a private writable directory.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RootFilesystem {
    pub layers: Vec<Layer>,
    pub upper: PathBuf,
    pub work: PathBuf,
    pub read_only: bool,
}

/// What a bind mount shows.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BindSource {
    /// A path of the host, made by the node.
    pub path: PathBuf,
    /// A path below it that the pod chose; it may not leave `path`, symlinks included.
    pub sub_path: Option<PathBuf>,
    /// Whether a missing `sub_path` is made as a directory.
    pub create_sub_path: bool,
    /// Files keep the container's ids on disk; without it they carry host ids of the pod's range.
    pub identity_mapped: bool,
    /// Whether mounts below `path` are shown too.
    pub recursive: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MountKind {
    Bind(BindSource),
    /// A read-only view of a file or directory of the host, through inodes that only this container has: what it watches and
    /// locks there are its own. Mounts below it are not shown.
    View {
        path: PathBuf,
    },
    /// A private tmpfs of at most this size.
    Memory {
        size_bytes: u64,
        mode: u32,
    },
}

/// A mount inside the container. Targets resolve inside the new root, so that an image's symlinks cannot lead out.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Mount {
    pub target: PathBuf,
    pub kind: MountKind,
    pub read_only: bool,
    pub no_exec: bool,
}

/// Who the container runs as, in container ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// A resource limit by its Linux number.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ResourceLimit {
    pub resource: u32,
    pub soft: u64,
    pub hard: u64,
}

/// The container's command. The agent runs it, and every later exec, with the same user and confinement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Process {
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub working_directory: String,
    pub user: User,
    /// Bit set of capabilities that stay; none by default.
    pub capabilities: u64,
    pub limits: Vec<ResourceLimit>,
    pub terminal: bool,
    /// Whether standard input stays open for attach; without it the command reads end of file.
    pub stdin: bool,
    pub stdin_once: bool,
    /// Set where another runtime has the container, and the agent is outside of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrance: Option<Entrance>,
}

/// How commands get into a container that another runtime has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entrance {
    /// The call that runs a command, up to the file that describes it.
    pub exec: Vec<String>,
    /// The call that tells the container's state.
    pub state: Vec<String>,
    /// The container, as the other runtime knows it.
    pub identifier: String,
    /// What describes a command, but for its words: `process` of the bundle's configuration.
    pub process: String,
    /// Where such files may be; the runtime writes `pid` there when it has made the container.
    pub directory: PathBuf,
}

/// Another runtime makes the container, from a bundle whose root the launcher has built. It and the agent are in the pod's
/// namespaces, user namespace included, and in none of the container's.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outside {
    /// The bundle's `config.json`, which the launcher puts on the stage.
    pub configuration: String,
    /// Paths of the container that the bundle refers to, found as `staged/<index>` beside `config.json`.
    pub staged: Vec<PathBuf>,
    /// The call of the other runtime, which the agent runs in place of the container's command.
    pub process: Process,
}

/// Where the container's traces on the host are.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ContainerFiles {
    /// The directory of this run of the container; `agent.sock` is made in it.
    pub directory: PathBuf,
    pub log: PathBuf,
    /// Receives a [`ContainerExit`] when the command ends.
    pub exit: PathBuf,
}

/// What `shim launch` does before it knows which container it starts: one line of JSON, the first of its standard input.
///
/// Joining control groups waits for the kernel longer than everything else together, so a launcher can be started, and
/// have done this, ahead of its request.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Preparation {
    pub pins: NamespacePins,
    /// Directories of the control groups to start in.
    pub control_groups: Vec<PathBuf>,
    pub out_of_memory_score: i32,
}

/// Asks a prepared `shim launch` to start one container: the rest of its standard input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Launch {
    pub identities: IdentityRange,
    pub hostname: String,
    /// Join this PID namespace, which another container of the pod is in, rather than make a new one.
    pub pid_namespace: Option<PathBuf>,
    /// An empty directory under which the launcher builds the root in its own mount namespace.
    pub stage: PathBuf,
    /// A directory whose mounts are dropped from the container's view of the host before anything else.
    pub hide: PathBuf,
    pub root: RootFilesystem,
    pub mounts: Vec<Mount>,
    pub shared_memory: Option<PathBuf>,
    pub shared_memory_bytes: u64,
    /// How many terminals the container may have open.
    pub terminals: u32,
    pub masked_paths: Vec<PathBuf>,
    pub read_only_paths: Vec<PathBuf>,
    /// Files with compiled seccomp programs, installed in this order.
    pub seccomp_programs: Vec<PathBuf>,
    /// The shim's own binary, which becomes the container's PID 1.
    pub agent: PathBuf,
    pub process: Process,
    pub files: ContainerFiles,
    /// Set where another runtime goes on from here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outside: Option<Outside>,
}

impl Launch {
    /// What the agent runs: the container's command, or the runtime that has it.
    pub fn agent_process(&self) -> &Process {
        self.outside
            .as_ref()
            .map_or(&self.process, |outside| &outside.process)
    }
}

/// The answer to a [`Launch`], one JSON value on standard output.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LaunchAnswer {
    /// The command runs; `pid` is its agent's, in the launcher's PID namespace.
    Started { pid: i32 },
    /// The container could not be made. A first process that exists all the same is the caller's to reap.
    Failed { message: String, pid: Option<i32> },
    /// The container was made, and its command could not be executed; `code` is what a shell would exit with.
    CommandFailed {
        message: String,
        code: i32,
        pid: i32,
    },
}

/// What the agent leaves behind when the container's command has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerExit {
    pub code: i32,
    pub signal: Option<i32>,
    /// Nanoseconds since the epoch.
    pub finished_at_ns: u64,
}
