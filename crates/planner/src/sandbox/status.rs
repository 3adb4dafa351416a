//! The status of a sandbox, from the objects that exist after the plan was carried out.

use std::sync::Arc;

use api::conditions::{ConditionStatus, ConditionType, Finding, Reason, find, merge, remove, set};
use api::sandbox::{ConditionForm, SuspensionType};
use api::start_problem::StartProblem;
use api::{SandboxStatus, labels};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::scheduling::pod_scheduled;
use super::start_failure::start_failure;
use super::suspension::{is_name_taken, suspended};
use super::{
    ObservedPod, Problem, SandboxFacts, Settings, Stage, current_pod, freezing, loss, service,
};
use crate::owner::{Ownership, ownership};

/// The objects that exist after a plan was carried out.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The sandbox's pod, if it has one.
    pub pod: Option<Arc<ObservedPod>>,
    /// The service that the sandbox uses, if there is one.
    pub service: Option<Arc<Service>>,
    pub trouble: Vec<Trouble>,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The spec is invalid: the message of the API server, or of our validation.
    Invalid(String),
    /// A retry may succeed.
    Failed(String),
    /// A wait, not an error: the obstacle goes away by itself.
    Waiting(String),
}

impl From<&Problem> for Trouble {
    fn from(problem: &Problem) -> Self {
        let message = problem.to_string();
        match problem {
            Problem::Leaving { .. } => Self::Waiting(message),
            _ if problem.is_invalid_spec() => Self::Invalid(message),
            _ => Self::Failed(message),
        }
    }
}

impl Outcome {
    /// The objects that exist before anything is done.
    pub fn before(observed: &SandboxFacts) -> Self {
        let pod = current_pod(observed).filter(|pod| observed.owns(&pod.metadata));
        let service = observed.service.as_ref().filter(|service| {
            let metadata = &service.metadata;
            let others = matches!(ownership(metadata, observed.uid()), Ownership::Others(_));
            observed.sandbox.spec.service != Some(false)
                && metadata.deletion_timestamp.is_none()
                && !others
        });
        Self {
            pod: pod.cloned(),
            service: service.cloned(),
            trouble: Vec::new(),
        }
    }
}

/// The status to publish.
pub fn status(
    observed: &SandboxFacts,
    stage: Stage,
    outcome: &Outcome,
    settings: &Settings<'_>,
    now: &Time,
) -> SandboxStatus {
    let before = observed.sandbox.status.clone().unwrap_or_default();
    let mut status = match stage {
        Stage::Deleting => return before,
        Stage::Expired => SandboxStatus {
            conditions: before.conditions,
            ..SandboxStatus::default()
        },
        Stage::Live | Stage::Expiring => SandboxStatus {
            conditions: before.conditions,
            ..resources(observed, outcome, settings)
        },
    };
    let generation = observed.sandbox.metadata.generation;
    let conditions = &mut status.conditions;
    let mut findings = vec![(ConditionType::Suspended, suspended(observed, outcome))];
    // Once the sandbox has expired, `Finished` stays although the pod is gone.
    if stage != Stage::Expired {
        findings.push((ConditionType::Finished, finished(outcome)));
    }
    for (kind, finding) in findings {
        match finding {
            Some(finding) => merge(conditions, &finding, generation, now),
            None => remove(conditions, kind),
        }
    }
    let scheduled = outcome.pod.as_deref().filter(|_| {
        let form = observed.sandbox.spec.condition_form();
        stage != Stage::Expired && form == ConditionForm::OperatingMode
    });
    match scheduled {
        Some(pod) => set(conditions, pod_scheduled(pod, generation, now)),
        None => remove(conditions, ConditionType::PodScheduled),
    }
    merge(
        conditions,
        &ready(observed, stage, outcome),
        generation,
        now,
    );
    status
}

