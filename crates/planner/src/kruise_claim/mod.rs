//! What to do about a batch SandboxClaim of the OpenKruise dialect.
//!
//! A claim adopts its sandboxes in batches. The names of a batch are written to the claim's status first, under the claim's optimistic
//! lock; each sandbox is then adopted under its own lock, and initialised with the claim's environment variables. The next batch is
//! written once the result of each sandbox is known, together with the new count. So working on a batch is idempotent: any process
//! may do it, several times and several at once.
//!
//! ```text
//!   Pending ──▶ Claiming ──────────────────────────────────────────▶ Completed
//!                 │  ▲                                all held, or the time is up, or the set is gone
//!    write batch  ▼  │ count, next batch
//!                batch ── take ──▶ the claim's ── init ──▶ held
//!                  └─▶ lost            ├──────▶ failed: released, or set aside
//!                                      └──────▶ unserved: kept, until the claim or the sandbox changes
//! ```
//!
//! # Guarantees
//! - A sandbox is held by at most one claim: taking it succeeds only on a sandbox that is still its set's and carries no lock.
//! - A claim never holds more than it asked for: only sandboxes of its batch are ever taken for it or made for it, and a batch is
//!   never larger than what is missing.
//! - A claim with a timeout is Completed by then, as far as the API server answers.

mod entry;
mod pass;
mod status;
mod validation;

use std::collections::HashSet;
use std::time::Duration;

use api::conditions::Reason;
use api::kruise::{ClaimPhase, SandboxClaim, SandboxClaimStatus};
use api::labels::kruise as keys;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

pub use entry::{Entry, Initialisation, Next, next};
pub use pass::{Environment, reconcile};
pub use status::status;
pub use validation::{Invalid, validate};

use crate::owner::is_controlled_by;

/// The delay before a sandbox that did not respond, or is not Ready yet, is checked again.
const UNSETTLED_RECHECK: Duration = Duration::from_millis(500);
/// The delay before `/init` is retried on sandboxes that do not serve it.
const UNSERVED_RECHECK: Duration = Duration::from_secs(60);
/// The delay before a claim looks again for free sandboxes, if no event wakes it.
const FREE_SANDBOX_RECHECK: Duration = Duration::from_secs(2);
/// How long a claim without a timeout waits for its set to exist.
const SET_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest delay after failed sandboxes.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Where a sandbox of a batch comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It is taken from the set.
    Taken,
    /// It is made for the claim.
    Made,
}

/// A sandbox of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pick {
    pub name: String,
    pub origin: Origin,
}

/// The result of a sandbox of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The claim owns it, and it is initialised.
    Held,
    /// It is gone, or another owner's.
    Lost,
    /// It could not be initialised, and no longer counts.
    Failed,
    /// It is not known yet.
    Unsettled,
    /// The claim owns it, but it does not serve `/init` (the error). The claim keeps it until a change of the claim needs no `/init`.
    Unserved(String),
    /// The API server refuses what the claim would write on it (its message).
    Refused(String),
}

/// The batch that a claim's status names.
pub fn batch(claim: &SandboxClaim) -> Vec<Pick> {
    let Some(status) = &claim.status else {
        return Vec::new();
    };
    let pick = |origin| {
        move |name: &String| Pick {
            name: name.clone(),
            origin,
        }
    };
    let taken = status.claiming.iter().map(pick(Origin::Taken));
    let made = status.creating.iter().map(pick(Origin::Made));
    taken.chain(made).collect()
}

/// How many sandboxes a claim holds besides its batch, of those that `sandboxes` shows.
pub fn held_besides<'a>(
    claim: &SandboxClaim,
    sandboxes: impl IntoIterator<Item = &'a ObjectMeta>,
) -> usize {
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let batch = batch(claim);
    let in_batch: HashSet<&str> = batch.iter().map(|pick| pick.name.as_str()).collect();
    let is_failed = |metadata: &ObjectMeta| {
        let annotations = metadata.annotations.as_ref();
        annotations.is_some_and(|annotations| annotations.contains_key(keys::INIT_FAILURE))
    };
    sandboxes
        .into_iter()
        .filter(|metadata| {
            is_controlled_by(metadata, uid)
                && metadata.deletion_timestamp.is_none()
                && !is_failed(metadata)
                && !in_batch.contains(metadata.name.as_deref().unwrap_or_default())
        })
        .count()
}

/// Whether a cache that shows so many sandboxes besides the batch is as recent as the claim's status. If not, the API server must be
/// asked whether the cache is stale or a sandbox is gone.
pub fn agrees_with_status(claim: &SandboxClaim, held: usize) -> bool {
    let recorded = claim
        .status
        .as_ref()
        .map_or(0, |status| status.claimed_replicas);
    usize::try_from(recorded).is_ok_and(|recorded| recorded == held)
}

