//! What to do about a SandboxClaim.
//!
//! A claim gets its sandbox in three writes: it is bound (the sandbox's name on the claim, which is the intent), the sandbox is
//! transferred to it or created for it, and its status is published. The binding comes first and is written under the claim's optimistic
//! lock; the transfer under the sandbox's. That keeps the guarantees below despite stale caches, queues and crashes:
//!
//! # Guarantees
//! - A sandbox is held by at most one claim: the transfer only succeeds on a sandbox that is still its pool's.
//! - A claim holds at most one sandbox: only the sandbox it is bound to is ever transferred or made for it, and it is bound to
//!   another only once that one is known to be gone or another owner's. One that is made for it has the claim's own name, so
//!   that making it twice is impossible.
//! - Users can edit the binding. A claim that lost it still has the sandbox whose owner reference names the claim, and gets the
//!   binding again. A binding to a warm sandbox that the claim's spec does not allow it to adopt is replaced.
//!
//! ```text
//!   Free ──bind(warm)──▶ Bound ──transfer──▶ Owned
//!    │ ▲                    │                    │
//!    │ └── gone or another's┘◀────── gone ───────┘
//!    └────bind(own name)──▶ Planned ──create──▶ Owned
//! ```

mod acquisition;
mod binding;
mod holding;
mod pass;
mod pod_metadata;
mod status;

use std::time::Duration;

use api::claim::{ClaimShutdownPolicy, ClaimSource};
use api::conditions::{self, ConditionType, Reason};
use api::metadata;
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::Value;

pub use acquisition::{candidate, is_adoptable, warm_request};
pub use binding::unfinished_binding;
pub use holding::{Holding, holding, names_to_look_up};
pub use pass::{Announcement, Environment, Source, reconcile};
pub use status::{Report, is_first_start, next_look, status};

use crate::blueprint::Blueprint;
use crate::expiry::{Deadlines, Expiry, expiry};
use crate::owner::is_controlled_by;
use crate::version::Version;

/// The delay before a missing template or pool is looked up again. Its creation ends the wait.
const ABSENCE_RECHECK: Duration = Duration::from_secs(60);

/// Something a claim refers to.
#[derive(Debug)]
pub enum Lookup<'a, K> {
    /// The claim does not refer to one.
    NotAsked,
    Found(&'a K),
    /// The API server has confirmed that it does not exist.
    Missing,
}

impl<K> Clone for Lookup<'_, K> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<K> Copy for Lookup<'_, K> {}

impl<'a, K> Lookup<'a, K> {
    pub fn found(self) -> Option<&'a K> {
        match self {
            Self::Found(object) => Some(object),
            Self::NotAsked | Self::Missing => None,
        }
    }
}

/// The facts that a decision about a claim rests on.
#[derive(Clone, Copy, Debug)]
pub struct ClaimFacts<'a> {
    pub claim: &'a SandboxClaim,
    /// The pool that `warmPoolRef` names.
    pub pool: Lookup<'a, SandboxWarmPool>,
    /// The template that the claim, its pool, or the sandbox it holds names.
    pub template: Lookup<'a, SandboxTemplate>,
    pub holding: Holding<'a>,
    /// The metadata of a sandbox that the claim controls and that cannot be decoded.
    pub unreadable: Option<&'a ObjectMeta>,
    /// A sandbox of the claim's name that is not the claim's.
    pub namesake: Option<&'a Sandbox>,
    /// A warm sandbox that the queue has set aside for this claim.
    pub candidate: Option<&'a Sandbox>,
    /// The policy that older controllers made for each claim.
    pub legacy_policy: Option<&'a NetworkPolicy>,
    /// When the controller first saw the claim.
    pub first_observed: Timestamp,
}

/// A write, with its preconditions.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Write on the claim which sandbox it is to have.
    Bind {
        sandbox: String,
        patch: Value,
    },
    /// Take a stale binding off the claim.
    Unbind {
        patch: Value,
    },
    /// Make a warm sandbox the claim's.
    Transfer {
        sandbox: Version,
        patch: Value,
    },
    /// Make a sandbox for the claim.
    Create {
        sandbox: Box<Sandbox>,
    },
    /// Bring the sandbox's pod metadata in line with template and claim.
    SyncMetadata {
        sandbox: Version,
        patch: Value,
    },
    DeleteSandbox {
        sandbox: Version,
    },
    DeleteClaim {
        foreground: bool,
    },
    DeleteLegacyPolicy {
        policy: Version,
    },
}

