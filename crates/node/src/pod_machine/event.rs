//! What is reported to a pod's machine, and how each report changes what is known of the pod.

use std::time::Duration;

use jiff::Timestamp;
use saturating_time::SaturatingTime;

use super::publication::{Answer, RETRY};
use super::{Command, PodMachine, ProbeKind, ProbeStage, ProbeVerdict, Severity};
use crate::awaited_objects::Awaited;
use crate::pod_lifecycle::{
    self, ContainerState, EventReason, Phase, Sandbox, Verdict, WaitingReason,
};
use crate::runtime::{PodSandbox, StartError, StartedContainer, Termination};
use api::errors::chain;

/// How long a container waits at most for an object to change before it is tried again.
const OBJECT_CHECK: Duration = Duration::from_secs(10);

/// How a command ended, or what happened to a container.
#[derive(Debug)]
pub enum Event {
    SandboxReady(PodSandbox),
    SandboxWaits(NotPrepared),
    Started {
        container: String,
        run: u32,
        started: StartedContainer,
    },
    NotStarted {
        container: String,
        run: u32,
        failure: StartFailure,
        awaits: Option<Awaited>,
    },
    /// An object has changed without which a container, or the pod's sandbox, could not be created.
    ObjectsChanged(Option<String>),
    Ended {
        container: String,
        run: u32,
        termination: Termination,
    },
    Probed {
        container: String,
        run: u32,
        kind: ProbeKind,
        verdict: ProbeVerdict,
    },
    HookFailed {
        container: String,
        run: u32,
        message: String,
    },
    Throttled {
        container: String,
        run: u32,
        throttled: bool,
    },
    /// The node ends the pod.
    Condemned(Verdict),
    /// The pod is frozen, or could not be frozen.
    Frozen(Result<(), String>),
    /// Memory of the frozen pod was paged out: how much, for users.
    PagedOut(String),
    /// The pod is thawed, or could not be thawed.
    Thawed(Result<(), String>),
    SandboxFreed {
        succeeded: bool,
    },
    Published(Answer),
    Removed {
        succeeded: bool,
    },
    ObjectDeleted {
        succeeded: bool,
    },
}

/// Why a pod's sandbox cannot be created yet.
#[derive(Debug)]
pub struct NotPrepared {
    /// The reason of the event; absent if there is nothing to warn of.
    pub event: Option<EventReason>,
    /// The reason in the pod's status.
    pub reason: WaitingReason,
    pub message: String,
    /// The objects whose change starts the next attempt; without them, the next attempt starts after a pause.
    pub awaits: Option<Awaited>,
}

/// Why a container did not start.
#[derive(Debug)]
pub enum StartFailure {
    /// Its image is not available.
    Image {
        reason: WaitingReason,
        message: String,
    },
    Start(StartError),
}

impl StartFailure {
    pub fn message(&self) -> String {
        match self {
            Self::Image { message, .. } => message.clone(),
            Self::Start(error) => chain(error),
        }
    }

    /// Why the container waits for the next attempt.
    fn waiting_reason(&self) -> WaitingReason {
        match self {
            Self::Image { reason, .. } => *reason,
            Self::Start(StartError::Configuration(_)) => WaitingReason::CreateContainerConfigError,
            Self::Start(_) => WaitingReason::CreateContainerError,
        }
    }
}

impl PodMachine {
    /// A container, if this is its current run. Reports of earlier runs come late and count for nothing.
    fn current(&mut self, container: &str, run: u32) -> Option<&mut ContainerState> {
        self.containers
            .get_mut(container)
            .filter(|state| state.runs == run + 1)
    }

    /// A container, if this is its current run and has not ended. A probe or hook may report after the end of its run; kept, its
    /// failure would stop the next run.
    fn current_live(&mut self, container: &str, run: u32) -> Option<&mut ContainerState> {
        self.current(container, run).filter(|state| state.is_live())
    }

    /// Takes an event in.
    pub fn handle(&mut self, event: Event, now: Timestamp) {
        match event {
            Event::SandboxReady(sandbox) => {
                self.await_objects(None, None);
                self.commands.push(Command::RefreshVolumes(sandbox.clone()));
                self.sandbox = Sandbox::Ready(sandbox);
            }
            Event::SandboxWaits(not_prepared) => self.sandbox_waits(not_prepared, now),
            Event::Started {
                container,
                run,
                started,
            } => self.started(&container, run, started),
            Event::NotStarted {
                container,
                run,
                failure,
                awaits,
            } => {
                self.not_started(&container, run, &failure, awaits.as_ref(), now);
                self.await_objects(Some(container), awaits);
            }
            Event::ObjectsChanged(container) => self.retry_now(container.as_deref(), now),
            Event::Ended {
                container,
                run,
                termination,
            } => {
                if let Some(state) = self.current(&container, run) {
                    state.end(termination);
                    self.commands.push(Command::StopProbes { container });
                }
            }
            Event::Probed {
                container,
                run,
                kind,
                verdict,
            } => self.probed(&container, run, kind, verdict),
            Event::HookFailed {
                container,
                run,
                message,
            } => {
                let (severity, reason) = (Severity::Warning, EventReason::FailedPostStartHook);
                self.emit(Some(&container), severity, reason, message.clone());
                if let Some(state) = self.current_live(&container, run) {
                    state.unhealthy = Some(message);
                }
            }
            Event::Throttled {
                container,
                run,
                throttled,
            } => {
                if let Some(state) = self.current_live(&container, run) {
                    state.throttled = throttled;
                }
            }
            Event::Condemned(verdict) => self.end_pod(verdict),
            Event::Frozen(frozen) => self.frozen(frozen, now),
            Event::PagedOut(note) => self.paged_out(note),
            Event::Thawed(thawed) => self.thawed(thawed, now),
            Event::SandboxFreed { succeeded } => {
                self.free_again_at = (!succeeded).then(|| now.later_by(RETRY));
            }
            Event::Published(answer) => self.publication.answered(answer, now),
            Event::Removed { succeeded } | Event::ObjectDeleted { succeeded } => {
                self.removal_went_on(succeeded, now);
            }
        }
    }

