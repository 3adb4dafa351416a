//! The controller of `SandboxSet`: keeps a set at its size and revision, as [`planner::sandbox_set`] decides. It is the warm pool's
//! machinery over another kind.

use std::sync::Arc;

use api::kruise::{SandboxSet, SandboxSetStatus};
use api::labels::kruise as keys;
use api::{Sandbox, SandboxTemplate};
use kube::ResourceExt;
use planner::pacing::Pacing;
use planner::sandbox_set::{self, Mould, Observed, Problem, Source, decide, selector, set_label};
use serde_json::json;

use super::indexed;
use crate::cache::{Cache, Change};
use crate::context::Context;
use crate::key::ObjectKey;
use crate::queue::Queue;
use crate::runtime::{Action, Runtime};
use crate::warm_pool::apply::{Changes, Keeper, apply};
use crate::warm_pool::memory::{Memories, Memory};
use crate::warm_pool::{Going, SpokenFor, settle};
use crate::warm_supply::WarmSupply;
use crate::writes::{WriteError, Writer};

/// The controller's name in logs, metrics and events.
const CONTROLLER: &str = "sandboxset";
/// The name under which its writes are filed in managed fields; status is applied under it.
const FIELD_MANAGER: &str = "sandboxset-controller";
/// The index of sandboxes by namespace and the set's label.
const BY_SET: &str = "sandbox-set";
/// The index of sets by namespace and the label of their sandboxes.
const BY_LABEL: &str = "label";
/// The index of sets by namespace and the template they name.
const BY_TEMPLATE: &str = "template";