/// What the claim waits for, or why it is invalid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    pub reason: Reason,
    pub message: String,
}

impl Obstacle {
    pub fn new(reason: Reason, message: impl std::fmt::Display) -> Self {
        Self {
            reason,
            message: format!("{message}"),
        }
    }
}

/// What the claim's status reports once the effects are applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlannedStatus {
    /// Nothing: the claim is being deleted, or gone.
    Silent,
    /// The state of its sandbox.
    Reflect,
    /// Why it has no sandbox, or the wrong one.
    Blocked(Obstacle),
    /// It has expired.
    Expired,
}

/// What to do about a claim.
#[derive(Clone, Debug, PartialEq)]
pub struct ClaimPlan {
    pub effects: Vec<Effect>,
    pub planned_status: PlannedStatus,
    /// The claim has just expired, which is announced.
    pub announces_expiry: bool,
    /// Why part of the claim's metadata does not reach its pod, if that is so.
    pub unapplied: Option<String>,
    /// When to reconcile again without a change, besides the claim's deadlines.
    pub recheck_after: Option<Duration>,
}

/// Decides what to do about a claim.
pub fn decide(observed: &ClaimFacts<'_>, now: Timestamp) -> ClaimPlan {
    decide_by(observed, now, acquisition::decide)
}

/// Decides what to do about a claim whose dependencies could not all be looked up: it still expires, but gets no sandbox.
pub fn decide_unobserved(
    observed: &ClaimFacts<'_>,
    obstacle: Obstacle,
    now: Timestamp,
) -> ClaimPlan {
    let mut plan = decide_by(observed, now, |_| Ok(Vec::new()));
    if plan.planned_status == PlannedStatus::Reflect {
        plan.planned_status = PlannedStatus::Blocked(obstacle);
    }
    plan
}

fn decide_by(
    observed: &ClaimFacts<'_>,
    now: Timestamp,
    acquire: impl Fn(&ClaimFacts<'_>) -> Result<Vec<Effect>, Obstacle>,
) -> ClaimPlan {
    let mut plan = ClaimPlan {
        effects: Vec::new(),
        planned_status: PlannedStatus::Silent,
        announces_expiry: false,
        unapplied: None,
        recheck_after: None,
    };
    if observed.claim.metadata.deletion_timestamp.is_some() {
        return plan;
    }
    plan.effects.extend(legacy_cleanup(observed));
    if expiry_of(observed.claim, now).has_passed() {
        decide_expired(observed, &mut plan);
        return plan;
    }
    plan.effects.extend(binding::restore(observed));
    plan.unapplied = unapplied(observed);
    match acquire(observed) {
        Ok(effects) => {
            plan.effects.extend(effects);
            plan.planned_status = PlannedStatus::Reflect;
        }
        Err(obstacle) => {
            if let Holding::Broken { .. } = observed.holding {
                plan.effects.push(binding::unbind());
            }
            let is_absence = matches!(
                obstacle.reason,
                Reason::TemplateNotFound
                    | Reason::WarmPoolNotFound
                    | Reason::ReconcilerError
                    | Reason::SandboxNotReady
            );
            plan.recheck_after = is_absence.then_some(ABSENCE_RECHECK);
            plan.planned_status = PlannedStatus::Blocked(obstacle);
        }
    }
    plan
}

/// Why part of the claim's metadata cannot be given to its pod, if that is so.
fn unapplied(observed: &ClaimFacts<'_>) -> Option<String> {
    let keys = pod_metadata::unchangeable(observed);
    if keys.is_empty() {
        return None;
    }
    let template =
        template_name(observed.claim, observed.holding, observed.pool).unwrap_or_default();
    Some(format!(
        "spec.additionalPodMetadata: {} of the pod stay as they are, because SandboxTemplate {template:?}, which may have set them, is gone; \
         create the template again to change them",
        keys.join(", ")
    ))
}

/// Whether the claim has expired, or when it will.
fn expiry_of(claim: &SandboxClaim, now: Timestamp) -> Expiry {
    let conditions = claim
        .status
        .as_ref()
        .map_or(&[][..], |status| &status.conditions);
    expiry(&deadlines(claim, conditions), now)
}

fn deadlines<'a>(
    claim: &'a SandboxClaim,
    conditions: &'a [k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition],
) -> Deadlines<'a> {
    let lifecycle = claim.spec.lifecycle.as_ref();
    Deadlines {
        shutdown_time: lifecycle.and_then(|lifecycle| lifecycle.shutdown_time.as_ref()),
        ttl_seconds_after_finished: lifecycle
            .and_then(|lifecycle| lifecycle.ttl_seconds_after_finished),
        conditions,
    }
}

