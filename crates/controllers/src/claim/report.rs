//! Tells the world what became of a claim: its status, events, measurements.

use std::sync::Arc;
use std::time::Duration;

use api::conditions::{self, ConditionType, Reason};
use api::{Sandbox, SandboxClaim, SandboxClaimStatus, labels};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use planner::claim::{Obstacle, Report, status};
use planner::owner::controller_of;
use planner::patch::difference;

use super::apply::{self, Applied};
use super::observe::Facts;
use super::{CONTROLLER, Claims, Error};
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::instrumentation::{ClaimReadiness, Launch, Provisioning};
use crate::key::ObjectKey;
use crate::writes::Precondition;

/// Whether a report was about the claim as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Published {
    Yes,
    /// The claim had changed since, and what was to be said of it may not be so any more.
    Outdated,
}

/// Writes the claim's status if it says anything new.
pub(super) async fn publish(
    context: &Context,
    claims: &Claims,
    key: &ObjectKey,
    claim: &Arc<SandboxClaim>,
    report: &Report<'_>,
) -> Result<Published, Error> {
    let before = claim.status.clone().unwrap_or_default();
    let after = status(claim, report, context.clock.now());
    let Some(patch) = difference(&before, &after).map_err(Error::Serialize)? else {
        return Ok(Published::Yes);
    };
    let is_final = matches!(report, Report::Expired { .. });
    // Its time may just have been extended.
    let precondition = if is_final {
        Precondition::unchanged(claim.as_ref())
    } else {
        Precondition::same(claim.as_ref())
    };
    let answer = apply::claims(context)
        .patch_status(key, &precondition, patch)
        .await;
    match answer {
        Ok(_) => {}
        Err(error) if is_final && error.is_conflict() => return Ok(Published::Outdated),
        // It is gone, or another of its name took its place.
        Err(error) if error.is_not_found() || error.is_conflict() => return Ok(Published::Yes),
        Err(error) => return Err(Error::Publish(error)),
    }
    if let Report::Blocked { obstacle, .. } | Report::Unobserved { obstacle } = report {
        tell_obstacle(context, claim, &before, obstacle);
    }
    if let Report::Reflects {
        sandbox: Some(sandbox),
    } = report
        && is_ready(&after)
        && claims.first_ready.is_now(claim)
    {
        measure_readiness(context, claim, sandbox);
    }
    Ok(Published::Yes)
}

pub(super) fn is_ready(status: &SandboxClaimStatus) -> bool {
    conditions::is_true(&status.conditions, ConditionType::Ready)
}

fn measure_readiness(context: &Context, claim: &SandboxClaim, sandbox: &Sandbox) {
    let now = context.clock.now();
    // A time that cannot be read, or lies ahead of ours, tells nothing.
    let since = |annotation: &str| {
        let moment: Timestamp = claim.annotations().get(annotation)?.parse().ok()?;
        Duration::try_from(now.duration_since(moment)).ok()
    };
    let launch = if sandbox.annotations().contains_key(labels::POD_NAME) {
        Launch::Warm
    } else {
        Launch::Cold
    };
    let ready_at = sandbox
        .status
        .as_ref()
        .and_then(|status| conditions::find(&status.conditions, ConditionType::Ready))
        .map(|ready| ready.last_transition_time.0);
    let created_at = sandbox
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|time| time.0);
    context.instrumentation.claim_ready(&ClaimReadiness {
        namespace: claim.metadata.namespace.as_deref().unwrap_or_default(),
        template: template_of(sandbox),
        launch,
        since_admission: since(labels::WEBHOOK_FIRST_OBSERVED_AT),
        since_request: since(labels::CLIENT_FIRST_REQUESTED_AT),
        since_first_observed: since(labels::CONTROLLER_FIRST_OBSERVED_AT),
        sandbox_creation: ready_at
            .zip(created_at)
            .and_then(|(ready, created)| Duration::try_from(ready.duration_since(created)).ok()),
    });
}

