//! Keeping pools of sandboxes at their size and revision, whichever kind describes them.
//!
//! A pass looks at a pool's sandboxes and at who wants them, has the kind decide, carries the plan out and publishes the status.
//! What tells the kinds apart is [`Pool`].

mod apply;
mod memory;
mod observe;

use std::sync::Arc;

use api::{Sandbox, SandboxTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::core::object::HasStatus;
use planner::pacing::Pacing;
use planner::stock::{Plan, Stock};
use serde::Serialize;
use serde_json::{Value, json};

use crate::cache::{Cache, Change};
use crate::cached::Cached;
use crate::context::{Caches, Context};
use crate::key::{ObjectKey, within};
use crate::not_ready::Subject;
use crate::queue::Queue;
use crate::runtime::{Action, Runtime, at_once};
use crate::warm_supply::WarmSupply;
use crate::writes::WriteError;

use memory::{Memories, Memory};
use observe::{Going, SpokenFor};

pub(crate) use observe::template;

/// The index of pools by namespace and the label of their sandboxes.
const BY_LABEL: &str = "label";
/// The index of pools by namespace and the template they name.
pub(crate) const BY_TEMPLATE: &str = "template";

/// A kind whose objects are pools of sandboxes.
pub(crate) trait Pool:
    Cached + HasStatus<Status: PartialEq + Serialize + Send + Sync>
{
    /// The controller's name in logs, metrics and events.
    const CONTROLLER: &'static str;
    /// The name under which its writes are filed in managed fields; status is applied under it.
    const FIELD_MANAGER: &'static str;
    /// The label that says which pool a sandbox is of. Also the name of the index of sandboxes by namespace and this label.
    const LABEL: &'static str;
    /// What a pool's sandboxes are made from, or why there is nothing to make them from.
    type Mould: Send + Sync;

    fn cache(caches: &Caches) -> &Cache<Self>;

    /// The value of the label that the pool's sandboxes carry.
    fn label(&self) -> String;

    /// The template that the pool names, if it names one.
    fn template(&self) -> Option<&str>;

    /// What the pool's sandboxes are made from, given the template that it names, if there is one. `supply` is told which revision is
    /// current where the template alone does not say so.
    fn mould(&self, template: Option<Arc<SandboxTemplate>>, supply: &WarmSupply) -> Self::Mould;

    /// Decides what to do about the pool.
    fn decide(
        &self,
        mould: &Self::Mould,
        stock: Stock<'_>,
        pacing: &Pacing,
        now: Timestamp,
    ) -> Plan<Self::Status>;

    /// The conditions of a status.
    fn conditions(status: &Self::Status) -> &[Condition];

    /// A status as it is written.
    fn written(status: &Self::Status) -> Value {
        json!(status)
    }

    /// Tells what is news in a status that was published.
    fn tell(&self, _published: &Self::Status, _context: &Context) {}
}

/// Why a pool could not be brought to what its spec says.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("cannot look up the pool's template")]
    Template(#[source] WriteError),
    #[error("cannot list the pool's sandboxes")]
    List(#[source] kube::Error),
    #[error("cannot carry out what was decided for the pool")]
    Apply(#[source] WriteError),
    #[error("cannot publish the pool's status")]
    Publish(#[source] WriteError),
}

/// What all pools of a kind share.
#[derive(Clone, Debug)]
struct Pools {
    supply: WarmSupply,
    memories: Memories,
    pacing: Pacing,
}

/// A pool, and what it is kept with.
#[derive(Debug)]
struct Keeper<'a, P> {
    context: &'a Context,
    supply: &'a WarmSupply,
    key: &'a ObjectKey,
    pool: &'a P,
}

/// Adds the controller of a kind to a runtime.
pub(crate) fn register<P: Pool>(runtime: &mut Runtime, supply: &WarmSupply) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let cache = P::cache(caches);
    let pools = Pools {
        supply: supply.clone(),
        memories: Memories::default(),
        pacing: Pacing::default(),
    };
    let memories = pools.memories.clone();
    memories.count(&context, P::CONTROLLER);
    supply.count(&context, P::CONTROLLER);
    let workers = context.config.warm_pool_workers.get();
    let queue = runtime.controller(
        P::CONTROLLER,
        workers,
        cache,
        at_once,
        move |pool, context| reconcile::<P>(pool, context, pools.clone()),
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
fn enqueue_pools_of<P: Pool>(change: &Change<'_, Sandbox>, pools: &Cache<P>, queue: &Queue) {
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

/// Brings one pool a step closer to what its spec says.
async fn reconcile<P: Pool>(
    pool: Arc<P>,
    context: Arc<Context>,
    pools: Pools,
) -> Result<Action, Error> {
    let key = ObjectKey::of(pool.as_ref());
    if pool.meta().deletion_timestamp.is_some() {
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
    let keeper = Keeper {
        context: &context,
        supply: &pools.supply,
        key: &key,
        pool: pool.as_ref(),
    };
    keeper.step(&pools.pacing, &mut memory).await
}

impl<P: Pool> Keeper<'_, P> {
    async fn step(&self, pacing: &Pacing, memory: &mut Memory) -> Result<Action, Error> {
        let (context, pool) = (self.context, self.pool);
        let now = context.clock.now();
        let label = within(pool, &pool.label());
        // Before they are counted: one that the cache comes to show in between would be missed by both.
        self.strike_off(&mut memory.expectations);
        let sandboxes = context.caches.sandboxes.indexed(P::LABEL, &label);
        self.confirm(&sandboxes, &mut memory.expectations)
            .await
            .map_err(Error::List)?;
        let template = match template(context, self.key, pool).await {
            Ok(template) => template,
            Err(failure) => return self.unobserved(failure).await,
        };
        let mould = pool.mould(template, self.supply);
        let started = tokio::time::Instant::now();
        let plan = pool.decide(
            &mould,
            Stock {
                sandboxes: &sandboxes,
                spoken_for: &SpokenFor(self.supply),
                going: &Going(&memory.expectations),
                unseen: memory.expectations.unseen() + self.unreadable().len(),
                demand: self.supply.demand(),
                held_back_since: memory.held_back_since,
                max_batch: context.config.warm_pool_max_batch_size.get(),
            },
            pacing,
            now,
        );
        memory.worked(started.elapsed());
        memory.held_back_since = plan
            .holds_back
            .then(|| memory.held_back_since.unwrap_or(now));
        let failure = self.apply(&plan, memory).await;
        self.publish(&plan.status).await.map_err(Error::Publish)?;
        if let Some(failure) = failure {
            return Err(Error::Apply(failure));
        }
        Ok(plan
            .recheck_after
            .map_or(Action::AwaitChange, Action::RequeueAfter))
    }

    /// Says that the pool's template could not be looked up. What a retry cannot mend waits for a change.
    async fn unobserved(&self, failure: WriteError) -> Result<Action, Error> {
        let (context, pool) = (self.context, self.pool);
        let subject = Subject {
            context,
            controller: P::CONTROLLER,
            cache: P::cache(&context.caches),
            key: self.key,
        };
        let before = pool.status().map_or(&[][..], P::conditions);
        let published = subject.unobserved(pool, before, &failure).await;
        if published.is_ok() && failure.failure.is_lasting() {
            return Ok(Action::AwaitChange);
        }
        Err(Error::Template(failure))
    }
}
