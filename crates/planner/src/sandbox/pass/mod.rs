//! One pass over a Sandbox: look up its pods, volume claims and service, decide, carry the plan out, publish the status.
//!
//! The first attempt works from the caches. If a write shows that they were outdated, the second one works from the API server.

mod apply;
mod environment;
mod observe;
mod publish;

use std::time::Duration;

use api::Sandbox;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

pub use environment::{Environment, Part};

use self::apply::{Applied, apply};
use self::observe::{Freshness, observe};
use self::publish::{Published, publish};
use super::{SandboxPlan, Stage, decide, is_first_start, status};
use crate::pass::{Action, Error, end_unobserved};

/// How soon an expired sandbox is cleaned up after its status reported the expiry.
const IMMEDIATELY: Duration = Duration::from_millis(1);

/// Brings one sandbox a step closer to its spec.
pub async fn reconcile<E: Environment>(
    env: &E,
    sandbox: &Sandbox,
) -> Result<Action, Error<E::Error>> {
    let name = sandbox.metadata.name.as_deref().unwrap_or_default();
    let settings = env.settings();
    for freshness in [Freshness::Cached, Freshness::Live] {
        let observed = match observe(env, name, freshness).await {
            Ok(Some(observed)) => observed,
            Ok(None) => return Ok(Action::AwaitChange),
            Err(error) => {
                let status = sandbox.status.as_ref();
                let before = status.map_or(&[][..], |status| &status.conditions);
                let sandboxes = env.sandboxes_as_reporter();
                let (now, emit) = (env.now(), |event| env.emit(sandbox, event));
                return end_unobserved(&sandboxes, sandbox, before, error, now, emit).await;
            }
        };
        let plan = decide(&observed, &settings, env.now());
        let applied = apply(env, &observed, &plan).await;
        if applied.is_outdated {
            continue;
        }
        if !applied.sandbox_deleted {
            let now = api_time(env.now());
            let status = status(&observed, plan.stage, &applied.outcome, &settings, &now);
            if is_first_start(&observed, &applied.outcome, &status)
                && let Some(left) = env.delay_first_status()
            {
                return Ok(Action::RequeueAfter(left));
            }
            env.end_status_delay();
            if publish(env, &applied.sandbox, &observed, status).await? == Published::Outdated {
                return Ok(Action::Retry);
            }
        }
        return finish(&plan, applied);
    }
    Ok(Action::Retry)
}

fn finish<E: std::error::Error>(
    plan: &SandboxPlan,
    applied: Applied<E>,
) -> Result<Action, Error<E>> {
    if let Some(failure) = applied.failure {
        return Err(Error::Apply(failure));
    }
    if plan.stage == Stage::Expiring {
        return Ok(Action::RequeueAfter(IMMEDIATELY));
    }
    let is_in_the_way = |problem: &super::Problem| !problem.is_invalid_spec();
    if plan.problems.iter().any(is_in_the_way) {
        // No watch reports that another controller lets go of an object without a sandbox's label.
        return Ok(Action::Retry);
    }
    let requeue = plan.requeue.map(Action::RequeueAfter);
    Ok(requeue.unwrap_or(Action::AwaitChange))
}

/// The time as the API writes it: in whole seconds, so that a value read back equals the value written.
fn api_time(now: Timestamp) -> Time {
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}
