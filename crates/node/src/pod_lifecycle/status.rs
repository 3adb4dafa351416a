//! The pod status that a kubelet would report in this state.

use api::freezing::{self as freezing_api, FROZEN};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{
    Container, ContainerState as ApiState, ContainerStateRunning, ContainerStateTerminated,
    ContainerStateWaiting, ContainerStatus, HostIP, PodCondition, PodIP, PodSpec, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use saturating_time::SaturatingTime;

use super::{
    ContainerState, Observed, Outcome, PULL_FAILURE_SHOWN, Phase, Sandbox, WaitingReason, back_off,
    freezing, is_sidecar, state_of,
};
use crate::runtime::{ContainerId, Termination};

/// A container wants more CPU time than its limit gives it. Only on pods that were throttled at least once.
pub const CPU_THROTTLED: &str = "CPUThrottled";

/// Conditions that this node writes; those of other writers stay as they are.
const OWN_CONDITIONS: [&str; 6] = [
    "PodReadyToStartContainers",
    "Initialized",
    "ContainersReady",
    "Ready",
    CPU_THROTTLED,
    FROZEN,
];

pub fn status(
    observed: &Observed<'_>,
    spec: &PodSpec,
    outcome: &Outcome,
    now: Timestamp,
) -> PodStatus {
    let previous = observed.pod.status.clone().unwrap_or_default();
    let addresses = match observed.sandbox {
        Sandbox::Ready(sandbox)
        | Sandbox::Stopped {
            address: Some(sandbox),
        } => {
            let addresses = sandbox.addresses().into_iter();
            Some(addresses.map(|ip| PodIP { ip: ip.to_string() }).collect())
        }
        _ => previous.pod_ips.clone().filter(|_| outcome.is_over()),
    }
    .filter(|addresses: &Vec<PodIP>| !addresses.is_empty());
    let init: Vec<ContainerStatus> = spec
        .init_containers
        .iter()
        .flatten()
        .map(|container| container_status(observed, spec, container, outcome, now))
        .collect();
    let main: Vec<ContainerStatus> = spec
        .containers
        .iter()
        .map(|container| container_status(observed, spec, container, outcome, now))
        .collect();
    let ephemeral: Vec<ContainerStatus> = super::ephemeral_containers(spec)
        .iter()
        .map(|container| ContainerStatus {
            // An ephemeral container has no readiness.
            ready: false,
            started: None,
            ..container_status(observed, spec, container, outcome, now)
        })
        .collect();
    let (reason, message) = match outcome {
        Outcome::Failed { reason, message } => {
            let reason = reason.as_ref().map(|reason| reason.as_str().to_owned());
            (reason, message.clone())
        }
        _ => (None, None),
    };
    PodStatus {
        phase: Some(phase(observed, spec, outcome).to_owned()),
        conditions: Some(conditions(observed, spec, outcome, &main, &previous, now)),
        host_ip: Some(observed.node_address.clone()),
        host_ips: Some(vec![HostIP {
            ip: observed.node_address.clone(),
        }]),
        pod_ip: addresses
            .as_ref()
            .and_then(|addresses| addresses.first())
            .map(|address| address.ip.clone()),
        pod_ips: addresses,
        start_time: Some(
            previous
                .start_time
                .clone()
                .unwrap_or(Time(observed.accepted_at)),
        ),
        init_container_statuses: (!init.is_empty()).then_some(init),
        container_statuses: Some(main),
        ephemeral_container_statuses: (!ephemeral.is_empty()).then_some(ephemeral),
        reason,
        message,
        ..previous
    }
}

fn phase(observed: &Observed<'_>, spec: &PodSpec, outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Succeeded => return "Succeeded",
        Outcome::Failed { .. } => return "Failed",
        Outcome::Unfinished => {}
    }
    let waiting = spec.containers.iter().any(|container| {
        let state = state_of(observed.containers, &container.name);
        state.previous.is_none()
            && matches!(
                state.phase,
                Phase::NotStarted | Phase::Starting | Phase::Refused { .. }
            )
    });
    if waiting || !is_initialized(observed, spec) {
        "Pending"
    } else {
        "Running"
    }
}

/// Whether the pod has started: it is in the phase Running, if it has not ended.
pub(super) fn is_running(observed: &Observed<'_>, spec: &PodSpec) -> bool {
    phase(observed, spec, &Outcome::Unfinished) == "Running"
}

