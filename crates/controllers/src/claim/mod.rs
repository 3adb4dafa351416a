//! The controller of `SandboxClaim`: wires watches to its queue, and runs the pass of [`planner::claim`] over each claim.

mod acquired;
mod announce;
mod environment;
mod first_ready;
mod first_seen;

use std::sync::Arc;

use api::claim::ClaimSource;
use api::rbac::{FOLLOW, MANAGE, Rule, SUBRESOURCE};
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use kube::ResourceExt;
use planner::claim::unfinished_binding;
use planner::owner::{controller_of, refers_to};
use planner::pass::Error;

use crate::cache::{Cache, Change};
use crate::context::Context;
use crate::key::{ObjectKey, within};
use crate::queue::Queue;
use crate::rbac::{EVENTS, SANDBOXES};
use crate::runtime::{Action, Runtime, at_once};
use crate::status_delay::StatusDelay;
use crate::warm_queue::SharedWarmQueue;
use crate::writes::WriteError;

use acquired::Acquired;
use environment::ClaimEnvironment;
use first_ready::FirstReady;
use first_seen::FirstSeen;

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
/// The field manager of its writes.
const FIELD_MANAGER: &str = "sandboxclaim-controller";
/// The index of claims by namespace and the template they name.
const BY_TEMPLATE: &str = "template";
/// The index of claims by namespace and the pool they name.
const BY_POOL: &str = "pool";
/// The index of claims whose binding is unfinished, by the namespace and name of the sandbox.
const BY_UNFINISHED_BINDING: &str = "unfinished binding";

/// What all claims share.
#[derive(Clone, Debug)]
struct Claims {
    warm_queue: SharedWarmQueue,
    first_seen: FirstSeen,
    first_ready: FirstReady,
    acquired: Acquired,
    status_delay: StatusDelay<SandboxClaim>,
}

/// Adds the controller to a runtime.
pub fn register(runtime: &mut Runtime, warm_queue: &SharedWarmQueue) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let claims = Claims {
        warm_queue: warm_queue.clone(),
        first_seen: FirstSeen::default(),
        first_ready: FirstReady::default(),
        acquired: Acquired::default(),
        status_delay: StatusDelay::of(&caches.claims, &context, CONTROLLER),
    };
    claims.first_seen.follow(&caches.claims, &context.clock);
    claims.first_ready.follow(&caches.claims);
    claims.acquired.follow(&caches.claims);
    let (first_seen, first_ready) = (claims.first_seen.clone(), claims.first_ready.clone());
    let acquired = claims.acquired.clone();
    let count_entries = |structure, count| {
        context
            .instrumentation
            .count_entries(structure, CONTROLLER, count);
    };
    count_entries("first_seen", Box::new(move || first_seen.len()));
    count_entries("first_ready", Box::new(move || first_ready.len()));
    count_entries("acquired", Box::new(move || acquired.len()));
    let workers = context.config.claim_workers.get();
    let queue = runtime.controller(
        CONTROLLER,
        workers,
        &caches.claims,
        at_once,
        move |claim, context| reconcile(claim, context, claims.clone()),
    );
    warm_queue.watch_claims(queue.clone());
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
    caches.claims.index_by(BY_UNFINISHED_BINDING, |claim| {
        let sandbox = unfinished_binding(claim).map(|name| within(claim, name));
        sandbox.into_iter().collect()
    });
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

/// Enqueues the claim that owns a sandbox or did before, and the claim of the sandbox's name, which may wait for that name.
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

/// Whether a change of a pool matters to claims: creation, deletion, or another template. Status changes are frequent and do not.
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

/// Brings one claim a step closer to its spec.
async fn reconcile(
    claim: Arc<SandboxClaim>,
    context: Arc<Context>,
    claims: Claims,
) -> Result<Action, Error<WriteError>> {
    let key = ObjectKey::of(claim.as_ref());
    let environment = ClaimEnvironment {
        context: &context,
        claims: &claims,
        key: &key,
    };
    planner::claim::reconcile(&environment, claim).await
}
