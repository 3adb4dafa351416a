//! A scheduler for one node: binds every pod that may run there, up to the node's pod capacity.

mod queue;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use api::decoding::{Decoded, Problem, Unreadable};
use apimachinery::quantity::Quantity;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Binding, Node, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use self::queue::Queue;
use crate::object_uid::object_uid;
use api::errors::chain;
use api::readable::{readable, shell, warn};
use event_recorder::{EventSink, Severity};

const NAME: &str = "default-scheduler";

/// The pause after a failed request.
const PAUSE: Duration = Duration::from_millis(500);

/// Whether a pod waits for this scheduler.
fn is_ours(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    spec.node_name.as_deref().is_none_or(str::is_empty)
        && pod.metadata.deletion_timestamp.is_none()
        && spec
            .scheduler_name
            .as_deref()
            .is_none_or(|name| name == NAME)
        && spec.scheduling_gates.as_ref().is_none_or(Vec::is_empty)
}

/// The scheduling constraints of a pod that have no effect in a cluster of one node.
fn wishes(pod: &Pod) -> Vec<&'static str> {
    let Some(spec) = &pod.spec else {
        return Vec::new();
    };
    let spread = spec.topology_spread_constraints.as_ref();
    [
        (
            "nodeSelector",
            spec.node_selector
                .as_ref()
                .is_some_and(|selector| !selector.is_empty()),
        ),
        ("affinity", spec.affinity.is_some()),
        (
            "topologySpreadConstraints",
            spread.is_some_and(|constraints| !constraints.is_empty()),
        ),
    ]
    .into_iter()
    .filter_map(|(field, present)| present.then_some(field))
    .collect()
}

