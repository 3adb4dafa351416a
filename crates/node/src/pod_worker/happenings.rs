//! What happens to a pod's containers, its probes and its actions, and what it changes of what is known.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodStatus;
use saturating_time::SaturatingTime;

use super::preparing::{NotPrepared, StartFailure};
use super::{End, PodWorker, RETRY};
use crate::awaited_objects::Awaited;
use crate::pod_lifecycle::{self, ContainerState, EventReason, Phase, Sandbox, Verdict};
use crate::probes;
use crate::runtime::{PodSandbox, Runtime, StartError, StartedContainer, Termination};
use event_recorder::Severity;

/// How long a container waits at most for an object to change before it is tried again.
const OBJECT_CHECK: Duration = Duration::from_secs(10);

/// What became of an action, or of a container.
#[derive(Debug)]
pub(super) enum Event {
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
    /// An object has changed that a container, or without one the pod's sandbox, could not be made without.
    ObjectsChanged(Option<String>),
    Ended {
        container: String,
        run: u32,
        termination: Termination,
    },
    Probed {
        container: String,
        run: u32,
        kind: probes::Kind,
        verdict: probes::Verdict,
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
    Condemned(Verdict),
    Published(Box<Result<PodStatus, kube::Error>>),
    Finished(bool),
    /// A task of the worker panicked with a message.
    Panicked(String),
}

impl<R: Runtime> PodWorker<R> {
    pub(super) fn current(&mut self, container: &str, run: u32) -> Option<&mut ContainerState> {
        self.containers
            .get_mut(container)
            .filter(|state| state.runs == run + 1)
    }

