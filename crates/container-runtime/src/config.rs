//! What the runtime is configured with.

use std::path::PathBuf;
use std::time::Duration;

use pod_network::pod_cidr::PodNetwork;

use crate::freeze_swap::FreezeSwap;

/// The runtime's configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// The directory of all files of the runtime. Interfaces, cgroups and nftables tables are named after it, so that several nodes
    /// with different directories can share a machine.
    pub data_dir: PathBuf,
    /// Chosen from the data directory when absent.
    pub pod_network: Option<PodNetwork>,
    /// How many pod sandboxes are prepared ahead of pods.
    pub ready_namespaces: usize,
    pub maximum_pods: u32,
    /// The limit on processes of a container that sets none.
    pub default_process_limit: u64,
    /// A container's log is rotated when it grows past this.
    pub log_maximum_bytes: u64,
    /// How many rotated files of a log remain.
    pub log_maximum_files: u32,
    /// The timeout from the launch of a container to the start of its command.
    pub launch_deadline: Duration,
    /// Swap for the memory of frozen pods. Without it, frozen pods keep their memory.
    pub freeze_swap: Option<FreezeSwap>,
    /// The nftables program, by path or by name.
    pub firewall_program: PathBuf,
    /// The users of this machine whose processes reach pods by their addresses; every user when absent.
    pub local_users: Option<Vec<u32>>,
}
