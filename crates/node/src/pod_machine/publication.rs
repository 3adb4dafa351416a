//! When a pod's status is written to the API: only when it changed, one write at a time, the latest status wins.
//!
//! ```text
//!             decide             next               answered(Written)
//!  up to date ──────► pending ─────────► in flight ───────────────────► up to date
//!                      ▲   ▲                │
//!                      │   └── retry_at ────┘ answered(NoSuchPod | Failed)
//!                      └ suppressed while the pod starts for the first time
//!
//!  gone: the API has no such pod any more, nothing is written again
//! ```
//!
//! Nothing here performs a write or reads a clock.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodStatus;
use saturating_time::SaturatingTime;

use crate::pod_lifecycle::WaitingReason;
use crate::pod_lifecycle::status::is_own_condition;

/// How long after a failed write the status is written again.
pub const RETRY: Duration = Duration::from_secs(2);

/// How long the status of a pod that is about to be ready is suppressed. Each write is followed by writes of controllers, which would
/// delay a pod that is ready within this time.
const STARTING_SUPPRESSED: Duration = Duration::from_millis(100);

/// What the API answered to a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Written,
    /// The pod was deleted, or another pod has its name by now. The watch will tell which.
    NoSuchPod,
    Failed,
}

/// Whether the API still has the pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Presence {
    Present,
    /// The API refused the last write, but the watch has not reported a deletion yet.
    Refused,
    Gone,
}

/// Which status of a pod the API has, and which it is to have.
#[derive(Debug)]
pub struct Publication {
    latest: Option<PodStatus>,
    published: Option<PodStatus>,
    in_flight: Option<PodStatus>,
    retry_at: Option<Timestamp>,
    suppressed_until: Timestamp,
    presence: Presence,
}

impl Publication {
    /// The publication of a pod whose status in the API is `published`.
    pub fn new(published: Option<PodStatus>, accepted_at: Timestamp) -> Self {
        Self {
            latest: None,
            published,
            in_flight: None,
            retry_at: None,
            suppressed_until: accepted_at.later_by(STARTING_SUPPRESSED),
            presence: Presence::Present,
        }
    }

    /// The newest status: the one decided last, or the one that the API had before the first decision.
    pub fn newest(&self) -> Option<&PodStatus> {
        self.latest.as_ref().or(self.published.as_ref())
    }

    /// Replaces the status that is to be published.
    pub fn decide(&mut self, status: PodStatus) {
        self.latest = Some(status);
    }

    /// The status that a pod has which was observed with another: this node's own fields as decided last, conditions of other
    /// writers as observed. A watch may lag behind what this node has written.
    pub fn merged(&self, observed: Option<PodStatus>) -> Option<PodStatus> {
        match &self.latest {
            Some(latest) => Some(overlay(latest, observed.as_ref())),
            None => observed,
        }
    }

    /// The status to write now, if there is one. The write is in flight until it is answered.
    pub fn next(&mut self, now: Timestamp) -> Option<PodStatus> {
        if !self.is_pending() || self.due_at() > Some(now) {
            return None;
        }
        self.retry_at = None;
        self.in_flight.clone_from(&self.latest);
        self.in_flight.clone()
    }

    /// When the next write is due, if one is pending and not due at once.
    pub fn wake_at(&self) -> Option<Timestamp> {
        self.due_at().filter(|_| self.is_pending())
    }

    /// Takes in the answer to the write in flight.
    pub fn answered(&mut self, answer: Answer, now: Timestamp) {
        let written = self.in_flight.take();
        match answer {
            Answer::Written => {
                if self.presence == Presence::Refused {
                    self.presence = Presence::Present;
                }
                self.published = written;
                return;
            }
            Answer::NoSuchPod if self.presence == Presence::Present => {
                self.presence = Presence::Refused;
            }
            Answer::NoSuchPod => {}
            // The write may have been done, so which status the API has is not known.
            Answer::Failed => self.published = None,
        }
        self.retry_at = Some(now.later_by(RETRY));
    }

    /// The watch reported that the pod was deleted.
    pub fn pod_is_gone(&mut self) {
        self.presence = Presence::Gone;
    }