/// Whether a status is the first of the sandbox, and reports only that the first pod is starting.
pub fn is_first_start(observed: &SandboxFacts, outcome: &Outcome, status: &SandboxStatus) -> bool {
    let is_coming_up = outcome
        .pod
        .as_deref()
        .is_some_and(|pod| pod.metadata.deletion_timestamp.is_none() && loss(pod).is_none());
    let is_waited_for = find(&status.conditions, ConditionType::Ready).is_some_and(|ready| {
        ready.reason == Reason::DependenciesNotReady.as_str()
            && StartProblem::parse(&ready.message).is_none()
    });
    observed.sandbox.status.is_none() && is_coming_up && is_waited_for
}

/// The fields that say what the sandbox is made of.
fn resources(observed: &SandboxFacts, outcome: &Outcome, settings: &Settings<'_>) -> SandboxStatus {
    let namespace = observed.sandbox.metadata.namespace.as_deref();
    let service = outcome
        .service
        .as_ref()
        .and_then(|service| service.metadata.name.clone());
    let service_fqdn = service.as_ref().map(|name| {
        let namespace = namespace.unwrap_or_default();
        format!("{name}.{namespace}.svc.{}", settings.cluster_domain)
    });
    let spec = &observed.sandbox.spec;
    let is_suspended = spec.suspension().is_requested();
    let kept = outcome.pod.as_deref();
    let kept = kept.filter(|_| !is_suspended || spec.suspension_type() != SuspensionType::Stop);
    // A pod that goes, or does not answer, has an address that no client should use.
    let running = kept.filter(|pod| !is_suspended && !freezing::is_frozen(pod));
    SandboxStatus {
        service_fqdn,
        service,
        conditions: Vec::new(),
        replicas: i32::from(outcome.pod.is_some()),
        selector: Some(format!(
            "{}={}",
            labels::SANDBOX_NAME_HASH,
            observed.name_hash()
        )),
        pod_ips: running.map(pod_ips).unwrap_or_default(),
        node_name: kept.and_then(node_name),
    }
}

/// The result of a pod that terminated by itself.
fn finished(outcome: &Outcome) -> Option<Finding> {
    let pod = outcome.pod.as_deref()?;
    let (reason, message) = end_of(pod)?;
    Some(Finding::new(ConditionType::Finished, true, reason, message))
}

/// Whether the pod came to its own end.
pub(super) fn has_ended(pod: &ObservedPod) -> bool {
    end_of(pod).is_some()
}

fn end_of(pod: &ObservedPod) -> Option<(Reason, &'static str)> {
    // A pod that is being deleted was stopped: its phase is not a result of its own.
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    match phase(pod) {
        "Succeeded" => Some((Reason::PodSucceeded, "Pod completed successfully")),
        "Failed" if loss(pod).is_none() => Some((Reason::PodFailed, "Pod failed")),
        _ => None,
    }
}

fn ready(observed: &SandboxFacts, stage: Stage, outcome: &Outcome) -> Finding {
    let not_ready =
        |reason, message: String| Finding::new(ConditionType::Ready, false, reason, message);
    if stage != Stage::Live {
        return not_ready(Reason::SandboxExpired, "Sandbox has expired".to_owned());
    }
    if let Some((reason, message)) = trouble(&outcome.trouble) {
        return not_ready(reason, message);
    }
    if observed.sandbox.spec.suspension().is_requested() {
        let message = suspension_message(observed, outcome);
        return not_ready(Reason::SandboxSuspended, message);
    }
    if let Some((reason, message)) = outcome.pod.as_deref().and_then(end_of) {
        return not_ready(reason, message.to_owned());
    }
    let (pod_is_ready, mut message) = pod_readiness(outcome.pod.as_deref());
    let service_exists = outcome.service.is_some();
    let service_missing = service::is_required(observed, service_exists) && !service_exists;
    if service_exists {
        message.push_str("; Service Exists");
    } else if service_missing {
        message.push_str("; Service does not exist");
    }
    if pod_is_ready && !service_missing {
        return Finding::new(
            ConditionType::Ready,
            true,
            Reason::DependenciesReady,
            message,
        );
    }
    let status = observed.sandbox.status.as_ref();
    let ready = status.and_then(|status| find(&status.conditions, ConditionType::Ready));
    let published = ready.map(|ready| ready.message.as_str());
    let pod = outcome.pod.as_deref().filter(|pod| is_starting(pod));
    if let Some(failure) = pod.and_then(|pod| start_failure(pod, published)) {
        // Text from the pod comes last: clients parse what precedes it.
        message.push_str("; ");
        message.push_str(&failure.to_string());
    }
    not_ready(Reason::DependenciesNotReady, message)
}