/// The pod capacity in the node's status. Waits for the node.
async fn capacity(client: &Client, node_name: &str) -> usize {
    let nodes = Api::<Node>::all(client.clone());
    loop {
        let pods = match nodes.get_opt(node_name).await {
            Ok(node) => node
                .and_then(|node| node.status?.allocatable?.remove("pods"))
                .and_then(|pods| pods.0.parse::<Quantity>().ok())
                .and_then(|pods| u64::try_from(pods.value()).ok()),
            Err(error) => {
                tracing::warn!(error = %chain(&error), "the scheduler cannot read its node");
                None
            }
        };
        if let Some(pods) = pods {
            return usize::try_from(pods).unwrap_or(usize::MAX);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Binds pods to the node, up to its capacity, until `shutdown`.
pub async fn run(client: Client, node_name: String, shutdown: CancellationToken) {
    let Some(capacity) = shutdown
        .run_until_cancelled(capacity(&client, &node_name))
        .await
    else {
        return;
    };
    let (results, outcomes) = mpsc::unbounded_channel();
    let scheduler = Scheduler {
        events: EventSink::new(client.clone(), NAME, &node_name),
        queue: Queue::new(capacity),
        client,
        node_name,
        unreadable: HashMap::new(),
        results,
    };
    let scheduling = scheduler.run(outcomes);
    Box::pin(shutdown.run_until_cancelled(scheduling)).await;
}

/// The outcome of a binding.
struct Outcome {
    uid: String,
    pod: Arc<Pod>,
    result: Result<(), kube::Error>,
}

struct Scheduler {
    client: Client,
    node_name: String,
    events: EventSink,
    queue: Queue<Arc<Pod>>,
    /// Unbound pods that cannot be decoded, with the reported error, by UID.
    unreadable: HashMap<String, Problem>,
    results: mpsc::UnboundedSender<Outcome>,
}

impl Scheduler {
    async fn run(mut self, mut outcomes: mpsc::UnboundedReceiver<Outcome>) {
        let pods = Api::<Decoded<Pod>>::all(self.client.clone());
        // The server may ignore the selector for an empty node name, so pods are filtered here as well.
        let unbound = watcher::Config::default().fields("spec.nodeName=");
        let mut unbound = object_watch::watch(pods, unbound);
        let active = format!(
            "spec.nodeName={},status.phase!=Succeeded,status.phase!=Failed",
            self.node_name
        );
        let active = watcher::Config::default().fields(&active);
        let metadata = Api::<Decoded<PartialObjectMeta<Pod>>>::all(self.client.clone());
        let mut active = object_watch::watch(metadata, active);
        let mut wake_at = None;
        loop {
            tokio::select! {
                // What fails is logged and tried again by the watch.
                Some(event) = unbound.next() => if let Ok(event) = event { self.unbound(event) },
                Some(event) = active.next() => if let Ok(event) = event { self.active(event) },
                Some(outcome) = outcomes.recv() => self.take(outcome),
                () = until(wake_at) => {}
            }
            wake_at = self.advance(Timestamp::now());
        }
    }

    fn unbound(&mut self, event: Event<Decoded<Pod>>) {
        let event = match event {
            Event::Apply(Decoded::Unreadable(left))
            | Event::InitApply(Decoded::Unreadable(left)) => {
                return self.unreadable(*left);
            }
            event => event,
        };
        let Some(event) = readable(event) else {
            return;
        };
        let (Event::Apply(pod) | Event::InitApply(pod) | Event::Delete(pod)) = &event else {
            return;
        };
        let Some(uid) = object_uid(pod) else {
            return;
        };
        self.unreadable.remove(&uid);
        match event {
            Event::Apply(pod) | Event::InitApply(pod) if is_ours(&pod) => {
                let ignored = wishes(&pod);
                let pod = Arc::new(pod);
                if self.queue.wait(&uid, pod.clone()) && !ignored.is_empty() {
                    let note = format!("{} ignored: there is one node", ignored.join(", "));
                    let events = &self.events;
                    events.tell(&pod, None, Severity::Warning, "Unsupported", note);
                }
            }
            Event::Apply(_) | Event::InitApply(_) | Event::Delete(_) => {
                self.queue.leave(&uid);
            }
            Event::Init | Event::InitDone => {}
        }
    }

    /// Reports that a pod which cannot be decoded is not bound, because its requirements are not known.
    fn unreadable(&mut self, left: Unreadable) {
        let Some(uid) = left.metadata.uid.clone().filter(|uid| !uid.is_empty()) else {
            return warn::<Pod>(&left);
        };
        self.queue.leave(&uid);
        let is_bound = left
            .conditions
            .iter()
            .any(|condition| condition.type_ == "PodScheduled" && condition.status == "True");
        let reported = self.unreadable.insert(uid, left.problem.clone());
        if is_bound
            || left.metadata.deletion_timestamp.is_some()
            || reported.as_ref() == Some(&left.problem)
        {
            return;
        }
        warn::<Pod>(&left);
        let note = format!("The pod cannot be read: {}", left.problem);
        let pod: Arc<Pod> = Arc::new(shell(left));
        let events = &self.events;
        events.tell(
            &pod,
            None,
            Severity::Warning,
            "FailedScheduling",
            note.clone(),
        );
        tokio::spawn(report_unschedulable(self.client.clone(), pod, note));
    }

    fn active(&mut self, event: Event<Decoded<PartialObjectMeta<Pod>>>) {
        match event {
            // A mirror pod represents a process of the machine and takes no capacity.
            Event::Apply(pod) | Event::InitApply(pod) if api::labels::is_mirror(&pod) => {}
            Event::Apply(pod) | Event::InitApply(pod) => {
                if let Some(uid) = object_uid(&pod) {
                    self.queue.arrived(uid);
                }
            }
            Event::Delete(pod) => {
                if let Some(uid) = object_uid(&pod) {
                    self.queue.departed(&uid);
                }
            }
            Event::Init => self.queue.relisting(),
            Event::InitDone => self.queue.relisted(),
        }
    }

    fn take(&mut self, Outcome { uid, pod, result }: Outcome) {
        match result {
            Ok(()) => self.queue.settled(&uid),
            // Another scheduler has bound it, or it was deleted.
            Err(kube::Error::Api(status)) if status.code == 409 || status.code == 404 => {
                self.queue.departed(&uid);
            }
            Err(error) => {
                let (name, namespace) = (pod.name_any(), pod.namespace().unwrap_or_default());
                tracing::warn!(pod = name, namespace, error = %chain(&error), "cannot bind a pod, and will try again");
                self.queue.failed(&uid, pod, Timestamp::now());
            }
        }
    }

    /// Carries out what is due. Returns when to look again.
    fn advance(&mut self, now: Timestamp) -> Option<Timestamp> {
        let plan = self.queue.plan(now);
        for (uid, pod) in plan.bind {
            let (client, node, results) = (
                self.client.clone(),
                self.node_name.clone(),
                self.results.clone(),
            );
            tokio::spawn(async move {
                let result = bind(client, &pod, node).await;
                let _ = results.send(Outcome { uid, pod, result });
            });
        }
        for pod in plan.refuse {
            let note = "0/1 nodes are available: 1 Too many pods.".to_owned();
            let events = &self.events;
            events.tell(
                &pod,
                None,
                Severity::Warning,
                "FailedScheduling",
                note.clone(),
            );
            tokio::spawn(report_unschedulable(self.client.clone(), pod, note));
        }
        plan.wake_at
    }
}

async fn until(moment: Option<Timestamp>) {
    match moment {
        Some(moment) => {
            let left = moment.duration_since(Timestamp::now());
            tokio::time::sleep(Duration::try_from(left).unwrap_or(Duration::ZERO)).await;
        }
        None => std::future::pending().await,
    }
}

async fn bind(client: Client, pod: &Pod, node_name: String) -> Result<(), kube::Error> {
    let (name, namespace) = (pod.name_any(), pod.namespace().unwrap_or_default());
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(namespace.clone()),
            uid: pod.uid(),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: Some(node_name),
            ..ObjectReference::default()
        },
    };
    let api = Api::<Pod>::namespaced(client, &namespace);
    let bound: Result<serde_json::Value, kube::Error> = api
        .create_subresource("binding", &name, &PostParams::default(), &binding)
        .await;
    bound.map(drop)
}

/// Writes the condition `PodScheduled=False` to a pod that waits.
async fn report_unschedulable(client: Client, pod: Arc<Pod>, message: String) {
    let (name, namespace) = (pod.name_any(), pod.namespace().unwrap_or_default());
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": message, "lastTransitionTime": Time(Timestamp::now())});
    let patch = json!({"metadata": {"uid": pod.uid()}, "status": {"conditions": [condition]}});
    let patched = Api::<Decoded<Pod>>::namespaced(client, &namespace)
        .patch_status(&name, &PatchParams::default(), &Patch::Strategic(patch))
        .await;
    if let Err(error) = patched {
        tracing::debug!(pod = name, namespace, error = %chain(&error), "cannot say that a pod waits");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scheduling_constraints_without_effect_are_reported() {
        let pod = |spec: serde_json::Value| -> Pod {
            serde_json::from_value(json!({"spec": spec})).unwrap()
        };
        let plain = pod(json!({"containers": [], "nodeSelector": {}}));
        assert!(wishes(&plain).is_empty());
        let choosy = pod(
            json!({"containers": [], "nodeSelector": {"a": "b"}, "affinity": {},
            "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "k", "whenUnsatisfiable": "DoNotSchedule"}]}),
        );
        assert_eq!(
            wishes(&choosy),
            ["nodeSelector", "affinity", "topologySpreadConstraints"]
        );
    }
}