fn is_initialized(observed: &Observed<'_>, spec: &PodSpec) -> bool {
    let begun = spec
        .containers
        .iter()
        .any(|container| state_of(observed.containers, &container.name).has_begun());
    begun || incomplete_init(observed, spec).is_empty()
}

fn incomplete_init(observed: &Observed<'_>, spec: &PodSpec) -> Vec<String> {
    let is_complete = |container: &Container| {
        let state = state_of(observed.containers, &container.name);
        if is_sidecar(container) {
            state.started
        } else {
            matches!(&state.phase, Phase::Ended(end) if end.exit_code == 0)
        }
    };
    let init = spec.init_containers.iter().flatten();
    init.filter(|container| !is_complete(container))
        .map(|container| container.name.clone())
        .collect()
}

fn terminated(id: &ContainerId, termination: &Termination) -> ContainerStateTerminated {
    ContainerStateTerminated {
        container_id: Some(id.uri()),
        exit_code: termination.exit_code,
        signal: termination.signal,
        reason: Some(termination.reason.clone()),
        message: termination.message.clone(),
        started_at: termination.started_at.map(Time),
        finished_at: Some(Time(termination.finished_at)),
    }
}

fn waiting(reason: WaitingReason, message: Option<String>) -> ApiState {
    ApiState {
        waiting: Some(ContainerStateWaiting {
            reason: Some(reason.as_str().to_owned()),
            message,
        }),
        ..ApiState::default()
    }
}

/// The state shown now, and the one before it.
fn states(
    observed: &Observed<'_>,
    spec: &PodSpec,
    container: &Container,
    state: &ContainerState,
    outcome: &Outcome,
    now: Timestamp,
) -> (ApiState, Option<ApiState>) {
    let (uid, metadata) = (observed.uid, &observed.pod.metadata);
    let id = |run: u32| uid.container(&container.name, run);
    let ended = |run: u32, termination: &Termination| ApiState {
        terminated: Some(terminated(&id(run), termination)),
        ..ApiState::default()
    };
    let last_run = state.runs.saturating_sub(1);
    let previous = state
        .previous
        .as_ref()
        .map(|termination| ended(last_run.saturating_sub(1), termination));
    let current = match &state.phase {
        Phase::NotStarted | Phase::Starting => match observed.sandbox {
            Sandbox::Waiting {
                reason, message, ..
            } => waiting(*reason, Some(message.clone())),
            _ if !is_initialized(observed, spec)
                && spec.containers.iter().any(|own| own.name == container.name) =>
            {
                waiting(WaitingReason::PodInitializing, None)
            }
            _ => waiting(WaitingReason::ContainerCreating, None),
        },
        Phase::Running { started_at } | Phase::Stopping { started_at, .. } => ApiState {
            running: Some(ContainerStateRunning {
                started_at: Some(Time(*started_at)),
            }),
            ..ApiState::default()
        },
        Phase::Refused {
            reason: WaitingReason::ErrImagePull,
            message,
            since,
            ..
        } if now >= since.later_by(PULL_FAILURE_SHOWN) => {
            let image = container.image.as_deref().unwrap_or_default();
            let message = format!("Back-off pulling image \"{image}\": {message}");
            waiting(WaitingReason::ImagePullBackOff, Some(message))
        }
        Phase::Refused {
            reason, message, ..
        } => waiting(*reason, Some(message.clone())),
        Phase::Ended(termination) => {
            let delay = back_off(state.crashes);
            let restarts = spec.restart_policy.as_deref().unwrap_or("Always");
            let is_init = spec
                .init_containers
                .iter()
                .flatten()
                .any(|init| init.name == container.name && !is_sidecar(init));
            let is_ephemeral = spec
                .ephemeral_containers
                .iter()
                .flatten()
                .any(|ephemeral| ephemeral.name == container.name);
            let will_restart = match restarts {
                _ if is_ephemeral => false,
                "Never" => is_sidecar(container),
                "OnFailure" => termination.exit_code != 0 || is_sidecar(container),
                _ => !is_init || termination.exit_code != 0,
            };
            let backing_off = will_restart
                && !outcome.is_over()
                && metadata.deletion_timestamp.is_none()
                && !delay.is_zero()
                && termination.finished_at.later_by(delay) > now;
            if !backing_off {
                return (ended(last_run, termination), previous);
            }
            let message = format!(
                "back-off {}s restarting failed container={} pod={}_{}({uid})",
                delay.as_secs(),
                container.name,
                metadata.name.as_deref().unwrap_or_default(),
                metadata.namespace.as_deref().unwrap_or_default(),
            );
            return (
                waiting(WaitingReason::CrashLoopBackOff, Some(message)),
                Some(ended(last_run, termination)),
            );
        }
    };
    (current, previous)
}