/// Whether the pod may still become ready by itself.
fn is_starting(pod: &ObservedPod) -> bool {
    let is_up = has_ready_condition(pod);
    pod.metadata.deletion_timestamp.is_none() && loss(pod).is_none() && !is_up
}

/// One reason and message for all problems. Those that the author of the spec must correct come first.
fn trouble(trouble: &[Trouble]) -> Option<(Reason, String)> {
    let (mut invalid, mut failed, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for trouble in trouble {
        match trouble {
            Trouble::Invalid(message) => invalid.push(message.as_str()),
            Trouble::Failed(message) => failed.push(message.as_str()),
            Trouble::Waiting(message) => waiting.push(message.as_str()),
        }
    }
    if !invalid.is_empty() {
        return Some((Reason::InvalidConfiguration, invalid.join("; ")));
    }
    if !failed.is_empty() {
        let message = format!("Error seen: {}", failed.join("; "));
        return Some((Reason::ReconcilerError, message));
    }
    (!waiting.is_empty()).then(|| (Reason::DependenciesNotReady, waiting.join("; ")))
}

/// A fixed message, which clients compare. If two fields disagree, an event reports which one suspends the sandbox.
fn suspension_message(observed: &SandboxFacts, outcome: &Outcome) -> String {
    let has_other_pod = observed.sandbox.spec.condition_form() == ConditionForm::OperatingMode
        && is_name_taken(observed);
    let finding = suspended(observed, outcome);
    let is_suspended = finding.is_some_and(|finding| finding.status == ConditionStatus::True);
    let message = if is_suspended && !has_other_pod {
        "Sandbox is suspended"
    } else {
        "Sandbox is suspending"
    };
    message.to_owned()
}

fn pod_readiness(pod: Option<&ObservedPod>) -> (bool, String) {
    let Some(pod) = pod else {
        return (false, "Pod does not exist".to_owned());
    };
    if pod.metadata.deletion_timestamp.is_some() {
        return (false, "Pod is terminating".to_owned());
    }
    if let Some(loss) = loss(pod) {
        let message = format!("Pod was lost ({}) and will be recreated", loss.reason);
        return (false, message);
    }
    match phase(pod) {
        "Running" if !has_ready_condition(pod) => {
            (false, "Pod is Running but not Ready".to_owned())
        }
        "Running" if pod_ips(pod).is_empty() => {
            (false, "Pod is Ready but has no IP address".to_owned())
        }
        "Running" => (true, "Pod is Ready".to_owned()),
        phase => (false, format!("Pod exists with phase: {phase}")),
    }
}

pub(super) fn phase(pod: &ObservedPod) -> &str {
    pod.status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending")
}

fn has_ready_condition(pod: &ObservedPod) -> bool {
    pod.status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten())
        .any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

fn pod_ips(pod: &ObservedPod) -> Vec<String> {
    let Some(status) = &pod.status else {
        return Vec::new();
    };
    let listed: Vec<String> = status
        .pod_ips
        .iter()
        .flatten()
        .map(|address| address.ip.clone())
        .collect();
    if listed.is_empty() {
        status.pod_ip.clone().into_iter().collect()
    } else {
        listed
    }
}

/// The node, once the pod has begun to run there: a binding alone is not worth a write.
fn node_name(pod: &ObservedPod) -> Option<String> {
    if phase(pod) == "Pending" {
        return None;
    }
    pod.spec.as_ref()?.node_name.clone()
}