    fn await_objects(&mut self, container: Option<String>, awaited: Option<Awaited>) {
        self.commands
            .push(Command::AwaitObjects { container, awaited });
    }

    fn sandbox_waits(&mut self, not_prepared: NotPrepared, now: Timestamp) {
        let NotPrepared {
            event,
            reason,
            message,
            awaits,
        } = not_prepared;
        if let Some(event) = event {
            self.emit(None, Severity::Warning, event, message.clone());
        }
        let retry_at = match awaits {
            Some(_) => None,
            None => Some(now.later_by(RETRY)),
        };
        self.sandbox = Sandbox::Waiting {
            reason,
            message,
            retry_at,
        };
        self.await_objects(None, awaits);
    }

    /// An attempt that failed for lack of an object is due now that the object has changed.
    fn retry_now(&mut self, container: Option<&str>, now: Timestamp) {
        let Some(container) = container else {
            if let Sandbox::Waiting { retry_at, .. } = &mut self.sandbox {
                *retry_at = Some(now);
            }
            return;
        };
        if let Some(state) = self.containers.get_mut(container)
            && let Phase::Refused { retry_at, .. } = &mut state.phase
        {
            *retry_at = now;
            state.failed_pulls = 0;
        }
    }

    fn started(&mut self, container: &str, run: u32, started: StartedContainer) {
        let Some(state) = self.current(container, run) else {
            return;
        };
        state.phase = Phase::Running {
            started_at: started.started_at,
        };
        state.image_id = Some(started.image_id);
        state.failed_pulls = 0;
        self.await_objects(Some(container.to_owned()), None);
        let note = format!("Started container {container}");
        let (severity, reason) = (Severity::Normal, EventReason::Started);
        self.emit(Some(container), severity, reason, note);
        self.container_runs(container, run, None);
    }

    fn not_started(
        &mut self,
        container: &str,
        run: u32,
        failure: &StartFailure,
        awaits: Option<&Awaited>,
        now: Timestamp,
    ) {
        let message = failure.message();
        let Some(state) = self.current(container, run) else {
            return;
        };
        match failure {
            StartFailure::Start(StartError::Command { .. }) => {
                state.end(Termination::not_started(message.clone(), now));
            }
            // The pod is about to end. It is as if the run had never begun.
            StartFailure::Start(StartError::GivenUp) => {
                state.runs -= 1;
                state.phase = match state.previous.take() {
                    Some(before) => Phase::Ended(before),
                    None => Phase::NotStarted,
                };
                return;
            }
            failure => {
                // The container never ran, so the same run is tried again.
                state.runs -= 1;
                let delay = if matches!(failure, StartFailure::Image { .. }) {
                    state.failed_pulls += 1;
                    pod_lifecycle::pull_back_off(state.failed_pulls)
                } else if awaits.is_some() {
                    // A change of the object comes first. A missing object is no crash.
                    OBJECT_CHECK
                } else {
                    state.crashes += 1;
                    pod_lifecycle::back_off(state.crashes).max(RETRY)
                };
                state.phase = Phase::Refused {
                    reason: failure.waiting_reason(),
                    message: message.clone(),
                    since: now,
                    retry_at: now.later_by(delay),
                };
            }
        }
        let (severity, note) = (Severity::Warning, format!("Error: {message}"));
        self.emit(Some(container), severity, EventReason::Failed, note);
    }

    fn probed(&mut self, container: &str, run: u32, kind: ProbeKind, verdict: ProbeVerdict) {
        // A report that was under way when the pod was frozen tells of the freezer and not of the container.
        if !self.freezer.is_thawed() {
            return;
        }
        if let ProbeVerdict::Failing(message) = &verdict {
            let note = format!("{} probe failed: {message}", kind.name());
            let (severity, reason) = (Severity::Warning, EventReason::Unhealthy);
            self.emit(Some(container), severity, reason, note);
        }
        let Some(state) = self.current_live(container, run) else {
            return;
        };
        match (kind, verdict) {
            (ProbeKind::Readiness, verdict) => state.ready = verdict == ProbeVerdict::Passing,
            (ProbeKind::Startup, ProbeVerdict::Passing) => {
                state.started = true;
                self.commands.push(Command::StartProbes {
                    container: container.to_owned(),
                    run,
                    stage: ProbeStage::Running,
                });
            }
            (ProbeKind::Liveness, ProbeVerdict::Passing) => {}
            (kind, ProbeVerdict::Failing(_)) => {
                let name = kind.name().to_lowercase();
                state.unhealthy = Some(format!(
                    "Container {container} failed {name} probe, will be restarted"
                ));
            }
        }
    }
}
