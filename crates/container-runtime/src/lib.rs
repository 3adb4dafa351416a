//! Containers and pod sandboxes as isolated processes: the interface of a container runtime, and the default runtime.
//!
//! The node knows only the [`Runtime`] trait. [`native::NativeRuntime`] implements it, and also starts the runtimes of other
//! runtime classes ([`handlers`]).

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod agent;
pub mod assets;
pub mod capabilities;
pub mod cgroups;
pub mod config;
pub mod cpu_fairness;
pub mod freeze_swap;
pub mod handlers;
pub mod host_image;
mod kernel_limits;
pub mod launcher;
pub mod logs;
pub mod native;
pub mod node_ranges;
pub mod oci_spec;
pub mod privileges;
pub mod reclaim;
pub mod seccomp;
pub mod signals;
pub mod slots;
pub mod throttling;

use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use shim_protocol::Mount;
use tokio::net::TcpStream;

use self::cgroups::Limits;
pub use self::config::Config;
use self::throttling::Periods;

/// The cgroup that holds the cgroups of all pods of the node with this data directory.
pub fn cgroup(data_dir: &std::path::Path) -> String {
    pod_network::names::Names::of(data_dir).cgroup
}

/// The UID and the name of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodIdentity {
    pub uid: String,
    pub namespace: String,
    pub name: String,
}

/// One run of one container. A restart is another attempt.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ContainerId {
    pub pod: String,
    pub container: String,
    pub attempt: u32,
}

impl ContainerId {
    /// The ID in the form of `containerStatuses[].containerID`.
    pub fn uri(&self) -> String {
        let hash = pod_network::names::short_hash(
            format!("{}/{}/{}", self.pod, self.container, self.attempt),
            32,
        );
        format!("agent-sandbox://{hash}")
    }
}

/// The specification of a pod sandbox: what a pod needs before its containers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PodSandboxSpec {
    pub identity: PodIdentity,
    pub hostname: String,
    pub host_aliases: Vec<(String, Vec<String>)>,
    pub fully_qualified_name: Option<String>,
    pub resolver: String,
    pub shared_processes: bool,
    /// How many containers share `/dev/shm`.
    pub containers: usize,
    /// The other runtime that runs the pod's containers. Absent for the native runtime.
    #[serde(default)]
    pub driver: Option<handlers::Driver>,
}

/// A pod's namespaces and address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodSandbox {
    pub address: Ipv4Addr,
    /// Absent on a machine without IPv6.
    pub ipv6_address: Option<Ipv6Addr>,
    /// The first UID of the pod's UID range on the host; container ID 0 maps to it.
    pub uid_base: u32,
}

impl PodSandbox {
    pub fn addresses(&self) -> Vec<IpAddr> {
        let six = self.ipv6_address.map(IpAddr::from);
        std::iter::once(self.address.into()).chain(six).collect()
    }
}

/// The source of a container's root file system.
#[derive(Debug, Clone)]
pub enum ImageSource {
    /// The built-in image `host`: a read-only view of this machine.
    Host,
    /// An empty root file system.
    Nothing,
    /// An image of the store, and the reference that the pod names it by.
    Stored {
        image: Arc<images::Image>,
        name: images::Reference,
    },
}

impl ImageSource {
    /// The image's digest in the form of `containerStatuses[].imageID`.
    pub fn id(image: &images::Image, name: &images::Reference) -> String {
        match &image.manifest {
            Some(manifest) => name.with_digest(manifest),
            None => image.id.to_string(),
        }
    }
}

/// The specification of one run of a container.
#[derive(Debug, Clone)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a field of the same name in the pod's specification"
)]
pub struct ContainerSpec {
    pub id: ContainerId,
    pub image: ImageSource,
    /// Replaces the image's entry point when not empty.
    pub command: Vec<String>,
    pub arguments: Vec<String>,
    pub environment: Vec<(String, String)>,
    pub working_directory: Option<String>,
    pub mounts: Vec<Mount>,
    pub user: Option<u32>,
    pub group: Option<u32>,
    pub supplementary_groups: Vec<u32>,
    pub must_not_be_root: bool,
    /// The bounding set, as bits.
    pub capabilities: u64,
    /// Whether set-user-ID bits and file capabilities have no effect (`no_new_privs`).
    pub no_new_privileges: bool,
    pub read_only_root: bool,
    pub limits: Limits,
    pub terminal: bool,
    pub stdin: bool,
    pub stdin_once: bool,
    pub termination_message_path: String,
    /// Whether the end of the log is the termination message of a container that fails without one (`FallbackToLogsOnError`).
    pub message_from_log: bool,
    /// How many runs in a row have failed before this one, for the restart back-off after a restart of the node.
    pub crashes: u32,
    /// Another container of the pod whose PID namespace this one joins.
    pub beside: Option<String>,
}

