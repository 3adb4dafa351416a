//! Protection of volume claims in use: a finalizer delays the deletion of a claim until its last pod has been deleted or has
//! terminated.
//!
//! Claims of ephemeral volumes are owned by their pod and deleted after it, so this controller does not handle them.

use std::sync::Arc;

use apimachinery::status::Status;
use serde_json::Value;
use store::{Event, EventKind, Key, Object, Range, ResourceId};

use super::content_deletion::follow;
use crate::{
    metadata,
    operations::Api,
    strategy::persistent_volume_claim::CLAIM_PROTECTION,
    target::{Part, Target, WriteOptions},
};

/// Removes the finalizer of terminating claims that no pod uses.
pub async fn run_claims(api: Arc<Api>) {
    follow(
        &api,
        &claims(),
        |_| true,
        |api, claim| async move {
            release(&api, &claim).await;
        },
    )
    .await;
}

/// Checks the claims of pods that terminate or are deleted.
pub async fn run_pods(api: Arc<Api>) {
    follow(&api, &pods(), terminates, |api, pod| async move {
        for name in claims_of(&pod.value()) {
            let key = Key::new(pod.key.namespace(), &name);
            if let Some(claim) = api.store.get(&claims(), &key) {
                release(&api, &claim).await;
            }
        }
    })
    .await;
}

fn claims() -> ResourceId {
    ResourceId::new("", "persistentvolumeclaims")
}

fn pods() -> ResourceId {
    ResourceId::new("", "pods")
}

/// Whether an object's JSON contains a text. Pods change often and few have claims, so this avoids parsing most of them.
fn mentions(object: &Object, text: &str) -> bool {
    let bytes = object.bytes_as(object.api_version());
    std::str::from_utf8(&bytes).is_ok_and(|json| json.contains(text))
}

fn terminates(event: &Event) -> bool {
    if event.kind == EventKind::Added || !mentions(&event.object, "\"persistentVolumeClaim\"") {
        return false;
    }
    event.kind == EventKind::Deleted || has_terminated(&event.object.value())
}

fn has_terminated(pod: &Value) -> bool {
    matches!(
        pod["status"]["phase"].as_str(),
        Some("Succeeded" | "Failed")
    )
}

/// The names of the claims that a pod's volumes use.
fn claims_of(pod: &Value) -> Vec<String> {
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    volumes
        .filter_map(|volume| volume.pointer("/persistentVolumeClaim/claimName")?.as_str())
        .map(str::to_owned)
        .collect()
}

/// Whether a pod uses the claim: it is assigned to a node and has not terminated.
fn uses(pod: &Value, claim: &str) -> bool {
    let is_assigned = pod["spec"]["nodeName"]
        .as_str()
        .is_some_and(|node| !node.is_empty());
    is_assigned && !has_terminated(pod) && claims_of(pod).iter().any(|name| name == claim)
}

fn is_used(api: &Api, claim: &Key) -> bool {
    let range = Range::namespace(claim.namespace());
    let Ok(pods) = api.store.list(&pods(), &range, None) else {
        return true;
    };
    pods.objects
        .iter()
        .filter(|pod| mentions(pod, claim.name()))
        .any(|pod| uses(&pod.value(), claim.name()))
}

async fn release(api: &Api, claim: &Object) {
    let is_held = metadata::list_of_text(claim.value().pointer("/metadata/finalizers"))
        .contains(&CLAIM_PROTECTION);
    if !claim.is_deleting() || !is_held || is_used(api, &claim.key) {
        return;
    }
    match remove_finalizer(api, &claim.key).await {
        Err(status) if !status.is_not_found() => {
            tracing::warn!(error = %status, claim = %claim.key.as_str(), "cannot remove the protection of a volume claim");
        }
        _ => {}
    }
}

async fn remove_finalizer(api: &Api, claim: &Key) -> Result<(), Status> {
    let resource = api.registry().find("", "v1", "persistentvolumeclaims");
    let target = Target {
        resource: resource.ok_or_else(Status::unknown_path)?,
        namespace: claim.namespace().to_owned(),
        name: claim.name().to_owned(),
    };
    let transform = |old: &Value| {
        let mut claim = old.clone();
        let finalizers = metadata::of(&mut claim).get_mut("finalizers");
        if let Some(finalizers) = finalizers.and_then(Value::as_array_mut) {
            finalizers.retain(|finalizer| finalizer != CLAIM_PROTECTION);
        }
        Ok(claim)
    };
    let options = WriteOptions::system("pvc-protection-controller");
    api.modify(&target, Part::Main, &transform, &options)
        .await
        .map(drop)
}
