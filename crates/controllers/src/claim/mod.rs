//! The controller of `SandboxClaim`: gets each claim its sandbox, as [`planner::claim`] decides.
//!
//! A warm claim costs three writes before it is Ready: bind the claim, transfer the sandbox, publish the status.

mod acquired;
mod apply;
mod first_ready;
mod observe;
mod report;

use std::sync::Arc;
use std::time::Duration;

use api::claim::ClaimSource;
use api::conditions::Reason;
use api::rbac::{FOLLOW, MANAGE, Rule, SUBRESOURCE};
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use kube::ResourceExt;
use planner::claim::{
    Holding, Obstacle, Report, Verdict, decide, decide_unobserved, is_first_start, next_look,
    status,
};
use planner::owner::{controller_of, refers_to};

use crate::cache::{Cache, Change};
use crate::context::Context;
use crate::key::{ObjectKey, within};
use crate::queue::Queue;
use crate::rbac::{EVENTS, SANDBOXES};
use crate::runtime::{Action, Runtime, at_once};
use crate::starting::Starting;
use crate::trace;
use crate::warm_supply::WarmSupply;
use crate::writes::{Failure, WriteError};

use acquired::Acquired;
use apply::Applied;
use first_ready::FirstReady;
use observe::{FirstSeen, observe};
use report::Published;

/// What the controller needs to be allowed.
pub const RBAC: &[Rule] = &[
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxclaims", "sandboxtemplates", "sandboxwarmpools"],
        verbs: MANAGE,
    },
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxclaims/finalizers", "sandboxclaims/status"],
        verbs: SUBRESOURCE,
    },
    SANDBOXES,
    Rule {
        groups: &[""],
        resources: &["pods"],
        verbs: &["get", "list", "patch", "update", "watch"],
    },
    Rule {
        groups: &["coordination.k8s.io"],
        resources: &["leases"],
        verbs: MANAGE,
    },
    Rule {
        groups: &["networking.k8s.io"],
        resources: &["networkpolicies"],
        verbs: &["delete", FOLLOW[0], FOLLOW[1], FOLLOW[2]],
    },
    EVENTS,
];

/// The controller's name in logs, metrics and events.
pub const CONTROLLER: &str = "sandboxclaim";
/// The name under which its writes are filed in managed fields.
const FIELD_MANAGER: &str = "sandboxclaim-controller";
/// How often one reconcile tries again with what it has learned from a conflict.
const ATTEMPTS: usize = 3;
/// The index of claims by namespace and the template they name.
const BY_TEMPLATE: &str = "template";
/// The index of claims by namespace and the pool they name.
const BY_POOL: &str = "pool";
/// The index of claims that are in the middle of getting a sandbox, by its namespace and name.
const BY_PROMISE: &str = "promise";
/// How soon an expired claim is cleaned up once its status says that it has expired.
const IMMEDIATELY: Duration = Duration::from_millis(1);

