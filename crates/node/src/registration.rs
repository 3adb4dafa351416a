//! The Node object and its heartbeat (lease).

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{
    DaemonEndpoint, Node, NodeAddress, NodeCondition, NodeDaemonEndpoints, NodeSpec, NodeStatus,
    NodeSystemInfo, Taint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference, Time};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::eviction::Pressure;
use crate::network::enforcer::Enforcement;
use crate::runtime::handlers::{Finding, NATIVE};
use api::errors::chain;
use container_runtime::privileges::ROOTLESS_LIMITS;

/// Lists runtime handlers as JSON: `handler`, `works`, and `detail`, a version or a reason.
pub const HANDLERS_ANNOTATION: &str = "node.agents.x-k8s.io/runtime-handlers";

const LEASE_NAMESPACE: &str = "kube-node-lease";
const LEASE_SECONDS: i32 = 40;
const HEARTBEAT: Duration = Duration::from_secs(10);
/// The interval at which the status is written even if nothing has changed.
const STATUS_BEATS: u32 = 30;

#[derive(Debug, thiserror::Error)]
pub enum RegistrationError {
    #[error("registering node {name}")]
    Register {
        name: String,
        #[source]
        source: Box<kube::Error>,
    },
}

/// The properties that a node reports about itself.
#[derive(Debug, Clone)]
pub struct Description {
    pub name: String,
    /// Labels besides those that every node has.
    pub labels: BTreeMap<String, String>,
    /// Taints that the Node is created with.
    pub taints: Vec<Taint>,
    pub address: String,
    pub pod_range: String,
    pub kubelet_port: u16,
    pub maximum_pods: u32,
    pub machine: Machine,
    /// Descriptions of what does not work on this machine.
    pub problems: Vec<String>,
    /// The reason why pods have no IPv6 addresses. `None` if they have them.
    pub without_ipv6: Option<String>,
    /// Whether the node runs without root.
    pub rootless: bool,
}

/// The capacity of the machine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Machine {
    pub cpus: u64,
    pub memory_bytes: u64,
    pub storage_bytes: u64,
}

impl Machine {
    pub fn measure(config: &Config) -> Self {
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kilobytes = memory
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"));
        let kilobytes = kilobytes
            .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or(0);
        let storage = rustix::fs::statvfs(&config.data_dir)
            .map_or(0, |found| found.f_blocks * found.f_frsize);
        Self {
            cpus: std::thread::available_parallelism().map_or(1, |count| count.get() as u64),
            memory_bytes: kilobytes * 1024,
            storage_bytes: storage,
        }
    }
}

fn quantity(value: &impl ToString) -> Quantity {
    Quantity(value.to_string())
}

/// The properties of a node that change while it runs.
#[derive(Debug, Clone)]
pub struct Health {
    pub enforcement: watch::Receiver<Enforcement>,
    pub pressure: watch::Receiver<Option<Pressure>>,
}

/// A snapshot of [`Health`].
#[derive(Debug, Clone)]
pub struct Condition {
    pub enforcement: Enforcement,
    pub pressure: Option<Pressure>,
}

impl Health {
    fn now(&mut self) -> Condition {
        Condition {
            enforcement: self.enforcement.borrow_and_update().clone(),
            pressure: *self.pressure.borrow_and_update(),
        }
    }

    /// Waits for a change since the last snapshot.
    async fn changed(&mut self) {
        tokio::select! {
            Ok(()) = self.enforcement.changed() => {}
            Ok(()) = self.pressure.changed() => {}
            else => std::future::pending().await,
        }
    }
}

