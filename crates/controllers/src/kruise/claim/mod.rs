//! The controller of the batch `SandboxClaim`: gets each claim its sandboxes, as [`planner::kruise_claim`] decides.
//!
//! A batch costs one write of the claim's status, which names its sandboxes before they are taken, and one write of each sandbox;
//! the status that counts them names the next batch, or says that the claim is Completed.

mod batch;
mod notes;

use std::sync::Arc;
use std::time::Duration;

use api::conditions::{self, ConditionType, Reason};
use api::kruise::{ClaimPhase, SandboxClaim, SandboxSet};
use api::{Sandbox, labels};
use kube::ResourceExt;
use kube::api::PropagationPolicy;
use planner::kruise_claim::{
    Life, NextBatch, Progress, Surroundings, Verdict, agrees_with_status, decide, held_besides,
    life, next_look, pause_after, progress, status,
};
use planner::owner::{controller_of, refers_to};
use planner::patch::difference;
use planner::sandbox_set::candidate;
use planner::warm_queue::Request;

use super::waiting::Waiting;
use crate::cache::Change;
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::key::{ObjectKey, within};
use crate::not_ready::Subject;
use crate::queue::Queue;
use crate::runtime::{Action, Runtime, at_once};
use crate::warm_supply::{Reservation, WarmSupply};
use crate::writes::{Deletion, Failure, Precondition, WriteError, Writer, list_metadata};

use notes::Notes;

/// The controller's name in logs, metrics and events.
const CONTROLLER: &str = "kruise-sandboxclaim";
/// The name under which its writes are filed in managed fields.
const FIELD_MANAGER: &str = "kruise-sandboxclaim-controller";
/// How often one reconcile looks again: after a conflict, and to work off the batch that it has begun.
const PASSES: usize = 4;
/// The index of claims that are not Completed by namespace and the set they name.
const BY_SET: &str = "set";