/// Why a claim could not be given its sandbox.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot observe the claim")]
    Observe(#[source] WriteError),
    #[error("cannot carry out what was decided for the claim")]
    Apply(#[source] WriteError),
    #[error("cannot publish the claim's status")]
    Publish(#[source] WriteError),
    #[error("cannot serialize the claim's status")]
    Serialize(#[source] serde_json::Error),
}

/// What all claims share.
#[derive(Clone, Debug)]
struct Claims {
    supply: WarmSupply,
    first_seen: FirstSeen,
    first_ready: FirstReady,
    acquired: Acquired,
    starting: Starting<SandboxClaim>,
}

/// Adds the controller to a runtime.
pub fn register(runtime: &mut Runtime, supply: &WarmSupply) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let claims = Claims {
        supply: supply.clone(),
        first_seen: FirstSeen::default(),
        first_ready: FirstReady::default(),
        acquired: Acquired::default(),
        starting: Starting::of(&caches.claims, &context, CONTROLLER),
    };
    claims.first_seen.follow(&caches.claims, &context.clock);
    claims.first_ready.follow(&caches.claims);
    claims.acquired.follow(&caches.claims);
    let (first_seen, first_ready) = (claims.first_seen.clone(), claims.first_ready.clone());
    let acquired = claims.acquired.clone();
    let keeps = |structure, count| context.instrumentation.keeps(structure, CONTROLLER, count);
    keeps("first_seen", Box::new(move || first_seen.len()));
    keeps("first_ready", Box::new(move || first_ready.len()));
    keeps("acquired", Box::new(move || acquired.len()));
    let workers = context.config.claim_workers.get();
    let queue = runtime.controller(
        CONTROLLER,
        workers,
        &caches.claims,
        at_once,
        move |claim, context| reconcile(claim, context, claims.clone()),
    );
    supply.watch_claims(queue.clone());
    runtime.follow(&caches.sandboxes);
    runtime.follow(&caches.templates);
    runtime.follow(&caches.warm_pools);
    runtime.follow(&caches.network_policies);
    caches
        .claims
        .index_by(BY_TEMPLATE, |claim| match claim.spec.source() {
            Ok(ClaimSource::Template { template, .. }) => vec![within(claim, template)],
            _ => Vec::new(),
        });
    caches
        .claims
        .index_by(BY_POOL, |claim| match claim.spec.source() {
            Ok(ClaimSource::Pool { pool }) => vec![within(claim, pool)],
            _ => Vec::new(),
        });
    caches
        .claims
        .index_by(BY_PROMISE, |claim| promised_to(claim).into_iter().collect());
    let (all, own) = (caches.claims.clone(), queue.clone());
    caches
        .sandboxes
        .subscribe(move |change| enqueue_claim_of(change, &all, &own));
    let (all, pools, own) = (
        caches.claims.clone(),
        caches.warm_pools.clone(),
        queue.clone(),
    );
    caches
        .templates
        .subscribe(move |change| enqueue_claims_of_template(change, &all, &pools, &own));
    let all = caches.claims.clone();
    caches
        .warm_pools
        .subscribe(move |change| enqueue_claims_of_pool(change, &all, &queue));
}

/// Enqueues the claim that has a sandbox or had it, and one of its name, which may wait for the name to be free.
fn enqueue_claim_of(change: &Change<'_, Sandbox>, claims: &Cache<SandboxClaim>, queue: &Queue) {
    let key = ObjectKey::of(change.latest().as_ref());
    let mut last: Option<&str> = None;
    for sandbox in [change.before, change.after].into_iter().flatten() {
        if let Some(owner) = controller_of(&sandbox.metadata)
            && refers_to::<SandboxClaim>(owner)
            && last != Some(&owner.name)
        {
            queue.add(key.sibling(&owner.name));
            last = Some(&owner.name);
        }
    }
    if last != Some(&key.name) && claims.get(&key).is_some() {
        queue.add(key);
    }
}

fn enqueue_claims_of_template(
    change: &Change<'_, SandboxTemplate>,
    claims: &Cache<SandboxClaim>,
    pools: &Cache<SandboxWarmPool>,
    queue: &Queue,
) {
    let template = change.latest();
    let value = within(template.as_ref(), &template.name_any());
    let by_pool = pools
        .indexed(crate::pool::BY_TEMPLATE, &value)
        .into_iter()
        .flat_map(|pool| claims.indexed(BY_POOL, &within(pool.as_ref(), &pool.name_any())));
    queue.add_all(claims.indexed(BY_TEMPLATE, &value));
    queue.add_all(by_pool);
}

/// Only a pool's coming, going and change of template matter to claims; its status changes all the time.
fn enqueue_claims_of_pool(
    change: &Change<'_, SandboxWarmPool>,
    claims: &Cache<SandboxClaim>,
    queue: &Queue,
) {
    if let (Some(before), Some(after)) = (change.before, change.after)
        && before.spec.sandbox_template_ref == after.spec.sandbox_template_ref
    {
        return;
    }
    let pool = change.latest();
    let value = within(pool.as_ref(), &pool.name_any());
    queue.add_all(claims.indexed(BY_POOL, &value));
}

/// The sandbox that a claim is bound to, as long as nothing was said of the claim yet.
fn promised_to(claim: &SandboxClaim) -> Option<String> {
    let name = claim.labels().get(api::labels::ASSIGNED_SANDBOX_NAME)?;
    claim.status.is_none().then(|| within(claim, name))
}

/// Brings one claim a step closer to what its spec says.
async fn reconcile(
    claim: Arc<SandboxClaim>,
    context: Arc<Context>,
    claims: Claims,
) -> Result<Action, Error> {
    let key = ObjectKey::of(claim.as_ref());
    let mut claim = claim;
    for _ in 0..ATTEMPTS {
        match attempt(&claim, &context, &claims, &key).await? {
            Attempt::Done(action) => return Ok(action),
            Attempt::Outdated => {
                let fresh = apply::claims(&context).get(&key).await;
                match fresh.map_err(Error::Observe)? {
                    Some(fresh) if fresh.uid() == claim.uid() => claim = fresh,
                    _ => return Ok(Action::AwaitChange),
                }
            }
        }
    }
    let holds_one = claim
        .status
        .as_ref()
        .is_some_and(|status| status.sandbox.is_some());
    // A claim that has its sandbox does not lose it because its metadata could not be brought up to date.
    if !holds_one {
        let obstacle = Obstacle::new(
            Reason::AdoptionConflict,
            "Others keep changing the claim or its sandbox; trying again",
        );
        let report = Report::Blocked {
            obstacle: &obstacle,
            sandbox: None,
        };
        let _ = report::publish(&context, &claims, &key, &claim, &report).await?;
    }
    Ok(Action::Retry)
}

enum Attempt {
    Done(Action),
    /// What was decided upon had changed; look again.
    Outdated,
}

async fn attempt(
    claim: &Arc<SandboxClaim>,
    context: &Context,
    claims: &Claims,
    key: &ObjectKey,
) -> Result<Attempt, Error> {
    let claim = &trace::with_context(claim);
    let mut facts = observe(context, claims, key, claim).await;
    let trouble = facts.trouble.take();
    let _acquiring = match facts.holding() {
        Holding::Owned(_) => None,
        _ => Some(claims.supply.acquiring(&context.clock)),
    };
    let now = context.clock.now();
    let plan = match &trouble {
        None => decide(&facts.observed(), now),
        Some(error) => decide_unobserved(&facts.observed(), obstacle_of(error), now),
    };
    let applied = apply::apply(context, key, claim, &plan.effects).await;
    if let Some(sandbox) = &applied.acquired {
        claims.acquired.note(&context.caches.claims, claim, sandbox);
    }
    if applied.transferred {
        facts.keep_candidate();
    }
    if applied.is_outdated() {
        return Ok(Attempt::Outdated);
    }
    report::tell_provisioning(context, claim, &facts, &applied);
    if let Some(why) = &plan.unapplied {
        report::tell_unapplied(context, claim, why);
    }
    let held = applied.sandbox.as_deref().or(match facts.holding() {
        Holding::Owned(sandbox) => Some(sandbox),
        _ => None,
    });
    let held = held.filter(|_| !applied.deleted_sandbox);
    let mut obstacle = applied.failure.as_ref().map(obstacle_of);
    if let (None, Verdict::Blocked(planned)) = (&obstacle, &plan.verdict) {
        obstacle = Some(planned.clone());
    }
    let report = match (&obstacle, &plan.verdict) {
        (None, Verdict::Silent) => return finish(applied, Action::AwaitChange),
        (Some(obstacle), Verdict::Blocked(_)) if trouble.is_some() => {
            Report::Unobserved { obstacle }
        }
        (Some(obstacle), _) => Report::Blocked {
            obstacle,
            sandbox: held,
        },
        (None, Verdict::Expired) => Report::Expired { sandbox: held },
        (None, _) => Report::Reflects { sandbox: held },
    };
    let current = applied.claim.as_ref().unwrap_or(claim);
    if is_first_start(current, &report)
        && let Some(left) = claims.starting.unsaid_for(key)
    {
        return finish(applied, Action::RequeueAfter(left));
    }
    claims.starting.forget(key);
    if report::publish(context, claims, key, current, &report).await? == Published::Outdated {
        return Ok(Attempt::Outdated);
    }
    if plan.announces_expiry {
        report::tell_expiry(context, claim);
    }
    if let (Some(error), Report::Unobserved { .. }) = (trouble, &report)
        && !error.is_lasting()
    {
        return Err(Error::Observe(error));
    }
    let deadline = next_look(current, &status(current, &report, now), now);
    let next = [plan.recheck_after, deadline].into_iter().flatten().min();
    finish(
        applied,
        next.map_or(Action::AwaitChange, |delay| {
            Action::RequeueAfter(delay.max(IMMEDIATELY))
        }),
    )
}

/// A failure that a retry may mend is retried, later each time.
fn finish(applied: Applied, action: Action) -> Result<Attempt, Error> {
    match applied.failure {
        None => Ok(Attempt::Done(action)),
        Some(error) if matches!(error.failure, Failure::Invalid(_)) => Ok(Attempt::Done(action)),
        Some(error) if error.is_namespace_terminating() => Ok(Attempt::Done(Action::AwaitChange)),
        Some(error) => Err(Error::Apply(error)),
    }
}

fn obstacle_of(error: &WriteError) -> Obstacle {
    match &error.failure {
        // A spec that the API refuses will be refused again.
        Failure::Invalid(message) => Obstacle::new(Reason::InvalidConfiguration, message),
        _ => Obstacle::new(
            Reason::ReconcilerError,
            format!("Error seen: {}", error.told()),
        ),
    }
}
