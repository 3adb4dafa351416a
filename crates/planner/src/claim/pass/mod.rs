//! One pass over a SandboxClaim: look up what it depends on, decide, carry the decision out, publish the status.
//!
//! A warm claim costs three writes: bind the claim, transfer the sandbox, publish the status. A conflict starts the pass over with the
//! claim as the API server has it; after [`ATTEMPTS`] of them the claim is retried later.

mod apply;
mod environment;
mod observe;
mod publish;

use std::sync::Arc;
use std::time::Duration;

use api::SandboxClaim;
use api::conditions::Reason;
use kube::ResourceExt;

pub use environment::{Announcement, Environment, Source};

use self::apply::{Applied, apply};
use self::observe::observe;
use self::publish::{Published, announce_provisioning, announce_unapplied, publish};
use super::{
    ClaimPlan, Holding, Obstacle, PlannedStatus, Report, decide, decide_unobserved, is_first_start,
    next_look, status,
};
use crate::pass::{Action, Error, Failure, Objects, RequestError};

/// How often one pass starts over after a conflict.
const ATTEMPTS: usize = 3;
/// How soon an expired claim is cleaned up after its status reported the expiry.
const IMMEDIATELY: Duration = Duration::from_millis(1);

/// Brings one claim a step closer to its spec.
pub async fn reconcile<E: Environment>(
    env: &E,
    claim: Arc<SandboxClaim>,
) -> Result<Action, Error<E::Error>> {
    let mut claim = claim;
    for _ in 0..ATTEMPTS {
        match attempt(env, &claim).await? {
            Attempt::Done(action) => return Ok(action),
            Attempt::Outdated => {
                let live = env.claims().get(&claim.name_any()).await;
                match live.map_err(Error::Observe)? {
                    Some(live) if live.uid() == claim.uid() => claim = live,
                    _ => return Ok(Action::AwaitChange),
                }
            }
        }
    }
    report_contention(env, &claim).await?;
    Ok(Action::Retry)
}

enum Attempt {
    Done(Action),
    /// The decision was made from outdated objects; observe again.
    Outdated,
}

async fn attempt<E: Environment>(
    env: &E,
    claim: &Arc<SandboxClaim>,
) -> Result<Attempt, Error<E::Error>> {
    let claim = &env.with_trace(claim);
    let mut facts = observe(env, claim).await;
    let unobserved = facts.unobserved.take();
    let _acquiring = (!facts.is_owned()).then(|| env.acquiring());

    let now = env.now();
    let plan = match &unobserved {
        None => decide(&facts.observed(), now),
        Some(error) => decide_unobserved(&facts.observed(), obstacle_of(error), now),
    };

    let applied = apply(env, claim, &plan.effects).await;
    if applied.transferred {
        facts.keep_candidate();
    }
    if applied.is_outdated() {
        return Ok(Attempt::Outdated);
    }
    announce_provisioning(env, claim, &facts, &applied);
    announce_unapplied(env, claim, &plan);

    let held = match facts.holding() {
        _ if applied.deleted_sandbox => None,
        Holding::Owned(sandbox) => applied.sandbox.as_deref().or(Some(sandbox)),
        _ => applied.sandbox.as_deref(),
    };
    let obstacle = obstacle(&plan, &applied);
    let report = match (&obstacle, &plan.planned_status) {
        (None, PlannedStatus::Silent) => return finish(applied, Action::AwaitChange),
        (Some(obstacle), PlannedStatus::Blocked(_)) if unobserved.is_some() => {
            Report::Unobserved { obstacle }
        }
        (Some(obstacle), _) => Report::Blocked {
            obstacle,
            sandbox: held,
        },
        (None, PlannedStatus::Expired) => Report::Expired { sandbox: held },
        (None, _) => Report::Reflects { sandbox: held },
    };

    let current = applied.claim.as_ref().unwrap_or(claim);
    if is_first_start(current, &report)
        && let Some(left) = env.delay_first_status()
    {
        return finish(applied, Action::RequeueAfter(left));
    }
    env.end_status_delay();
    if publish(env, current, &report).await? == Published::Outdated {
        return Ok(Attempt::Outdated);
    }
    if plan.announces_expiry {
        env.announce(claim, Announcement::Expired);
    }
    if let (Some(error), Report::Unobserved { .. }) = (unobserved, &report)
        && !error.failure().is_lasting()
    {
        return Err(Error::Observe(error));
    }
    let deadline = next_look(current, &status(current, &report, now), now);
    let next = [plan.recheck_after, deadline].into_iter().flatten().min();
    let action = next.map_or(Action::AwaitChange, |delay| {
        Action::RequeueAfter(delay.max(IMMEDIATELY))
    });
    finish(applied, action)
}

/// What stopped the plan, or what the plan says is in the way.
fn obstacle<E: RequestError>(plan: &ClaimPlan, applied: &Applied<E>) -> Option<Obstacle> {
    match (&applied.failure, &plan.planned_status) {
        (Some(error), _) => Some(obstacle_of(error)),
        (None, PlannedStatus::Blocked(planned)) => Some(planned.clone()),
        (None, _) => None,
    }
}

fn obstacle_of<E: RequestError>(error: &E) -> Obstacle {
    match error.failure() {
        // The API will refuse this spec again.
        Failure::Invalid(message) => Obstacle::new(Reason::InvalidConfiguration, message),
        _ => Obstacle::new(
            Reason::ReconcilerError,
            format!("Error seen: {}", error.message()),
        ),
    }
}

/// Ends the attempt. A failure that may pass is retried, later each time.
fn finish<E: RequestError>(applied: Applied<E>, action: Action) -> Result<Attempt, Error<E>> {
    match applied.failure {
        None => Ok(Attempt::Done(action)),
        Some(error) => match error.failure() {
            Failure::Invalid(_) => Ok(Attempt::Done(action)),
            Failure::NamespaceTerminating => Ok(Attempt::Done(Action::AwaitChange)),
            _ => Err(Error::Apply(error)),
        },
    }
}

/// Reports that each attempt met a conflict. A claim that has its sandbox stays Ready: only its metadata could not be synchronised.
async fn report_contention<E: Environment>(
    env: &E,
    claim: &Arc<SandboxClaim>,
) -> Result<(), Error<E::Error>> {
    let status = claim.status.as_ref();
    if status.is_some_and(|status| status.sandbox.is_some()) {
        return Ok(());
    }
    let obstacle = Obstacle::new(
        Reason::AdoptionConflict,
        "Others keep changing the claim or its sandbox; trying again",
    );
    let report = Report::Blocked {
        obstacle: &obstacle,
        sandbox: None,
    };
    let _ = publish(env, claim, &report).await?;
    Ok(())
}