/// Why a claim could not be brought further.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("cannot look up what the claim refers to")]
    Observe(#[source] WriteError),
    #[error("cannot list the claim's sandboxes")]
    List(#[source] kube::Error),
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
    waiting: Waiting,
    notes: Notes,
}

/// Adds the controller to a runtime.
pub(super) fn register(runtime: &mut Runtime, supply: &WarmSupply) {
    let context = Arc::clone(&runtime.context);
    let caches = &context.caches;
    let claims = Claims {
        supply: supply.clone(),
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
    supply.watch_claims(queue.clone());
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

fn is_completed(claim: &SandboxClaim) -> bool {
    let status = claim.status.as_ref();
    status.is_some_and(|status| status.phase == Some(ClaimPhase::Completed))
}

/// Tells one waiting claim of a sandbox that can be claimed now, and a claim of what happens to a sandbox that is its own.
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

fn claims_of(context: &Context) -> Writer<'_, SandboxClaim> {
    Writer::new(context, &context.caches.batch_claims, FIELD_MANAGER)
}

/// Brings one claim further: settles the batch it has begun, and begins the next.
async fn reconcile(
    claim: Arc<SandboxClaim>,
    context: Arc<Context>,
    claims: Claims,
) -> Result<Action, Error> {
    let key = ObjectKey::of(claim.as_ref());
    match life(&claim, context.clock.now()) {
        Life::Going | Life::Completed(None) => return Ok(Action::AwaitChange),
        Life::Completed(Some(left)) => return Ok(Action::RequeueAfter(left)),
        Life::Outlived => return remove(&context, &key, &claim).await,
        Life::Active => {}
    }
    let _acquiring = claims.supply.acquiring(&context.clock);
    let mut claim = claim;
    for attempt in 1..=PASSES {
        match pass(&context, &claims, &key, &claim).await? {
            Pass::Done(action) => return Ok(action),
            // A few batches in a row; then other claims have their turn.
            Pass::Begun(_) if attempt == PASSES => break,
            Pass::Begun(begun) => claim = begun,
            Pass::Outdated => match claims_of(&context).get(&key).await {
                Ok(Some(fresh)) if fresh.uid() == claim.uid() && !is_completed(&fresh) => {
                    claim = fresh;
                }
                Ok(_) => return Ok(Action::AwaitChange),
                Err(error) => return Err(Error::Observe(error)),
            },
        }
    }
    Ok(Action::RequeueAfter(Duration::ZERO))
}

/// Deletes the object of a claim that has outlived its time, and nothing else.
async fn remove(context: &Context, key: &ObjectKey, claim: &SandboxClaim) -> Result<Action, Error> {
    let deletion = Deletion {
        propagation: Some(PropagationPolicy::Orphan),
        ..Deletion::given(Precondition::same(claim))
    };
    let deleted = claims_of(context).delete(key, deletion).await;
    match deleted {
        Err(error) if !error.is_conflict() => Err(Error::Apply(error)),
        _ => Ok(Action::AwaitChange),
    }
}

enum Pass {
    Done(Action),
    /// The claim as it is now, with a batch to be worked off.
    Begun(Arc<SandboxClaim>),
    /// The claim has changed; look again.
    Outdated,
}

async fn pass(
    context: &Context,
    claims: &Claims,
    key: &ObjectKey,
    claim: &Arc<SandboxClaim>,
) -> Result<Pass, Error> {
    let set = match find_set(context, key, claim).await {
        Ok(set) => set,
        Err(failure) => return unobserved(context, key, claim, failure).await,
    };
    let worked = batch::work_off(context, key, claim, set.as_deref()).await?;
    let held = held(context, key, claim).await?;
    let progress = progress(claim, held, worked.outcomes);
    let now = context.clock.now();
    if worked.failed > 0 {
        claims.notes.pause(key, now, pause_after(progress.failed));
    }
    if progress.unsettled.is_empty() {
        // What was taken has left the queue by now; what was lost may go back to it.
        claims.notes.keep(key, Vec::new());
    }
    let surroundings = Surroundings {
        set_exists: set.is_some(),
        paused_until: claims.notes.paused_until(key),
        max_batch: context.config.batch_claim_max_batch_size.get(),
        now,
    };
    let verdict = decide(claim, &progress, &surroundings);
    let (next, reservations) = match (&verdict, &set) {
        (Verdict::Claim(count), Some(set)) => pick(context, claims, key, claim, set, *count),
        _ => (NextBatch::default(), Vec::new()),
    };
    let published = publish(context, key, claim, &progress, &verdict, &next).await?;
    let Some(published) = published else {
        return Ok(Pass::Outdated);
    };
    if let Some(failure) = worked.failure {
        return finish_failed(failure);
    }
    if !next.is_empty() {
        claims.notes.keep(key, reservations);
        return Ok(Pass::Begun(published));
    }
    let look = next_look(&published, &verdict, &next, now);
    Ok(Pass::Done(
        look.map_or(Action::AwaitChange, Action::RequeueAfter),
    ))
}

fn finish_failed(failure: WriteError) -> Result<Pass, Error> {
    if failure.failure == Failure::NamespaceTerminating {
        return Ok(Pass::Done(Action::AwaitChange));
    }
    Err(Error::Apply(failure))
}

/// The set that the claim names, if it exists and stays. That it does not is only believed of the API server itself.
async fn find_set(
    context: &Context,
    key: &ObjectKey,
    claim: &SandboxClaim,
) -> Result<Option<Arc<SandboxSet>>, WriteError> {
    if claim.spec.template_name.is_empty() {
        return Ok(None);
    }
    let name = key.sibling(&claim.spec.template_name);
    let sets = &context.caches.sandbox_sets;
    let found = match sets.get(&name) {
        Some(set) => Some(set),
        None => Writer::new(context, sets, FIELD_MANAGER).get(&name).await?,
    };
    Ok(found.filter(|set| set.metadata.deletion_timestamp.is_none()))
}

/// Says that the claim's set could not be looked up. What a retry cannot mend waits for a change.
async fn unobserved(
    context: &Context,
    key: &ObjectKey,
    claim: &SandboxClaim,
    failure: WriteError,
) -> Result<Pass, Error> {
    let subject = Subject {
        context,
        controller: CONTROLLER,
        cache: &context.caches.batch_claims,
        key,
    };
    let status = claim.status.as_ref();
    let before = status.map_or(&[][..], |status| &status.conditions);
    let published = subject.unobserved(claim, before, &failure).await;
    if published.is_ok() && failure.failure.is_lasting() {
        return Ok(Pass::Done(Action::AwaitChange));
    }
    Err(Error::Observe(failure))
}

/// How many sandboxes the claim holds besides its batch.
async fn held(context: &Context, key: &ObjectKey, claim: &SandboxClaim) -> Result<usize, Error> {
    let uid = claim.uid().unwrap_or_default();
    let cached = context.caches.sandboxes.controlled_by(&uid);
    let held = held_besides(claim, cached.iter().map(|sandbox| &sandbox.metadata));
    if agrees_with_status(claim, held) {
        return Ok(held);
    }
    let selector = format!("{}={uid}", labels::CLAIM_UID);
    let listed = list_metadata::<Sandbox>(context, &key.namespace, &selector)
        .await
        .map_err(Error::List)?;
    Ok(held_besides(claim, listed.iter()))
}

/// Picks the sandboxes of the next batch, and sets them aside. A claim that finds none waits in line.
fn pick(
    context: &Context,
    claims: &Claims,
    key: &ObjectKey,
    claim: &SandboxClaim,
    set: &SandboxSet,
    count: usize,
) -> (NextBatch, Vec<Reservation>) {
    let uid = set.uid().unwrap_or_default();
    let request = Request {
        namespace: key.namespace.to_string(),
        template_hash: uid.clone(),
        pool_hash: Some(uid.clone()),
    };
    let reserve = || -> Vec<Reservation> {
        let reservations = std::iter::from_fn(|| claims.supply.reserve(&request));
        reservations.take(count).collect()
    };
    let mut reservations = reserve();
    let mut next = NextBatch::default();
    if claim.spec.create_on_no_stock.unwrap_or(false) {
        let missing = reservations.len()..count;
        next.creating = missing.map(|_| new_name(context, set)).collect();
    } else if reservations.is_empty() {
        claims.waiting.join(&uid, key);
        // Stock that came before the claim was in line was told to nobody.
        reservations = reserve();
    }
    next.claiming = reservations
        .iter()
        .map(|reservation| reservation.sandbox.name_any())
        .collect();
    (next, reservations)
}

/// A name for a sandbox to be made, short enough to be one label of a host name.
fn new_name(context: &Context, set: &SandboxSet) -> String {
    const BASE_MAX: usize = 50;
    let name = set.name_any();
    let base = name.get(..BASE_MAX).unwrap_or(&name);
    let base = base.trim_end_matches(['-', '.']);
    let suffix = context.random.number() & 0xffff_ffff;
    format!("{base}-{suffix:08x}")
}

/// Writes the claim's status if it says anything new, and returns the claim as it is now; nothing if it has changed meanwhile.
async fn publish(
    context: &Context,
    key: &ObjectKey,
    claim: &Arc<SandboxClaim>,
    progress: &Progress,
    verdict: &Verdict,
    next: &NextBatch,
) -> Result<Option<Arc<SandboxClaim>>, Error> {
    let after = Some(status(claim, progress, verdict, next, context.clock.now()));
    let Some(patch) = difference(&claim.status, &after).map_err(Error::Serialize)? else {
        return Ok(Some(Arc::clone(claim)));
    };
    let precondition = Precondition::unchanged(claim.as_ref());
    let answer = claims_of(context)
        .patch_status(key, &precondition, patch)
        .await;
    match answer {
        Ok(published) => {
            let message = after.and_then(|status| status.message).unwrap_or_default();
            match verdict {
                Verdict::Completed(reason) => tell_completed(context, claim, *reason, message),
                Verdict::Blocked(reason, _) if !was_blocked_by(claim, *reason) => {
                    tell_blocked(context, claim, *reason, message);
                }
                _ => {}
            }
            Ok(Some(published))
        }
        Err(error) if error.is_conflict() || error.is_not_found() => Ok(None),
        Err(error) => Err(Error::Publish(error)),
    }
}

/// Whether the claim's status gives this reason already.
fn was_blocked_by(claim: &SandboxClaim, reason: Reason) -> bool {
    let status = claim.status.as_ref();
    let completed =
        status.and_then(|status| conditions::find(&status.conditions, ConditionType::Completed));
    completed.is_some_and(|completed| completed.reason == reason.as_str())
}

/// Tells why nothing is claimed until something is changed. That a set does not exist yet is no reason for concern: it may be applied next.
fn tell_blocked(context: &Context, claim: &SandboxClaim, reason: Reason, note: String) {
    if reason == Reason::SandboxSetNotFound {
        return;
    }
    let occurrence = Occurrence {
        severity: Severity::Warning,
        reason: reason.as_str(),
        action: "Claim",
        note,
    };
    context.events.record(CONTROLLER, claim, occurrence);
}

fn tell_completed(context: &Context, claim: &SandboxClaim, reason: Reason, note: String) {
    let occurrence = Occurrence {
        severity: if reason == Reason::AllReplicasClaimed {
            Severity::Normal
        } else {
            Severity::Warning
        },
        reason: reason.as_str(),
        action: "Complete",
        note,
    };
    context.events.record(CONTROLLER, claim, occurrence);
}
