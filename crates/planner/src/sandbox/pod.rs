//! The pod of a sandbox: created, adopted, synchronized, replaced when it was lost, and deleted or frozen on suspension.
//!
//! A pod that terminates by itself stays, so that its result can be read. Only a lost pod (evicted, disrupted, or on a lost node) is
//! replaced, with a delay that grows while new pods keep being lost.

use std::sync::Arc;
use std::time::Duration;

use api::sandbox::SuspensionType;
use api::{Sandbox, labels};
use k8s_openapi::api::core::v1::{Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::metadata::Freeze;
use super::observed_pod::{ObservedPod, State};
use super::{
    DeletionCause, Effect, Problem, SandboxFacts, SandboxPlan, Settings, freezing, metadata,
    volume_claims,
};
use crate::owner::{Named, Ownership, controller_reference, ownership, with_controller};
use crate::version::Version;

const KIND: &str = "pod";
/// The delay before a second lost pod in a row is replaced; the first is at once.
const RECREATION_DELAY: Duration = Duration::from_secs(10);
const RECREATION_DELAY_MAX: Duration = Duration::from_secs(300);
/// A pod that lived this long before it was lost resets the count.
const STABLE_AFTER: SignedDuration = SignedDuration::from_mins(10);

/// The reasons that a node or the control plane gives a lost pod.
const LOSS_REASONS: [&str; 5] = [
    "Evicted",
    "NodeLost",
    "NodeShutdown",
    "Shutdown",
    "Terminated",
];
const DISRUPTION_TARGET: &str = "DisruptionTarget";

/// Why a pod was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    pub reason: String,
}

/// The name of the sandbox's pod: from its annotation, or the sandbox's own.
pub fn pod_name(sandbox: &Sandbox) -> &str {
    annotated_name(sandbox)
        .or(sandbox.metadata.name.as_deref())
        .unwrap_or_default()
}

/// The pod that is, or may become, the sandbox's.
pub fn current_pod(observed: &SandboxFacts) -> Option<&Arc<ObservedPod>> {
    annotated_pod(observed).or_else(|| named(observed, observed.name()))
}

/// Why the pod was lost, if it was.
pub fn loss(pod: &ObservedPod) -> Option<Loss> {
    let status = pod.status.as_ref()?;
    if status.phase.as_deref() != Some("Failed") {
        return None;
    }
    let reason = status.reason.as_deref();
    if let Some(reason) = reason.filter(|reason| LOSS_REASONS.contains(reason)) {
        return Some(Loss {
            reason: reason.to_owned(),
        });
    }
    let disrupted = status
        .conditions
        .iter()
        .flatten()
        .find(|condition| condition.type_ == DISRUPTION_TARGET && condition.status == "True")?;
    // A pod past its own deadline has terminated by itself, even if its node was also disrupted.
    if reason == Some("DeadlineExceeded") {
        return None;
    }
    let reason = disrupted.reason.clone();
    Some(Loss {
        reason: reason.unwrap_or_else(|| DISRUPTION_TARGET.to_owned()),
    })
}

pub(super) fn plan(
    observed: &SandboxFacts,
    settings: &Settings<'_>,
    now: Timestamp,
    plan: &mut SandboxPlan,
) {
    if observed.sandbox.spec.suspension().is_requested() {
        suspend(observed, plan);
        return;
    }
    if annotated_name(&observed.sandbox).is_some() && annotated_pod(observed).is_none() {
        plan.effects.push(clear_pod_name(observed));
    }
    let Some(pod) = current_pod(observed) else {
        create(observed, 0, plan);
        return;
    };
    if observed.is_leaving(&pod.metadata) {
        if !observed.owns(&pod.metadata) {
            let name = name_of(pod);
            plan.problems.push(Problem::Leaving { kind: KIND, name });
        }
        return;
    }
    match ownership(&pod.metadata, observed.uid()) {
        Ownership::Others(owner) => plan.problems.push(Problem::OwnedByOther {
            kind: KIND,
            name: name_of(pod),
            controller: Named(owner).to_string(),
        }),
        Ownership::Unowned if !settings.adoption.allows(&pod.metadata) => {
            let name = name_of(pod);
            plan.problems
                .push(Problem::NotAdoptable { kind: KIND, name });
        }
        Ownership::Unowned => plan.effects.push(adopt(observed, pod)),
        Ownership::Ours => {
            delete_strays(observed, pod, plan);
            match loss(pod) {
                Some(loss) => replace(observed, pod, loss, now, plan),
                None => keep_in_step(observed, pod, Freeze::NotAsked, plan),
            }
        }
    }
}

