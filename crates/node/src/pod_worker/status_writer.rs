//! Writing a pod's status to the API.

use std::sync::atomic::Ordering;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::Shared;
use crate::pod_lifecycle::status::is_own_condition;
use crate::pod_machine::publication::Answer;
use crate::runtime::Runtime;
use api::errors::chain;

/// Writes a status and classifies the answer.
pub(super) async fn publish<R: Runtime>(
    shared: &Shared<R>,
    pod: &ObjectMeta,
    status: &PodStatus,
) -> Answer {
    match write(shared, pod, status).await {
        Ok(()) => Answer::Written,
        Err(kube::Error::Api(status)) if is_of_another(&status) => Answer::NoSuchPod,
        Err(kube::Error::Api(status)) if status.code == CONFLICT => {
            after_conflict(shared, pod).await
        }
        Err(error) => {
            tracing::warn!(pod = pod.name, error = %chain(&error), "cannot report a pod's status");
            Answer::Failed
        }
    }
}

const CONFLICT: u16 = 409;

/// A conflict means that another pod has the name by now, or that other writers were faster. Only the former is no pod of ours: its
/// end must not go unpublished for the latter.
async fn after_conflict<R: Runtime>(shared: &Shared<R>, pod: &ObjectMeta) -> Answer {
    let namespace = pod.namespace.as_deref().unwrap_or_default();
    let api = Api::<Pod>::namespaced(shared.client.clone(), namespace);
    let name = pod.name.as_deref().unwrap_or_default();
    match api.get_metadata_opt(name).await {
        Ok(Some(found)) if found.metadata.uid == pod.uid => Answer::Failed,
        Ok(_) => Answer::NoSuchPod,
        Err(_) => Answer::Failed,
    }
}

/// Whether the API has no such pod any more. A patch with another UID than the pod's tries to change an immutable field.
fn is_of_another(status: &kube::core::Status) -> bool {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    match status.code {
        404 => true,
        422 => causes.any(|cause| cause.field == "metadata.uid"),
        _ => false,
    }
}

/// Writes a status. A strategic merge patch leaves the conditions of other writers alone; where the server does not accept one, the
/// patch contains the conditions last observed.
async fn write<R: Runtime>(
    shared: &Shared<R>,
    pod: &ObjectMeta,
    status: &PodStatus,
) -> Result<(), kube::Error> {
    const UNSUPPORTED_MEDIA_TYPE: u16 = 415;
    let api = Api::<Pod>::namespaced(
        shared.client.clone(),
        pod.namespace.as_deref().unwrap_or_default(),
    );
    let name = pod.name.as_deref().unwrap_or_default();
    if !shared.plain_patches.load(Ordering::Relaxed) {
        let patch = json!({"metadata": {"uid": pod.uid}, "status": strategic(status)});
        match api
            .patch_status(name, &PatchParams::default(), &Patch::Strategic(patch))
            .await
        {
            Err(kube::Error::Api(answer)) if answer.code == UNSUPPORTED_MEDIA_TYPE => {
                shared.plain_patches.store(true, Ordering::Relaxed);
            }
            other => return other.map(drop),
        }
    }
    let patch = json!({"metadata": {"uid": pod.uid}, "status": merging(status)});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
        .map(drop)
}

/// A status for a merge patch. Absent fields are set to null: a merge patch that omits one would keep the old value.
fn merging(status: &PodStatus) -> Value {
    let mut body = json!(status);
    for field in ["reason", "message", "podIP", "podIPs"] {
        set_null(&mut body, field);
    }
    body
}

/// A status for a strategic merge patch, which merges lists item by item: conditions by their type, so that those of other writers
/// stay, and addresses, which have to be replaced.
fn strategic(status: &PodStatus) -> Value {
    let mut body = merging(status);
    let own = status
        .conditions
        .iter()
        .flatten()
        .filter(|condition| is_own_condition(&condition.type_));
    body["conditions"] = own
        .map(|condition| {
            let mut condition = json!(condition);
            set_null(&mut condition, "reason");
            set_null(&mut condition, "message");
            condition
        })
        .collect();
    for field in ["podIPs", "hostIPs"] {
        if let Some(Value::Array(addresses)) = body.get_mut(field) {
            addresses.insert(0, json!({"$patch": "replace"}));
        }
    }
    body
}

fn set_null(object: &mut Value, field: &str) {
    if object.get(field).is_none() {
        object[field] = Value::Null;
    }
}