fn container_status(
    observed: &Observed<'_>,
    spec: &PodSpec,
    container: &Container,
    outcome: &Outcome,
    now: Timestamp,
) -> ContainerStatus {
    let state = state_of(observed.containers, &container.name);
    // The status of a pod that ended before this run of the node is kept.
    if outcome.is_over() && state.runs == 0 && state.phase == Phase::NotStarted {
        let before = observed.pod.status.iter().flat_map(|status| {
            status
                .container_statuses
                .iter()
                .flatten()
                .chain(status.init_container_statuses.iter().flatten())
                .chain(status.ephemeral_container_statuses.iter().flatten())
        });
        if let Some(reported) = before
            .into_iter()
            .find(|status| status.name == container.name)
        {
            return reported.clone();
        }
    }
    let (current, last) = states(observed, spec, container, state, outcome, now);
    let running = matches!(state.phase, Phase::Running { .. } | Phase::Stopping { .. });
    let is_init = spec
        .init_containers
        .iter()
        .flatten()
        .any(|init| init.name == container.name && !is_sidecar(init));
    // An init container is ready when it has done its work.
    let ready = if is_init {
        matches!(&state.phase, Phase::Ended(end) if end.exit_code == 0)
    } else {
        running && state.started && state.ready
    };
    let has_run = state.runs > 0 && !(state.runs == 1 && matches!(state.phase, Phase::Starting));
    let id = observed
        .uid
        .container(&container.name, state.runs.saturating_sub(1));
    ContainerStatus {
        name: container.name.clone(),
        image: container.image.clone().unwrap_or_default(),
        image_id: state.image_id.clone().unwrap_or_default(),
        container_id: has_run.then(|| id.uri()),
        ready,
        restart_count: i32::try_from(state.runs.saturating_sub(1)).unwrap_or(i32::MAX),
        started: Some(running && state.started),
        state: Some(current),
        last_state: Some(last.unwrap_or_default()),
        ..ContainerStatus::default()
    }
}

#[derive(Clone)]
pub(super) struct Verdict {
    pub(super) kind: &'static str,
    pub(super) holds: bool,
    pub(super) reason: Option<String>,
    pub(super) message: Option<String>,
}

fn conditions(
    observed: &Observed<'_>,
    spec: &PodSpec,
    outcome: &Outcome,
    main: &[ContainerStatus],
    previous: &PodStatus,
    now: Timestamp,
) -> Vec<PodCondition> {
    let before = previous.conditions.clone().unwrap_or_default();
    let mut conditions: Vec<PodCondition> = before
        .iter()
        .filter(|condition| !OWN_CONDITIONS.contains(&condition.type_.as_str()))
        .cloned()
        .collect();
    for verdict in verdicts(observed, spec, outcome, main, &before) {
        let status = if verdict.holds { "True" } else { "False" };
        let unchanged = before
            .iter()
            .find(|condition| condition.type_ == verdict.kind && condition.status == status);
        conditions.push(PodCondition {
            type_: verdict.kind.to_owned(),
            status: status.to_owned(),
            reason: verdict.reason,
            message: verdict.message,
            last_transition_time: unchanged
                .and_then(|condition| condition.last_transition_time.clone())
                .or(Some(Time(now))),
            ..PodCondition::default()
        });
    }
    conditions
}