fn suspend(observed: &SandboxFacts, plan: &mut SandboxPlan) {
    match observed.sandbox.spec.suspension_type() {
        SuspensionType::Stop => delete_owned(observed, &DeletionCause::Suspended, plan),
        _ => keep_suspended(observed, plan),
    }
    // Until the pod is gone, the annotation is needed to find it.
    let owns_any = observed.pods.iter().any(|pod| observed.owns(&pod.metadata));
    if !owns_any && annotated_name(&observed.sandbox).is_some() {
        plan.effects.push(clear_pod_name(observed));
    }
}

/// Keeps the pod of a sandbox that is suspended without losing it, and makes none. Where the strategy is not possible, the pod runs on:
/// a pod that stopped instead would lose what the strategy is to keep.
fn keep_suspended(observed: &SandboxFacts, plan: &mut SandboxPlan) {
    let own = current_pod(observed).filter(|pod| observed.owns(&pod.metadata));
    let Some(pod) = own else {
        delete_owned(observed, &DeletionCause::Stray, plan);
        return;
    };
    if pod.metadata.deletion_timestamp.is_some() {
        return;
    }
    delete_strays(observed, pod, plan);
    match loss(pod) {
        Some(loss) => {
            delete_if_owned(observed, pod, &DeletionCause::LostSuspended(loss), plan);
        }
        None => keep_in_step(observed, pod, freezing::request(observed, pod), plan),
    }
}

/// Deletes every pod that is the sandbox's.
pub(super) fn delete_owned(observed: &SandboxFacts, cause: &DeletionCause, plan: &mut SandboxPlan) {
    for pod in &observed.pods {
        delete_if_owned(observed, pod, cause, plan);
    }
}

fn delete_strays(observed: &SandboxFacts, current: &ObservedPod, plan: &mut SandboxPlan) {
    for pod in &observed.pods {
        if pod.metadata.name != current.metadata.name {
            delete_if_owned(observed, pod, &DeletionCause::Stray, plan);
        }
    }
}

fn delete_if_owned(
    observed: &SandboxFacts,
    pod: &ObservedPod,
    cause: &DeletionCause,
    plan: &mut SandboxPlan,
) {
    if observed.owns(&pod.metadata) && pod.metadata.deletion_timestamp.is_none() {
        plan.effects.push(Effect::DeletePod {
            name: name_of(pod),
            uid: pod.metadata.uid.clone(),
            cause: cause.clone(),
        });
    }
}