/// The node's status. Pure.
pub fn status(
    description: &Description,
    condition: &Condition,
    previous: Option<&NodeStatus>,
    now: Timestamp,
) -> NodeStatus {
    let machine = description.machine;
    let capacity = BTreeMap::from([
        ("cpu".to_owned(), quantity(&machine.cpus)),
        (
            "memory".to_owned(),
            quantity(&format!("{}Ki", machine.memory_bytes / 1024)),
        ),
        (
            "ephemeral-storage".to_owned(),
            quantity(&format!("{}Ki", machine.storage_bytes / 1024)),
        ),
        ("pods".to_owned(), quantity(&description.maximum_pods)),
    ]);
    let kernel = rustix::system::uname();
    NodeStatus {
        allocatable: Some(capacity.clone()),
        capacity: Some(capacity),
        addresses: Some(vec![
            NodeAddress {
                type_: "InternalIP".to_owned(),
                address: description.address.clone(),
            },
            NodeAddress {
                type_: "Hostname".to_owned(),
                address: description.name.clone(),
            },
        ]),
        conditions: Some(conditions(description, condition, previous, now)),
        daemon_endpoints: Some(NodeDaemonEndpoints {
            kubelet_endpoint: Some(DaemonEndpoint {
                port: i32::from(description.kubelet_port),
            }),
        }),
        node_info: Some(NodeSystemInfo {
            architecture: go_architecture().to_owned(),
            operating_system: "linux".to_owned(),
            os_image: os_image(),
            kernel_version: kernel.release().to_string_lossy().into_owned(),
            kubelet_version: format!("v1.35.0-agent-sandbox.{}", env!("CARGO_PKG_VERSION")),
            container_runtime_version: format!("agent-sandbox://{}", env!("CARGO_PKG_VERSION")),
            machine_id: read_trimmed("/etc/machine-id"),
            boot_id: read_trimmed("/proc/sys/kernel/random/boot_id"),
            ..NodeSystemInfo::default()
        }),
        ..NodeStatus::default()
    }
}

fn conditions(
    description: &Description,
    condition: &Condition,
    previous: Option<&NodeStatus>,
    now: Timestamp,
) -> Vec<NodeCondition> {
    let problems = description.problems.join("; ");
    let network = if problems.is_empty() {
        (
            "NetworkUnavailable",
            "False",
            "RouteCreated",
            match &description.without_ipv6 {
                None => "pods have addresses and a way out".to_owned(),
                Some(reason) => {
                    format!("pods have addresses and a way out, but no IPv6: {reason}")
                }
            },
        )
    } else {
        ("NetworkUnavailable", "False", "Degraded", problems)
    };
    let policies = match &condition.enforcement {
        Ok(restored) => (
            "NetworkPolicyEnforced",
            "True",
            "RulesInForce",
            in_force_message(*restored),
        ),
        Err(reason) => (
            "NetworkPolicyEnforced",
            "False",
            "RulesRefused",
            format!("pods that a network policy selects are not run: {reason}"),
        ),
    };
    let disk = match condition.pressure {
        None => (
            "DiskPressure",
            "False",
            "KubeletHasNoDiskPressure",
            "there is disk".to_owned(),
        ),
        Some(pressure) => (
            "DiskPressure",
            "True",
            "KubeletHasDiskPressure",
            format!("the disk runs out of {pressure}, and pods are evicted for it"),
        ),
    };
    let table = [
        (
            "Ready",
            "True",
            "KubeletReady",
            "the node runs pods".to_owned(),
        ),
        (
            "MemoryPressure",
            "False",
            "KubeletHasSufficientMemory",
            "there is memory".to_owned(),
        ),
        disk,
        (
            "PIDPressure",
            "False",
            "KubeletHasSufficientPID",
            "there are process numbers".to_owned(),
        ),
        network,
        policies,
    ];
    let rootless = description
        .rootless
        .then(|| ("Rootless", "True", "NoRoot", ROOTLESS_LIMITS.to_owned()));
    let before = previous.and_then(|status| status.conditions.as_ref());
    table
        .into_iter()
        .chain(rootless)
        .map(|(kind, status, reason, message)| {
            let same = before
                .into_iter()
                .flatten()
                .find(|old| old.type_ == kind && old.status == status);
            NodeCondition {
                type_: kind.to_owned(),
                status: status.to_owned(),
                reason: Some(reason.to_owned()),
                message: Some(message),
                last_heartbeat_time: Some(Time(now)),
                last_transition_time: same
                    .and_then(|old| old.last_transition_time.clone())
                    .or(Some(Time(now))),
            }
        })
        .collect()
}