fn verdicts(
    observed: &Observed<'_>,
    spec: &PodSpec,
    outcome: &Outcome,
    main: &[ContainerStatus],
    before: &[PodCondition],
) -> Vec<Verdict> {
    let yes = |kind| Verdict {
        kind,
        holds: true,
        reason: None,
        message: None,
    };
    let no = |kind, reason: &str, message: Option<String>| Verdict {
        kind,
        holds: false,
        reason: Some(reason.to_owned()),
        message,
    };
    let sandbox = match observed.sandbox {
        Sandbox::Waiting {
            reason, message, ..
        } => no(
            "PodReadyToStartContainers",
            reason.as_str(),
            Some(message.clone()),
        ),
        other => Verdict {
            holds: matches!(other, Sandbox::Ready(_)),
            ..yes("PodReadyToStartContainers")
        },
    };
    let initialized = match (outcome, is_initialized(observed, spec)) {
        (Outcome::Succeeded, _) => Verdict {
            reason: Some("PodCompleted".to_owned()),
            ..yes("Initialized")
        },
        (_, true) => yes("Initialized"),
        (_, false) => {
            let names = incomplete_init(observed, spec).join(" ");
            no(
                "Initialized",
                "ContainersNotInitialized",
                Some(format!("containers with incomplete status: [{names}]")),
            )
        }
    };
    let unready: Vec<&str> = main
        .iter()
        .filter(|status| !status.ready)
        .map(|status| status.name.as_str())
        .collect();
    let containers = match outcome {
        Outcome::Succeeded => no("ContainersReady", "PodCompleted", None),
        Outcome::Failed { .. } => no("ContainersReady", "PodFailed", None),
        Outcome::Unfinished if unready.is_empty() => yes("ContainersReady"),
        Outcome::Unfinished => {
            let message = format!("containers with unready status: [{}]", unready.join(" "));
            no("ContainersReady", "ContainersNotReady", Some(message))
        }
    };
    let gates: Vec<String> = spec
        .readiness_gates
        .iter()
        .flatten()
        .filter(|gate| !before.iter().any(|condition| condition.type_ == gate.condition_type && condition.status == "True"))
        .map(|gate| format!("corresponding condition of pod readiness gate \"{}\" does not exist or is not true.", gate.condition_type))
        .collect();
    let ready = match (containers.holds, gates.is_empty()) {
        (false, _) => Verdict {
            kind: "Ready",
            ..containers.clone()
        },
        // Its containers stay ready: they go on as they are once the pod is thawed.
        (true, _) if !observed.freezer.is_thawed() => {
            no("Ready", freezing_api::reason::FROZEN, None)
        }
        (true, false) => no("Ready", "ReadinessGatesNotReady", Some(gates.join(", "))),
        (true, true) => yes("Ready"),
    };
    let mut verdicts = vec![sandbox, initialized, containers, ready];
    verdicts.extend(throttling(observed, before));
    verdicts.extend(freezing::verdict(observed, before));
    verdicts
}

fn throttling(observed: &Observed<'_>, before: &[PodCondition]) -> Option<Verdict> {
    let held_back = throttled(observed);
    let known = |condition: &PodCondition| condition.type_ == CPU_THROTTLED;
    if held_back.is_empty() {
        return before.iter().any(known).then(|| Verdict {
            kind: CPU_THROTTLED,
            holds: false,
            reason: Some("WithinLimit".to_owned()),
            message: None,
        });
    }
    let names = held_back.join(", ");
    Some(Verdict {
        kind: CPU_THROTTLED,
        holds: true,
        reason: Some("LimitReached".to_owned()),
        message: Some(format!(
            "wants more CPU time than its limit gives it: {names}"
        )),
    })
}

/// The containers that are throttled, each with its CPU limit.
fn throttled(observed: &Observed<'_>) -> Vec<String> {
    let limit = |name: &str| {
        let spec = observed.pod.spec.as_ref()?;
        let mut all = spec
            .containers
            .iter()
            .chain(spec.init_containers.iter().flatten());
        let container = all.find(|container| container.name == name)?;
        let limits = container.resources.as_ref()?.limits.as_ref()?;
        limits.get("cpu").map(|limit| limit.0.clone())
    };
    let states = observed.containers.iter();
    states
        .filter(|(_, state)| state.throttled)
        .map(|(name, _)| match limit(name) {
            Some(limit) => format!("container {name} (limit {limit})"),
            None => format!("container {name}"),
        })
        .collect()
}

/// Whether a condition is this node's to write.
pub fn is_own_condition(kind: &str) -> bool {
    OWN_CONDITIONS.contains(&kind)
}