/// Why a set could not be brought to what its spec says.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot look up the set's template")]
    Template(#[source] WriteError),
    #[error("cannot list the set's sandboxes")]
    List(#[source] kube::Error),
    #[error("cannot carry out what was decided for the set")]
    Apply(#[source] WriteError),
    #[error("cannot publish the set's status")]
    Publish(#[source] WriteError),
}

/// What all sets share.
#[derive(Clone, Debug)]
struct Sets {
    supply: WarmSupply,
    memories: Memories,
    pacing: Pacing,
}

/// Adds the controller to a runtime.
pub(super) fn register(runtime: &mut Runtime, supply: &WarmSupply) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let sets = Sets {
        supply: supply.clone(),
        memories: Memories::default(),
        pacing: Pacing::default(),
    };
    let (memories, stock) = (sets.memories.clone(), supply.clone());
    memories.count(&context, CONTROLLER);
    supply.count(&context, CONTROLLER);
    let workers = context.config.warm_pool_workers.get();
    let queue = runtime.controller(
        CONTROLLER,
        workers,
        &caches.sandbox_sets,
        move |set, context| reconcile(set, context, sets.clone()),
    );
    runtime.follow(&caches.sandboxes);
    runtime.follow(&caches.templates);
    caches
        .sandboxes
        .index_by(BY_SET, |sandbox| label_value(sandbox).into_iter().collect());
    caches.sandbox_sets.index_by(BY_LABEL, |set| {
        vec![indexed(set, &set_label(&set.name_any()))]
    });
    caches
        .sandbox_sets
        .index_by(BY_TEMPLATE, |set| match sandbox_set::source(&set.spec) {
            Ok(Source::Template(name)) => vec![indexed(set, name)],
            _ => Vec::new(),
        });
    caches.sandbox_sets.subscribe(move |change| {
        if let Some(set) = change.departed() {
            memories.forget(&ObjectKey::of(set.as_ref()));
            let namespace = set.namespace().unwrap_or_default();
            stock.forget(&namespace, &set.uid().unwrap_or_default());
        }
    });
    let (sets, own) = (caches.sandbox_sets.clone(), queue.clone());
    caches
        .sandboxes
        .subscribe(move |change| enqueue_sets_of(change, &sets, &own));
    let sets = caches.sandbox_sets.clone();
    caches.templates.subscribe(move |change| {
        let template = change.latest();
        let value = indexed(template.as_ref(), &template.name_any());
        for set in sets.indexed(BY_TEMPLATE, &value) {
            queue.add(ObjectKey::of(set.as_ref()));
        }
    });
}

/// Enqueues the sets that a sandbox belongs to or did before.
fn enqueue_sets_of(change: &Change<'_, Sandbox>, sets: &Cache<SandboxSet>, queue: &Queue) {
    let values = [change.before, change.after].map(|sandbox| label_value(sandbox?));
    let [before, after] = values;
    for value in before
        .iter()
        .chain(after.iter().filter(|_| before != after))
    {
        for set in sets.indexed(BY_LABEL, value) {
            queue.add(ObjectKey::of(set.as_ref()));
        }
    }
}

fn label_value(sandbox: &Sandbox) -> Option<String> {
    let set = sandbox.labels().get(keys::SANDBOX_POOL)?;
    Some(indexed(sandbox, set))
}

/// Brings one set a step closer to what its spec says.
async fn reconcile(
    set: Arc<SandboxSet>,
    context: Arc<Context>,
    sets: Sets,
) -> Result<Action, Error> {
    let key = ObjectKey::of(set.as_ref());
    if set.metadata.deletion_timestamp.is_some() {
        return Ok(Action::AwaitChange);
    }
    let memory = sets.memories.of(&key, set.uid().as_deref());
    let mut memory = memory.lock().await;
    if memory.namespace_is_ending {
        return Ok(Action::AwaitChange);
    }
    if let Some(rest) = memory.rest() {
        return Ok(Action::RequeueAfter(rest));
    }
    step(&set, &context, &sets, &key, &mut memory).await
}

async fn step(
    set: &Arc<SandboxSet>,
    context: &Arc<Context>,
    sets: &Sets,
    key: &ObjectKey,
    memory: &mut Memory,
) -> Result<Action, Error> {
    let now = context.clock.now();
    let label = indexed(set.as_ref(), &set_label(&key.name));
    let sandboxes = context.caches.sandboxes.indexed(BY_SET, &label);
    let selector = selector(&key.name);
    settle(
        context,
        key,
        &sandboxes,
        &selector,
        &mut memory.expectations,
    )
    .await
    .map_err(Error::List)?;
    let mould = mould(context, key, set).await.map_err(Error::Template)?;
    if let Ok(mould) = &mould {
        let uid = set.uid().unwrap_or_default();
        let namespace = &key.namespace;
        sets.supply
            .set_current_revision(namespace, &uid, &mould.revision);
    }
    let started = tokio::time::Instant::now();
    let plan = decide(
        &Observed {
            set,
            mould: &mould,
            sandboxes: &sandboxes,
            spoken_for: &SpokenFor(&sets.supply),
            going: &Going(&memory.expectations),
            unseen: memory.expectations.unseen(),
            waiting_claims: sets.supply.waiting_claims(),
            held_back_since: memory.held_back_since,
            max_batch: context.config.warm_pool_max_batch_size.get(),
        },
        &sets.pacing,
        now,
    );
    memory.worked(started.elapsed());
    memory.held_back_since = plan
        .holds_back
        .then(|| memory.held_back_since.unwrap_or(now));
    let keeper = Keeper {
        context,
        supply: &sets.supply,
        key,
        pool: set.as_ref(),
        controller: CONTROLLER,
        field_manager: FIELD_MANAGER,
    };
    let creations = plan.creations.as_ref();
    let changes = Changes {
        adoptions: &plan.adoptions,
        deletions: &plan.deletions,
        creations: creations.map(|(count, sandbox)| (*count, sandbox.as_ref())),
    };
    let failure = apply(&keeper, changes, memory).await;
    publish(context, key, set, &plan.status).await?;
    if let Some(failure) = failure {
        return Err(Error::Apply(failure));
    }
    Ok(plan
        .recheck_after
        .map_or(Action::AwaitChange, Action::RequeueAfter))
}

/// What the set's sandboxes are made from. That its template is missing is only believed of the API server itself.
pub(super) async fn mould(
    context: &Context,
    key: &ObjectKey,
    set: &SandboxSet,
) -> Result<Result<Mould, Problem>, WriteError> {
    let template = match sandbox_set::source(&set.spec) {
        Ok(Source::Template(name)) => {
            let name = key.sibling(name);
            match context.caches.templates.get(&name) {
                Some(template) => Some(template),
                None => templates(context).get(&name).await?,
            }
        }
        _ => None,
    };
    Ok(Mould::new(set, template.as_deref()))
}

fn templates(context: &Context) -> Writer<'_, SandboxTemplate> {
    Writer::new(context, &context.caches.templates, FIELD_MANAGER)
}

/// Applies the status if it says anything new.
async fn publish(
    context: &Context,
    key: &ObjectKey,
    set: &SandboxSet,
    status: &SandboxSetStatus,
) -> Result<(), Error> {
    if set.status.as_ref() == Some(status) {
        return Ok(());
    }
    let sets = Writer::new(context, &context.caches.sandbox_sets, FIELD_MANAGER);
    match sets.apply_status(key, json!(status)).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(Error::Publish(error)),
    }
}