    pub fn is_gone(&self) -> bool {
        self.presence == Presence::Gone
    }

    /// Whether nothing is left to write: the API has the latest status, or does not have the pod.
    pub fn is_complete(&self) -> bool {
        self.in_flight.is_none()
            && (self.presence != Presence::Present || self.latest == self.published)
    }

    fn is_pending(&self) -> bool {
        self.in_flight.is_none()
            && self.presence != Presence::Gone
            && self.latest.is_some()
            && self.latest != self.published
    }

    fn due_at(&self) -> Option<Timestamp> {
        let suppressed = self.latest.as_ref().is_some_and(is_starting);
        let suppressed_until = suppressed.then_some(self.suppressed_until);
        self.retry_at.max(suppressed_until)
    }
}

/// Whether a status says no more than that the pod is about to be ready for the first time.
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
            let state = container.state.as_ref();
            let waiting = state.and_then(|state| state.waiting.as_ref());
            let reason = waiting.and_then(|waiting| waiting.reason.as_deref());
            let is_created = matches!(
                reason.and_then(WaitingReason::parse),
                Some(WaitingReason::ContainerCreating | WaitingReason::PodInitializing)
            );
            let is_running = state.is_some_and(|state| state.running.is_some());
            container.restart_count == 0 && (is_created || is_running)
        })
}

