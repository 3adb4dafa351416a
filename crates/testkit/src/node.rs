//! Fake nodes: one that binds every pod, makes it ready at once, and finishes its deletion; and one that only marks pods Ready.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::task::JoinHandle;

/// The name of the node to which pods are bound.
pub const NODE_NAME: &str = "fake-node";

/// How a fake node treats its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Pods are bound, running and ready.
    Ready,
    /// Pods are bound but never start.
    Bound,
}

/// A fake node that runs until it is dropped.
#[derive(Debug)]
pub struct FakeNode {
    task: JoinHandle<()>,
}

impl FakeNode {
    /// Starts a node that makes every pod in the cluster ready.
    pub fn start(client: Client) -> Self {
        Self::start_with(client, Behaviour::Ready)
    }

    pub fn start_with(client: Client, behaviour: Behaviour) -> Self {
        let kubelet = Kubelet {
            client: client.clone(),
            behaviour,
            addresses: Arc::new(AtomicU32::new(1)),
        };
        let task = tokio::spawn(async move {
            let pods = Api::<Pod>::all(client);
            let events = watcher(pods, watcher::Config::default())
                .default_backoff()
                .applied_objects();
            events
                .for_each_concurrent(16, |event| async {
                    if let Ok(pod) = event {
                        kubelet.sync(&pod).await;
                    }
                })
                .await;
        });
        Self { task }
    }
}

impl Drop for FakeNode {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Kubelet {
    client: Client,
    behaviour: Behaviour,
    addresses: Arc<AtomicU32>,
}

impl Kubelet {
    /// Takes one step for an observed pod. Errors are ignored, because the pod's next change causes a retry: the pod may have
    /// been deleted meanwhile, or replaced by another one with the same name.
    async fn sync(&self, pod: &Pod) {
        let namespace = pod.namespace().unwrap_or_default();
        let pods = Api::<Pod>::namespaced(self.client.clone(), &namespace);
        let name = pod.name_any();
        if pod.metadata.deletion_timestamp.is_some() {
            let now = DeleteParams {
                grace_period_seconds: Some(0),
                preconditions: Some(Preconditions {
                    uid: pod.uid(),
                    resource_version: None,
                }),
                ..DeleteParams::default()
            };
            let _ = pods.delete(&name, &now).await;
            return;
        }
        let bound = pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref());
        if bound.is_none() {
            let binding = json!({
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": { "name": name, "namespace": namespace },
                "target": { "kind": "Node", "name": NODE_NAME },
            });
            let _ = pods
                .create_subresource::<_, serde_json::Value>(
                    "binding",
                    &name,
                    &PostParams::default(),
                    &binding,
                )
                .await;
            return;
        }
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        let waits = phase.is_none_or(|phase| phase == "Pending");
        if self.behaviour == Behaviour::Ready && waits {
            make_ready(&pods, pod, self.next_address()).await;
        }
    }

    fn next_address(&self) -> Ipv4Addr {
        let number = self.addresses.fetch_add(1, Ordering::Relaxed);
        Ipv4Addr::from_bits(Ipv4Addr::new(10, 128, 0, 0).to_bits() + number)
    }
}

async fn make_ready(pods: &Api<Pod>, seen: &Pod, address: Ipv4Addr) {
    let status = json!({
        "metadata": { "resourceVersion": seen.resource_version() },
        "status": {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{ "ip": address }],
            "conditions": [
                { "type": "PodScheduled", "status": "True" },
                { "type": "Ready", "status": "True" },
            ],
        },
    });
    let (name, patch) = (seen.name_any(), Patch::Merge(&status));
    let _ = pods
        .patch_status(&name, &PatchParams::default(), &patch)
        .await;
}

/// Marks every pod of the cluster Ready until the future is dropped: the cheapest node. Each pod costs one write and is never bound, which
/// matters to tests and benchmarks that count requests.
pub async fn mark_pods_ready(client: Client) {
    let pods = Api::<Pod>::all(client.clone());
    let mut events = std::pin::pin!(watcher(pods, watcher::Config::default()).default_backoff());
    let mut seen: u32 = 0;
    while let Some(event) = events.next().await {
        let Ok(Event::Apply(pod) | Event::InitApply(pod)) = event else {
            continue;
        };
        let phase = pod
            .status
            .as_ref()
            .and_then(|status| status.phase.as_deref());
        let is_waiting = matches!(phase, None | Some("Pending"));
        if is_waiting && pod.metadata.deletion_timestamp.is_none() {
            seen += 1;
            tokio::spawn(mark_ready(client.clone(), pod, seen));
        }
    }
}

async fn mark_ready(client: Client, pod: Pod, number: u32) {
    let pods = Api::<Pod>::namespaced(client, &pod.namespace().unwrap_or_default());
    let [_, high, middle, low] = number.to_be_bytes();
    let address = format!("10.{high}.{middle}.{low}");
    let status = json!({
        "phase": "Running",
        "podIP": address,
        "podIPs": [{ "ip": address }],
        "conditions": [{ "type": "Ready", "status": "True" }],
    });
    // A pod that has changed meanwhile is seen again; it may have ended.
    let version = json!({ "resourceVersion": pod.resource_version() });
    let patch = Patch::Merge(json!({ "metadata": version, "status": status }));
    // The pod may be deleted by now.
    let _ = pods
        .patch_status(&pod.name_any(), &PatchParams::default(), &patch)
        .await;
}

/// Terminates a pod with the status that a node would report.
pub async fn end_pod(pods: &Api<Pod>, name: &str, phase: &str, reason: Option<&str>) {
    let status = json!({ "status": {
        "phase": phase,
        "reason": reason,
        "conditions": [{ "type": "Ready", "status": "False" }],
    }});
    pods.patch_status(name, &PatchParams::default(), &Patch::Merge(&status))
        .await
        .expect("the pod's status is written");
}
