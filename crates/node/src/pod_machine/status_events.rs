//! Which changes of a pod's status are reported as events too. Pure.

use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use kube::ResourceExt;

use super::{PodEvent, Severity};
use crate::pod_lifecycle::status::CPU_THROTTLED;
use crate::pod_lifecycle::{EventReason, WaitingReason, container_of};
use crate::pod_uid::PodUid;

/// The events for what changed between two statuses.
pub(super) fn between(
    uid: &PodUid,
    pod: &Pod,
    before: Option<&PodStatus>,
    now: &PodStatus,
) -> Vec<PodEvent> {
    let mut events = Vec::new();
    for status in containers(now) {
        let was = before
            .into_iter()
            .flat_map(containers)
            .find(|other| other.name == status.name);
        let reason = waiting_for(status);
        if reason == was.and_then(waiting_for) {
            continue;
        }
        let (severity, note) = match reason {
            Some(WaitingReason::CrashLoopBackOff) => (
                Severity::Warning,
                format!(
                    "Back-off restarting failed container {} in pod {}_{}({})",
                    status.name,
                    pod.name_any(),
                    pod.namespace().unwrap_or_default(),
                    uid
                ),
            ),
            Some(WaitingReason::ImagePullBackOff) => (
                Severity::Normal,
                format!("Back-off pulling image \"{}\"", image_of(pod, &status.name)),
            ),
            _ => continue,
        };
        events.push(PodEvent {
            container: Some(status.name.clone()),
            severity,
            reason: EventReason::BackOff,
            note,
        });
    }
    let throttled = |status: &PodStatus| {
        let conditions = status.conditions.iter().flatten();
        conditions
            .filter(|condition| condition.type_ == CPU_THROTTLED && condition.status == "True")
            .find_map(|condition| condition.message.clone())
    };
    if let Some(note) = throttled(now)
        && before.and_then(throttled).is_none()
    {
        events.push(PodEvent {
            container: None,
            severity: Severity::Warning,
            reason: EventReason::CPUThrottled,
            note,
        });
    }
    events
}

fn containers(status: &PodStatus) -> impl Iterator<Item = &ContainerStatus> {
    let main = status.container_statuses.iter().flatten();
    main.chain(status.init_container_statuses.iter().flatten())
}

fn waiting_for(status: &ContainerStatus) -> Option<WaitingReason> {
    WaitingReason::parse(status.state.as_ref()?.waiting.as_ref()?.reason.as_deref()?)
}

fn image_of(pod: &Pod, container: &str) -> String {
    container_of(pod, container)
        .and_then(|container| container.image)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn status(state: &Value, throttled: Option<&str>) -> PodStatus {
        serde_json::from_value(json!({
            "containerStatuses": [{"name": "c", "state": state, "image": "i", "imageID": "", "ready": false, "restartCount": 1}],
            "conditions": [{"type": CPU_THROTTLED, "status": if throttled.is_some() { "True" } else { "False" }, "message": throttled}],
        }))
        .unwrap()
    }

    #[test]
    fn a_back_off_and_a_throttled_container_are_reported_when_they_begin_and_not_again() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [{"name": "c", "image": "r/i:v1"}]}
        }))
        .unwrap();
        let running = status(&json!({"running": {}}), None);
        let crashed = status(&json!({"waiting": {"reason": "CrashLoopBackOff"}}), None);
        let unpulled = status(&json!({"waiting": {"reason": "ImagePullBackOff"}}), None);
        let hot = status(&json!({"running": {}}), Some("container c wants more"));
        let notes = |before: Option<&PodStatus>, now: &PodStatus| -> Vec<(EventReason, String)> {
            let uid = PodUid::of(&pod.metadata).unwrap();
            let events = between(&uid, &pod, before, now).into_iter();
            events.map(|event| (event.reason, event.note)).collect()
        };
        let restarting = "Back-off restarting failed container c in pod p_n(u)".to_owned();
        assert_eq!(
            notes(Some(&running), &crashed),
            [(EventReason::BackOff, restarting.clone())]
        );
        assert_eq!(notes(None, &crashed), [(EventReason::BackOff, restarting)]);
        assert_eq!(notes(Some(&crashed), &crashed), []);
        assert_eq!(
            notes(Some(&running), &unpulled),
            [(
                EventReason::BackOff,
                "Back-off pulling image \"r/i:v1\"".to_owned()
            )]
        );
        assert_eq!(
            notes(Some(&running), &hot),
            [(
                EventReason::CPUThrottled,
                "container c wants more".to_owned()
            )]
        );
        assert_eq!(notes(Some(&hot), &hot), []);
        assert_eq!(notes(Some(&hot), &running), []);
    }
}
