//! Publishes the status of a batch claim.

use std::sync::Arc;

use api::conditions::{self, ConditionType, Reason};
use api::kruise::SandboxClaim;
use kube::ResourceExt;

use super::super::{NextBatch, NextStep, Progress, status};
use super::Environment;
use crate::pass::{Error, Event, Failure, Objects, Precondition, RequestError};
use crate::patch::difference;

/// Writes the claim's status if it differs from the one it has. Returns the claim as it is now, or `None` if it has changed meanwhile.
pub(super) async fn publish<E: Environment>(
    env: &E,
    claim: &Arc<SandboxClaim>,
    progress: &Progress,
    next_step: &NextStep,
    next: &NextBatch,
) -> Result<Option<Arc<SandboxClaim>>, Error<E::Error>> {
    let after = Some(status(claim, progress, next_step, next, env.now()));
    let Some(patch) = difference(&claim.status, &after).map_err(Error::Serialize)? else {
        return Ok(Some(Arc::clone(claim)));
    };
    let (claims, name) = (env.claims(), claim.name_any());
    let precondition = Precondition::unchanged(claim.as_ref());
    match claims.patch_status(&name, &precondition, patch).await {
        Ok(published) => {
            let message = after.and_then(|status| status.message).unwrap_or_default();
            if let Some(event) = event(claim, next_step, message) {
                env.emit(claim, event);
            }
            Ok(Some(published))
        }
        Err(error) => match error.failure() {
            Failure::Conflict | Failure::NotFound => Ok(None),
            _ => Err(Error::Publish(error)),
        },
    }
}

fn event(claim: &SandboxClaim, next_step: &NextStep, message: String) -> Option<Event> {
    match next_step {
        NextStep::Completed(Reason::AllReplicasClaimed) => {
            let reason = Reason::AllReplicasClaimed.as_str();
            Some(Event::normal(reason, "Complete", message))
        }
        NextStep::Completed(reason) => Some(Event::warning(reason.as_str(), "Complete", message)),
        // A set that does not exist yet is no reason for a warning: it may be applied next.
        NextStep::Blocked(Reason::SandboxSetNotFound, _) => None,
        NextStep::Blocked(reason, _) if !was_blocked_by(claim, *reason) => {
            Some(Event::warning(reason.as_str(), "Claim", message))
        }
        _ => None,
    }
}

/// Whether the claim's status gives this reason already.
fn was_blocked_by(claim: &SandboxClaim, reason: Reason) -> bool {
    let status = claim.status.as_ref();
    let completed =
        status.and_then(|status| conditions::find(&status.conditions, ConditionType::Completed));
    completed.is_some_and(|completed| completed.reason == reason.as_str())
}
