//! The condition `Suspended`, in the form of the object's API generation, and the warning if `replicas` and `operatingMode` disagree.

use api::conditions::{self, ConditionType, Finding, Reason};
use api::sandbox::{ConditionForm, OperatingMode, Suspension, SuspensionType};
use api::{SandboxSpec, SandboxStatus};

use super::{ObservedPod, Outcome, SandboxFacts, current_pod, freezing, loss};

/// The condition Suspended, or `None` for an object that has no such condition.
pub(super) fn suspended(observed: &SandboxFacts, outcome: &Outcome) -> Option<Finding> {
    let spec = &observed.sandbox.spec;
    let form = spec.condition_form();
    let is_requested = spec.suspension().is_requested();
    if is_requested && let Some(pod) = kept_pod(observed, outcome) {
        return Some(freezing::suspended(spec.suspension_type(), pod));
    }
    let (holds, reason, message) = match (form, is_requested, outcome.pod.is_some()) {
        (ConditionForm::Replicas, false, _) => return None,
        (ConditionForm::Replicas, true, true) => {
            (false, Reason::PodNotTerminated, "Pod is being terminated")
        }
        (ConditionForm::Replicas, true, false) => {
            (true, Reason::PodTerminated, "Pod is terminated")
        }
        (ConditionForm::OperatingMode, false, _) => {
            (false, Reason::NotSuspended, "Sandbox is not suspended")
        }
        (ConditionForm::OperatingMode, true, true) => (
            false,
            Reason::PodTerminating,
            "Pod is terminating. Sandbox is suspending",
        ),
        (ConditionForm::OperatingMode, true, false) if is_name_taken(observed) => (
            false,
            Reason::PodNotOwned,
            "Refused to delete pod because it is not owned by this sandbox",
        ),
        (ConditionForm::OperatingMode, true, false) => (
            true,
            Reason::PodTerminated,
            "Pod has been terminated. Sandbox is suspended",
        ),
    };
    let condition = ConditionType::Suspended;
    Some(Finding::new(condition, holds, reason, message))
}

/// The pod of a sandbox whose strategy keeps it, unless the pod is going.
fn kept_pod<'a>(observed: &SandboxFacts, outcome: &'a Outcome) -> Option<&'a ObservedPod> {
    let pod = outcome.pod.as_deref()?;
    let is_going = pod.metadata.deletion_timestamp.is_some() || loss(pod).is_some();
    let is_kept = observed.sandbox.spec.suspension_type() != SuspensionType::Stop;
    (is_kept && !is_going).then_some(pod)
}

/// Whether the pod of the sandbox's name belongs to another owner.
pub(super) fn is_name_taken(observed: &SandboxFacts) -> bool {
    current_pod(observed).is_some_and(|pod| !observed.owns(&pod.metadata))
}

/// Whether a status reports a requested suspension, in either form.
pub fn is_reported_suspended(status: &SandboxStatus) -> bool {
    conditions::find(&status.conditions, ConditionType::Suspended)
        .is_some_and(|suspended| suspended.reason != Reason::NotSuspended.as_str())
}

/// The message about a spec whose `replicas` and `operatingMode` disagree: which of them decides.
///
/// `replicas: 1` is also what the schema fills in, so beside `operatingMode: Suspended` it is ignored by itself. It counts as a
/// request to resume if the spec was changed while the sandbox was suspended.
pub fn disagreement(spec: &SandboxSpec, before: &SandboxStatus) -> Option<&'static str> {
    match spec.suspension() {
        Suspension::ByReplicas if spec.operating_mode == Some(OperatingMode::Running) => Some(
            "Suspended because spec.replicas is 0, though spec.operatingMode is Running; set spec.replicas to 1 to resume",
        ),
        Suspension::ByOperatingMode
            if spec.replicas == Some(1)
                && conditions::is_true(&before.conditions, ConditionType::Suspended) =>
        {
            Some(
                "Still suspended because spec.operatingMode is Suspended, though spec.replicas is 1; set spec.operatingMode to Running to resume",
            )
        }
        _ => None,
    }
}
