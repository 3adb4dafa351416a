//! Pods of the node's that cannot be read, such as those of a newer API server. What runs of such a pod goes on; nothing is begun, and
//! its owner is told which field is in the way.

use std::collections::HashMap;
use std::sync::Arc;

use api::decoding::{Decoded, Problem, Unreadable};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client};
use serde_json::json;
use tokio_util::task::TaskTracker;

use super::{Dispatcher, Ended, end_and_remove, recover_pod};
use crate::pod_lifecycle::EventReason;
use crate::pod_uid::PodUid;
use crate::runtime::Runtime;
use api::errors::chain;
use api::readable::{shell, warn};
use event_recorder::Severity;

/// What an event and a pod's status give as the reason.
const REASON: EventReason = EventReason::InvalidConfiguration;

/// Pods that cannot be read, and what their owners were told of it, by UID.
#[derive(Debug, Default)]
pub(super) struct UnreadablePods(HashMap<PodUid, Problem>);

impl UnreadablePods {
    pub fn contains(&self, uid: &PodUid) -> bool {
        self.0.contains_key(uid)
    }

    pub fn forget(&mut self, uid: &PodUid) {
        self.0.remove(uid);
    }

    /// Notes a pod; whether there is something new to tell its owner.
    fn note(&mut self, uid: &PodUid, problem: &Problem) -> bool {
        self.0.insert(uid.clone(), problem.clone()).as_ref() != Some(problem)
    }
}

impl<R: Runtime> Dispatcher<R> {
    pub(super) fn apply_unreadable(&mut self, left: Unreadable) {
        let Some(uid) = PodUid::of(&left.metadata) else {
            return;
        };
        if api::labels::is_mirror(&shell::<Pod>(left.clone())) {
            return;
        }
        let is_new = self.unreadable.note(&uid, &left.problem);
        if is_new {
            warn::<Pod>(&left);
        }
        // What it was started as can be read, and goes on; that it is to end is in its metadata.
        if let Some(worker) = self.workers.get(&uid) {
            worker.updates.send_if_modified(|known| {
                let Some(pod) = known else { return false };
                pod.metadata = left.metadata;
                true
            });
            return;
        }
        if left.metadata.deletion_timestamp.is_some() {
            self.end_unreadable(uid, left);
        } else if is_new {
            let message = format!("The pod cannot be read: {}", left.problem);
            let pod: Pod = shell(left);
            let events = &self.shared.events;
            events.tell(&pod, None, Severity::Warning, REASON, message.clone());
            tokio::spawn(say_unreadable(self.shared.client.clone(), pod, message));
        }
    }

    /// Ends what an earlier run left of a pod that is being deleted, and lets its object go.
    fn end_unreadable(&mut self, uid: PodUid, left: Unreadable) {
        if !self.strays.insert(uid.clone()) {
            return;
        }
        let recovered = self.recovered.remove(&uid);
        let shared = Arc::clone(&self.shared);
        self.spawn(Some(uid.clone()), TaskTracker::new(), async move {
            let found = match recovered {
                Some(pod) => Some(pod),
                None => recover_pod(&shared, &uid).await,
            };
            let containers = found.map_or_else(Vec::new, |pod| pod.containers);
            end_and_remove(&shared, &uid, containers).await;
            release(shared.client.clone(), &shell(left)).await;
            Ended::Gone(uid)
        });
    }
}

fn pods(client: Client, pod: &Pod) -> (Api<Decoded<Pod>>, String) {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.clone().unwrap_or_default();
    (Api::namespaced(client, namespace), name)
}

async fn say_unreadable(client: Client, pod: Pod, message: String) {
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
        tracing::debug!(pod = name, error = %chain(&error), "cannot say that a pod cannot be read");
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
        tracing::warn!(pod = name, error = %chain(&error), "cannot let go of a pod that cannot be read");
    }
}