fn template_of(sandbox: &Sandbox) -> &str {
    sandbox
        .annotations()
        .get(labels::SANDBOX_TEMPLATE_REF)
        .map_or("", String::as_str)
}

/// Tells what stands in a claim's way, once for each thing.
fn tell_obstacle(
    context: &Context,
    claim: &SandboxClaim,
    before: &SandboxClaimStatus,
    obstacle: &Obstacle,
) {
    let known = conditions::find(&before.conditions, ConditionType::Ready)
        .is_some_and(|ready| ready.reason == obstacle.reason.as_str());
    // That it waits for something to go is nothing to warn of.
    let is_wait = obstacle.reason == Reason::SandboxNotReady;
    if known || is_wait {
        return;
    }
    let occurrence = Occurrence {
        severity: Severity::Warning,
        reason: obstacle.reason.as_str(),
        action: "Provision",
        note: obstacle.message.clone(),
    };
    context.events.record(CONTROLLER, claim, occurrence);
}

/// Tells that the claim got its sandbox, and from where.
pub(super) fn tell_provisioning(
    context: &Context,
    claim: &SandboxClaim,
    facts: &Facts,
    applied: &Applied,
) {
    let Some(sandbox) = applied.sandbox.as_deref() else {
        return;
    };
    if !applied.transferred && !applied.created {
        return;
    }
    let source = facts.source_of(sandbox);
    let pool = source
        .and_then(|before| controller_of(&before.metadata))
        .map(|owner| owner.name.as_str());
    let was_ready = source
        .and_then(|before| before.status.as_ref())
        .is_some_and(|status| conditions::is_true(&status.conditions, ConditionType::Ready));
    context.instrumentation.claim_provisioned(&Provisioning {
        namespace: claim.metadata.namespace.as_deref().unwrap_or_default(),
        template: template_of(sandbox),
        launch: if applied.transferred {
            Launch::Warm
        } else {
            Launch::Cold
        },
        pool: pool.filter(|_| applied.transferred),
        was_ready: was_ready && applied.transferred,
        wanted_warm: facts.wanted_warm,
    });
    let name = sandbox.name_any();
    let occurrence = if applied.transferred {
        Occurrence {
            severity: Severity::Normal,
            reason: "SandboxAdopted",
            action: "Adopt",
            note: format!(
                "Adopted warm sandbox {name:?} from pool {:?}",
                pool.unwrap_or("none")
            ),
        }
    } else {
        Occurrence {
            severity: Severity::Normal,
            reason: "SandboxProvisioned",
            action: "Create",
            note: format!("Created sandbox {name:?}"),
        }
    };
    context.events.record(CONTROLLER, claim, occurrence);
}

/// Tells why part of the claim's metadata does not reach its pod, once for each change of its spec.
pub(super) fn tell_unapplied(context: &Context, claim: &SandboxClaim, why: &str) {
    let status = claim.status.as_ref();
    let ready =
        status.and_then(|status| conditions::find(&status.conditions, ConditionType::Ready));
    if ready.is_some_and(|ready| ready.observed_generation == claim.metadata.generation) {
        return;
    }
    let occurrence = Occurrence {
        severity: Severity::Warning,
        reason: "MetadataNotApplied",
        action: "Sync",
        note: why.to_owned(),
    };
    context.events.record(CONTROLLER, claim, occurrence);
}

/// Tells that the claim has expired.
pub(super) fn tell_expiry(context: &Context, claim: &SandboxClaim) {
    let occurrence = Occurrence {
        severity: Severity::Normal,
        reason: Reason::ClaimExpired.as_str(),
        action: "Expire",
        note: format!(
            "Claim {:?} has expired; its shutdown policy is carried out",
            claim.name_any()
        ),
    };
    context.events.record(CONTROLLER, claim, occurrence);
}
