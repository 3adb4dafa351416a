//! The controller of the batch `SandboxClaim`: wires watches to its queue, and runs the pass of [`planner::kruise_claim`] over each claim.

mod environment;
mod notes;

use std::sync::Arc;

use api::Sandbox;
use api::kruise::SandboxClaim;
use kube::ResourceExt;
use planner::kruise_claim::is_completed;
use planner::owner::{controller_of, refers_to};
use planner::pass::Error;
use planner::sandbox_set::candidate;

use super::waiting::Waiting;
use crate::cache::Change;
use crate::context::Context;
use crate::key::{ObjectKey, within};
use crate::queue::Queue;
use crate::runtime::{Action, Runtime, at_once};
use crate::warm_queue::SharedWarmQueue;
use crate::writes::WriteError;

use environment::BatchClaimEnvironment;
use notes::Notes;

/// The controller's name in logs, metrics and events.
const CONTROLLER: &str = "kruise-sandboxclaim";
/// The field manager of its writes.
const FIELD_MANAGER: &str = "kruise-sandboxclaim-controller";
/// The index of claims that are not Completed by namespace and the set they name.
const BY_SET: &str = "set";

/// What all claims share.
#[derive(Clone, Debug)]
struct Claims {
    warm_queue: SharedWarmQueue,
    waiting: Waiting,
    notes: Notes,
}

/// Adds the controller to a runtime.
pub(super) fn register(runtime: &mut Runtime, warm_queue: &SharedWarmQueue) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let claims = Claims {
        warm_queue: warm_queue.clone(),
        waiting: Waiting::default(),
        notes: Notes::default(),
    };
    let (waiting, notes) = (claims.waiting.clone(), claims.notes.clone());
    let workers = context.config.claim_workers.get();
    let queue = runtime.controller(
        CONTROLLER,
        workers,
        &caches.batch_claims,
        at_once,
        move |claim, context| reconcile(claim, context, claims.clone()),
    );
    warm_queue.watch_claims(queue.clone());
    runtime.follow(&caches.sandboxes);
    runtime.follow(&caches.templates);
    runtime.follow(&caches.sandbox_sets);
    caches.batch_claims.index_by(BY_SET, |claim| {
        if is_completed(claim) {
            return Vec::new();
        }
        vec![within(claim, &claim.spec.template_name)]
    });
    caches.batch_claims.subscribe(move |change| {
        if change.after.is_none_or(|claim| is_completed(claim)) {
            notes.forget(&ObjectKey::of(change.latest().as_ref()));
        }
    });
    let own = queue.clone();
    caches
        .sandboxes
        .subscribe(move |change| wake_claims(change, &waiting, &own));
    let claims = caches.batch_claims.clone();
    caches.sandbox_sets.subscribe(move |change| {
        let set = change.latest();
        let is_new = change.before.is_none();
        let is_going = change
            .after
            .is_none_or(|set| set.metadata.deletion_timestamp.is_some());
        if is_new || is_going {
            let value = within(set.as_ref(), &set.name_any());
            queue.add_all(claims.indexed(BY_SET, &value));
        }
    });
}

/// Enqueues one waiting claim when a sandbox can be claimed, and a claim when one of its own sandboxes changes.
fn wake_claims(change: &Change<'_, Sandbox>, waiting: &Waiting, queue: &Queue) {
    let before = change.before.and_then(|sandbox| candidate(sandbox));
    if let (None, Some(free)) = (before, change.after.and_then(|sandbox| candidate(sandbox))) {
        if let Some(claim) = waiting.call(&free.pool_hash) {
            queue.add(claim);
        }
        return;
    }
    let Some(before) = change.before else {
        return;
    };
    let owner = controller_of(&before.metadata).filter(|owner| refers_to::<SandboxClaim>(owner));
    let has_changed = change.after.is_none_or(|after| {
        after.metadata.deletion_timestamp != before.metadata.deletion_timestamp
            || conditions_of(after) != conditions_of(before)
    });
    if let Some(owner) = owner.filter(|_| has_changed) {
        queue.add(ObjectKey::of(before.as_ref()).sibling(&owner.name));
    }
}

fn conditions_of(
    sandbox: &Sandbox,
) -> &[k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition] {
    let status = sandbox.status.as_ref();
    status.map_or(&[], |status| &status.conditions)
}

/// Brings one claim a step closer to its spec.
async fn reconcile(
    claim: Arc<SandboxClaim>,
    context: Arc<Context>,
    claims: Claims,
) -> Result<Action, Error<WriteError>> {
    let key = ObjectKey::of(claim.as_ref());
    let environment = BatchClaimEnvironment {
        context: &context,
        claims: &claims,
        key: &key,
    };
    planner::kruise_claim::reconcile(&environment, claim).await
}