/// The message about rules that were restored this many times.
fn in_force_message(restored: u64) -> String {
    const ENFORCED: &str = "network policies are enforced";
    let times = match restored {
        0 => return ENFORCED.to_owned(),
        1 => "once".to_owned(),
        more => format!("{more} times"),
    };
    format!(
        "{ENFORCED}; another program removed or changed the rules {times} since the node started, and they were restored"
    )
}

fn go_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn read_trimmed(path: &str) -> String {
    std::fs::read_to_string(path)
        .unwrap_or_default()
        .trim()
        .to_owned()
}

fn os_image() -> String {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text
        .lines()
        .find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or_else(
        || "Linux".to_owned(),
        |name| name.trim_matches('"').to_owned(),
    )
}

fn labels(description: &Description) -> BTreeMap<String, String> {
    let pairs = [
        ("kubernetes.io/hostname", description.name.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", go_architecture()),
    ];
    let mut labels = description.labels.clone();
    labels.extend(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())));
    labels
}

/// The Node as it is created.
fn object(description: &Description) -> Node {
    Node {
        metadata: ObjectMeta {
            name: Some(description.name.clone()),
            labels: Some(labels(description)),
            ..ObjectMeta::default()
        },
        spec: Some(NodeSpec {
            pod_cidr: Some(description.pod_range.clone()),
            pod_cidrs: Some(vec![description.pod_range.clone()]),
            taints: (!description.taints.is_empty()).then(|| description.taints.clone()),
            ..NodeSpec::default()
        }),
        status: None,
    }
}

/// Creates or updates the Node object, and writes its status once.
pub async fn register(
    client: &Client,
    description: &Description,
    health: &Health,
) -> Result<Node, RegistrationError> {
    let failed = |source| RegistrationError::Register {
        name: description.name.clone(),
        source: Box::new(source),
    };
    let nodes = Api::<Node>::all(client.clone());
    match nodes
        .create(&PostParams::default(), &object(description))
        .await
    {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 409 => {
            let patch = json!({"metadata": {"labels": labels(description)}});
            nodes
                .patch(
                    &description.name,
                    &PatchParams::default(),
                    &Patch::Merge(patch),
                )
                .await
                .map_err(failed)?;
        }
        Err(error) => return Err(failed(error)),
    }
    report(&nodes, description, &health.clone().now())
        .await
        .map_err(failed)
}

async fn report(
    nodes: &Api<Node>,
    description: &Description,
    condition: &Condition,
) -> Result<Node, kube::Error> {
    let current = nodes.get(&description.name).await?;
    let status = status(
        description,
        condition,
        current.status.as_ref(),
        Timestamp::now(),
    );
    nodes
        .patch_status(
            &description.name,
            &PatchParams::default(),
            &Patch::Merge(json!({"status": status})),
        )
        .await
}

/// Reports in an annotation of the Node which runtime handlers work, and why others do not.
pub async fn report_handlers(
    client: &Client,
    name: &str,
    findings: &[Finding],
) -> Result<(), kube::Error> {
    let nodes = Api::<Node>::all(client.clone());
    let all = serde_json::to_string(findings).map_err(kube::Error::SerdeError)?;
    let annotation = json!({"metadata": {"annotations": {HANDLERS_ANNOTATION: all}}});
    nodes
        .patch(name, &PatchParams::default(), &Patch::Merge(annotation))
        .await?;
    let working = findings
        .iter()
        .filter(|finding| finding.works)
        .map(|finding| finding.handler);
    let list: Vec<_> = ["", NATIVE]
        .into_iter()
        .chain(working)
        .map(|name| json!({"name": name}))
        .collect();
    let status = json!({"status": {"runtimeHandlers": list}});
    nodes
        .patch_status(name, &PatchParams::default(), &Patch::Merge(status))
        .await
        .map(drop)
}

