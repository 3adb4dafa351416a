//! The controllers of pools of sandboxes, of any kind: wires watches to their queue, and runs the pass of [`planner::pool`] over each pool.

mod environment;
mod memory;

use std::sync::Arc;

use api::Sandbox;
use kube::ResourceExt;
use planner::pass::Error;
use planner::pool::{Pool, reconcile};

use crate::cache::{Cache, Change};
use crate::cached::Cached;
use crate::context::{Caches, Context};
use crate::key::{ObjectKey, within};
use crate::queue::Queue;
use crate::runtime::{Action, Runtime, at_once};
use crate::warm_queue::SharedWarmQueue;
use crate::writes::WriteError;

use environment::PoolEnvironment;
use memory::{Memories, Memory};

/// The index of pools by namespace and the label of their sandboxes.
const BY_LABEL: &str = "label";
/// The index of pools by namespace and the template they name.
pub(crate) const BY_TEMPLATE: &str = "template";

/// The controller of a kind whose objects are pools of sandboxes.
pub(crate) trait PoolController: Cached + Pool {
    /// The controller's name in logs, metrics and events.
    const CONTROLLER: &'static str;
    /// The field manager of its writes; status is applied under it.
    const FIELD_MANAGER: &'static str;

    fn cache(caches: &Caches) -> &Cache<Self>;
}

/// What all pools of a kind share.
#[derive(Clone, Debug)]
struct Pools {
    warm_queue: SharedWarmQueue,
    memories: Memories,
}

/// Adds the controller of a kind to a runtime.
pub(crate) fn register<P: PoolController>(runtime: &mut Runtime, warm_queue: &SharedWarmQueue) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let cache = P::cache(caches);
    let pools = Pools {
        warm_queue: warm_queue.clone(),
        memories: Memories::default(),
    };
    let memories = pools.memories.clone();
    memories.count(&context, P::CONTROLLER);
    warm_queue.count(&context, P::CONTROLLER);
    let workers = context.config.warm_pool_workers.get();
    let queue = runtime.controller(
        P::CONTROLLER,
        workers,
        cache,
        at_once,
        move |pool, context| reconcile_pool::<P>(pool, context, pools.clone()),
    );
    runtime.follow(&caches.sandboxes);
    runtime.follow(&caches.templates);
    caches.sandboxes.index_by(P::LABEL, |sandbox| {
        label_of::<P>(sandbox).into_iter().collect()
    });
    cache.index_by(BY_LABEL, |pool| vec![within(pool, &pool.label())]);
    cache.index_by(BY_TEMPLATE, |pool| {
        let template = pool.template().map(|name| within(pool, name));
        template.into_iter().collect()
    });
    cache.subscribe(move |change| {
        if change.after.is_none() {
            memories.forget(&ObjectKey::of(change.latest().as_ref()));
        }
    });
    let (all, own) = (cache.clone(), queue.clone());
    caches
        .sandboxes
        .subscribe(move |change| enqueue_pools_of(change, &all, &own));
    let all = cache.clone();
    caches.templates.subscribe(move |change| {
        let template = change.latest();
        let value = within(template.as_ref(), &template.name_any());
        queue.add_all(all.indexed(BY_TEMPLATE, &value));
    });
}

/// Enqueues the pools that a sandbox belongs to or did before.
fn enqueue_pools_of<P: PoolController>(
    change: &Change<'_, Sandbox>,
    pools: &Cache<P>,
    queue: &Queue,
) {
    let [before, after] =
        [change.before, change.after].map(|sandbox| label_of::<P>(sandbox?.as_ref()));
    let moved = after.filter(|after| before.as_ref() != Some(after));
    for value in before.into_iter().chain(moved) {
        queue.add_all(pools.indexed(BY_LABEL, &value));
    }
}

/// What the pool of a sandbox is indexed under.
fn label_of<P: Pool>(sandbox: &Sandbox) -> Option<String> {
    let label = sandbox.labels().get(P::LABEL)?;
    Some(within(sandbox, label))
}

/// Brings one pool a step closer to its spec.
async fn reconcile_pool<P: PoolController>(
    pool: Arc<P>,
    context: Arc<Context>,
    pools: Pools,
) -> Result<Action, Error<WriteError>> {
    let key = ObjectKey::of(pool.as_ref());
    let memory = pools.memories.of(&key, pool.uid().as_deref());
    let mut memory = memory.lock().await;
    let Memory { planner, rest } = &mut *memory;
    let environment = PoolEnvironment::new(&context, &pools.warm_queue, &key, rest);
    reconcile(&environment, pool.as_ref(), planner).await
}
