//! Claims, sandboxes and pods that should be Ready but are not, and why: the condition of the claim or the sandbox, and what keeps
//! its pod from running. Pure.

use api::conditions::{self, ConditionType, Reason};
use api::start_problem::StartProblem;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::{Resource, ResourceExt};
use serde::Serialize;

use super::super::columns::{self, holder};
use super::{ObservedObjects, State, conditions_of_claim, conditions_of_sandbox, is_ready, state};

/// An object that is not Ready this long after its creation is listed as stuck.
const STUCK_AFTER: SignedDuration = SignedDuration::from_secs(10);

/// An object that does not become Ready, and the known reason.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Stuck {
    pub kind: &'static str,
    pub namespace: String,
    pub name: String,
    pub age: String,
    pub why: String,
}

/// The stuck objects, claims first. A sandbox is listed only if its claim is not, and a pod only if its sandbox is not.
pub fn stuck(observed: &ObservedObjects, now: Timestamp) -> Vec<Stuck> {
    let mut stuck = Vec::new();
    for (kind, left) in &observed.unreadable {
        let metadata = &left.metadata;
        stuck.push(Stuck {
            kind,
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            age: columns::age(metadata, now),
            why: format!("it cannot be read: {}", left.problem),
        });
    }
    for claim in &observed.claims {
        let conditions = conditions_of_claim(claim);
        if is_ready(conditions) {
            continue;
        }
        let ready = conditions::find(conditions, ConditionType::Ready);
        let is_final = ready
            .and_then(|ready| Reason::from_wire(&ready.reason))
            .is_some_and(Reason::is_final);
        if is_final || is_old(claim, now) {
            let sandbox = claim
                .status
                .as_ref()
                .and_then(|status| status.sandbox.as_ref());
            if let Some(sandbox) = sandbox
                && is_suspended(observed, claim.namespace().as_deref(), &sandbox.name)
            {
                continue;
            }
            // The Ready condition already names the pod's problem.
            let pod = sandbox
                .filter(|_| !names_problem(ready))
                .and_then(|sandbox| {
                    pod_trouble(observed, claim.namespace().as_deref(), &sandbox.name)
                });
            let why = why(ready);
            stuck.push(entry("claim", claim, now, why, pod));
        }
    }
    for sandbox in &observed.sandboxes {
        let suspended = conditions::find(conditions_of_sandbox(sandbox), ConditionType::Suspended);
        if let Some(suspended) = suspended.filter(|suspended| prevents_suspension(suspended)) {
            stuck.push(entry("sandbox", sandbox, now, why(Some(suspended)), None));
            continue;
        }
        let is_claimed = holder(sandbox).is_some_and(|holder| holder.starts_with("claim/"));
        if is_claimed || state(sandbox) != State::Starting || !is_old(sandbox, now) {
            continue;
        }
        let conditions = conditions_of_sandbox(sandbox);
        let ready = conditions::find(conditions, ConditionType::Ready);
        let namespace = sandbox.namespace();
        let pod = if names_problem(ready) {
            None
        } else {
            pod_trouble(observed, namespace.as_deref(), &sandbox.name_any())
        };
        let why = why(ready);
        stuck.push(entry("sandbox", sandbox, now, why, pod));
    }
    stuck
}

/// Whether the condition Suspended says that the sandbox cannot be suspended.
fn prevents_suspension(suspended: &Condition) -> bool {
    suspended.status == "False"
        && Reason::from_wire(&suspended.reason).is_some_and(Reason::prevents_suspension)
}

/// Whether the condition Ready names the reason why the pod does not start. Other releases of the controllers do not set it.
fn names_problem(ready: Option<&Condition>) -> bool {
    ready.is_some_and(|ready| StartProblem::parse(&ready.message).is_some())
}

/// The reason and message of a condition.
fn why(ready: Option<&Condition>) -> String {
    ready.map_or_else(
        || "no controller has looked at it: is one running?".to_owned(),
        |ready| format!("{}: {}", ready.reason, ready.message),
    )
}

fn entry(
    kind: &'static str,
    object: &impl Resource,
    now: Timestamp,
    why: String,
    pod: Option<String>,
) -> Stuck {
    Stuck {
        kind,
        namespace: object.meta().namespace.clone().unwrap_or_default(),
        name: object.meta().name.clone().unwrap_or_default(),
        age: columns::age(object.meta(), now),
        why: match pod {
            Some(pod) => format!("{why} ({pod})"),
            None => why,
        },
    }
}

fn is_old(object: &impl Resource, now: Timestamp) -> bool {
    let created = object.meta().creation_timestamp.as_ref();
    created.is_some_and(|created| now.duration_since(created.0) > STUCK_AFTER)
}

fn is_suspended(observed: &ObservedObjects, namespace: Option<&str>, name: &str) -> bool {
    observed.sandboxes.iter().any(|sandbox| {
        sandbox.namespace().as_deref() == namespace
            && sandbox.name_any() == name
            && sandbox.spec.suspension().is_requested()
    })
}

/// What keeps the pod of a sandbox from running, from the pod's status.
fn pod_trouble(
    observed: &ObservedObjects,
    namespace: Option<&str>,
    sandbox: &str,
) -> Option<String> {
    let pod = observed.pods.iter().find(|pod| {
        pod.namespace().as_deref() == namespace
            && (pod.name_any() == sandbox || is_owned_by(pod, sandbox))
    })?;
    let status = pod.status.as_ref()?;
    let unscheduled = status
        .conditions
        .iter()
        .flatten()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    if let Some(condition) = unscheduled {
        return condition
            .message
            .clone()
            .or_else(|| condition.reason.clone());
    }
    let mut containers = status
        .init_container_statuses
        .iter()
        .chain(&status.container_statuses)
        .flatten();
    containers
        .find_map(container_trouble)
        .or_else(|| status.message.clone())
}

fn is_owned_by(pod: &Pod, sandbox: &str) -> bool {
    pod.owner_references()
        .iter()
        .any(|owner| owner.kind == "Sandbox" && owner.name == sandbox)
}

fn container_trouble(container: &ContainerStatus) -> Option<String> {
    let state = container.state.as_ref()?;
    let (reason, message) = match (&state.waiting, &state.terminated) {
        (Some(waiting), _) => (waiting.reason.clone(), waiting.message.clone()),
        (None, Some(ended)) if ended.exit_code != 0 => {
            (ended.reason.clone(), ended.message.clone())
        }
        _ => return None,
    };
    let reason =
        reason.filter(|reason| reason != "ContainerCreating" && reason != "PodInitializing")?;
    let message = message.filter(|message| !message.is_empty());
    Some(match message {
        Some(message) => format!("container {}: {reason}: {message}", container.name),
        None => format!("container {}: {reason}", container.name),
    })
}
