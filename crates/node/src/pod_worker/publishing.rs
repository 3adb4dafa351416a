//! Reporting a pod's status: only when it changed, one write at a time, the latest winning.

use std::sync::atomic::Ordering;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{Patch, PatchParams};
use saturating_time::SaturatingTime;
use serde_json::{Value, json};

use super::{Audience, Event, PodWorker, RETRY, Shared};
use crate::pod_lifecycle::WaitingReason;
use crate::pod_lifecycle::status::is_own_condition;
use crate::runtime::Runtime;
use api::errors::chain;

/// A pod that is ready at once is not said to be starting before: every write about it is followed by others' writes, and they
/// would all be in its way.
const START_UNTOLD: Duration = Duration::from_millis(100);

/// Whether a status says no more than that the pod is about to be ready.
fn is_starting(status: &PodStatus) -> bool {
    let conditions = status.conditions.iter().flatten();
    let is_ready = conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let mut containers = status
        .init_container_statuses
        .iter()
        .chain(&status.container_statuses)
        .flatten();
    !is_ready
        && matches!(status.phase.as_deref(), Some("Pending" | "Running"))
        && containers.all(|container| {
            let state = container.state.clone().unwrap_or_default();
            let reason = state.waiting.and_then(|waiting| waiting.reason);
            let is_created = matches!(
                reason.as_deref().and_then(WaitingReason::parse),
                Some(WaitingReason::ContainerCreating | WaitingReason::PodInitializing)
            );
            container.restart_count == 0 && (is_created || state.running.is_some())
        })
}

/// What this node has said, with the conditions others have added since.
pub(super) fn overlay(said: &PodStatus, seen: Option<&PodStatus>) -> PodStatus {
    let mut status = said.clone();
    let own = said
        .conditions
        .iter()
        .flatten()
        .filter(|condition| is_own_condition(&condition.type_));
    let others = seen
        .into_iter()
        .flat_map(|seen| seen.conditions.iter().flatten());
    let others = others.filter(|condition| !is_own_condition(&condition.type_));
    status.conditions = Some(others.chain(own).cloned().collect());
    if status.qos_class.is_none() {
        status.qos_class = seen.and_then(|seen| seen.qos_class.clone());
    }
    status
}

impl<R: Runtime> PodWorker<R> {
    pub(super) fn publish(&mut self, now: Timestamp) {
        if self.publishing
            || self.finishing
            || self.audience == Audience::Gone
            || self.decided == self.published
        {
            return;
        }
        if self.publish_after.is_some_and(|after| after > now) {
            return;
        }
        let Some(status) = self.decided.clone() else {
            return;
        };
        let told_from = self.accepted_at.later_by(START_UNTOLD);
        if is_starting(&status) && now < told_from {
            self.untold_until = Some(told_from);
            return;
        }
        self.untold_until = None;
        self.publish_after = None;
        self.publishing = true;
        // The next decision starts from what is being said now: transition times are kept.
        self.pod.status = Some(status.clone());
        let (shared, pod, sender) = (
            self.shared.clone(),
            self.pod.metadata.clone(),
            self.sender.clone(),
        );
        self.act(async move {
            let result = write(&shared, &pod, &status).await;
            let _ = sender.send(Event::Published(Box::new(result.map(|()| status))));
        });
    }

    /// Whether whoever watches the pod knows all there is to know of it.
    pub(super) fn has_said_all(&self) -> bool {
        self.audience != Audience::Watching || (!self.publishing && self.decided == self.published)
    }

    pub(super) fn status_published(&mut self, result: Result<PodStatus, kube::Error>) {
        self.publishing = false;
        match result {
            Ok(status) => {
                if self.audience == Audience::Leaving {
                    self.audience = Audience::Watching;
                }
                self.published = Some(status);
            }
            // Deleted, or another pod of the same name by now; the watch will say which.
            Err(kube::Error::Api(status)) if is_of_another(&status) => {
                if self.audience == Audience::Watching {
                    self.audience = Audience::Leaving;
                }
                self.publish_after = Some(Timestamp::now().later_by(RETRY));
            }
            Err(error) => {
                tracing::warn!(pod = self.pod.metadata.name, error = %chain(&error), "cannot report a pod's status");
                self.publish_after = Some(Timestamp::now().later_by(RETRY));
            }
        }
    }
}

/// Whether the API knows no such pod any more. To name another UID than the pod has is to change a field that cannot change.
fn is_of_another(status: &kube::core::Status) -> bool {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    match status.code {
        404 | 409 => true,
        422 => causes.any(|cause| cause.field == "metadata.uid"),
        _ => false,
    }
}

/// Writes a status. A strategic patch leaves the conditions of others alone; where the server does not take one, the
/// conditions last seen are written along.
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

/// A status for a merge patch. What it does not say is unsaid: left out, it would stay as it was.
fn merging(status: &PodStatus) -> Value {
    let mut body = json!(status);
    for field in ["reason", "message", "podIP", "podIPs"] {
        unsay(&mut body, field);
    }
    body
}

/// A status for a strategic patch, which merges lists item by item: conditions by their type, so that those of others stay, and
/// addresses, which have to be replaced.
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
            unsay(&mut condition, "reason");
            unsay(&mut condition, "message");
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

fn unsay(object: &mut Value, field: &str) {
    if object.get(field).is_none() {
        object[field] = Value::Null;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(phase: &str, ready: &str, restarts: i32, state: &Value) -> PodStatus {
        serde_json::from_value(json!({
            "phase": phase,
            "conditions": [{"type": "Ready", "status": ready}],
            "containerStatuses": [{
                "name": "one", "image": "", "imageID": "", "ready": ready == "True",
                "restartCount": restarts, "state": state,
            }],
        }))
        .unwrap()
    }

    #[test]
    fn only_a_first_start_without_trouble_is_left_untold() {
        let creating = || json!({"waiting": {"reason": "ContainerCreating"}});
        let running = || json!({"running": {}});
        for (phase, ready, restarts, state, untold) in [
            ("Pending", "False", 0, creating(), true),
            ("Running", "False", 0, running(), true),
            ("Running", "True", 0, running(), false),
            ("Running", "False", 1, running(), false),
            (
                "Pending",
                "False",
                0,
                json!({"waiting": {"reason": "ErrImagePull"}}),
                false,
            ),
            (
                "Running",
                "False",
                0,
                json!({"terminated": {"exitCode": 1}}),
                false,
            ),
            (
                "Succeeded",
                "False",
                0,
                json!({"terminated": {"exitCode": 0}}),
                false,
            ),
        ] {
            let said = format!("{phase} {ready} {restarts} {state}");
            assert_eq!(
                is_starting(&status(phase, ready, restarts, &state)),
                untold,
                "{said}"
            );
        }
    }
}
