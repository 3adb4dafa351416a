//! One pass over a batch claim: settle the batch that its status names, and begin the next.
//!
//! A batch costs one write of the claim's status, which names its sandboxes before they are taken, and one write of each sandbox. The
//! status that counts them names the next batch, or reports that the claim is Completed.

mod environment;
mod publish;
mod settle;

use std::sync::Arc;
use std::time::Duration;

use api::kruise::{SandboxClaim, SandboxSet};
use api::labels;
use kube::ResourceExt;

pub use environment::Environment;

use self::publish::publish;
use self::settle::settle_batch;
use super::{
    Life, NextBatch, NextStep, Surroundings, agrees_with_status, decide, held_besides,
    is_completed, life, next_look, pause_after, progress,
};
use crate::pass::{
    Action, Error, Failure, Objects, Precondition, Propagation, RequestError, end_unobserved,
};
use crate::warm_queue::{Request, Reservation};

/// How many attempts one pass makes: after a conflict, and to settle the batch that it has begun. Then other claims go first.
const ATTEMPTS: usize = 4;
/// The longest prefix that a new sandbox takes of its set's name: the name must fit one label of a host name.
const NAME_PREFIX_MAX: usize = 50;

/// Brings one claim a step closer to its spec: settles the batch that it has begun, and begins the next.
pub async fn reconcile<E: Environment>(
    env: &E,
    claim: Arc<SandboxClaim>,
) -> Result<Action, Error<E::Error>> {
    match life(&claim, env.now()) {
        Life::Going | Life::Completed(None) => return Ok(Action::AwaitChange),
        Life::Completed(Some(left)) => return Ok(Action::RequeueAfter(left)),
        Life::Outlived => return remove(env, &claim).await,
        Life::Active => {}
    }
    let _acquiring = env.acquiring();
    let mut claim = claim;
    for number in 1..=ATTEMPTS {
        match attempt(env, &claim).await? {
            Attempt::Done(action) => return Ok(action),
            Attempt::Begun(_) if number == ATTEMPTS => break,
            Attempt::Begun(begun) => claim = begun,
            Attempt::Outdated => match env.claims().get(&claim.name_any()).await {
                Ok(Some(live)) if live.uid() == claim.uid() && !is_completed(&live) => claim = live,
                Ok(_) => return Ok(Action::AwaitChange),
                Err(error) => return Err(Error::Observe(error)),
            },
        }
    }
    Ok(Action::RequeueAfter(Duration::ZERO))
}

/// Deletes a claim whose time to live is over. Its sandboxes stay.
async fn remove<E: Environment>(env: &E, claim: &SandboxClaim) -> Result<Action, Error<E::Error>> {
    let (claims, name) = (env.claims(), claim.name_any());
    let deleted = claims.delete(&name, Precondition::same(claim), Propagation::Orphan);
    match deleted.await {
        Err(error) if *error.failure() != Failure::Conflict => Err(Error::Apply(error)),
        _ => Ok(Action::AwaitChange),
    }
}

enum Attempt {
    Done(Action),
    /// The claim with a new batch to be settled.
    Begun(Arc<SandboxClaim>),
    /// The claim has changed; observe again.
    Outdated,
}

async fn attempt<E: Environment>(
    env: &E,
    claim: &Arc<SandboxClaim>,
) -> Result<Attempt, Error<E::Error>> {
    let set = match find_set(env, claim).await {
        Ok(set) => set,
        Err(error) => return unobserved(env, claim, error).await,
    };
    let settled = settle_batch(env, claim, set.as_deref()).await?;
    let held = held(env, claim).await?;
    let progress = progress(claim, held, settled.outcomes);
    let now = env.now();
    if settled.failed > 0 {
        env.pause(now, pause_after(progress.failed));
    }
    if progress.unsettled.is_empty() {
        // The taken sandboxes have left the queue by now; the lost ones may go back to it.
        env.hold(Vec::new());
    }
    let surroundings = Surroundings {
        set_exists: set.is_some(),
        paused_until: env.paused_until(),
        max_batch: env.max_batch(),
        now,
    };
    let next_step = decide(claim, &progress, &surroundings);
    let (next, reservations) = match (&next_step, &set) {
        (NextStep::Claim(count), Some(set)) => pick(env, claim, set, *count),
        _ => (NextBatch::default(), Vec::new()),
    };
    let Some(published) = publish(env, claim, &progress, &next_step, &next).await? else {
        return Ok(Attempt::Outdated);
    };
    if let Some(failure) = settled.failure {
        return match failure.failure() {
            Failure::NamespaceTerminating => Ok(Attempt::Done(Action::AwaitChange)),
            _ => Err(Error::Apply(failure)),
        };
    }
    if !next.is_empty() {
        env.hold(reservations);
        return Ok(Attempt::Begun(published));
    }
    let look = next_look(&published, &next_step, &next, now);
    let action = look.map_or(Action::AwaitChange, Action::RequeueAfter);
    Ok(Attempt::Done(action))
}

