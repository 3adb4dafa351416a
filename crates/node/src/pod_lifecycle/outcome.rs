//! Whether a pod's work is done, and how it ended.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use saturating_time::SaturatingTime;

use super::{ContainerState, FailureReason, Observed, Phase, is_sidecar, state_of};
use crate::runtime::Termination;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RestartPolicy {
    Always,
    OnFailure,
    Never,
}

impl RestartPolicy {
    pub(super) fn of(spec: &PodSpec) -> Self {
        match spec.restart_policy.as_deref() {
            Some("Never") => Self::Never,
            Some("OnFailure") => Self::OnFailure,
            _ => Self::Always,
        }
    }

    pub(super) fn restarts(self, termination: &Termination) -> bool {
        match self {
            Self::Always => true,
            Self::OnFailure => termination.exit_code != 0,
            Self::Never => false,
        }
    }
}

/// Whether a pod's work is done, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Unfinished,
    Succeeded,
    Failed {
        reason: Option<FailureReason>,
        message: Option<String>,
    },
}

impl Outcome {
    /// An end that the containers' own states explain.
    fn failed() -> Self {
        Self::Failed {
            reason: None,
            message: None,
        }
    }

    pub fn is_over(&self) -> bool {
        *self != Self::Unfinished
    }
}

/// How far a pod has come, and when its time is up if it has a limit that it has not reached.
pub(super) fn of(
    observed: &Observed<'_>,
    spec: &PodSpec,
    now: Timestamp,
) -> (Outcome, Option<Timestamp>) {
    let status = observed.pod.status.as_ref();
    // An end once reported stands: nothing brings such a pod back.
    match status.and_then(|status| status.phase.as_deref()) {
        Some("Succeeded") => return (Outcome::Succeeded, None),
        Some("Failed") => {
            let failed = Outcome::Failed {
                reason: status
                    .and_then(|status| status.reason.clone())
                    .map(FailureReason::Reported),
                message: status.and_then(|status| status.message.clone()),
            };
            return (failed, None);
        }
        _ => {}
    }
    if let Some(verdict) = observed.verdict {
        let failed = Outcome::Failed {
            reason: Some(verdict.reason.clone()),
            message: Some(verdict.message.clone()),
        };
        return (failed, None);
    }
    let deadline = spec
        .active_deadline_seconds
        .map(|seconds| Duration::from_secs(seconds.unsigned_abs()))
        .map(|active| observed.accepted_at.later_by(active));
    if deadline.is_some_and(|deadline| deadline <= now) {
        let failed = Outcome::Failed {
            reason: Some(FailureReason::DeadlineExceeded),
            message: Some(
                "Pod was active on the node longer than the specified deadline".to_owned(),
            ),
        };
        return (failed, None);
    }
    (by_containers(observed, spec), deadline)
}

fn by_containers(observed: &Observed<'_>, spec: &PodSpec) -> Outcome {
    let policy = RestartPolicy::of(spec);
    let mut init = spec.init_containers.iter().flatten();
    let init_failed = policy == RestartPolicy::Never && init.any(|container| {
        !is_sidecar(container)
            && matches!(&state(observed, container).phase, Phase::Ended(end) if end.exit_code != 0)
    });
    if init_failed {
        return Outcome::failed();
    }
    let ends = spec.containers.iter().map(|container| {
        let phase = &state(observed, container).phase;
        match phase {
            Phase::Ended(end) if !policy.restarts(end) => Some(end.exit_code),
            _ => None,
        }
    });
    match ends.collect::<Option<Vec<i32>>>() {
        Some(codes) if codes.iter().all(|code| *code == 0) => Outcome::Succeeded,
        Some(_) => Outcome::failed(),
        None => Outcome::Unfinished,
    }
}

/// How a pod ended that was deleted and of which nothing runs any more: well, if each of its containers did.
pub(super) fn of_deleted(observed: &Observed<'_>, spec: &PodSpec) -> Outcome {
    let well = |container: &Container| {
        let phase = &state(observed, container).phase;
        matches!(phase, Phase::Ended(end) if end.exit_code == 0)
    };
    if !spec.containers.is_empty() && spec.containers.iter().all(well) {
        Outcome::Succeeded
    } else {
        Outcome::failed()
    }
}

fn state<'a>(observed: &Observed<'a>, container: &Container) -> &'a ContainerState {
    state_of(observed.containers, &container.name)
}
