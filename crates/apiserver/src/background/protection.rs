//! Volume claims stay as long as a pod uses them: a finalizer holds one that is deleted, and goes when its last pod has gone or ended.
//!
//! Claims of ephemeral volumes belong to their pod and go after it, so they need no looking after here.

use std::sync::Arc;

use apimachinery::status::Status;
use serde_json::Value;

use super::contents::follow;
use crate::{
    operations::{Api, Part, Target, WriteOptions, metadata},
    store::{Event, EventKind, Key, Object, Range, ResourceId},
    strategy::CLAIM_PROTECTION,
};

/// Lets claims go that are being deleted and that no pod uses.
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

/// Looks again at the claims of pods that end or go.
pub async fn run_pods(api: Arc<Api>) {
    follow(&api, &pods(), ends, |api, pod| async move {
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

/// Pods change often and few have claims, so they are not parsed for nothing.
fn mentions(object: &Object, words: &str) -> bool {
    let bytes = object.bytes_as(object.api_version());
    std::str::from_utf8(&bytes).is_ok_and(|text| text.contains(words))
}

fn ends(event: &Event) -> bool {
    if event.kind == EventKind::Added || !mentions(&event.object, "\"persistentVolumeClaim\"") {
        return false;
    }
    event.kind == EventKind::Deleted || has_ended(&event.object.value())
}

fn has_ended(pod: &Value) -> bool {
    matches!(
        pod["status"]["phase"].as_str(),
        Some("Succeeded" | "Failed")
    )
}

/// The names of the claims that a pod's volumes are.
fn claims_of(pod: &Value) -> Vec<String> {
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    volumes
        .filter_map(|volume| volume.pointer("/persistentVolumeClaim/claimName")?.as_str())
        .map(str::to_owned)
        .collect()
}

/// Whether a pod that has been given to a node uses the claim, and has not ended.
fn uses(pod: &Value, claim: &str) -> bool {
    let is_given = pod["spec"]["nodeName"]
        .as_str()
        .is_some_and(|node| !node.is_empty());
    is_given && !has_ended(pod) && claims_of(pod).iter().any(|name| name == claim)
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
            tracing::warn!(error = %status, claim = %claim.key.as_str(), "cannot let a volume claim go");
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