/// The set that the claim names, unless it is missing or being deleted. If the cache does not have it, the API server is asked.
async fn find_set<E: Environment>(
    env: &E,
    claim: &SandboxClaim,
) -> Result<Option<Arc<SandboxSet>>, E::Error> {
    let name = &claim.spec.template_name;
    if name.is_empty() {
        return Ok(None);
    }
    let sets = env.sandbox_sets();
    let found = match sets.cached(name) {
        Some(set) => Some(set),
        None => sets.get(name).await?,
    };
    Ok(found.filter(|set| set.metadata.deletion_timestamp.is_none()))
}

async fn unobserved<E: Environment>(
    env: &E,
    claim: &SandboxClaim,
    error: E::Error,
) -> Result<Attempt, Error<E::Error>> {
    let status = claim.status.as_ref();
    let before = status.map_or(&[][..], |status| &status.conditions);
    let (now, emit) = (env.now(), |event| env.emit(claim, event));
    let claims = env.claims_as_reporter();
    end_unobserved(&claims, claim, before, error, now, emit)
        .await
        .map(Attempt::Done)
}

/// How many sandboxes the claim holds besides its batch.
async fn held<E: Environment>(env: &E, claim: &SandboxClaim) -> Result<usize, Error<E::Error>> {
    let (sandboxes, uid) = (env.sandboxes(), claim.uid().unwrap_or_default());
    let cached = sandboxes.controlled_by(&uid);
    let held = held_besides(claim, cached.iter().map(|sandbox| &sandbox.metadata));
    if agrees_with_status(claim, held) {
        return Ok(held);
    }
    let selector = format!("{}={uid}", labels::CLAIM_UID);
    let listed = sandboxes.list_metadata(&selector).await;
    Ok(held_besides(claim, &listed.map_err(Error::List)?))
}

/// Picks the sandboxes of the next batch, and reserves them. A claim that finds none waits in the set's queue.
fn pick<E: Environment>(
    env: &E,
    claim: &SandboxClaim,
    set: &SandboxSet,
    count: usize,
) -> (NextBatch, Vec<E::Reservation>) {
    let uid = set.uid().unwrap_or_default();
    let request = Request {
        namespace: claim.namespace().unwrap_or_default(),
        template_hash: uid.clone(),
        pool_hash: Some(uid.clone()),
    };
    let reserve = || -> Vec<E::Reservation> {
        let reservations = std::iter::from_fn(|| env.reserve(&request));
        reservations.take(count).collect()
    };
    let mut reservations = reserve();
    let mut next = NextBatch::default();
    if claim.spec.create_on_no_stock.unwrap_or(false) {
        let missing = reservations.len()..count;
        next.creating = missing.map(|_| new_name(env, set)).collect();
    } else if reservations.is_empty() {
        env.wait_in_line(&uid);
        // A sandbox that became Ready before the claim was queued woke no claim.
        reservations = reserve();
    }
    next.claiming = reservations
        .iter()
        .map(|reservation| reservation.sandbox().name_any())
        .collect();
    (next, reservations)
}

/// A name for a sandbox that is created for a claim.
fn new_name<E: Environment>(env: &E, set: &SandboxSet) -> String {
    let name = set.name_any();
    let prefix = name.get(..NAME_PREFIX_MAX).unwrap_or(&name);
    let prefix = prefix.trim_end_matches(['-', '.']);
    let suffix = env.random_number() & 0xffff_ffff;
    format!("{prefix}-{suffix:08x}")
}