/// The progress of a claim after work on its batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub held: usize,
    /// How many have failed since the claim was made.
    pub failed: usize,
    /// The sandboxes of the batch without a result.
    pub unsettled: Vec<Pick>,
    /// Why the API server refuses to let the claim have sandboxes, if it does.
    pub refused: Option<String>,
    /// Why the sandboxes of the set cannot be initialised, if they cannot.
    pub unserved: Option<String>,
}

/// Sums up the results of a batch.
pub fn progress(claim: &SandboxClaim, held: usize, outcomes: Vec<(Pick, Outcome)>) -> Progress {
    let failed = claim
        .status
        .as_ref()
        .map_or(0, |status| status.failed_replicas);
    let mut progress = Progress {
        held,
        failed: usize::try_from(failed).unwrap_or(0),
        ..Progress::default()
    };
    for (pick, outcome) in outcomes {
        match outcome {
            Outcome::Held => progress.held += 1,
            Outcome::Failed => progress.failed += 1,
            Outcome::Unsettled => progress.unsettled.push(pick),
            Outcome::Unserved(why) => {
                progress.unserved = Some(format!("sandbox {:?}: {why}", pick.name));
                progress.unsettled.push(pick);
            }
            Outcome::Refused(message) => progress.refused = Some(message),
            Outcome::Lost => {}
        }
    }
    progress
}

/// What a claim does next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// Claiming is over.
    Completed(Reason),
    /// Nothing can be claimed until the claim is changed.
    Blocked(Reason, String),
    /// The batch is not settled.
    Settling,
    /// Sandboxes failed; the claim tries others after this time.
    Paused(Duration),
    /// It begins a batch of up to so many.
    Claim(usize),
}

/// The facts besides the claim that decide its next step.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings {
    /// The set exists and is not being deleted.
    pub set_exists: bool,
    /// Until when the claim waits after a failure, if it does.
    pub paused_until: Option<Timestamp>,
    pub max_batch: usize,
    pub now: Timestamp,
}

/// Decides what a claim does next.
pub fn decide(claim: &SandboxClaim, progress: &Progress, surroundings: &Surroundings) -> NextStep {
    let desired = usize::try_from(claim.spec.desired_replicas()).unwrap_or(1);
    if let Some(why) = &progress.unserved {
        return NextStep::Blocked(
            Reason::EnvVarsInjectionRejected,
            format!(
                "spec.envVars: the sandboxes of SandboxSet {:?} serve no POST /init on port 49983 ({why}); use an image that runs sandboxd, \
                 leave out envVars, or set skipInitRuntime",
                claim.spec.template_name
            ),
        );
    }
    if !progress.unsettled.is_empty() {
        return NextStep::Settling;
    }
    if progress.held >= desired {
        return NextStep::Completed(Reason::AllReplicasClaimed);
    }
    if !surroundings.set_exists {
        let set = &claim.spec.template_name;
        return if awaits_set(claim, surroundings.now) {
            let why = format!("waits for SandboxSet {set:?}, which does not exist");
            NextStep::Blocked(Reason::SandboxSetNotFound, why)
        } else {
            NextStep::Completed(Reason::SandboxSetNotFound)
        };
    }
    let invalid = validate(claim).err();
    // Whatever its timeout, a claim takes the sandboxes that are available now.
    let has_tried = has_begun(claim) || invalid.is_some();
    if has_tried && is_overdue(claim, surroundings.now) {
        return NextStep::Completed(Reason::TimeoutReached);
    }
    if let Some(invalid) = invalid {
        return NextStep::Blocked(invalid.reason(), invalid.to_string());
    }
    if let Some(message) = &progress.refused {
        return NextStep::Blocked(Reason::InvalidConfiguration, message.clone());
    }
    let left = surroundings
        .paused_until
        .and_then(|until| Duration::try_from(until.duration_since(surroundings.now)).ok())
        .filter(|left| !left.is_zero());
    if let Some(left) = left {
        return NextStep::Paused(left);
    }
    NextStep::Claim((desired - progress.held).min(batch_size(surroundings.max_batch, progress)))
}

/// Limits a batch after failures: a set whose sandboxes fail is not emptied by trying them all.
fn batch_size(max_batch: usize, progress: &Progress) -> usize {
    let halvings = u32::try_from(progress.failed).unwrap_or(u32::MAX);
    max_batch.checked_shr(halvings).unwrap_or(0).max(1)
}

/// The delay after `failed` sandboxes in all.
pub fn pause_after(failed: usize) -> Duration {
    let doublings = u32::try_from(failed.saturating_sub(1)).unwrap_or(u32::MAX);
    Duration::from_secs(1_u64 << doublings.min(6)).min(LONGEST_PAUSE)
}

