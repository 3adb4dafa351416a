//! Writes a sandbox's status, if it changed, and tells of changes that a user would ask about.

use std::sync::Arc;

use api::conditions::{self, ConditionType, Reason};
use api::{Sandbox, SandboxStatus};
use planner::patch;
use planner::sandbox::{Observed, disagreement, is_reported_suspended};

use super::{CONTROLLER, Error, FIELD_MANAGER};
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::key::ObjectKey;
use crate::writes::{Precondition, Writer};

/// Whether the status last said that suspension was asked for.
pub(super) fn was_suspended(sandbox: &Sandbox) -> bool {
    sandbox.status.as_ref().is_some_and(is_reported_suspended)
}

/// What became of a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Published {
    /// It is written, or there was nothing to write, or nothing left to write it to.
    Yes,
    /// The sandbox has changed since it was observed.
    Outdated,
}

/// Publishes a status.
pub(super) async fn publish(
    context: &Context,
    key: &ObjectKey,
    latest: &Arc<Sandbox>,
    observed: &Observed,
    status: SandboxStatus,
) -> Result<Published, Error> {
    let before = observed.sandbox.status.clone().unwrap_or_default();
    let Some(change) = patch::difference(&before, &status).map_err(Error::Serialize)? else {
        return Ok(Published::Yes);
    };
    let precondition = Precondition::unchanged(latest.as_ref());
    let sandboxes = Writer::new(context, &context.caches.sandboxes, FIELD_MANAGER);
    match sandboxes.patch_status(key, &precondition, change).await {
        Ok(_) => {
            tell(context, latest, &before, &status);
            tell_disagreement(context, latest, &before, &status);
            Ok(Published::Yes)
        }
        Err(error) if error.is_not_found() => Ok(Published::Yes),
        Err(error) if error.is_conflict() => Ok(Published::Outdated),
        Err(error) => Err(Error::Publish(error)),
    }
}

/// Emits an event for a new version of the spec whose two fields of suspension disagree.
fn tell_disagreement(
    context: &Context,
    sandbox: &Sandbox,
    before: &SandboxStatus,
    after: &SandboxStatus,
) {
    let observed = |status: &SandboxStatus| {
        let ready = conditions::find(&status.conditions, ConditionType::Ready);
        ready.and_then(|ready| ready.observed_generation)
    };
    if observed(before) == observed(after) {
        return;
    }
    let Some(note) = disagreement(&sandbox.spec, before) else {
        return;
    };
    let occurrence = Occurrence {
        severity: Severity::Normal,
        reason: "SuspensionFieldsDisagree",
        action: "Suspend",
        note: note.to_owned(),
    };
    context.events.record(CONTROLLER, sandbox, occurrence);
}

/// Tells of a sandbox that has become unable to work, or has expired.
fn tell(context: &Context, sandbox: &Sandbox, before: &SandboxStatus, after: &SandboxStatus) {
    let ready = |status: &SandboxStatus| {
        conditions::find(&status.conditions, ConditionType::Ready)
            .map(|ready| (Reason::from_wire(&ready.reason), ready.message.clone()))
    };
    let (was, is) = (ready(before), ready(after));
    if was == is {
        return;
    }
    let Some((Some(reason), message)) = is else {
        return;
    };
    let severity = match reason {
        Reason::InvalidConfiguration | Reason::ReconcilerError => Severity::Warning,
        Reason::SandboxExpired => Severity::Normal,
        _ => return,
    };
    let occurrence = Occurrence {
        severity,
        reason: reason.as_str(),
        action: "Reconcile",
        note: message,
    };
    context.events.record(CONTROLLER, sandbox, occurrence);
}
