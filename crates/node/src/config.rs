//! What the node is told: where its data is, what it is called, and what it may do.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use container_runtime::handlers::Driver;
use pod_network::firewall;
use pod_network::pod_cidr::PodNetwork;
use pod_network::policy::Unselected;

/// The node's configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Everything the node keeps. Its bridge, control groups and rules are named after it, so that two nodes with
    /// different directories share a machine.
    pub data_dir: PathBuf,
    pub node_name: String,
    /// Chosen from the data directory when absent.
    pub pod_network: Option<PodNetwork>,
    /// Namespaces kept ready, so that a pod does not wait for them.
    pub ready_namespaces: usize,
    pub maximum_pods: u32,
    pub allow_host_path: bool,
    /// Images to run as another one, by repository without tag: `python-runtime-sandbox` as `host`, say.
    pub image_aliases: BTreeMap<String, String>,
    /// Registries beyond loopback that may be reached without encryption, as `host` or `host:port`.
    pub plain_registries: Vec<String>,
    /// Registries on this machine, its link or its pods' network that images are pulled from, as `host` or `host:port`. Those of
    /// `plain_registries` are, too.
    pub allowed_registries: Vec<String>,
    /// When the disk is fuller than the first, images nobody uses are removed until it is no fuller than the second.
    pub image_high_percent: u8,
    pub image_low_percent: u8,
    /// How long an image stays after its last use, however full the disk is.
    pub image_minimum_age: jiff::SignedDuration,
    /// Limits for containers that name none.
    pub default_process_limit: u64,
    pub default_memory_limit: Option<u64>,
    /// When a container's log grows past this it is rotated; this many old files are kept.
    pub log_maximum_bytes: u64,
    pub log_maximum_files: u32,
    /// How often volumes are compared with the config maps, secrets and tokens they show.
    pub volume_refresh: Duration,
    /// How often pods' use of the disk is looked at.
    pub storage_check: Duration,
    /// How often containers' work is compared with their limits on processor time.
    pub cpu_throttling_interval: Duration,
    /// How often the machine is swept for processes and files of pods that the node does not know.
    pub stray_check: Duration,
    /// How long a container may take from its launch to the start of its command.
    pub launch_deadline: Duration,
    /// Where pods find the cluster's names; the node's own resolver when empty.
    pub name_servers: Vec<String>,
    /// Where the machine's own resolvers are listed.
    pub resolver_file: PathBuf,
    pub cluster_domain: String,
    /// The nftables program, by path or by name.
    pub firewall_program: PathBuf,
    /// What holds for pods that no network policy selects.
    pub unselected_pods: Unselected,
    /// The users of this machine whose processes reach pods by their addresses; every user when absent.
    pub local_users: Option<Vec<u32>>,
    /// Other runtimes to look for, for runtime classes that name them.
    pub runtime_drivers: Vec<Driver>,
    /// Where logs, exec, attach and port-forward are served; nowhere when absent.
    pub kubelet: Option<crate::kubelet::Endpoint>,
    /// For tests.
    #[doc(hidden)]
    pub faults: crate::faults::Faults,
}

impl Config {
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            node_name: host_name(),
            pod_network: None,
            ready_namespaces: 4,
            maximum_pods: 1000,
            allow_host_path: false,
            image_aliases: BTreeMap::new(),
            plain_registries: Vec::new(),
            allowed_registries: Vec::new(),
            image_high_percent: 85,
            image_low_percent: 80,
            image_minimum_age: jiff::SignedDuration::from_secs(120),
            default_process_limit: 1024,
            default_memory_limit: None,
            log_maximum_bytes: 10 << 20,
            log_maximum_files: 5,
            volume_refresh: Duration::from_secs(60),
            storage_check: Duration::from_secs(10),
            cpu_throttling_interval: Duration::from_secs(10),
            stray_check: Duration::from_secs(30),
            launch_deadline: Duration::from_secs(120),
            name_servers: Vec::new(),
            resolver_file: "/etc/resolv.conf".into(),
            cluster_domain: "cluster.local".to_owned(),
            firewall_program: firewall::PROGRAM.into(),
            unselected_pods: Unselected::default(),
            local_users: None,
            runtime_drivers: Driver::ALL.to_vec(),
            kubelet: None,
            faults: crate::faults::Faults::default(),
        }
    }

    /// The part that the container runtime needs.
    pub fn runtime(&self) -> container_runtime::Config {
        container_runtime::Config {
            data_dir: self.data_dir.clone(),
            pod_network: self.pod_network,
            ready_namespaces: self.ready_namespaces,
            maximum_pods: self.maximum_pods,
            default_process_limit: self.default_process_limit,
            log_maximum_bytes: self.log_maximum_bytes,
            log_maximum_files: self.log_maximum_files,
            launch_deadline: self.launch_deadline,
            firewall_program: self.firewall_program.clone(),
            local_users: self.local_users.clone(),
        }
    }
}

/// Where a node with this data directory keeps images.
pub fn image_directory(data_dir: &Path) -> PathBuf {
    data_dir.join("image-store")
}

fn host_name() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .to_lowercase();
    let valid: String = name
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || *c == '-' || *c == '.')
        .collect();
    if valid.is_empty() {
        "node".to_owned()
    } else {
        valid
    }
}
