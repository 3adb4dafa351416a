//! `PodScheduled`, copied from the pod so that it can be read without access to pods.

use api::conditions::{ConditionType, Reason};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::observed_pod::{ObservedPod, StateCondition};

/// The most bytes of a copied message; the schema of conditions allows 32 KiB.
const MESSAGE_MAX: usize = 4 * 1024;

/// The pod's condition `PodScheduled` as one of its sandbox.
pub(super) fn pod_scheduled(pod: &ObservedPod, generation: Option<i64>, now: &Time) -> Condition {
    let (status, reason, message) = match reported(pod) {
        Some(condition) => (
            status_of(condition),
            reason_of(condition),
            shortened(condition.message.as_deref().unwrap_or_default()),
        ),
        None => (
            "Unknown",
            Reason::PodSchedulingUnknown.as_str(),
            "Pod has not reported a PodScheduled condition yet".to_owned(),
        ),
    };
    Condition {
        type_: ConditionType::PodScheduled.as_str().to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        observed_generation: generation,
        last_transition_time: now.clone(),
    }
}

/// What the pod reports. The binding to a node is copied once the node reports a status: a status write for the binding
/// alone would delay the start that it precedes.
fn reported(pod: &ObservedPod) -> Option<&StateCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let scheduled = conditions
        .iter()
        .find(|condition| condition.type_ == ConditionType::PodScheduled.as_str())?;
    let is_binding_alone = scheduled.status == "True" && conditions.len() == 1;
    (!is_binding_alone).then_some(scheduled)
}

fn status_of(condition: &StateCondition) -> &'static str {
    match condition.status.as_str() {
        "True" => "True",
        "False" => "False",
        _ => "Unknown",
    }
}

/// The reason of a sandbox's condition: it must be one word, while a pod's may be empty or any text.
fn reason_of(condition: &StateCondition) -> &str {
    let is_word = |reason: &&str| {
        reason.starts_with(|first: char| first.is_ascii_alphabetic())
            && reason
                .chars()
                .all(|character| character.is_ascii_alphanumeric() || character == '_')
            && reason.len() <= 1024
    };
    let fallback = if condition.status == "True" {
        Reason::PodScheduled
    } else {
        Reason::PodSchedulingUnknown
    };
    condition
        .reason
        .as_deref()
        .filter(is_word)
        .unwrap_or(fallback.as_str())
}

fn shortened(message: &str) -> String {
    let fits = |(start, character): &(usize, char)| {
        start.saturating_add(character.len_utf8()) <= MESSAGE_MAX
    };
    let kept = message.char_indices().take_while(fits);
    kept.map(|(_, character)| character).collect()
}
