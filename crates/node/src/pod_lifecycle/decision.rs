//! What to do next about a pod: which containers to start, to stop and to kill, and when to look again.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use saturating_time::SaturatingTime;

use super::outcome::RestartPolicy;
use super::{
    Action, ContainerState, KILL_AGAIN, Observed, PULL_FAILURE_SHOWN, Phase, Sandbox, back_off,
    ephemeral_containers, is_sidecar, state_of,
};

const DEFAULT_GRACE_SECONDS: i64 = 30;

pub(super) struct Decision<'a> {
    pub(super) observed: &'a Observed<'a>,
    pub(super) now: Timestamp,
    pub(super) actions: Vec<Action>,
    wake_at: Option<Timestamp>,
}

impl<'a> Decision<'a> {
    pub(super) fn new(observed: &'a Observed<'a>, now: Timestamp) -> Self {
        Self {
            observed,
            now,
            actions: Vec::new(),
            wake_at: None,
        }
    }

    /// What to do, and when to decide again if nothing happens before.
    pub(super) fn made(self) -> (Vec<Action>, Option<Timestamp>) {
        (self.actions, self.wake_at)
    }
}

impl<'a> Decision<'a> {
    pub(super) fn wake(&mut self, at: Timestamp) {
        self.wake_at = Some(self.wake_at.map_or(at, |earlier| earlier.min(at)));
    }

