//! Decisions about one sandbox of a batch: adopt or create it, initialise it, and give it up if it does not respond.
//!
//! A sandbox that was Ready when it was selected is adopted even if it is not Ready any more: the contents of a batch never change, since
//! another process may be working on the same batch.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use api::Sandbox;
use api::conditions::{self, ConditionType};
use api::kruise::{SandboxClaim, SandboxSet};
use api::labels::{self, kruise as keys};
use api::names::LabelValue;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Map, Value, json};

use super::{Origin, Outcome, is_overdue, span};
use crate::owner::{controller_of, controller_reference, is_controlled_by, refers_to};
use crate::sandbox_set::{SetBlueprint, is_taken};
use crate::version::Version;

type Pairs = BTreeMap<String, String>;

/// The time after its pod became Ready in which a runtime must listen.
const RUNTIME_START: Duration = Duration::from_secs(5);
/// How long `/init` is retried on a sandbox that does not serve it. Times are in whole seconds, so this is one second at least.
const SERVED_WITHIN: Duration = Duration::from_secs(2);

/// The result of `POST /init`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Initialisation {
    /// Not tried in this pass.
    Untried,
    Done,
    /// It did not respond, or cannot yet (why).
    Unanswered(String),
    /// It refused (the response).
    Refused(String),
    /// It does not serve `/init`: the connection was refused, or the path not found (which). The call had no effect.
    Unserved(String),
}

/// One sandbox of a batch, as it was observed.
#[derive(Clone, Debug)]
pub struct Entry<'a> {
    pub name: &'a str,
    pub origin: Origin,
    /// The sandbox; `None` only if the API server has confirmed that it does not exist.
    pub sandbox: Option<&'a Sandbox>,
    pub initialisation: &'a Initialisation,
    /// The blueprint to create it from, if there is one.
    pub blueprint: Option<(&'a SandboxSet, &'a SetBlueprint)>,
    /// The token to lock it with, should it be taken now.
    pub token: &'a str,
}

/// What to do about a sandbox of a batch.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// Make it the claim's, if it is still as it was seen.
    Take { sandbox: Version, patch: Value },
    /// Make it.
    Make { sandbox: Box<Sandbox> },
    /// Call `/init` with its environment variables.
    Initialise { address: IpAddr, token: String },
    /// Delete it: it may have been initialised, so no other claim may have it.
    Release { sandbox: Version, why: String },
    /// Mark it as failed and keep it.
    SetAside {
        sandbox: Version,
        patch: Value,
        why: String,
    },
    /// Nothing more, for now or for ever.
    Settled(Outcome),
}

/// Decides what to do about one sandbox of a batch.
pub fn next(claim: &SandboxClaim, entry: &Entry<'_>, now: Timestamp) -> Next {
    let uid = claim.metadata.uid.as_deref().unwrap_or_default();
    let Some(sandbox) = entry.sandbox else {
        return absent(claim, entry, now);
    };
    if sandbox.metadata.deletion_timestamp.is_some() {
        return Next::Settled(Outcome::Lost);
    }
    if is_controlled_by(&sandbox.metadata, uid) {
        return owned(claim, entry, sandbox, now);
    }
    let is_free =
        controller_of(&sandbox.metadata).is_some_and(refers_to::<SandboxSet>) && !is_taken(sandbox);
    if is_free && entry.origin == Origin::Taken {
        return Next::Take {
            sandbox: Version::of(sandbox),
            patch: take(claim, sandbox, entry.token, now),
        };
    }
    Next::Settled(Outcome::Lost)
}

fn absent(claim: &SandboxClaim, entry: &Entry<'_>, now: Timestamp) -> Next {
    match (entry.origin, entry.blueprint) {
        (Origin::Made, Some((set, blueprint))) if !is_overdue(claim, now) => Next::Make {
            sandbox: Box::new(make(claim, entry, set, blueprint, now)),
        },
        _ => Next::Settled(Outcome::Lost),
    }
}

/// A sandbox of the claim counts once it runs and is initialised.
fn owned(claim: &SandboxClaim, entry: &Entry<'_>, sandbox: &Sandbox, now: Timestamp) -> Next {
    if sandbox.annotations().contains_key(keys::INIT_FAILURE) {
        return Next::Settled(Outcome::Failed);
    }
    if entry.origin == Origin::Made && !is_ready(sandbox) {
        return wait_or_give_up(claim, sandbox, "it is not Ready", now);
    }
    if claim.spec.variables().is_none() {
        return Next::Settled(Outcome::Held);
    }
    match entry.initialisation {
        Initialisation::Done => Next::Settled(Outcome::Held),
        Initialisation::Refused(why) => give_up(claim, sandbox, why),
        Initialisation::Unanswered(why) => wait_or_give_up(claim, sandbox, why, now),
        Initialisation::Unserved(why) => match ready_since(sandbox) {
            Some(ready) if !is_overdue(claim, now) => {
                let outcome = if has_had_time_to_serve(sandbox, ready, now) {
                    Outcome::Unserved(why.clone())
                } else {
                    Outcome::Unsettled
                };
                Next::Settled(outcome)
            }
            _ => wait_or_give_up(claim, sandbox, why, now),
        },
        Initialisation::Untried => match address(sandbox) {
            Some(address) => Next::Initialise {
                address,
                token: lock(sandbox).to_owned(),
            },
            None => wait_or_give_up(claim, sandbox, "it has no address", now),
        },
    }
}

