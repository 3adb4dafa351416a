//! Decides what to do with a pod and which status to publish: a pure function of its known state and the time.
//!
//! ```text
//!  container:  NotStarted ─► Starting ─► Running ─► Stopping ─► Ended ─┐ restart policy, back-off
//!                  ▲            │  ▲                              ▲    │
//!                  │            ▼  └──────────────────────────────┼────┘
//!                  └──────── Refused (retried)       Running ─────┘ by itself
//!
//!  pod:        sandbox ─► init containers, one by one ─► containers together ─► all ended ─► sandbox freed
//!              deletion: containers stopped within the grace period ─► their end published ─► removed ─► gone from the API
//! ```
//!
//! It performs no action, reads no clock and does not know how containers are created.

mod decision;
mod freezing;
mod outcome;
pub mod reason;
pub mod status;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, PodStatus};

use self::decision::Decision;
pub use self::freezing::Freezer;
pub use self::outcome::Outcome;
pub use self::reason::{EventReason, FailureReason, WaitingReason};
use crate::pod_uid::PodUid;
use crate::runtime::{PodSandbox, Termination};

/// The state of one container.
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
        reason: WaitingReason,
        message: String,
        since: Timestamp,
        retry_at: Timestamp,
    },
}

/// The known facts about one container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerState {
    pub phase: Phase,
    /// Runs begun so far; a restart count is one less.
    pub runs: u32,
    /// The runs that were in a pod sandbox that did not survive.
    pub lost_runs: u32,
    /// How the run before the current one ended.
    pub previous: Option<Termination>,
    /// Consecutive ends, each too soon after its start to reset the back-off.
    pub crashes: u32,
    /// Consecutive failed pulls of the image.
    pub failed_pulls: u32,
    pub image_id: Option<String>,
    /// The startup probe passed, or the container has no startup probe.
    pub started: bool,
    /// The readiness probe passes, or the container has no readiness probe.
    pub ready: bool,
    /// The reason of a failed probe that requires a restart.
    pub unhealthy: Option<String>,
    /// Whether its CPU limit throttles it.
    pub throttled: bool,
}

impl Default for ContainerState {
    fn default() -> Self {
        Self {
            phase: Phase::NotStarted,
            runs: 0,
            lost_runs: 0,
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
    /// Whether it has run, or was about to, in the pod's current sandbox.
    pub fn has_begun(&self) -> bool {
        self.runs > self.lost_runs
    }

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
    /// It cannot be created yet, for example because of a missing volume.
    Waiting {
        reason: WaitingReason,
        message: String,
        /// When it is tried again; without a time, only after a change of an object that it waits for.
        retry_at: Option<Timestamp>,
    },
    Stopping,
    /// Freed, because no container of the pod will run again.
    Stopped {
        address: Option<PodSandbox>,
    },
}

/// Why the node itself ends a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    pub reason: FailureReason,
    pub message: String,
}

/// Everything a decision depends on.
#[derive(Debug)]
pub struct Observed<'a> {
    pub uid: &'a PodUid,
    pub pod: &'a Pod,
    pub sandbox: &'a Sandbox,
    pub containers: &'a BTreeMap<String, ContainerState>,
    /// Set when the node itself has decided to end the pod.
    pub verdict: Option<&'a Verdict>,
    /// When the node first saw the pod.
    pub accepted_at: Timestamp,
    pub node_address: String,
    pub freezer: &'a Freezer,
    /// Why this node cannot freeze pods, if it cannot.
    pub cannot_freeze: Option<&'a str>,
}

/// An action to be carried out by the pod's worker.
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
    /// End every process of a container, or give up starting it.
    Kill {
        container: String,
    },
    /// Freeze all processes of the pod.
    Freeze,
    /// Let all processes of the pod run again.
    Thaw,
    /// Free everything of the pod except its logs.
    StopSandbox,
    /// Remove everything of the pod, then the object itself. The status of the same plan is published first.
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
pub const BACK_OFF_FORGET: Duration = Duration::from_secs(600);
/// How long the status shows a failed pull (`ErrImagePull`) before it shows the back-off (`ImagePullBackOff`).
pub const PULL_FAILURE_SHOWN: Duration = Duration::from_secs(2);
/// A kill without effect is repeated after this.
pub const KILL_AGAIN: Duration = Duration::from_secs(5);

/// The back-off of a container after `crashes` consecutive ends.
pub fn back_off(crashes: u32) -> Duration {
    match crashes {
        0 | 1 => Duration::ZERO,
        _ => BACK_OFF_FIRST
            .saturating_mul(1 << (crashes - 2).min(16))
            .min(BACK_OFF_LAST),
    }
}

/// The back-off after `failures` consecutive failed pulls of an image.
pub fn pull_back_off(failures: u32) -> Duration {
    BACK_OFF_FIRST
        .saturating_mul(1 << failures.saturating_sub(1).min(16))
        .min(BACK_OFF_LAST)
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

/// The definition of a container, of whichever kind.
pub fn container_of(pod: &Pod, name: &str) -> Option<Container> {
    let spec = pod.spec.as_ref()?;
    let ephemeral = || {
        let mut ephemeral = ephemeral_containers(spec).into_iter();
        ephemeral.find(|container| container.name == name)
    };
    spec.containers
        .iter()
        .chain(spec.init_containers.iter().flatten())
        .find(|container| container.name == name)
        .cloned()
        .or_else(ephemeral)
}

/// Decides what to do about a pod.
pub fn decide(observed: &Observed<'_>, now: Timestamp) -> Plan {
    static EMPTY: LazyLock<PodSpec> = LazyLock::new(PodSpec::default);
    let spec = observed.pod.spec.as_ref().unwrap_or(&EMPTY);
    let (mut outcome, deadline) = outcome::of(observed, spec, now);
    let mut decision = Decision::new(observed, now);
    if observed.pod.metadata.deletion_timestamp.is_some() {
        if decision.is_thawed() {
            decision.delete(spec);
        }
        let live = observed.containers.values().any(ContainerState::is_live);
        if !live && !outcome.is_over() {
            outcome = outcome::of_deleted(observed, spec);
        }
    } else if outcome.is_over() {
        if decision.is_thawed() {
            decision.wind_down(spec);
        }
    } else if decision.settle_freezer(spec) {
        decision.run(spec);
    }
    let (actions, wake_at) = decision.made();
    Plan {
        actions,
        status: status::status(observed, spec, &outcome, now),
        wake_at: wake_at.into_iter().chain(deadline).min(),
    }
}

static ABSENT: LazyLock<ContainerState> = LazyLock::new(ContainerState::default);

/// The known facts about a container. An unknown container has not started.
pub fn state_of<'a>(
    containers: &'a BTreeMap<String, ContainerState>,
    name: &str,
) -> &'a ContainerState {
    containers.get(name).unwrap_or_else(|| &ABSENT)
}
