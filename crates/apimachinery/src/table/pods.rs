//! The table row of a pod: summarizes the states of its containers in one word.

use jiff::Timestamp;
use serde_json::Value;

use super::builtin::{age_of, items, name, or_none, text};

/// Counters over the containers.
#[derive(Default)]
struct Tally {
    restarts: i64,
    last_restart: Option<Timestamp>,
    ready: usize,
}

impl Tally {
    fn count(&mut self, status: &Value) {
        self.restarts += status
            .get("restartCount")
            .and_then(Value::as_i64)
            .unwrap_or(0);
        let finished = text(status, "/lastState/terminated/finishedAt")
            .parse()
            .ok();
        self.last_restart = self.last_restart.max(finished);
    }

    fn restarts(&self, now: Timestamp) -> String {
        match self.last_restart {
            Some(last) if self.restarts != 0 => {
                let ago = crate::duration::human(crate::time::seconds_between(last, now));
                format!("{} ({ago} ago)", self.restarts)
            }
            _ => self.restarts.to_string(),
        }
    }
}

fn is_true(object: &Value, pointer: &str) -> bool {
    object.pointer(pointer) == Some(&Value::Bool(true))
}

fn condition<'a>(pod: &'a Value, kind: &str) -> Option<&'a Value> {
    items(pod, "/status/conditions")
        .iter()
        .find(|condition| text(condition, "/type") == kind)
}

fn has_condition(pod: &Value, kind: &str) -> bool {
    condition(pod, kind).is_some_and(|condition| text(condition, "/status") == "True")
}

/// Whether an init container is a sidecar, which runs beside the other containers.
fn is_sidecar(pod: &Value, name: &str) -> bool {
    let spec = items(pod, "/spec/initContainers")
        .iter()
        .find(|container| text(container, "/name") == name);
    spec.is_some_and(|container| text(container, "/restartPolicy") == "Always")
}

/// Why a container terminated, in one word.
fn termination_reason(terminated: &Value) -> String {
    let number = |name: &str| terminated.get(name).and_then(Value::as_i64).unwrap_or(0);
    match (text(terminated, "/reason"), number("signal")) {
        ("", 0) => format!("ExitCode:{}", number("exitCode")),
        ("", signal) => format!("Signal:{signal}"),
        (reason, _) => reason.to_owned(),
    }
}

pub(super) fn cells(pod: &Value, now: Timestamp) -> Vec<Value> {
    let phase = text(pod, "/status/phase");
    let mut reason = match text(pod, "/status/reason") {
        "" => phase.to_owned(),
        reason => reason.to_owned(),
    };
    if condition(pod, "PodScheduled")
        .is_some_and(|condition| text(condition, "/reason") == "SchedulingGated")
    {
        "SchedulingGated".clone_into(&mut reason);
    }
    let sidecars = items(pod, "/spec/initContainers")
        .iter()
        .filter(|container| text(container, "/restartPolicy") == "Always")
        .count();
    let total = items(pod, "/spec/containers").len() + sidecars;
    let (mut init, mut sidecar) = (Tally::default(), Tally::default());
    let initializing = init_state(pod, &mut init, &mut sidecar, &mut reason);
    let mut tally = init;
    if !initializing || has_condition(pod, "Initialized") {
        sidecar.ready = tally.ready;
        tally = sidecar;
        main_state(pod, &mut tally, &mut reason);
    }
    if !text(pod, "/metadata/deletionTimestamp").is_empty() {
        if text(pod, "/status/reason") == "NodeLost" {
            "Unknown".clone_into(&mut reason);
        } else if !matches!(phase, "Succeeded" | "Failed") {
            "Terminating".clone_into(&mut reason);
        }
    }
    vec![
        name(pod),
        format!("{}/{total}", tally.ready).into(),
        reason.into(),
        tally.restarts(now).into(),
        age_of(pod, now),
        or_none(
            items(pod, "/status/podIPs")
                .first()
                .map_or(text(pod, "/status/podIP"), |first| text(first, "/ip")),
        )
        .into(),
        or_none(text(pod, "/spec/nodeName")).into(),
        or_none(text(pod, "/status/nominatedNodeName")).into(),
        readiness_gates(pod).into(),
    ]
}

/// Goes through the init containers up to the first that has not completed. Returns whether there is one.
fn init_state(pod: &Value, tally: &mut Tally, sidecar: &mut Tally, reason: &mut String) -> bool {
    let total = items(pod, "/spec/initContainers").len();
    for (position, status) in items(pod, "/status/initContainerStatuses")
        .iter()
        .enumerate()
    {
        tally.count(status);
        let stays = is_sidecar(pod, text(status, "/name"));
        if stays {
            sidecar.count(status);
        }
        let terminated = status
            .pointer("/state/terminated")
            .filter(|state| state.is_object());
        let exit_code = terminated
            .and_then(|state| state.get("exitCode"))
            .and_then(Value::as_i64);
        if terminated.is_some() && exit_code.unwrap_or(0) == 0 {
            continue;
        }
        if stays && is_true(status, "/started") {
            tally.ready += usize::from(is_true(status, "/ready"));
            continue;
        }
        let waiting = text(status, "/state/waiting/reason");
        *reason = match terminated {
            Some(terminated) => format!("Init:{}", termination_reason(terminated)),
            None if !waiting.is_empty() && waiting != "PodInitializing" => {
                format!("Init:{waiting}")
            }
            None => format!("Init:{position}/{total}"),
        };
        return true;
    }
    false
}

fn main_state(pod: &Value, tally: &mut Tally, reason: &mut String) {
    let mut running = false;
    let mut failure = None;
    for status in items(pod, "/status/containerStatuses").iter().rev() {
        tally.count(status);
        let waiting = text(status, "/state/waiting/reason");
        let terminated = status
            .pointer("/state/terminated")
            .filter(|state| state.is_object());
        if !waiting.is_empty() {
            waiting.clone_into(reason);
        } else if let Some(terminated) = terminated {
            *reason = termination_reason(terminated);
            if terminated
                .get("exitCode")
                .and_then(Value::as_i64)
                .unwrap_or(0)
                != 0
            {
                failure = Some(reason.clone());
            }
        } else if is_true(status, "/ready") && status.pointer("/state/running").is_some() {
            running = true;
            tally.ready += 1;
        }
    }
    if reason == "Completed" {
        if running && has_condition(pod, "Ready") {
            "Running".clone_into(reason);
        } else if let Some(failure) = failure {
            *reason = failure;
        } else if running {
            "NotReady".clone_into(reason);
        }
    }
}

fn readiness_gates(pod: &Value) -> String {
    let gates = items(pod, "/spec/readinessGates");
    if gates.is_empty() {
        return "<none>".to_owned();
    }
    let open = gates
        .iter()
        .filter(|gate| has_condition(pod, text(gate, "/conditionType")))
        .count();
    format!("{open}/{}", gates.len())
}
