//! The controller of `SandboxWarmPool`: keeps a pool at its size and revision, as [`planner::warm_pool`] decides.

pub(crate) mod apply;
pub(crate) mod memory;

use std::sync::Arc;
use std::time::Duration;

use api::names::name_hash;
use api::rbac::{MANAGE, Rule, SUBRESOURCE};
use api::{Sandbox, SandboxTemplate, SandboxWarmPool, labels};
use kube::{Api, ResourceExt, api::ListParams};
use planner::expectations::Expectations;
use planner::pacing::Pacing;
use planner::warm_pool::{Observed, SandboxSet, decide, pool_hash};

use crate::cache::Change;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::queue::Queue;
use crate::runtime::{Action, Runtime};
use crate::warm_supply::{WarmSupply, sandbox_key};
use crate::writes::{WriteError, Writer};

use memory::{Memories, Memory};

/// What the controller needs to be allowed.
pub const RBAC: &[Rule] = &[
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxwarmpools", "sandboxtemplates"],
        verbs: MANAGE,
    },
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxwarmpools/finalizers", "sandboxwarmpools/status"],
        verbs: SUBRESOURCE,
    },
    Rule {
        groups: &[api::CORE_GROUP],
        resources: &["sandboxes"],
        verbs: MANAGE,
    },
    Rule {
        groups: &["", "events.k8s.io"],
        resources: &["events"],
        verbs: &["create", "patch", "update"],
    },
];

/// The controller's name in logs, metrics and events.
pub const CONTROLLER: &str = "sandboxwarmpool";
/// The name under which its writes are filed in managed fields; status is applied under it.
const FIELD_MANAGER: &str = "warmpool-controller";
/// The index of sandboxes by namespace and pool hash.
const BY_POOL: &str = "pool";
/// The index of pools by namespace and name hash.
const BY_HASH: &str = "hash";
/// The index of pools by namespace and template.
pub(crate) const BY_TEMPLATE: &str = "template";