/// Renews the node's lease, and its status at an interval, until `shutdown`.
pub async fn heartbeat(
    client: Client,
    node: Node,
    description: Description,
    mut health: Health,
    shutdown: CancellationToken,
) {
    let leases = Api::<Lease>::namespaced(client.clone(), LEASE_NAMESPACE);
    let nodes = Api::<Node>::all(client);
    let mut beat: u32 = 0;
    let mut changed = false;
    loop {
        if let Err(error) = renew(&leases, &node, &description.name).await {
            tracing::warn!(error = %chain(&error), "cannot renew the node's lease");
        }
        beat = beat.wrapping_add(1);
        if changed || beat.is_multiple_of(STATUS_BEATS) {
            let reported = report(&nodes, &description, &health.now()).await;
            changed = reported.is_err();
            if let Err(error) = reported {
                tracing::warn!(error = %chain(&error), "cannot report the node's status");
            }
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(HEARTBEAT) => {}
            () = health.changed() => changed = true,
        }
    }
}

async fn renew(leases: &Api<Lease>, node: &Node, name: &str) -> Result<(), kube::Error> {
    let now = MicroTime(Timestamp::now());
    let patch = json!({"spec": {"holderIdentity": name, "leaseDurationSeconds": LEASE_SECONDS, "renewTime": now}});
    match leases
        .patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
    {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            let owner = node.metadata.uid.clone().map(|uid| OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: name.to_owned(),
                uid,
                ..OwnerReference::default()
            });
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(name.to_owned()),
                    namespace: Some(LEASE_NAMESPACE.to_owned()),
                    owner_references: owner.map(|owner| vec![owner]),
                    ..ObjectMeta::default()
                },
                spec: Some(LeaseSpec {
                    holder_identity: Some(name.to_owned()),
                    lease_duration_seconds: Some(LEASE_SECONDS),
                    renew_time: Some(now),
                    ..LeaseSpec::default()
                }),
            };
            leases
                .create(&PostParams::default(), &lease)
                .await
                .map(drop)
        }
        other => other.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> Description {
        Description {
            name: "n".to_owned(),
            labels: BTreeMap::new(),
            taints: Vec::new(),
            address: String::new(),
            pod_range: "10.1.0.0/16".to_owned(),
            kubelet_port: 0,
            maximum_pods: 7,
            machine: Machine::default(),
            problems: Vec::new(),
            without_ipv6: None,
            rootless: false,
        }
    }

    #[test]
    fn a_node_is_created_with_its_labels_and_taints() {
        let plain = object(&description());
        assert_eq!(plain.spec.unwrap().taints, None);
        let taint = Taint {
            key: "dedicated".to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        };
        let own = [("pool", "fast"), ("kubernetes.io/hostname", "wrong")];
        let node = object(&Description {
            labels: own
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            taints: vec![taint.clone()],
            ..description()
        });
        let labels = node.metadata.labels.unwrap();
        assert_eq!(labels["pool"], "fast");
        assert_eq!(labels["kubernetes.io/hostname"], "n", "not overridden");
        assert_eq!(node.spec.unwrap().taints, Some(vec![taint]));
    }

    #[test]
    fn a_full_disk_is_a_condition_of_the_node_and_so_is_room_on_it() {
        let description = description();
        let disk = |pressure, previous: Option<&NodeStatus>, second| {
            let condition = Condition {
                enforcement: Ok(0),
                pressure,
            };
            let now = Timestamp::from_second(second).unwrap();
            let status = status(&description, &condition, previous, now);
            let conditions = status.conditions.clone().unwrap();
            let mut conditions = conditions.into_iter();
            let found = conditions.find(|condition| condition.type_ == "DiskPressure");
            (status, found.unwrap())
        };
        let (roomy, condition) = disk(None, None, 1);
        assert_eq!(condition.status, "False");
        assert_eq!(roomy.allocatable.as_ref().unwrap()["pods"].0, "7");
        let (full, condition) = disk(Some(Pressure::Inodes), Some(&roomy), 2);
        let changed = Some(Time(Timestamp::from_second(2).unwrap()));
        assert_eq!(
            (condition.status.as_str(), &condition.last_transition_time),
            ("True", &changed)
        );
        assert!(condition.message.unwrap().contains("inodes"));
        let (_, condition) = disk(Some(Pressure::Inodes), Some(&full), 3);
        assert_eq!(
            condition.last_transition_time, changed,
            "it has not changed since"
        );
    }
}
