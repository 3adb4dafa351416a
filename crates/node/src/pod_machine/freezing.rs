//! Freezing and thawing a pod: its probes pause, and a failure is tried again.

use jiff::Timestamp;
use saturating_time::SaturatingTime;

use super::publication::RETRY;
use super::{Command, PodMachine, ProbeStage, Severity};
use crate::pod_lifecycle::{EventReason, Freezer, Phase};
use crate::runtime::FreezerState;

impl PodMachine {
    /// Freezes the pod. Its probes stop first: one that is under way would fail.
    pub(super) fn freeze(&mut self) {
        let live = self.containers.iter().filter(|(_, state)| state.is_live());
        let stops = live.map(|(container, _)| Command::StopProbes {
            container: container.clone(),
        });
        self.commands.extend(stops.collect::<Vec<_>>());
        self.freezer = Freezer::Freezing;
        self.commands.push(Command::Freeze);
    }

    /// Takes in how freezing ended.
    pub(super) fn frozen(&mut self, frozen: Result<(), String>, now: Timestamp) {
        self.freezer = match frozen {
            Ok(()) => Freezer::Frozen { note: None },
            Err(message) => {
                self.warn_of_freezer(&format!("Error freezing the pod: {message}"));
                let retry_at = now.later_by(RETRY);
                Freezer::FreezeFailed { message, retry_at }
            }
        };
    }

    /// Takes in how much memory of the frozen pod was paged out.
    pub(super) fn paged_out(&mut self, paged_out: String) {
        if let Freezer::Frozen { note } = &mut self.freezer {
            *note = Some(paged_out);
        }
    }

    /// Takes in how thawing ended. Probes go on with what they had found.
    pub(super) fn thawed(&mut self, thawed: Result<(), String>, now: Timestamp) {
        if let Err(message) = thawed {
            self.warn_of_freezer(&format!("Error thawing the pod: {message}"));
            let retry_at = now.later_by(RETRY);
            self.freezer = Freezer::ThawFailed { message, retry_at };
            return;
        }
        self.freezer = Freezer::Thawed;
        let containers: Vec<String> = self.containers.keys().cloned().collect();
        for container in containers {
            self.start_probes(&container);
        }
    }

    /// Takes over the freezer as an earlier run of the node left it. A node that was killed in the middle freezes or thaws again.
    pub(super) fn adopt_freezer(&mut self, found: FreezerState, now: Timestamp) {
        self.freezer = match found {
            FreezerState::Thawed => Freezer::Thawed,
            FreezerState::Partly => Freezer::FreezeFailed {
                message: "The node was stopped while it froze or thawed the pod".to_owned(),
                retry_at: now,
            },
            FreezerState::Frozen => Freezer::Frozen {
                note: self.reported_note(),
            },
        };
    }

    /// What the pod's status says of a pod that is frozen.
    fn reported_note(&self) -> Option<String> {
        let conditions = self.pod.status.as_ref()?.conditions.as_ref()?;
        let frozen = conditions.iter().find(|condition| {
            condition.type_ == api::freezing::FROZEN && condition.status == "True"
        });
        frozen?.message.clone()
    }

    /// Starts the probes of a container that runs, unless its pod is frozen.
    pub(super) fn start_probes(&mut self, container: &str) {
        let Some(state) = self.containers.get(container) else {
            return;
        };
        if !self.freezer.is_thawed() || !matches!(state.phase, Phase::Running { .. }) {
            return;
        }
        self.commands.push(Command::StartProbes {
            container: container.to_owned(),
            run: state.runs.saturating_sub(1),
            stage: if state.started {
                ProbeStage::Running
            } else {
                ProbeStage::Startup
            },
        });
    }

    fn warn_of_freezer(&mut self, note: &str) {
        let (severity, reason) = (Severity::Warning, EventReason::FreezeFailed);
        self.emit(None, severity, reason, note.to_owned());
    }
}
