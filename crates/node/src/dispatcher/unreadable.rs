//! Pods of the node that cannot be decoded, such as those of a newer API server. Their containers keep running, nothing is started,
//! and the pod's status and an event name the field at fault.

use std::sync::Arc;

use api::decoding::{Decoded, Unreadable};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client};
use serde_json::json;

use super::{Dispatcher, Ended, end_and_remove, recover_pod};
use crate::pod_lifecycle::EventReason;
use crate::pod_uid::PodUid;
use crate::runtime::{RecoveredPod, Runtime};
use api::errors::chain;
use api::readable::shell;
use event_recorder::Severity;

/// The reason in the event and in the pod's status.
const REASON: EventReason = EventReason::InvalidConfiguration;

impl<R: Runtime> Dispatcher<R> {
    pub(super) fn report_unreadable(&self, object: Unreadable) {
        let message = format!("The pod cannot be read: {}", object.problem);
        let pod: Pod = shell(object);
        let events = &self.shared.events;
        events.tell(&pod, None, Severity::Warning, REASON, message.clone());
        tokio::spawn(write_unreadable(self.shared.client.clone(), pod, message));
    }

    /// Ends what an earlier run left of a pod that is being deleted, and deletes its object.
    pub(super) fn end_unreadable(
        &mut self,
        uid: PodUid,
        recovered: Option<RecoveredPod>,
        object: Unreadable,
    ) {
        let shared = Arc::clone(&self.shared);
        self.spawn(Some(uid.clone()), async move {
            let found = match recovered {
                Some(pod) => Some(pod),
                None => recover_pod(&shared, &uid).await,
            };
            let containers = found.map_or_else(Vec::new, |pod| pod.containers);
            end_and_remove(&shared, &uid, containers).await;
            release(shared.client.clone(), &shell(object)).await;
            Ended::Gone(uid)
        });
    }
}

fn pods(client: Client, pod: &Pod) -> (Api<Decoded<Pod>>, String) {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.clone().unwrap_or_default();
    (Api::namespaced(client, namespace), name)
}

async fn write_unreadable(client: Client, pod: Pod, message: String) {
    let (pods, name) = pods(client, &pod);
    let patch = json!({
        "metadata": { "uid": pod.metadata.uid },
        "status": { "phase": "Pending", "reason": REASON.as_str(), "message": message },
    });
    let params = PatchParams::default();
    if let Err(error) = pods
        .patch_status(&name, &params, &Patch::Strategic(patch))
        .await
    {
        tracing::debug!(pod = name, error = %chain(&error), "cannot report that a pod cannot be read");
    }
}

async fn release(client: Client, pod: &Pod) {
    let (pods, name) = pods(client, pod);
    let now = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(Preconditions {
            uid: pod.metadata.uid.clone(),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    if let Err(error) = pods.delete(&name, &now).await {
        tracing::warn!(pod = name, error = %chain(&error), "cannot delete a pod that cannot be read");
    }
}