/// Whether a runtime that serves `/init` would listen by now: the pod may be Ready before.
fn has_had_time_to_serve(sandbox: &Sandbox, ready: Timestamp, now: Timestamp) -> bool {
    let is_over = |since: Timestamp, time| since.checked_add(span(time)).is_ok_and(|at| at <= now);
    is_over(ready, RUNTIME_START)
        && claimed_at(sandbox).is_none_or(|claimed| is_over(claimed, SERVED_WITHIN))
}

fn claimed_at(sandbox: &Sandbox) -> Option<Timestamp> {
    let text = sandbox.annotations().get(keys::CLAIM_TIMESTAMP)?;
    text.parse().ok()
}

fn wait_or_give_up(claim: &SandboxClaim, sandbox: &Sandbox, why: &str, now: Timestamp) -> Next {
    let timeout = span(claim.spec.wait_ready_timeout());
    let is_late = claimed_at(sandbox)
        .and_then(|claimed| claimed.checked_add(timeout).ok())
        .is_none_or(|deadline| deadline <= now);
    if is_late || is_overdue(claim, now) {
        return give_up(claim, sandbox, why);
    }
    Next::Settled(Outcome::Unsettled)
}

fn give_up(claim: &SandboxClaim, sandbox: &Sandbox, why: &str) -> Next {
    let version = Version::of(sandbox);
    let why = why.to_owned();
    if claim.spec.reserve_failed_sandbox.unwrap_or(false) {
        let patch = json!({ "metadata": { "annotations": { keys::INIT_FAILURE: &why } } });
        return Next::SetAside {
            sandbox: version,
            patch,
            why,
        };
    }
    Next::Release {
        sandbox: version,
        why,
    }
}

/// The patch that makes a sandbox of a set the claim's.
fn take(claim: &SandboxClaim, sandbox: &Sandbox, token: &str, now: Timestamp) -> Value {
    let marks = Marks::new(claim, &sandbox.name_any(), token, now);
    let mut labels: Map<String, Value> = json_map(marks.labels);
    labels.insert(keys::SANDBOX_POOL.to_owned(), Value::Null);
    let mut owners: Vec<OwnerReference> = sandbox
        .owner_references()
        .iter()
        .filter(|owner| owner.controller != Some(true))
        .cloned()
        .collect();
    owners.push(controller_reference(claim));
    let mut patch = json!({ "metadata": {
        "labels": labels,
        "annotations": json_map(marks.annotations),
        "ownerReferences": owners,
    }});
    if let Some(time) = &claim.spec.shutdown_time {
        patch["spec"] = json!({ "shutdownTime": time });
    }
    patch
}

/// A sandbox made for the claim.
fn make(
    claim: &SandboxClaim,
    entry: &Entry<'_>,
    set: &SandboxSet,
    blueprint: &SetBlueprint,
    now: Timestamp,
) -> Sandbox {
    let marks = Marks::new(claim, entry.name, entry.token, now);
    let mut sandbox = blueprint.sandbox(set);
    sandbox.metadata.name = Some(entry.name.to_owned());
    sandbox.metadata.owner_references = Some(vec![controller_reference(claim)]);
    sandbox.labels_mut().extend(marks.labels);
    sandbox.annotations_mut().extend(marks.annotations);
    sandbox
        .spec
        .shutdown_time
        .clone_from(&claim.spec.shutdown_time);
    sandbox
}

/// The labels and annotations that name the owner, with those that the claim adds. Our own keys win; a claim that uses them is refused before.
struct Marks {
    labels: Pairs,
    annotations: Pairs,
}

impl Marks {
    fn new(claim: &SandboxClaim, sandbox: &str, token: &str, now: Timestamp) -> Self {
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let id = format!("{}--{sandbox}", claim.namespace().unwrap_or_default());
        let mut labels = claim.spec.labels.clone().unwrap_or_default();
        labels.insert(keys::SANDBOX_CLAIMED.to_owned(), "true".to_owned());
        labels.insert(labels::CLAIM_UID.to_owned(), uid.clone());
        // Names may be longer than a label's value; the annotations contain the same.
        for (key, value) in [(keys::CLAIM_NAME, claim.name_any()), (keys::SANDBOX_ID, id)] {
            if value.parse::<LabelValue>().is_ok() {
                labels.insert(key.to_owned(), value);
            }
        }
        let mut annotations = claim.spec.annotations.clone().unwrap_or_default();
        let moment = Timestamp::from_second(now.as_second()).unwrap_or(now);
        annotations.insert(keys::LOCK.to_owned(), token.to_owned());
        annotations.insert(keys::OWNER.to_owned(), uid);
        annotations.insert(keys::CLAIM_TIMESTAMP.to_owned(), moment.to_string());
        if let Some((key, context)) = claim.annotations().get_key_value(labels::TRACE_CONTEXT) {
            annotations.insert(key.clone(), context.clone());
        }
        Self {
            labels,
            annotations,
        }
    }
}

fn json_map(pairs: Pairs) -> Map<String, Value> {
    pairs
        .into_iter()
        .map(|(key, value)| (key, Value::from(value)))
        .collect()
}

fn is_ready(sandbox: &Sandbox) -> bool {
    ready_since(sandbox).is_some()
}

fn ready_since(sandbox: &Sandbox) -> Option<Timestamp> {
    let ready = conditions::find(&sandbox.status.as_ref()?.conditions, ConditionType::Ready)?;
    (ready.status == "True").then_some(ready.last_transition_time.0)
}

fn address(sandbox: &Sandbox) -> Option<IpAddr> {
    let addresses = &sandbox.status.as_ref()?.pod_ips;
    addresses.iter().find_map(|text| text.parse().ok())
}

fn lock(sandbox: &Sandbox) -> &str {
    sandbox
        .annotations()
        .get(keys::LOCK)
        .map_or("", String::as_str)
}
