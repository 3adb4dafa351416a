//! Suspension that keeps the pod: whether its node is asked to freeze it, and what is reported of it.

use api::conditions::{ConditionType, Finding, Reason};
use api::freezing::{self, FROZEN, reason};
use api::sandbox::SuspensionType;

use super::metadata::Freeze;
use super::observed_pod::StateCondition;
use super::status::{has_ended, phase};
use super::{ObservedPod, SandboxFacts};

/// What the pod's node reports of the freezer. A kubelet reports nothing.
fn reported(pod: &ObservedPod) -> Option<&StateCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    conditions
        .iter()
        .find(|condition| condition.type_ == FROZEN)
}

/// Whether the processes of the pod are frozen, or being frozen or thawed. It does not answer then.
pub(super) fn is_frozen(pod: &ObservedPod) -> bool {
    let is_frozen = reported(pod).is_some_and(|condition| condition.status == "True");
    is_frozen || freezing::is_asked_for(pod.metadata.annotations.as_ref())
}

/// Whether the node of a suspended sandbox's pod is asked to freeze the pod: only if it has announced that it can.
pub(super) fn request(observed: &SandboxFacts, pod: &ObservedPod) -> Freeze {
    let can_freeze = reported(pod)
        .is_some_and(|condition| condition.reason.as_deref() != Some(reason::NOT_SUPPORTED));
    if observed.sandbox.spec.suspension_type() == SuspensionType::Freeze && can_freeze {
        Freeze::Asked
    } else {
        Freeze::NotAsked
    }
}

/// The condition Suspended of a sandbox whose pod is kept, with a strategy other than Stop.
pub(super) fn suspended(strategy: SuspensionType, pod: &ObservedPod) -> Finding {
    let finding = |holds: bool, reason, message: String| {
        Finding::new(ConditionType::Suspended, holds, reason, message)
    };
    if has_ended(pod) {
        let message = "Pod has ended by itself; nothing is left to suspend".to_owned();
        return finding(true, Reason::PodTerminated, message);
    }
    match strategy {
        SuspensionType::Stop | SuspensionType::Freeze => {}
        SuspensionType::Hibernate => {
            let message = cannot("no node of this version can write the memory of a pod to disk");
            return finding(false, Reason::HibernateNotSupported, message);
        }
        SuspensionType::Unknown => {
            let message = cannot("spec.suspensionStrategy.type: this version does not know it");
            return finding(false, Reason::InvalidConfiguration, message);
        }
    }
    let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    let node = node.unwrap_or_default();
    let Some(condition) = reported(pod) else {
        if phase(pod) == "Pending" {
            let message = "Pod has not started yet; it is frozen once it runs".to_owned();
            return finding(false, Reason::Freezing, message);
        }
        let message =
            format!("node {node:?} is not a node of agent-sandbox and cannot freeze pods");
        return finding(false, Reason::FreezeNotSupported, cannot(&message));
    };
    let reported_message = condition.message.as_deref().unwrap_or_default();
    let with_message = |text: &str| match reported_message {
        "" => text.to_owned(),
        reported_message => format!("{text}: {reported_message}"),
    };
    match (condition.status.as_str(), condition.reason.as_deref()) {
        ("True", _) => finding(true, Reason::Frozen, with_message("Pod is frozen")),
        (_, Some(reason::NOT_SUPPORTED)) => {
            let message = cannot(&format!(
                "node {node:?} cannot freeze pods: {reported_message}"
            ));
            finding(false, Reason::FreezeNotSupported, message)
        }
        (_, Some(reason::FAILED)) => {
            let message = with_message("Pod could not be frozen; its node tries again");
            finding(false, Reason::FreezeFailed, message)
        }
        _ => finding(false, Reason::Freezing, with_message("Pod is being frozen")),
    }
}

fn cannot(why: &str) -> String {
    format!(
        "Sandbox runs on because {why}; set spec.suspensionStrategy.type to Stop to suspend it without its memory, or resume it"
    )
}
