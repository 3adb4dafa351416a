//! What to do about a pod, and what to say about it: a pure function of what is known and the time.
//!
//! ```text
//!  container:  NotStarted ─► Starting ─► Running ─► Stopping ─► Ended ─┐ restart policy, back-off
//!                  ▲            │  ▲                              ▲    │
//!                  │            ▼  └──────────────────────────────┼────┘
//!                  └──────── Refused (retried)       Running ─────┘ by itself
//!
//!  pod:        sandbox ─► init containers, one by one ─► containers together ─► all ended ─► sandbox freed
//!              deletion: containers stopped within the grace period ─► removed ─► gone from the API
//! ```
//!
//! Nothing here performs an action, reads a clock or knows how containers are made.

pub mod status;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, PodStatus};

use crate::runtime::{PodSandbox, Termination};

/// How far one container has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    NotStarted,
    Starting,
    Running {
        started_at: Timestamp,
    },
    /// Asked to end; it is killed at `kill_at`.
    Stopping {
        started_at: Timestamp,
        kill_at: Timestamp,
    },
    Ended(Termination),
    /// It could not be started; it is tried again at `retry_at`.
    Refused {
        reason: String,
        message: String,
        since: Timestamp,
        retry_at: Timestamp,
    },
}

/// What is known of one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerState {
    pub phase: Phase,
    /// Runs begun so far; a restart count is one less.
    pub runs: u32,
    /// How the run before the current one ended.
    pub previous: Option<Termination>,
    /// Ends in a row, each too soon after its start to forget the one before.
    pub crashes: u32,
    /// Pulls of the image that failed in a row.
    pub failed_pulls: u32,
    pub image_id: Option<String>,
    /// The startup probe passed, or there is none.
    pub started: bool,
    /// The readiness probe passes, or there is none.
    pub ready: bool,
    /// Why a probe wants the container restarted.
    pub unhealthy: Option<String>,
    /// It wants more processor time than its limit gives it.
    pub throttled: bool,
}

impl Default for ContainerState {
    fn default() -> Self {
        Self {
            phase: Phase::NotStarted,
            runs: 0,
            previous: None,
            crashes: 0,
            failed_pulls: 0,
            image_id: None,
            started: false,
            ready: false,
            unhealthy: None,
            throttled: false,
        }
    }
}

impl ContainerState {
    pub fn is_live(&self) -> bool {
        matches!(
            self.phase,
            Phase::Starting | Phase::Running { .. } | Phase::Stopping { .. }
        )
    }

    /// Records an end, and whether it counts towards the back-off.
    pub fn end(&mut self, termination: Termination) {
        let ran = termination.started_at.map_or(Duration::ZERO, |start| {
            termination
                .finished_at
                .duration_since(start)
                .try_into()
                .unwrap_or(Duration::ZERO)
        });
        self.crashes = if ran >= BACK_OFF_FORGET {
            0
        } else {
            self.crashes + 1
        };
        self.phase = Phase::Ended(termination);
        self.started = false;
        self.ready = false;
        self.unhealthy = None;
        self.throttled = false;
    }
}

/// The pod's namespaces and network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sandbox {
    Missing,
    Creating,
    Ready(PodSandbox),
    /// It cannot be made yet: a missing volume, say.
    Waiting {
        reason: String,
        message: String,
        retry_at: Timestamp,
    },
    Stopping,
    /// Freed, since nothing of the pod will run again.
    Stopped {
        address: Option<PodSandbox>,
    },
}

/// Why the node ends a pod on its own account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    pub reason: String,
    pub message: String,
}

/// Everything a decision depends on.
#[derive(Debug)]
pub struct Observed<'a> {
    pub pod: &'a Pod,
    pub sandbox: &'a Sandbox,
    pub containers: &'a BTreeMap<String, ContainerState>,
    /// Set when the node itself has decided to end the pod.
    pub verdict: Option<&'a Verdict>,
    /// When the node first saw the pod.
    pub accepted_at: Timestamp,
    pub node_address: String,
}

/// Something to be done; the doing is another's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    CreateSandbox,
    Start {
        container: String,
        run: u32,
        crashes: u32,
    },
    /// Ask a container to end, and kill it after the grace period.
    Stop {
        container: String,
        grace: Duration,
        why: String,
    },
    Kill {
        container: String,
    },
    /// Free what the pod holds but its logs.
    StopSandbox,
    /// Remove every trace of the pod, then the object itself.
    Finish,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub actions: Vec<Action>,
    pub status: PodStatus,
    /// When to decide again if nothing happens before.
    pub wake_at: Option<Timestamp>,
}