/// First the status reports the expiry, then the next pass deletes the sandbox: a client that watches sees the reason before the sandbox
/// is gone.
fn decide_expired(observed: &ClaimFacts<'_>, plan: &mut ClaimPlan) {
    plan.planned_status = PlannedStatus::Expired;
    if !is_marked_expired(observed.claim) {
        plan.announces_expiry = true;
        plan.recheck_after = Some(Duration::ZERO);
        return;
    }
    match observed.claim.spec.shutdown_policy() {
        ClaimShutdownPolicy::Delete => {
            plan.effects.push(Effect::DeleteClaim { foreground: false });
            plan.planned_status = PlannedStatus::Silent;
        }
        ClaimShutdownPolicy::DeleteForeground => {
            plan.effects.push(Effect::DeleteClaim { foreground: true });
            plan.planned_status = PlannedStatus::Silent;
        }
        ClaimShutdownPolicy::Retain => {
            let held = match observed.holding {
                Holding::Owned(sandbox) => Some(&sandbox.metadata),
                _ => observed.unreadable,
            };
            if let Some(metadata) = held
                && metadata.deletion_timestamp.is_none()
            {
                plan.effects.push(Effect::DeleteSandbox {
                    sandbox: Version::of_metadata(metadata),
                });
            }
        }
    }
}

fn is_marked_expired(claim: &SandboxClaim) -> bool {
    claim
        .status
        .as_ref()
        .and_then(|status| conditions::find(&status.conditions, ConditionType::Ready))
        .is_some_and(|ready| ready.reason == Reason::ClaimExpired.as_str())
}

/// The name of the policy that older controllers made for each claim.
pub fn legacy_policy_name(claim: &str) -> String {
    format!("{claim}-network-policy")
}

/// Deletes a policy only if the claim controls it; a user's policy of the same name stays.
fn legacy_cleanup(observed: &ClaimFacts<'_>) -> Option<Effect> {
    let policy = observed.legacy_policy?;
    let uid = observed.claim.metadata.uid.as_deref()?;
    let is_ours =
        is_controlled_by(&policy.metadata, uid) && policy.metadata.deletion_timestamp.is_none();
    is_ours.then(|| Effect::DeleteLegacyPolicy {
        policy: Version::of(policy),
    })
}

/// The name of the template to look up: that of the sandbox the claim holds, else the one its source names.
pub fn template_name<'a>(
    claim: &'a SandboxClaim,
    holding: Holding<'a>,
    pool: Lookup<'a, SandboxWarmPool>,
) -> Option<&'a str> {
    if let Holding::Owned(sandbox) | Holding::Bound(sandbox) = holding
        && let Some(name) = sandbox.annotations().get(api::labels::SANDBOX_TEMPLATE_REF)
    {
        return Some(name);
    }
    match claim.spec.source().ok()? {
        ClaimSource::Template { template, .. } => Some(template),
        ClaimSource::Pool { .. } => pool
            .found()
            .map(|pool| pool.spec.sandbox_template_ref.name.as_str()),
    }
}

/// Validates the claim's own fields.
fn validate(claim: &SandboxClaim) -> Result<ClaimSource<'_>, Obstacle> {
    let source = claim
        .spec
        .source()
        .map_err(|error| Obstacle::new(Reason::InvalidConfiguration, error))?;
    if let Some(additional) = &claim.spec.additional_pod_metadata {
        metadata::validate(additional)
            .map_err(|error| Obstacle::new(Reason::InvalidMetadata, error))?;
    }
    Ok(source)
}

fn blueprint(template: Lookup<'_, SandboxTemplate>) -> Option<Blueprint<'_>> {
    template.found().map(Blueprint::for_claim)
}

#[cfg(test)]
mod tests;