/// Why a pool could not be brought to what its spec says.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot look up the pool's template")]
    Template(#[source] WriteError),
    #[error("cannot list the pool's sandboxes")]
    List(#[source] kube::Error),
    #[error("cannot carry out what was decided for the pool")]
    Apply(#[source] WriteError),
    #[error("cannot publish the pool's status")]
    Publish(#[source] WriteError),
}

/// What all pools share.
#[derive(Clone, Debug)]
struct Pools {
    supply: WarmSupply,
    memories: Memories,
    pacing: Pacing,
}

/// Adds the controller to a runtime.
pub fn register(runtime: &mut Runtime, supply: &WarmSupply) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let pools = Pools {
        supply: supply.clone(),
        memories: Memories::default(),
        pacing: Pacing::default(),
    };
    let memories = pools.memories.clone();
    memories.count(&context, CONTROLLER);
    supply.count(&context, CONTROLLER);
    let workers = context.config.warm_pool_workers.get();
    let queue = runtime.controller(
        CONTROLLER,
        workers,
        &caches.warm_pools,
        move |pool, context| reconcile(pool, context, pools.clone()),
    );
    runtime.follow(&caches.sandboxes);
    runtime.follow(&caches.templates);
    caches
        .sandboxes
        .index_by(BY_POOL, |sandbox| pool_value(sandbox).into_iter().collect());
    caches.warm_pools.index_by(BY_HASH, |pool| {
        vec![indexed(pool, &name_hash(&pool.name_any()))]
    });
    caches.warm_pools.index_by(BY_TEMPLATE, |pool| {
        vec![indexed(pool, &pool.spec.sandbox_template_ref.name)]
    });
    caches.warm_pools.subscribe(move |change| {
        if change.after.is_none() {
            memories.forget(&ObjectKey::of(change.latest().as_ref()));
        }
    });
    let (pools_cache, own) = (caches.warm_pools.clone(), queue.clone());
    caches
        .sandboxes
        .subscribe(move |change| enqueue_pools_of(change, &pools_cache, &own));
    let pools_cache = caches.warm_pools.clone();
    caches.templates.subscribe(move |change| {
        let template = change.latest();
        for pool in pools_cache.indexed(
            BY_TEMPLATE,
            &indexed(template.as_ref(), &template.name_any()),
        ) {
            queue.add(ObjectKey::of(pool.as_ref()));
        }
    });
}

/// Enqueues the pools that a sandbox belongs to or did before.
fn enqueue_pools_of(
    change: &Change<'_, Sandbox>,
    pools: &crate::cache::Cache<SandboxWarmPool>,
    queue: &Queue,
) {
    let mut last = None;
    for sandbox in [change.before, change.after].into_iter().flatten() {
        let Some(value) = pool_value(sandbox).filter(|value| last.as_ref() != Some(value)) else {
            continue;
        };
        for pool in pools.indexed(BY_HASH, &value) {
            queue.add(ObjectKey::of(pool.as_ref()));
        }
        last = Some(value);
    }
}

fn pool_value(sandbox: &Sandbox) -> Option<String> {
    let hash = sandbox.labels().get(labels::WARM_POOL_SANDBOX)?;
    Some(indexed(sandbox, hash))
}

fn indexed<K: kube::Resource>(object: &K, value: &str) -> String {
    format!(
        "{}/{value}",
        object.meta().namespace.as_deref().unwrap_or_default()
    )
}

/// Brings one pool a step closer to what its spec says.
async fn reconcile(
    pool: Arc<SandboxWarmPool>,
    context: Arc<Context>,
    pools: Pools,
) -> Result<Action, Error> {
    let key = ObjectKey::of(pool.as_ref());
    if pool.metadata.deletion_timestamp.is_some() {
        return Ok(Action::AwaitChange);
    }
    let memory = pools.memories.of(&key, pool.uid().as_deref());
    let mut memory = memory.lock().await;
    if memory.namespace_is_ending {
        return Ok(Action::AwaitChange);
    }
    if let Some(rest) = memory.rest() {
        return Ok(Action::RequeueAfter(rest));
    }
    step(&pool, &context, &pools, &key, &mut memory).await
}

async fn step(
    pool: &Arc<SandboxWarmPool>,
    context: &Arc<Context>,
    pools: &Pools,
    key: &ObjectKey,
    memory: &mut Memory,
) -> Result<Action, Error> {
    let caches = &context.caches;
    let now = context.clock.now();
    let sandboxes = caches
        .sandboxes
        .indexed(BY_POOL, &indexed(pool.as_ref(), &pool_hash(pool)));
    let selector = format!("{}={}", labels::WARM_POOL_SANDBOX, pool_hash(pool));
    settle(
        context,
        key,
        &sandboxes,
        &selector,
        &mut memory.expectations,
    )
    .await
    .map_err(Error::List)?;
    let template = template(context, key, pool).await?;
    let started = tokio::time::Instant::now();
    let plan = decide(
        &Observed {
            pool,
            template: template.as_deref(),
            sandboxes: &sandboxes,
            spoken_for: &SpokenFor(&pools.supply),
            going: &Going(&memory.expectations),
            unseen: memory.expectations.unseen(),
            waiting_claims: pools.supply.waiting_claims(),
            held_back_since: memory.held_back_since,
            max_batch: context.config.warm_pool_max_batch_size.get(),
        },
        &pools.pacing,
        now,
    );
    memory.worked(started.elapsed());
    memory.held_back_since = plan
        .holds_back
        .then(|| memory.held_back_since.unwrap_or(now));
    let keeper = apply::Keeper {
        context,
        supply: &pools.supply,
        key,
        pool: pool.as_ref(),
        controller: CONTROLLER,
        field_manager: FIELD_MANAGER,
    };
    let changes = apply::Changes {
        adoptions: &plan.adoptions,
        deletions: &plan.deletions,
        creations: plan
            .creations
            .as_ref()
            .map(|(count, blueprint)| (*count, blueprint.as_ref())),
    };
    let failure = apply::apply(&keeper, changes, memory).await;
    apply::publish(context, key, pool, &plan.status).await?;
    if let Some(failure) = failure {
        return Err(Error::Apply(failure));
    }
    Ok(plan
        .recheck_after
        .map_or(Action::AwaitChange, Action::RequeueAfter))
}

/// The pool's template. That it is missing is only believed of the API server itself.
async fn template(
    context: &Context,
    key: &ObjectKey,
    pool: &SandboxWarmPool,
) -> Result<Option<Arc<SandboxTemplate>>, Error> {
    let name = key.sibling(&pool.spec.sandbox_template_ref.name);
    let templates = &context.caches.templates;
    if let Some(template) = templates.get(&name) {
        return Ok(Some(template));
    }
    let templates = Writer::new(context, templates, FIELD_MANAGER);
    templates.get(&name).await.map_err(Error::Template)
}

/// Strikes off what the cache shows by now, and asks the API server itself where it cannot be told otherwise.
pub(crate) async fn settle(
    context: &Context,
    key: &ObjectKey,
    sandboxes: &[Arc<Sandbox>],
    selector: &str,
    expectations: &mut Expectations,
) -> Result<(), kube::Error> {
    expectations.settle(|name| {
        let sandbox = context.caches.sandboxes.get(&key.sibling(name))?;
        let is_going = sandbox.metadata.deletion_timestamp.is_some();
        Some((sandbox.uid().unwrap_or_default(), is_going))
    });
    let now = context.clock.now();
    if !expectations.needs_confirmation(now) {
        return Ok(());
    }
    let api = Api::<Sandbox>::namespaced(context.client.clone(), &key.namespace);
    let listed = api
        .list_metadata(&ListParams::default().labels(selector))
        .await?;
    let identity = |metadata: &kube::core::ObjectMeta| {
        (
            metadata.name.clone().unwrap_or_default(),
            metadata.uid.clone().unwrap_or_default(),
        )
    };
    let listed: Vec<_> = listed
        .items
        .iter()
        .map(|item| identity(&item.metadata))
        .collect();
    let cached: Vec<_> = sandboxes
        .iter()
        .map(|sandbox| identity(&sandbox.metadata))
        .collect();
    expectations.confirm(&listed, &cached, now);
    Ok(())
}

#[derive(Debug)]
pub(crate) struct SpokenFor<'a>(pub &'a WarmSupply);

impl SandboxSet for SpokenFor<'_> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        self.0.is_spoken_for(&sandbox_key(sandbox))
    }
}

#[derive(Debug)]
pub(crate) struct Going<'a>(pub &'a Expectations);

impl SandboxSet for Going<'_> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        let uid = sandbox.metadata.uid.as_deref().unwrap_or_default();
        self.0
            .is_deleted(sandbox.metadata.name.as_deref().unwrap_or_default(), uid)
    }
}

/// The longest a busy pool rests between two passes.
const LONGEST_REST: Duration = Duration::from_millis(250);
