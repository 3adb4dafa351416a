//! A scheduler for one node: every pod that may run here is bound here.

use futures::StreamExt;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use tokio_util::sync::CancellationToken;

use crate::errors::chain;

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

/// Binds pods to `node_name` until told to stop.
pub async fn run(client: Client, node_name: String, shutdown: CancellationToken) {
    let pods = Api::<Pod>::all(client.clone());
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