    /// Takes an event in; the worker ends when the pod is gone for good, and when a task of its own was lost.
    pub(super) fn take(&mut self, event: Event) -> Option<End> {
        match event {
            Event::SandboxReady(sandbox) => {
                self.await_objects(None, None);
                self.keep_volumes_fresh(&sandbox);
                self.sandbox = Sandbox::Ready(sandbox);
            }
            Event::SandboxWaits(not_prepared) => self.sandbox_waits(not_prepared),
            Event::Started {
                container,
                run,
                started,
            } => {
                self.starting.remove(&container);
                self.started(&container, run, started);
            }
            Event::NotStarted {
                container,
                run,
                failure,
                awaits,
            } => {
                self.starting.remove(&container);
                self.not_started(&container, run, &failure, awaits.as_ref());
                self.await_objects(Some(&container), awaits);
            }
            Event::ObjectsChanged(container) => self.try_again(container.as_deref()),
            Event::Ended {
                container,
                run,
                termination,
            } => {
                if let Some(state) = self.current(&container, run) {
                    state.end(termination);
                    self.probes
                        .remove(&container)
                        .into_iter()
                        .flatten()
                        .for_each(|task| task.abort());
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
                self.shared.events.tell(
                    &self.pod,
                    Some(&container),
                    Severity::Warning,
                    EventReason::FailedPostStartHook,
                    message.clone(),
                );
                if let Some(state) = self.current(&container, run) {
                    state.unhealthy = Some(message);
                }
            }
            Event::Throttled {
                container,
                run,
                throttled,
            } => {
                if let Some(state) = self.current(&container, run) {
                    state.throttled = throttled && state.is_live();
                }
            }
            Event::Condemned(verdict) => self.condemn(verdict),
            Event::Published(result) => self.status_published(*result),
            Event::Finished(done) => {
                self.finishing = false;
                return done.then_some(End::Gone);
            }
            Event::Panicked(message) => return Some(End::Panicked(message)),
        }
        None
    }

    fn sandbox_waits(&mut self, not_prepared: NotPrepared) {
        let NotPrepared {
            event,
            reason,
            message,
            awaits,
        } = not_prepared;
        if let Some(event) = event {
            let (events, note) = (&self.shared.events, message.clone());
            events.tell(&self.pod, None, Severity::Warning, event, note);
        }
        let retry_at = match awaits {
            Some(_) => None,
            None => Some(Timestamp::now().later_by(RETRY)),
        };
        self.sandbox = Sandbox::Waiting {
            reason,
            message,
            retry_at,
        };
        self.await_objects(None, awaits);
    }

    /// What failed for want of an object is due now that the object has changed.
    fn try_again(&mut self, container: Option<&str>) {
        let now = Timestamp::now();
        match container {
            None => {
                if let Sandbox::Waiting { retry_at, .. } = &mut self.sandbox {
                    *retry_at = Some(now);
                }
            }
            Some(container) => {
                let state = self.containers.get_mut(container);
                if let Some(state) = state
                    && let Phase::Refused { retry_at, .. } = &mut state.phase
                {
                    *retry_at = now;
                    state.failed_pulls = 0;
                }
            }
        }
    }

    /// The node ends the pod on its own account.
    pub(super) fn condemn(&mut self, verdict: Verdict) {
        if self.verdict.is_some() || self.pod.metadata.deletion_timestamp.is_some() {
            return;
        }
        self.shared.events.tell(
            &self.pod,
            None,
            Severity::Warning,
            verdict.reason.event(),
            verdict.message.clone(),
        );
        self.verdict = Some(verdict);
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
        self.await_objects(Some(container), None);
        let note = format!("Started container {container}");
        self.shared.events.tell(
            &self.pod,
            Some(container),
            Severity::Normal,
            EventReason::Started,
            note,
        );
        self.container_runs(container, run, None);
    }

    fn not_started(
        &mut self,
        container: &str,
        run: u32,
        failure: &StartFailure,
        awaits: Option<&Awaited>,
    ) {
        let now = Timestamp::now();
        let message = failure.message();
        let Some(state) = self.current(container, run) else {
            return;
        };
        match failure {
            StartFailure::Start(StartError::Command { .. }) => {
                state.end(Termination::not_started(message.clone(), now));
            }
            // The pod is on its way out. It is as if the run had never been begun.
            StartFailure::Start(StartError::GivenUp) => {
                state.runs -= 1;
                state.phase = match state.previous.take() {
                    Some(before) => Phase::Ended(before),
                    None => Phase::NotStarted,
                };
                return;
            }
            other => {
                // It never ran, so it is the same run that is tried again.
                state.runs -= 1;
                let delay = if matches!(other, StartFailure::Image { .. }) {
                    state.failed_pulls += 1;
                    pod_lifecycle::pull_back_off(state.failed_pulls)
                } else if awaits.is_some() {
                    // A change of the object comes first. To want it was no crash.
                    OBJECT_CHECK
                } else {
                    state.crashes += 1;
                    pod_lifecycle::back_off(state.crashes).max(RETRY)
                };
                state.phase = Phase::Refused {
                    reason: other.waiting_reason(),
                    message: message.clone(),
                    since: now,
                    retry_at: now.later_by(delay),
                };
            }
        }
        self.shared.events.tell(
            &self.pod,
            Some(container),
            Severity::Warning,
            EventReason::Failed,
            format!("Error: {message}"),
        );
    }

    fn probed(&mut self, container: &str, run: u32, kind: probes::Kind, verdict: probes::Verdict) {
        if let probes::Verdict::Failing(message) = &verdict {
            let note = format!("{} probe failed: {message}", kind.name());
            self.shared.events.tell(
                &self.pod,
                Some(container),
                Severity::Warning,
                EventReason::Unhealthy,
                note,
            );
        }
        let Some(state) = self.current(container, run) else {
            return;
        };
        match (kind, verdict) {
            (probes::Kind::Readiness, verdict) => state.ready = verdict == probes::Verdict::Passing,
            (probes::Kind::Startup, probes::Verdict::Passing) => {
                state.started = true;
                self.start_probes(container, run, false);
            }
            (probes::Kind::Liveness, probes::Verdict::Passing) => {}
            (kind, probes::Verdict::Failing(_)) => {
                let name = kind.name().to_lowercase();
                state.unhealthy = Some(format!(
                    "Container {container} failed {name} probe, will be restarted"
                ));
            }
        }
    }
}
