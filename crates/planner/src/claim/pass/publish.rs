//! Publishes the status of a claim, and announces changes by events, metrics and log lines.

use std::sync::Arc;

use api::conditions::{self, ConditionType, Reason};
use api::{SandboxClaim, SandboxClaimStatus};
use kube::ResourceExt;

use super::super::{ClaimPlan, Obstacle, Report, status};
use super::apply::Applied;
use super::observe::Facts;
use super::{Announcement, Environment, Source};
use crate::owner::controller_of;
use crate::pass::{Error, Failure, Objects, Precondition, RequestError};
use crate::patch::difference;

/// Whether a status was about the claim as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Published {
    Yes,
    /// The claim has changed, and the status may no longer be true.
    Outdated,
}

/// Writes the claim's status if it differs from the one it has.
pub(super) async fn publish<E: Environment>(
    env: &E,
    claim: &Arc<SandboxClaim>,
    report: &Report<'_>,
) -> Result<Published, Error<E::Error>> {
    let before = claim.status.clone().unwrap_or_default();
    let after = status(claim, report, env.now());
    let Some(patch) = difference(&before, &after).map_err(Error::Serialize)? else {
        return Ok(Published::Yes);
    };
    let is_final = matches!(report, Report::Expired { .. });
    // Its deadline may just have been extended.
    let precondition = if is_final {
        Precondition::unchanged(claim.as_ref())
    } else {
        Precondition::same(claim.as_ref())
    };
    let (claims, name) = (env.claims(), claim.name_any());
    if let Err(error) = claims.patch_status(&name, &precondition, patch).await {
        return match error.failure() {
            Failure::Conflict if is_final => Ok(Published::Outdated),
            // The claim is gone, or replaced by another of its name.
            Failure::Conflict | Failure::NotFound => Ok(Published::Yes),
            _ => Err(Error::Publish(error)),
        };
    }
    if let Report::Blocked { obstacle, .. } | Report::Unobserved { obstacle } = report
        && is_new(obstacle, &before)
    {
        env.announce(claim, Announcement::Blocked(obstacle));
    }
    if let Report::Reflects {
        sandbox: Some(sandbox),
    } = report
        && conditions::is_true(&after.conditions, ConditionType::Ready)
        && env.is_first_ready(claim)
    {
        env.announce(claim, Announcement::FirstReady { sandbox });
    }
    Ok(Published::Yes)
}

/// Whether the status before does not give the reason of an obstacle yet. Waiting for a sandbox to be deleted is not worth a warning.
fn is_new(obstacle: &Obstacle, before: &SandboxClaimStatus) -> bool {
    let ready = conditions::find(&before.conditions, ConditionType::Ready);
    let is_known = ready.is_some_and(|ready| ready.reason == obstacle.reason.as_str());
    !is_known && obstacle.reason != Reason::SandboxNotReady
}

/// Announces that the claim got its sandbox, and from where.
pub(super) fn announce_provisioning<E: Environment>(
    env: &E,
    claim: &SandboxClaim,
    facts: &Facts<E>,
    applied: &Applied<E::Error>,
) {
    let Some(sandbox) = applied.sandbox.as_deref() else {
        return;
    };
    let source = if applied.transferred {
        let before = facts.before_adoption(sandbox);
        let status = before.and_then(|before| before.status.as_ref());
        Source::Adopted {
            warm_pool: before
                .and_then(|before| controller_of(&before.metadata))
                .map(|owner| owner.name.as_str()),
            was_ready: status.is_some_and(|status| {
                conditions::is_true(&status.conditions, ConditionType::Ready)
            }),
        }
    } else if applied.created {
        Source::Created
    } else {
        return;
    };
    let announcement = Announcement::Provisioned {
        sandbox,
        source,
        wanted_warm: facts.wanted_warm,
    };
    env.announce(claim, announcement);
}

/// Announces why a part of the claim's metadata does not reach its pod, once for each generation of its spec.
pub(super) fn announce_unapplied<E: Environment>(env: &E, claim: &SandboxClaim, plan: &ClaimPlan) {
    let Some(why) = &plan.unapplied else {
        return;
    };
    let status = claim.status.as_ref();
    let ready =
        status.and_then(|status| conditions::find(&status.conditions, ConditionType::Ready));
    if ready.is_none_or(|ready| ready.observed_generation != claim.metadata.generation) {
        env.announce(claim, Announcement::MetadataNotApplied(why));
    }
}
