//! A node that runs nothing: it says of every pod that it runs and is Ready, as soon as it sees it.

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

/// Marks pods Ready until it is dropped.
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
            tokio::spawn(mark(client.clone(), pod, seen));
        }
    }
}

async fn mark(client: Client, pod: Pod, number: u32) {
    let pods = Api::<Pod>::namespaced(client, &pod.namespace().unwrap_or_default());
    let [_, high, middle, low] = number.to_be_bytes();
    let address = format!("10.{high}.{middle}.{low}");
    let status = json!({
        "phase": "Running",
        "podIP": address,
        "podIPs": [{ "ip": address }],
        "conditions": [{ "type": "Ready", "status": "True" }],
    });
    // One that has changed since it was seen is seen again, and may have ended.
    let version = json!({ "resourceVersion": pod.resource_version() });
    let patch = Patch::Merge(json!({ "metadata": version, "status": status }));
    // A pod that is gone by now needs no status.
    let _ = pods
        .patch_status(&pod.name_any(), &PatchParams::default(), &patch)
        .await;
}
