//! The configuration of a node.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use container_runtime::freeze_swap::FreezeSwap;
use container_runtime::handlers::Driver;
use k8s_openapi::api::core::v1::Taint;
use pod_network::firewall;
use pod_network::pod_cidr::PodNetwork;
use pod_network::policy::Unselected;

/// The node's configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// The directory of all files of the node. Its interface, cgroups and rules are named after it, so that several nodes with
    /// different directories can share a machine.
    pub data_dir: PathBuf,
    pub node_name: String,
    /// Labels of the Node besides those that every node has.
    pub node_labels: BTreeMap<String, String>,
    /// Taints that the Node is created with. Later changes belong to the cluster's operators.
    pub node_taints: Vec<Taint>,
    /// Chosen from the data directory when absent.
    pub pod_network: Option<PodNetwork>,
    /// The number of pod sandboxes that are prepared ahead of pods.
    pub ready_namespaces: usize,
    pub maximum_pods: u32,
    pub allow_host_path: bool,
    /// Aliases of images, by repository without tag: for example, `python-runtime-sandbox` as `host`.
    pub image_aliases: BTreeMap<String, String>,
    /// Registries outside of loopback that may be used without TLS, as `host` or `host:port`.
    pub plain_registries: Vec<String>,
    /// Registries with addresses of this machine, its link or its pods that images may be pulled from (see SSRF protection in
    /// [`images`]), as `host` or `host:port`. Those of `plain_registries` are included.
    pub allowed_registries: Vec<String>,
    /// When the disk is fuller than the first, unused images are removed until it is no fuller than the second.
    pub image_high_percent: u8,
    pub image_low_percent: u8,
    /// The minimum time for which an image stays after its last use, however full the disk is.
    pub image_minimum_age: jiff::SignedDuration,
    /// The limits of containers that set none.
    pub default_process_limit: u64,
    pub default_memory_limit: Option<u64>,
    /// A container's log is rotated when it grows past this; this many old files remain.
    pub log_maximum_bytes: u64,
    pub log_maximum_files: u32,
    /// The interval at which volumes are refreshed from config maps, secrets and tokens.
    pub volume_refresh: Duration,
    /// The interval at which the disk usage of pods is measured.
    pub storage_check: Duration,
    /// The interval at which containers are checked for CPU throttling.
    pub cpu_throttling_interval: Duration,
    /// The interval at which processes and files of unknown pods are removed.
    pub stray_check: Duration,
    /// The timeout from the launch of a container to the start of its command.
    pub launch_deadline: Duration,
    /// The cluster's DNS servers for pods; the node's own resolver when empty.
    pub name_servers: Vec<String>,
    /// The machine's own `resolv.conf`.
    pub resolver_file: PathBuf,
    pub cluster_domain: String,
    /// Swap for the memory of frozen pods. Without it, frozen pods keep their memory.
    pub freeze_swap: Option<FreezeSwap>,
    /// The nftables program, by path or by name.
    pub firewall_program: PathBuf,
    /// The allowed traffic of pods that no network policy selects.
    pub unselected_pods: Unselected,
    /// The users of this machine whose processes reach pods by their addresses; every user when absent.
    pub local_users: Option<Vec<u32>>,
    /// The other runtimes to try, for runtime classes.
    pub runtime_drivers: Vec<Driver>,
    /// The endpoint of logs, exec, attach and port-forward; not served when absent.
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
            node_labels: BTreeMap::new(),
            node_taints: Vec::new(),
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
            freeze_swap: None,
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
            freeze_swap: self.freeze_swap,
            firewall_program: self.firewall_program.clone(),
            local_users: self.local_users.clone(),
        }
    }
}

/// The image directory of a node with this data directory.
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
