//! A scheduler for one node: every pod that may run here is bound here.

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use tokio_util::sync::CancellationToken;

use crate::errors::chain;
use crate::events::{EventSink, Severity};

const NAME: &str = "default-scheduler";

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

/// What a pod says of where it wants to be, which cannot be heeded where there is one node.
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

/// Binds pods to `node_name` until told to stop.
pub async fn run(client: Client, node_name: String, shutdown: CancellationToken) {
    let pods = Api::<Pod>::all(client.clone());
    let events_of_pods = EventSink::new(client.clone(), NAME, &node_name);
    // The server may not filter by an empty node name, so it is asked to, and not relied on.
    let waiting = watcher::Config::default().fields("spec.nodeName=");
    let mut events = std::pin::pin!(watcher::watcher(pods, waiting));
    loop {
        let event = tokio::select! {
            () = shutdown.cancelled() => return,
            event = events.next() => event,
        };
        match event {
            None => return,
            Some(Ok(Event::Apply(pod) | Event::InitApply(pod))) if is_ours(&pod) => {
                let ignored = wishes(&pod);
                if !ignored.is_empty() {
                    let note = format!("{} ignored: there is one node", ignored.join(", "));
                    events_of_pods.tell(&pod, None, Severity::Warning, "Unsupported", note);
                }
                tokio::spawn(bind(client.clone(), pod, node_name.clone()));
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                tracing::warn!(error = %chain(&error), "the scheduler's watch failed and is retried");
                tokio::time::sleep(std::time::Duration::from_millis(500)).await;
            }
        }
    }
}

async fn bind(client: Client, pod: Pod, node_name: String) {
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
    match bound {
        Ok(_) => {}
        // Bound by somebody else, or gone.
        Err(kube::Error::Api(status)) if status.code == 409 || status.code == 404 => {}
        Err(error) => {
            tracing::warn!(pod = name, namespace, error = %chain(&error), "cannot bind a pod");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn wishes_that_one_node_cannot_heed_are_named() {
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