const BACK_OFF_FIRST: Duration = Duration::from_secs(10);
const BACK_OFF_LAST: Duration = Duration::from_secs(300);
/// A container that ran this long starts again without a delay.
const BACK_OFF_FORGET: Duration = Duration::from_secs(600);
/// How long a failed pull is shown as such, before it is shown as waiting for the next.
pub const PULL_FAILURE_SHOWN: Duration = Duration::from_secs(2);
const DEFAULT_GRACE_SECONDS: i64 = 30;
/// A kill that did not take is repeated after this.
pub const KILL_AGAIN: Duration = Duration::from_secs(5);

/// How long a container that ended `crashes` times in a row waits before it starts again.
pub fn back_off(crashes: u32) -> Duration {
    match crashes {
        0 | 1 => Duration::ZERO,
        _ => BACK_OFF_FIRST
            .saturating_mul(1 << (crashes - 2).min(16))
            .min(BACK_OFF_LAST),
    }
}

/// How long an image that could not be pulled `failures` times in a row is left alone.
pub fn pull_back_off(failures: u32) -> Duration {
    BACK_OFF_FIRST
        .saturating_mul(1 << failures.saturating_sub(1).min(16))
        .min(BACK_OFF_LAST)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RestartPolicy {
    Always,
    OnFailure,
    Never,
}

impl RestartPolicy {
    fn of(spec: &PodSpec) -> Self {
        match spec.restart_policy.as_deref() {
            Some("Never") => Self::Never,
            Some("OnFailure") => Self::OnFailure,
            _ => Self::Always,
        }
    }

    fn restarts(self, termination: &Termination) -> bool {
        match self {
            Self::Always => true,
            Self::OnFailure => termination.exit_code != 0,
            Self::Never => false,
        }
    }
}

/// An init container that keeps running beside the others.
pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// A pod's ephemeral containers, as containers that lack what those cannot have.
pub fn ephemeral_containers(spec: &PodSpec) -> Vec<Container> {
    let ephemeral = spec.ephemeral_containers.iter().flatten();
    ephemeral
        .filter_map(|container| {
            let fields = serde_json::to_value(container).ok()?;
            serde_json::from_value(fields).ok()
        })
        .collect()
}

/// Decides what to do about a pod.
pub fn decide(observed: &Observed<'_>, now: Timestamp) -> Plan {
    let mut decision = Decision {
        observed,
        now,
        actions: Vec::new(),
        wake_at: None,
    };
    let spec = observed.pod.spec.clone().unwrap_or_default();
    let outcome = decision.outcome(&spec);
    if observed.pod.metadata.deletion_timestamp.is_some() {
        decision.delete(&spec);
    } else if outcome.is_over() {
        decision.wind_down(&spec);
    } else {
        decision.run(&spec);
    }
    let Decision {
        actions, wake_at, ..
    } = decision;
    Plan {
        actions,
        status: status::status(observed, &spec, &outcome, now),
        wake_at,
    }
}

/// Whether a pod's work is done, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Unfinished,
    Succeeded,
    Failed {
        reason: Option<String>,
        message: Option<String>,
    },
}

impl Outcome {
    pub fn is_over(&self) -> bool {
        *self != Self::Unfinished
    }
}

struct Decision<'a> {
    observed: &'a Observed<'a>,
    now: Timestamp,
    actions: Vec<Action>,
    wake_at: Option<Timestamp>,
}

static ABSENT: std::sync::LazyLock<ContainerState> =
    std::sync::LazyLock::new(ContainerState::default);

/// What is known of a container; one never heard of has not started.
pub fn state_of<'a>(
    containers: &'a BTreeMap<String, ContainerState>,
    name: &str,
) -> &'a ContainerState {
    containers.get(name).unwrap_or_else(|| &ABSENT)
}