/// Makes a pod, unless a volume it would mount is not the sandbox's.
fn create(observed: &SandboxFacts, recreations: u32, plan: &mut SandboxPlan) {
    if !plan.problems.is_empty() {
        return;
    }
    let wanted = metadata::wanted(observed);
    let mut annotations = wanted.annotations;
    if recreations > 0 {
        annotations.insert(labels::POD_RECREATIONS.to_owned(), recreations.to_string());
    }
    let mut spec = PodSpec::clone(&observed.sandbox.spec.pod_template.spec);
    volume_claims::merge_volumes(observed, &mut spec);
    plan.effects.push(Effect::CreatePod(Box::new(Pod {
        metadata: ObjectMeta {
            name: observed.sandbox.metadata.name.clone(),
            namespace: observed.sandbox.metadata.namespace.clone(),
            labels: Some(wanted.labels),
            annotations: (!annotations.is_empty()).then_some(annotations),
            owner_references: Some(vec![controller_reference(observed.sandbox.as_ref())]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    })));
}

fn adopt(observed: &SandboxFacts, pod: &ObservedPod) -> Effect {
    let mut patch = metadata::drift(observed, &pod.metadata, Freeze::NotAsked).unwrap_or_default();
    let owner = controller_reference(observed.sandbox.as_ref());
    let owners = with_controller(&pod.metadata, owner);
    patch.insert("ownerReferences".to_owned(), json!(owners));
    Effect::AdoptPod {
        name: name_of(pod),
        version: Version::of_metadata(&pod.metadata),
        patch: json!({ "metadata": patch }),
    }
}

fn keep_in_step(
    observed: &SandboxFacts,
    pod: &ObservedPod,
    freeze: Freeze,
    plan: &mut SandboxPlan,
) {
    if let Some(patch) = metadata::drift(observed, &pod.metadata, freeze) {
        plan.effects.push(Effect::UpdatePodMetadata {
            name: name_of(pod),
            version: Version::of_metadata(&pod.metadata),
            patch: json!({ "metadata": patch }),
        });
    }
}

/// Replaces a lost pod, now or when its delay is over.
fn replace(
    observed: &SandboxFacts,
    pod: &ObservedPod,
    loss: Loss,
    now: Timestamp,
    plan: &mut SandboxPlan,
) {
    let lost_at = lost_at(pod).unwrap_or(now);
    let losses = losses_before(pod, lost_at);
    let delay = recreation_delay(losses);
    let waited = Duration::try_from(now.duration_since(lost_at)).unwrap_or_default();
    let left = delay.saturating_sub(waited);
    if !left.is_zero() {
        plan.look_again_after(left);
        return;
    }
    plan.effects.push(Effect::DeletePod {
        name: name_of(pod),
        uid: pod.metadata.uid.clone(),
        cause: DeletionCause::Lost(loss),
    });
    if annotated_pod(observed).is_some() {
        plan.effects.push(clear_pod_name(observed));
    }
    create(observed, losses + 1, plan);
}

fn recreation_delay(losses: u32) -> Duration {
    match losses.checked_sub(1) {
        None => Duration::ZERO,
        Some(exponent) => RECREATION_DELAY
            .saturating_mul(1 << exponent.min(16))
            .min(RECREATION_DELAY_MAX),
    }
}

/// How many pods in a row were lost before this one.
fn losses_before(pod: &ObservedPod, lost_at: Timestamp) -> u32 {
    let created_at = pod.metadata.creation_timestamp.as_ref();
    let was_stable =
        created_at.is_some_and(|created| lost_at.duration_since(created.0) >= STABLE_AFTER);
    let count = pod
        .metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(labels::POD_RECREATIONS))
        .and_then(|count| count.parse().ok());
    if was_stable { 0 } else { count.unwrap_or(0) }
}

/// When the pod was lost: when the last of its conditions changed.
fn lost_at(pod: &ObservedPod) -> Option<Timestamp> {
    let conditions = |status: &State| {
        status
            .conditions
            .iter()
            .flatten()
            .filter_map(|condition| condition.last_transition_time.as_ref())
            .map(|time| time.0)
            .max()
    };
    let created = pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    pod.status.as_ref().and_then(conditions).or(created)
}

fn clear_pod_name(observed: &SandboxFacts) -> Effect {
    Effect::ClearPodName {
        version: Version::of_metadata(&observed.sandbox.metadata),
        patch: json!({ "metadata": { "annotations": { labels::POD_NAME: Value::Null } } }),
    }
}

fn annotated_name(sandbox: &Sandbox) -> Option<&str> {
    let annotations = sandbox.metadata.annotations.as_ref()?;
    let name = annotations.get(labels::POD_NAME)?;
    (!name.is_empty()).then_some(name)
}

fn annotated_pod(observed: &SandboxFacts) -> Option<&Arc<ObservedPod>> {
    named(observed, annotated_name(&observed.sandbox)?)
}

fn named<'a>(observed: &'a SandboxFacts, name: &str) -> Option<&'a Arc<ObservedPod>> {
    observed
        .pods
        .iter()
        .find(|pod| pod.metadata.name.as_deref() == Some(name))
}

fn name_of(pod: &ObservedPod) -> String {
    pod.metadata.name.clone().unwrap_or_default()
}