fn has_begun(claim: &SandboxClaim) -> bool {
    claim
        .status
        .as_ref()
        .is_some_and(|status| status.claim_start_time.is_some())
}

/// When the claim must be Completed, if it has a timeout.
fn deadline(claim: &SandboxClaim) -> Option<Timestamp> {
    let timeout = span(Duration::from(claim.spec.claim_timeout?));
    let began = claim
        .status
        .as_ref()
        .and_then(|status| status.claim_start_time.as_ref());
    let since = began.or(claim.metadata.creation_timestamp.as_ref())?;
    Some(since.0.checked_add(timeout).unwrap_or(Timestamp::MAX))
}

/// Whether a claim whose set does not exist waits for it: it may have been applied first. Once claiming has begun, the set was there and is gone.
fn awaits_set(claim: &SandboxClaim, now: Timestamp) -> bool {
    !has_begun(claim) && set_deadline(claim).is_some_and(|deadline| now < deadline)
}

/// When a claim no longer waits for its set to exist.
fn set_deadline(claim: &SandboxClaim) -> Option<Timestamp> {
    let created = claim.metadata.creation_timestamp.as_ref()?;
    let default = created.0.checked_add(span(SET_TIMEOUT));
    deadline(claim).or(Some(default.unwrap_or(Timestamp::MAX)))
}

fn is_overdue(claim: &SandboxClaim, now: Timestamp) -> bool {
    deadline(claim).is_some_and(|deadline| deadline <= now)
}

fn span(duration: Duration) -> SignedDuration {
    SignedDuration::try_from(duration).unwrap_or(SignedDuration::MAX)
}

/// The sandboxes that a claim is to have next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NextBatch {
    /// Free sandboxes of the set.
    pub claiming: Vec<String>,
    /// Names for sandboxes to be made.
    pub creating: Vec<String>,
}

impl NextBatch {
    pub fn is_empty(&self) -> bool {
        self.claiming.is_empty() && self.creating.is_empty()
    }
}

/// When to reconcile the claim again without a change.
pub fn next_look(
    claim: &SandboxClaim,
    next_step: &NextStep,
    batch: &NextBatch,
    now: Timestamp,
) -> Option<Duration> {
    let left = |deadline: Timestamp| Duration::try_from(deadline.duration_since(now)).ok();
    let by_verdict = match next_step {
        NextStep::Completed(_) => return removal(claim).map(|at| left(at).unwrap_or_default()),
        NextStep::Blocked(Reason::SandboxSetNotFound, _) => {
            set_deadline(claim).map(|at| left(at).unwrap_or_default())
        }
        NextStep::Blocked(Reason::EnvVarsInjectionRejected, _) => Some(UNSERVED_RECHECK),
        NextStep::Blocked(..) => None,
        NextStep::Settling => Some(UNSETTLED_RECHECK),
        NextStep::Paused(left) => Some(*left),
        NextStep::Claim(_) if batch.is_empty() => Some(FREE_SANDBOX_RECHECK),
        NextStep::Claim(_) => Some(Duration::ZERO),
    };
    let by_deadline = deadline(claim).map(|at| left(at).unwrap_or_default());
    by_verdict.into_iter().chain(by_deadline).min()
}

/// The stage of a claim's lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// It is being deleted.
    Going,
    Active,
    /// It is Completed, and deleted after this time, if it has one.
    Completed(Option<Duration>),
    /// It is Completed, and its time to live is over.
    Outlived,
}

/// The stage of a claim's lifecycle.
pub fn life(claim: &SandboxClaim, now: Timestamp) -> Life {
    if claim.metadata.deletion_timestamp.is_some() {
        return Life::Going;
    }
    if !is_completed(claim) {
        return Life::Active;
    }
    match removal(claim).map(|at| Duration::try_from(at.duration_since(now)).unwrap_or_default()) {
        None => Life::Completed(None),
        Some(left) if left.is_zero() => Life::Outlived,
        Some(left) => Life::Completed(Some(left)),
    }
}

pub fn is_completed(claim: &SandboxClaim) -> bool {
    let status = claim.status.as_ref();
    status.is_some_and(|status| status.phase == Some(ClaimPhase::Completed))
}

/// When a Completed claim is deleted, if it has a time to live.
fn removal(claim: &SandboxClaim) -> Option<Timestamp> {
    let ttl = span(Duration::from(claim.spec.ttl_after_completed?));
    let completed = completion_time(claim.status.as_ref()?)?;
    Some(completed.checked_add(ttl).unwrap_or(Timestamp::MAX))
}

fn completion_time(status: &SandboxClaimStatus) -> Option<Timestamp> {
    status.completion_time.as_ref().map(|time| time.0)
}

#[cfg(test)]
mod tests;