impl Decision<'_> {
    fn wake(&mut self, at: Timestamp) {
        self.wake_at = Some(self.wake_at.map_or(at, |earlier| earlier.min(at)));
    }

    fn state(&self, container: &Container) -> ContainerState {
        state_of(self.observed.containers, &container.name).clone()
    }

    fn outcome(&mut self, spec: &PodSpec) -> Outcome {
        let status = self.observed.pod.status.as_ref();
        // An end once reported stands: nothing brings such a pod back.
        match status.and_then(|status| status.phase.as_deref()) {
            Some("Succeeded") => return Outcome::Succeeded,
            Some("Failed") => {
                return Outcome::Failed {
                    reason: status.and_then(|status| status.reason.clone()),
                    message: status.and_then(|status| status.message.clone()),
                };
            }
            _ => {}
        }
        if let Some(verdict) = self.observed.verdict {
            return Outcome::Failed {
                reason: Some(verdict.reason.clone()),
                message: Some(verdict.message.clone()),
            };
        }
        if let Some(seconds) = spec.active_deadline_seconds {
            let deadline = self.observed.accepted_at + Duration::from_secs(seconds.unsigned_abs());
            if deadline <= self.now {
                return Outcome::Failed {
                    reason: Some("DeadlineExceeded".to_owned()),
                    message: Some(
                        "Pod was active on the node longer than the specified deadline".to_owned(),
                    ),
                };
            }
            self.wake(deadline);
        }
        let policy = RestartPolicy::of(spec);
        let init_failed = spec.init_containers.iter().flatten().filter(|container| !is_sidecar(container)).any(|container| {
            matches!(self.state(container).phase, Phase::Ended(end) if end.exit_code != 0 && policy == RestartPolicy::Never)
        });
        if init_failed {
            return Outcome::Failed {
                reason: None,
                message: None,
            };
        }
        let ends: Vec<Option<i32>> = spec
            .containers
            .iter()
            .map(|container| match self.state(container).phase {
                Phase::Ended(end) if !policy.restarts(&end) => Some(end.exit_code),
                _ => None,
            })
            .collect();
        match ends.iter().copied().collect::<Option<Vec<i32>>>() {
            Some(codes) if codes.iter().all(|code| *code == 0) => Outcome::Succeeded,
            Some(_) => Outcome::Failed {
                reason: None,
                message: None,
            },
            None => Outcome::Unfinished,
        }
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
                _ => {}
            }
        }
        false
    }

    fn kill_when_due(&mut self, container: &Container, kill_at: Timestamp) {
        if kill_at <= self.now {
            self.actions.push(Action::Kill {
                container: container.name.clone(),
            });
        } else {
            self.wake(kill_at);
        }
    }

    fn delete(&mut self, spec: &PodSpec) {
        let metadata = &self.observed.pod.metadata;
        // The API sets the time at which the grace period ends, cut to the second; deleting again with less shortens it.
        let deadline = metadata
            .deletion_timestamp
            .as_ref()
            .map_or(self.now, |time| time.0)
            + Duration::from_secs(1);
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
            let state = self.state(container);
            live |= state.is_live();
            if matches!(state.phase, Phase::Running { .. } | Phase::Stopping { .. }) {
                self.actions.push(Action::Kill {
                    container: container.name.clone(),
                });
            }
        }
        if live {
            self.wake(self.now + KILL_AGAIN);
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

    fn wind_down(&mut self, spec: &PodSpec) {
        // What the node ends for its own sake gets no time to go on.
        let grace = match self.observed.verdict {
            Some(_) => Duration::ZERO,
            None => grace_of(spec),
        };
        if self.stop_all(spec, grace, "the pod has ended")
            && matches!(self.observed.sandbox, Sandbox::Ready(_))
        {
            self.actions.push(Action::StopSandbox);
        }
    }

    fn run(&mut self, spec: &PodSpec) {
        match self.observed.sandbox {
            Sandbox::Missing => self.actions.push(Action::CreateSandbox),
            Sandbox::Waiting { retry_at, .. } if *retry_at <= self.now => {
                self.actions.push(Action::CreateSandbox);
            }
            Sandbox::Waiting { retry_at, .. } => self.wake(*retry_at),
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
            .any(|container| self.state(container).runs > 0);
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
                // What is said of a failed pull changes before it is tried again.
                let told = *since + PULL_FAILURE_SHOWN;
                self.wake(if told > self.now { told } else { *retry_at });
            }
            Phase::Ended(termination) if policy.restarts(termination) => {
                let due = termination.finished_at + back_off(state.crashes);
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