    fn state(&self, container: &Container) -> &'a ContainerState {
        state_of(self.observed.containers, &container.name)
    }

    /// Ends what still runs. Containers go before the sidecars that serve them.
    fn stop_all(&mut self, spec: &PodSpec, grace: Duration, why: &str) -> bool {
        let (sidecars, init): (Vec<_>, Vec<_>) = spec
            .init_containers
            .iter()
            .flatten()
            .partition(|container| is_sidecar(container));
        let ephemeral = ephemeral_containers(spec);
        let main: Vec<_> = spec
            .containers
            .iter()
            .chain(init)
            .chain(&ephemeral)
            .collect();
        let live = |containers: &[&Container]| {
            containers
                .iter()
                .any(|container| self.state(container).is_live())
        };
        let current = if live(&main) {
            main
        } else if live(&sidecars) {
            sidecars
        } else {
            return true;
        };
        for container in current {
            match self.state(container).phase {
                Phase::Running { .. } => self.actions.push(Action::Stop {
                    container: container.name.clone(),
                    grace,
                    why: why.to_owned(),
                }),
                Phase::Stopping { kill_at, .. } => self.kill_when_due(container, kill_at),
                // It has nothing to finish yet.
                Phase::Starting => self.kill(container),
                _ => {}
            }
        }
        false
    }

    /// Kills the containers of a pod that goes on whose time to stop is up.
    pub(super) fn kill_overdue(&mut self, spec: &PodSpec) {
        let init = spec.init_containers.iter().flatten();
        for container in init.chain(&spec.containers) {
            if let Phase::Stopping { kill_at, .. } = self.state(container).phase {
                self.kill_when_due(container, kill_at);
            }
        }
    }

    fn kill_when_due(&mut self, container: &Container, kill_at: Timestamp) {
        if kill_at <= self.now {
            self.kill(container);
        } else {
            self.wake(kill_at);
        }
    }

    fn kill(&mut self, container: &Container) {
        self.actions.push(Action::Kill {
            container: container.name.clone(),
        });
    }

    pub(super) fn delete(&mut self, spec: &PodSpec) {
        let metadata = &self.observed.pod.metadata;
        // The API sets the time at which the grace period ends, cut to the second; deleting again with less shortens it.
        let deadline = metadata
            .deletion_timestamp
            .as_ref()
            .map_or(self.now, |time| time.0)
            .later_by(Duration::from_secs(1));
        let whole = Duration::from_secs(
            metadata
                .deletion_grace_period_seconds
                .unwrap_or(0)
                .unsigned_abs(),
        );
        let left: Duration = deadline
            .duration_since(self.now)
            .try_into()
            .unwrap_or(Duration::ZERO);
        let grace = left.min(whole);
        if grace.is_zero() {
            self.kill_all(spec);
            return;
        }
        self.wake(deadline);
        if self.stop_all(spec, grace, "the pod is being deleted") {
            self.finish();
        }
    }

    fn kill_all(&mut self, spec: &PodSpec) {
        let mut live = false;
        for container in spec
            .init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
            .chain(&ephemeral_containers(spec))
        {
            if self.state(container).is_live() {
                live = true;
                self.kill(container);
            }
        }
        if live {
            self.wake(self.now.later_by(KILL_AGAIN));
        } else {
            self.finish();
        }
    }

    fn finish(&mut self) {
        match self.observed.sandbox {
            // What is being made must be made before it can be taken down.
            Sandbox::Creating | Sandbox::Stopping => {}
            _ => self.actions.push(Action::Finish),
        }
    }

    pub(super) fn wind_down(&mut self, spec: &PodSpec) {
        // What the node ends for its own sake gets no time to go on.
        let grace = match self.observed.verdict {
            Some(_) => Duration::ZERO,
            None => grace_of(spec),
        };
        // One that was never ready, or not in this run of the node, may have been made in part.
        let may_hold_something = match self.observed.sandbox {
            Sandbox::Missing | Sandbox::Ready(_) | Sandbox::Waiting { .. } => true,
            Sandbox::Creating | Sandbox::Stopping | Sandbox::Stopped { .. } => false,
        };
        if self.stop_all(spec, grace, "the pod has ended") && may_hold_something {
            self.actions.push(Action::StopSandbox);
        }
    }

    pub(super) fn run(&mut self, spec: &PodSpec) {
        match self.observed.sandbox {
            Sandbox::Missing => self.actions.push(Action::CreateSandbox),
            Sandbox::Waiting {
                retry_at: Some(retry_at),
                ..
            } if *retry_at <= self.now => {
                self.actions.push(Action::CreateSandbox);
            }
            Sandbox::Waiting { retry_at, .. } => {
                if let Some(at) = retry_at {
                    self.wake(*at);
                }
            }
            Sandbox::Ready(_) => {
                // They are there to find out why the others do not run.
                for container in ephemeral_containers(spec) {
                    self.advance(spec, &container, RestartPolicy::Never);
                }
                if self.run_init(spec) {
                    let policy = RestartPolicy::of(spec);
                    for container in &spec.containers {
                        self.advance(spec, container, policy);
                    }
                }
            }
            Sandbox::Creating | Sandbox::Stopping | Sandbox::Stopped { .. } => {}
        }
    }

    /// Brings init containers forward; true when the pod's own may run.
    fn run_init(&mut self, spec: &PodSpec) -> bool {
        let begun = spec
            .containers
            .iter()
            .any(|container| self.state(container).has_begun());
        for container in spec.init_containers.iter().flatten() {
            let state = self.state(container);
            if is_sidecar(container) {
                self.advance(spec, container, RestartPolicy::Always);
                if !state.started && !begun {
                    return false;
                }
            } else if !begun && !matches!(&state.phase, Phase::Ended(end) if end.exit_code == 0) {
                // Init containers are retried until they succeed, unless nothing of the pod may restart.
                let policy = match RestartPolicy::of(spec) {
                    RestartPolicy::Never => RestartPolicy::Never,
                    _ => RestartPolicy::OnFailure,
                };
                self.advance(spec, container, policy);
                return false;
            }
        }
        true
    }

    fn advance(&mut self, spec: &PodSpec, container: &Container, policy: RestartPolicy) {
        let state = self.state(container);
        let start = |run, crashes| Action::Start {
            container: container.name.clone(),
            run,
            crashes,
        };
        match &state.phase {
            Phase::NotStarted => self.actions.push(start(state.runs, state.crashes)),
            Phase::Refused { retry_at, .. } if *retry_at <= self.now => {
                self.actions.push(start(state.runs, state.crashes));
            }
            Phase::Refused {
                since, retry_at, ..
            } => {
                // The status changes from ErrImagePull to ImagePullBackOff before the next attempt.
                let shown_until = since.later_by(PULL_FAILURE_SHOWN);
                self.wake(if shown_until > self.now {
                    shown_until
                } else {
                    *retry_at
                });
            }
            Phase::Ended(termination) if policy.restarts(termination) => {
                let due = termination.finished_at.later_by(back_off(state.crashes));
                if due <= self.now {
                    self.actions.push(start(state.runs, state.crashes));
                } else {
                    self.wake(due);
                }
            }
            Phase::Running { .. } => {
                if let Some(why) = &state.unhealthy {
                    let grace = probe_grace(container).unwrap_or_else(|| grace_of(spec));
                    self.actions.push(Action::Stop {
                        container: container.name.clone(),
                        grace,
                        why: why.clone(),
                    });
                }
            }
            Phase::Stopping { kill_at, .. } => self.kill_when_due(container, *kill_at),
            Phase::Starting | Phase::Ended(_) => {}
        }
    }
}

fn grace_of(spec: &PodSpec) -> Duration {
    Duration::from_secs(
        spec.termination_grace_period_seconds
            .unwrap_or(DEFAULT_GRACE_SECONDS)
            .unsigned_abs(),
    )
}

fn probe_grace(container: &Container) -> Option<Duration> {
    let probe = container
        .liveness_probe
        .as_ref()
        .or(container.startup_probe.as_ref())?;
    probe
        .termination_grace_period_seconds
        .map(|seconds| Duration::from_secs(seconds.unsigned_abs()))
}
