//! Publishes the status of a sandbox, and emits events about changes that a user would ask about.

use std::sync::Arc;

use api::conditions::{self, ConditionType, Reason};
use api::{Sandbox, SandboxStatus};

use super::super::{SandboxFacts, disagreement};
use super::Environment;
use crate::pass::{Error, Event, Failure, Objects, Precondition, RequestError};
use crate::patch;

/// The result of publishing a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Published {
    /// It is written, or it did not differ, or the sandbox is gone.
    Yes,
    /// The sandbox has changed since it was observed.
    Outdated,
}

/// Writes the status of a sandbox if it differs from the one it has.
pub(super) async fn publish<E: Environment>(
    env: &E,
    latest: &Arc<Sandbox>,
    observed: &SandboxFacts,
    status: SandboxStatus,
) -> Result<Published, Error<E::Error>> {
    let before = observed.sandbox.status.clone().unwrap_or_default();
    let Some(change) = patch::difference(&before, &status).map_err(Error::Serialize)? else {
        return Ok(Published::Yes);
    };
    let name = latest.metadata.name.as_deref().unwrap_or_default();
    let precondition = Precondition::unchanged(latest.as_ref());
    let sandboxes = env.sandboxes();
    if let Err(error) = sandboxes.patch_status(name, &precondition, change).await {
        return match error.failure() {
            Failure::NotFound => Ok(Published::Yes),
            Failure::Conflict => Ok(Published::Outdated),
            _ => Err(Error::Publish(error)),
        };
    }
    let events = [
        problem_or_expiry(&before, &status),
        fields_disagree(latest, &before, &status),
    ];
    for event in events.into_iter().flatten() {
        env.emit(latest, event);
    }
    Ok(Published::Yes)
}

/// The event about a sandbox that has become unable to work, or has expired.
fn problem_or_expiry(before: &SandboxStatus, after: &SandboxStatus) -> Option<Event> {
    let ready = |status: &SandboxStatus| {
        conditions::find(&status.conditions, ConditionType::Ready)
            .map(|ready| (Reason::from_wire(&ready.reason), ready.message.clone()))
    };
    let (was, is) = (ready(before), ready(after));
    if was == is {
        return None;
    }
    let (reason, message) = is?;
    let reason = reason?;
    match reason {
        Reason::InvalidConfiguration | Reason::ReconcilerError => {
            Some(Event::warning(reason.as_str(), "Reconcile", message))
        }
        Reason::SandboxExpired => Some(Event::normal(reason.as_str(), "Reconcile", message)),
        _ => None,
    }
}

/// The event about a new generation of the spec whose two suspension fields disagree.
fn fields_disagree(
    sandbox: &Sandbox,
    before: &SandboxStatus,
    after: &SandboxStatus,
) -> Option<Event> {
    let observed = |status: &SandboxStatus| {
        let ready = conditions::find(&status.conditions, ConditionType::Ready);
        ready.and_then(|ready| ready.observed_generation)
    };
    if observed(before) == observed(after) {
        return None;
    }
    let note = disagreement(&sandbox.spec, before)?.to_owned();
    Some(Event::normal("SuspensionFieldsDisagree", "Suspend", note))
}