impl ContainerSpec {
    /// The specification of a container that the node itself starts: a command, and defaults for everything that a pod can set.
    pub fn plain(id: ContainerId, image: ImageSource, command: Vec<String>) -> Self {
        Self {
            id,
            image,
            command,
            arguments: Vec::new(),
            environment: Vec::new(),
            working_directory: None,
            mounts: Vec::new(),
            user: None,
            group: None,
            supplementary_groups: Vec::new(),
            must_not_be_root: false,
            capabilities: 0,
            no_new_privileges: true,
            read_only_root: false,
            limits: Limits::default(),
            terminal: false,
            stdin: false,
            stdin_once: false,
            termination_message_path: "/dev/termination-log".to_owned(),
            message_from_log: false,
            crashes: 0,
            beside: None,
        }
    }
}

/// A container that was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartedContainer {
    pub started_at: Timestamp,
    pub image_id: String,
}

/// How a container ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Termination {
    pub exit_code: i32,
    pub signal: Option<i32>,
    pub reason: String,
    pub message: Option<String>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Timestamp,
}

impl Termination {
    /// The termination of a run whose command could not be executed.
    pub fn not_started(message: String, now: Timestamp) -> Self {
        const START_FAILED: i32 = 128;
        Self {
            exit_code: START_FAILED,
            signal: None,
            reason: "StartError".to_owned(),
            message: Some(message),
            started_at: Some(now),
            finished_at: now,
        }
    }
}

/// A container found after a restart of the node.
#[derive(Debug, Clone)]
pub struct RecoveredContainer {
    pub id: ContainerId,
    pub started: StartedContainer,
    /// Whether it ran in a pod sandbox that did not survive. The pod has a new one or none.
    pub is_of_lost_sandbox: bool,
    pub crashes: u32,
    /// Absent while it runs.
    pub termination: Option<Termination>,
    /// How the run before this one ended.
    pub previous: Option<Termination>,
}

/// A pod found after a restart of the node.
#[derive(Debug, Clone)]
pub struct RecoveredPod {
    pub identity: PodIdentity,
    /// Absent when its namespaces did not survive, as after a reboot.
    pub sandbox: Option<PodSandbox>,
    pub containers: Vec<RecoveredContainer>,
    pub freezer: FreezerState,
}

/// How much of a pod is frozen, as the kernel says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum FreezerState {
    #[default]
    Thawed,
    /// Some containers are frozen or are being frozen, and others are not.
    Partly,
    /// All processes are frozen.
    Frozen,
}

/// The processes of a container that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerProcesses {
    pub container: String,
    pub processes: Vec<rustix::process::Pid>,
}

