//! What happens to a pod's containers, its probes and its actions, and what it changes of what is known.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodStatus;
use saturating_time::SaturatingTime;

use super::{End, PodWorker, RETRY};
use crate::events::Severity;
use crate::pod_lifecycle::{self, ContainerState, Phase, Sandbox, Verdict};
use crate::probes;
use crate::runtime::{PodSandbox, Runtime, StartError, StartedContainer, Termination};

/// What became of an action, or of a container.
#[derive(Debug)]
pub(super) enum Event {
    SandboxReady(PodSandbox),
    SandboxWaits {
        reason: String,
        message: String,
    },
    Started {
        container: String,
        run: u32,
        started: StartedContainer,
    },
    NotStarted {
        container: String,
        run: u32,
        error: StartError,
    },
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
                self.keep_volumes_fresh(&sandbox);
                self.sandbox = Sandbox::Ready(sandbox);
            }
            Event::SandboxWaits { reason, message } => {
                self.shared.events.tell(
                    &self.pod,
                    None,
                    Severity::Warning,
                    &reason,
                    message.clone(),
                );
                let waiting = if reason == "FailedMount" {
                    "ContainerCreating".to_owned()
                } else {
                    reason
                };
                self.sandbox = Sandbox::Waiting {
                    reason: waiting,
                    message,
                    retry_at: Timestamp::now().later_by(RETRY),
                };
            }
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
                error,
            } => {
                self.starting.remove(&container);
                self.not_started(&container, run, &error);
            }
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
                    "FailedPostStartHook",
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

    /// The node ends the pod on its own account.
    pub(super) fn condemn(&mut self, verdict: Verdict) {
        if self.verdict.is_some() || self.pod.metadata.deletion_timestamp.is_some() {
            return;
        }
        self.shared.events.tell(
            &self.pod,
            None,
            Severity::Warning,
            &verdict.reason,
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
        let note = format!("Started container {container}");
        self.shared.events.tell(
            &self.pod,
            Some(container),
            Severity::Normal,
            "Started",
            note,
        );
        self.container_runs(container, run, None);
    }

    fn not_started(&mut self, container: &str, run: u32, error: &StartError) {
        let now = Timestamp::now();
        let message = crate::errors::chain(error);
        let Some(state) = self.current(container, run) else {
            return;
        };
        let reason = match error {
            StartError::Command { .. } => {
                state.end(Termination::not_started(message.clone(), now));
                "Failed"
            }
            // The pod is on its way out. It is as if the run had never been begun.
            StartError::GivenUp => {
                state.runs -= 1;
                state.phase = match state.previous.take() {
                    Some(before) => Phase::Ended(before),
                    None => Phase::NotStarted,
                };
                return;
            }
            other => {
                let reason = match other {
                    StartError::Image { reason, .. } => reason,
                    StartError::Configuration(_) => &"CreateContainerConfigError",
                    _ => &"CreateContainerError",
                };
                // It never ran, so it is the same run that is tried again.
                state.runs -= 1;
                let delay = if matches!(other, StartError::Image { .. }) {
                    state.failed_pulls += 1;
                    pod_lifecycle::pull_back_off(state.failed_pulls)
                } else {
                    state.crashes += 1;
                    pod_lifecycle::back_off(state.crashes).max(RETRY)
                };
                state.phase = Phase::Refused {
                    reason: (*reason).to_owned(),
                    message: message.clone(),
                    since: now,
                    retry_at: now.later_by(delay),
                };
                "Failed"
            }
        };
        self.shared.events.tell(
            &self.pod,
            Some(container),
            Severity::Warning,
            reason,
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
                "Unhealthy",
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
