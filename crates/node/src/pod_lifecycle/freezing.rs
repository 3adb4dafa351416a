//! When the processes of a pod are frozen and thawed, and what the pod's status reports of it.
//!
//! ```text
//!            annotation set, no container starts or stops          runtime done
//!   Thawed ────────────────────────────────────────────► Freezing ──────────────► Frozen
//!     ▲                                                     │ failed                 │ annotation removed,
//!     │ runtime done                                        ▼                        │ or the pod ends
//!     └──────────────── Thawing ◄───────────────────── FreezeFailed (retried)        │
//!                          ▲  │ failed ──► ThawFailed (retried)                     │
//!                          └──────────────────────────────────────────────────────── ┘
//! ```
//!
//! A frozen pod is thawed before it is stopped: its command is to notice the signal. Starts, restarts and probes wait meanwhile.

use api::freezing::{FROZEN, is_asked_for, reason};
use api::labels::SANDBOX_NAME_HASH;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{PodCondition, PodSpec};

use super::decision::Decision;
use super::status::{Verdict, is_running};
use super::{Action, Observed, Phase};

/// What is known of the freezer of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Freezer {
    #[default]
    Thawed,
    Freezing,
    /// Frozen, with what the runtime reports of it, such as the memory that was paged out.
    Frozen {
        note: Option<String>,
    },
    Thawing,
    /// Some processes may be frozen.
    FreezeFailed {
        message: String,
        retry_at: Timestamp,
    },
    /// Some processes may be frozen.
    ThawFailed {
        message: String,
        retry_at: Timestamp,
    },
}

impl Freezer {
    pub fn is_thawed(&self) -> bool {
        *self == Self::Thawed
    }
}

/// Whether the pod is to be frozen. A node that cannot freeze pods ignores the annotation, and reports why.
fn is_wanted(observed: &Observed<'_>) -> bool {
    is_asked_for(observed.pod.metadata.annotations.as_ref()) && observed.cannot_freeze.is_none()
}

impl Decision<'_> {
    /// Thaws a pod that ends. False while that is under way. A pod that cannot be thawed is ended all the same.
    pub(super) fn is_thawed(&mut self) -> bool {
        match self.observed.freezer {
            Freezer::Thawed | Freezer::ThawFailed { .. } => return true,
            Freezer::Frozen { .. } | Freezer::FreezeFailed { .. } => {
                self.actions.push(Action::Thaw);
            }
            Freezer::Freezing | Freezer::Thawing => {}
        }
        false
    }

    /// Brings the freezer to where the annotation wants it. True if the containers of the pod may be started and restarted.
    pub(super) fn settle_freezer(&mut self, spec: &PodSpec) -> bool {
        let is_wanted = is_wanted(self.observed);
        match (self.observed.freezer, is_wanted) {
            (Freezer::Freezing | Freezer::Thawing, _) | (Freezer::Frozen { .. }, true) => {}
            (Freezer::Frozen { .. } | Freezer::FreezeFailed { .. }, false) => {
                self.actions.push(Action::Thaw);
            }
            (Freezer::ThawFailed { .. }, true) => self.actions.push(Action::Freeze),
            (Freezer::FreezeFailed { retry_at, .. }, true) => {
                self.retry(*retry_at, Action::Freeze);
            }
            (Freezer::ThawFailed { retry_at, .. }, false) => self.retry(*retry_at, Action::Thaw),
            // A pod that starts goes on: half of its containers would not be a sandbox.
            (Freezer::Thawed, true) if is_running(self.observed, spec) => {
                let phases = self.observed.containers.values().map(|state| &state.phase);
                let mut phases = phases.clone();
                if !phases.any(|phase| matches!(phase, Phase::Starting | Phase::Stopping { .. })) {
                    self.actions.push(Action::Freeze);
                }
                self.kill_overdue(spec);
            }
            (Freezer::Thawed, _) => return true,
        }
        false
    }

    fn retry(&mut self, at: Timestamp, action: Action) {
        if at <= self.now {
            self.actions.push(action);
        } else {
            self.wake(at);
        }
    }
}

/// The condition that says whether the pod is frozen. The pods of sandboxes have it from the first status on, which announces that the
/// node can freeze them; other pods only if they ask for it.
pub(super) fn verdict(observed: &Observed<'_>, before: &[PodCondition]) -> Option<Verdict> {
    let metadata = &observed.pod.metadata;
    let labels = metadata.labels.as_ref();
    let is_asked = is_asked_for(metadata.annotations.as_ref());
    let is_of_sandbox = labels.is_some_and(|labels| labels.contains_key(SANDBOX_NAME_HASH));
    let is_known = before.iter().any(|condition| condition.type_ == FROZEN);
    if !is_asked && !is_of_sandbox && !is_known {
        return None;
    }
    let (holds, reason, message) = match (observed.freezer, observed.cannot_freeze) {
        (_, Some(why)) => (false, reason::NOT_SUPPORTED, Some(why.to_owned())),
        (Freezer::Frozen { note }, _) => (true, reason::FROZEN, note.clone()),
        (Freezer::FreezeFailed { message, .. }, _) => {
            (false, reason::FAILED, Some(message.clone()))
        }
        // Until all of them run again, some of its processes do not.
        (Freezer::ThawFailed { message, .. }, _) => (true, reason::FROZEN, Some(message.clone())),
        (Freezer::Thawing, _) => (true, reason::FROZEN, None),
        (Freezer::Freezing, _) => (false, reason::FREEZING, None),
        (Freezer::Thawed, _) if is_asked => (false, reason::FREEZING, None),
        (Freezer::Thawed, _) => (false, reason::RUNNING, None),
    };
    Some(Verdict {
        kind: FROZEN,
        holds,
        reason: Some(reason.to_owned()),
        message,
    })
}