/// A status of this node, with the conditions that other writers have added since.
fn overlay(own: &PodStatus, observed: Option<&PodStatus>) -> PodStatus {
    let mut status = own.clone();
    let conditions = own.conditions.iter().flatten();
    let conditions = conditions.filter(|condition| is_own_condition(&condition.type_));
    let others = observed
        .into_iter()
        .flat_map(|observed| observed.conditions.iter().flatten());
    let others = others.filter(|condition| !is_own_condition(&condition.type_));
    status.conditions = Some(others.chain(conditions).cloned().collect());
    if status.qos_class.is_none() {
        status.qos_class = observed.and_then(|observed| observed.qos_class.clone());
    }
    status
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn at(milliseconds: i64) -> Timestamp {
        Timestamp::from_millisecond(1_800_000_000_000 + milliseconds).unwrap()
    }

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

    fn ready() -> PodStatus {
        status("Running", "True", 0, &json!({"running": {}}))
    }

    fn starting() -> PodStatus {
        status("Running", "False", 0, &json!({"running": {}}))
    }

    fn ended() -> PodStatus {
        status(
            "Failed",
            "False",
            0,
            &json!({"terminated": {"exitCode": 1}}),
        )
    }

    /// A publication of a pod that was accepted at 0, with a status decided.
    fn decided(status: PodStatus) -> Publication {
        let mut publication = Publication::new(None, at(0));
        publication.decide(status);
        publication
    }

    #[test]
    fn a_status_that_returns_after_a_lost_answer_is_written_again() {
        let mut publication = decided(ready());
        assert_eq!(publication.next(at(0)), Some(ready()));
        publication.answered(Answer::Written, at(0));
        publication.decide(ended());
        assert_eq!(publication.next(at(1)), Some(ended()));
        publication.answered(Answer::Failed, at(1));
        publication.decide(ready());
        assert_eq!(publication.next(at(2001)), Some(ready()));
    }

    #[test]
    fn only_a_first_start_without_trouble_is_suppressed() {
        let creating = || json!({"waiting": {"reason": "ContainerCreating"}});
        let running = || json!({"running": {}});
        let failed = || json!({"terminated": {"exitCode": 1}});
        for (phase, ready, restarts, state, suppressed) in [
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
            ("Running", "False", 0, failed(), false),
            ("Succeeded", "False", 0, failed(), false),
        ] {
            let case = format!("{phase} {ready} {restarts} {state}");
            let status = status(phase, ready, restarts, &state);
            assert_eq!(is_starting(&status), suppressed, "{case}");
            let mut publication = decided(status.clone());
            let first = (!suppressed).then(|| status.clone());
            assert_eq!(publication.next(at(99)), first, "{case}");
            if suppressed {
                assert_eq!(publication.wake_at(), Some(at(100)), "{case}");
                assert_eq!(publication.next(at(100)), Some(status), "{case}");
            }
        }
    }

    #[test]
    fn one_write_is_in_flight_and_the_latest_status_follows_it() {
        let mut publication = decided(ready());
        assert_eq!(publication.next(at(0)), Some(ready()));
        publication.decide(starting());
        publication.decide(ended());
        assert_eq!(publication.next(at(1)), None, "one at a time");
        assert_eq!(publication.wake_at(), None, "the answer wakes");
        assert!(!publication.is_complete());
        publication.answered(Answer::Written, at(2));
        assert_eq!(publication.next(at(2)), Some(ended()), "the latest");
        publication.answered(Answer::Written, at(3));
        assert!(publication.is_complete());
        publication.decide(ended());
        assert_eq!(publication.next(at(4)), None, "nothing changed");
    }

    #[test]
    fn a_status_that_the_api_has_already_is_not_written() {
        let mut publication = Publication::new(Some(ready()), at(0));
        publication.decide(ready());
        assert_eq!(publication.next(at(0)), None);
        assert!(publication.is_complete());
    }

    #[test]
    fn a_failed_write_is_repeated_after_a_pause_with_what_is_latest_then() {
        for answer in [Answer::Failed, Answer::NoSuchPod] {
            let mut publication = decided(ready());
            assert_eq!(publication.next(at(0)), Some(ready()));
            publication.answered(answer, at(10));
            publication.decide(ended());
            assert_eq!(publication.next(at(2009)), None, "{answer:?}");
            assert_eq!(publication.wake_at(), Some(at(2010)), "{answer:?}");
            assert_eq!(publication.next(at(2010)), Some(ended()), "{answer:?}");
        }
    }

    #[test]
    fn a_pod_that_the_api_refuses_may_be_removed_unless_a_later_write_succeeds() {
        let mut publication = decided(ready());
        publication.next(at(0));
        publication.answered(Answer::Failed, at(0));
        assert!(!publication.is_complete(), "the API is only unreachable");
        publication.next(at(3000));
        publication.answered(Answer::NoSuchPod, at(3000));
        assert!(publication.is_complete());
        publication.next(at(6000));
        publication.answered(Answer::Written, at(6000));
        publication.decide(ended());
        assert!(!publication.is_complete(), "the pod is there after all");
    }

    #[test]
    fn nothing_is_written_of_a_pod_that_is_gone() {
        let mut publication = decided(ready());
        publication.pod_is_gone();
        assert_eq!(
            (publication.next(at(0)), publication.wake_at()),
            (None, None)
        );
        assert!(publication.is_complete() && publication.is_gone());
        let mut in_flight = decided(ready());
        in_flight.next(at(0));
        in_flight.pod_is_gone();
        assert!(!in_flight.is_complete(), "the answer is still to come");
        in_flight.answered(Answer::NoSuchPod, at(1));
        assert!(in_flight.is_complete() && in_flight.is_gone());
    }

    #[test]
    fn conditions_of_other_writers_survive_and_own_ones_do_not_go_back() {
        let publication = decided(ready());
        let observed = json!({"phase": "Pending", "qosClass": "Burstable", "conditions": [
            {"type": "example.com/gate", "status": "True"}, {"type": "Ready", "status": "False"}
        ]});
        let observed: PodStatus = serde_json::from_value(observed).unwrap();
        let merged = publication.merged(Some(observed.clone())).unwrap();
        assert_eq!(merged.phase.as_deref(), Some("Running"));
        assert_eq!(merged.qos_class.as_deref(), Some("Burstable"));
        let conditions: Vec<(&str, &str)> = merged
            .conditions
            .iter()
            .flatten()
            .map(|condition| (condition.type_.as_str(), condition.status.as_str()))
            .collect();
        assert_eq!(
            conditions,
            [("example.com/gate", "True"), ("Ready", "True")]
        );
        let undecided = Publication::new(None, at(0));
        assert_eq!(undecided.merged(Some(observed.clone())), Some(observed));
    }
}