#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    #[error("preparing {what}")]
    Io {
        what: String,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "pods of this node have addresses of {had} and cannot have others while they run: delete them before you have pods in \
         {wanted}, or start with `--pod-cidr {had}`"
    )]
    OtherRange { had: String, wanted: String },
    #[error("no address is free for another pod")]
    NoFreeSlot,
    #[error(transparent)]
    Network(#[from] pod_network::links::NetworkError),
    #[error(transparent)]
    NodeRanges(#[from] node_ranges::NodeRangesError),
    #[error(transparent)]
    Cgroup(#[from] cgroups::CgroupError),
    #[error("the launcher failed: {0}")]
    Launcher(String),
    #[error("the container did not start within {0:?}")]
    TooSlow(std::time::Duration),
    #[error("pod {0} has no sandbox")]
    NoSandbox(String),
    #[error("container {0} is not running")]
    NotRunning(String),
    #[error("pod {0} is frozen")]
    Frozen(String),
    #[error("{0}")]
    CannotFreeze(String),
    #[error("some processes of container {container} were not frozen within {limit:?}")]
    NotFrozen {
        container: String,
        limit: std::time::Duration,
    },
    #[error(transparent)]
    FreezeSwap(#[from] freeze_swap::SwapError),
    #[error(transparent)]
    Agent(#[from] agent::AgentError),
    #[error(transparent)]
    Image(#[from] images::StoreError),
}

/// Why a container did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The specification cannot be honoured.
    #[error("{0}")]
    Configuration(String),
    /// The container was created, but its command cannot be executed.
    #[error("{message}")]
    Command { message: String, code: i32 },
    /// The container was killed before it had started.
    #[error("the start was given up")]
    GivenUp,
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

/// A container runtime.
///
/// Every operation is idempotent: the node repeats one whose outcome it does not know, for example after a crash.
pub trait Runtime: Send + Sync + std::fmt::Debug + 'static {
    fn create_sandbox(
        &self,
        spec: &PodSandboxSpec,
    ) -> impl Future<Output = Result<PodSandbox, RuntimeError>> + Send;
    fn start(
        &self,
        spec: ContainerSpec,
    ) -> impl Future<Output = Result<StartedContainer, StartError>> + Send;
    /// Waits until a started container has ended.
    fn wait(&self, id: &ContainerId) -> impl Future<Output = Termination> + Send;
    /// Signals the container's command.
    fn signal(
        &self,
        id: &ContainerId,
        signal: i32,
    ) -> impl Future<Output = Result<(), RuntimeError>> + Send;
    /// Kills every process of the container. Cancels the start of one that is being started.
    fn kill(&self, id: &ContainerId) -> impl Future<Output = Result<(), RuntimeError>> + Send;
    /// Runs a command inside the container.
    fn exec(
        &self,
        id: &ContainerId,
        request: shim_protocol::ExecRequest,
    ) -> impl Future<Output = Result<agent::Session, RuntimeError>> + Send;
    /// Connects to the input and output of the container's command.
    fn attach(
        &self,
        id: &ContainerId,
        stdin: bool,
    ) -> impl Future<Output = Result<agent::Session, RuntimeError>> + Send;
    /// The log of a run. The logs of other runs are in the same directory.
    fn log_path(&self, id: &ContainerId) -> PathBuf;
    /// Whether a run has ended, or was never started.
    fn has_ended(&self, id: &ContainerId) -> bool;
    /// Opens a TCP connection to a port on the pod's loopback interface.
    fn connect_to_port(
        &self,
        pod: &str,
        port: u16,
    ) -> impl Future<Output = Result<std::io::Result<std::net::TcpStream>, RuntimeError>> + Send;
    /// Opens a TCP connection from inside the pod's network.
    fn connect_from(
        &self,
        pod: &str,
        target: SocketAddr,
    ) -> impl Future<Output = Result<std::io::Result<TcpStream>, RuntimeError>> + Send;
    /// How often its CPU limit has throttled a running container. `None` once it has ended, and without the CPU controller.
    fn cpu_periods(&self, id: &ContainerId) -> Option<Periods>;
    /// Why pods cannot be frozen on this machine, if they cannot.
    fn cannot_freeze(&self) -> Option<String>;
    /// Freezes all processes of a pod. From the call on, requests to its containers are refused.
    fn freeze(&self, pod: &str) -> impl Future<Output = Result<(), RuntimeError>> + Send;
    /// Pages the memory of a frozen pod out, where the operator gave swap for it: how much, for users.
    fn page_out(&self, pod: &str) -> impl Future<Output = Option<String>> + Send;
    /// Lets all processes of a pod run again.
    fn thaw(&self, pod: &str) -> impl Future<Output = Result<(), RuntimeError>> + Send;
    /// Whether a pod is frozen, or is being frozen or thawed.
    fn is_frozen(&self, pod: &str) -> bool;
    /// Frees the pod's namespaces and the layers of its containers; logs stay.
    fn stop_sandbox(&self, pod: &str) -> impl Future<Output = Result<(), RuntimeError>> + Send;
    /// Removes every trace of the pod.
    fn remove_sandbox(&self, pod: &str) -> impl Future<Output = Result<(), RuntimeError>> + Send;
    /// The pods that an earlier run of the node left.
    fn recover(&self) -> impl Future<Output = Result<Vec<RecoveredPod>, RuntimeError>> + Send;
    /// The state of one pod on disk. No operation on the pod may be running. `None` if nothing was ever prepared for it.
    fn recover_pod(
        &self,
        pod: &str,
    ) -> impl Future<Output = Result<Option<RecoveredPod>, RuntimeError>> + Send;
    /// The processes of a pod, by its containers.
    fn processes(&self, pod: &str) -> Vec<ContainerProcesses>;
    /// The CPU time of a pod's processes, in microseconds. `None` without a v2 cgroup hierarchy. A pod whose CPU time has not changed
    /// has not run.
    fn cpu_time_us(&self, pod: &str) -> Option<u64>;
    /// The pods that have files or cgroups on this machine. Removes what belongs to no pod.
    fn sweep(&self) -> impl Future<Output = Vec<String>> + Send;
}

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
