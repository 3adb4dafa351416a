//! Carries out what was decided for a pool of either kind: adoptions, deletions and creations; and the status of a warm pool.

use api::conditions::{self, ConditionType, Reason};
use api::{Sandbox, SandboxWarmPool, SandboxWarmPoolStatus};
use futures::future::join_all;
use kube::{Resource, ResourceExt};
use planner::expectations::Expectations;
use planner::pool::{self, Cause, slow_start};
use planner::warm_pool::Adoption;
use planner::warm_queue::SandboxKey;
use serde_json::json;

use super::memory::Memory;
use super::{CONTROLLER, Error, FIELD_MANAGER};
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::key::ObjectKey;
use crate::warm_supply::WarmSupply;
use crate::writes::{Deletion, Failure, Precondition, WriteError, Writer};

/// A pool, and on whose behalf it is kept.
#[derive(Debug)]
pub(crate) struct Keeper<'a, K> {
    pub context: &'a Context,
    pub supply: &'a WarmSupply,
    pub key: &'a ObjectKey,
    pub pool: &'a K,
    /// The controller's name in events.
    pub controller: &'static str,
    pub field_manager: &'static str,
}

/// What is to change about a pool's sandboxes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Changes<'a> {
    pub adoptions: &'a [Adoption],
    pub deletions: &'a [pool::Deletion],
    /// How many sandboxes to make, and of what.
    pub creations: Option<(usize, &'a Sandbox)>,
}

/// Does all that can be done, and returns the first failure that is worth a retry.
pub(crate) async fn apply<K: Resource<DynamicType = ()>>(
    keeper: &Keeper<'_, K>,
    changes: Changes<'_>,
    memory: &mut Memory,
) -> Option<WriteError> {
    let context = keeper.context;
    let expectations = &mut memory.expectations;
    let sandboxes = Writer::new(context, &context.caches.sandboxes, keeper.field_manager);
    let mut failures = Vec::new();
    failures.extend(adopt(&sandboxes, keeper.key, changes.adoptions).await);
    failures.extend(delete(keeper, &sandboxes, changes.deletions, expectations).await);
    // A sandbox that changed or went in the meantime comes back as an event. One that could not be made does not: servers also answer
    // with a conflict when many creations count against one quota.
    failures.retain(|error| !error.is_conflict() && !error.is_not_found());
    if let Some((count, blueprint)) = changes.creations {
        failures.extend(create(keeper, &sandboxes, count, blueprint, expectations).await);
    }
    memory.namespace_is_ending = failures.iter().any(WriteError::is_namespace_terminating);
    failures
        .into_iter()
        .find(|error| !error.is_namespace_terminating())
}

async fn adopt(
    sandboxes: &Writer<'_, Sandbox>,
    key: &ObjectKey,
    adoptions: &[Adoption],
) -> Vec<WriteError> {
    let requests = adoptions.iter().map(|adoption| async move {
        let precondition = Precondition {
            uid: Some(adoption.sandbox.uid.clone()),
            resource_version: Some(adoption.sandbox.resource_version.clone()),
        };
        let patch = json!({ "metadata": { "ownerReferences": adoption.owner_references } });
        let target = key.sibling(&adoption.sandbox.name);
        sandboxes.patch(&target, &precondition, patch).await
    });
    join_all(requests)
        .await
        .into_iter()
        .filter_map(Result::err)
        .collect()
}

/// Deletes in batches that double. Each deletion holds only if the sandbox is as it was seen: one that has been claimed since is
/// somebody's.
async fn delete<K: Resource<DynamicType = ()>>(
    keeper: &Keeper<'_, K>,
    sandboxes: &Writer<'_, Sandbox>,
    deletions: &[pool::Deletion],
    expectations: &mut Expectations,
) -> Vec<WriteError> {
    let (key, supply) = (keeper.key, keeper.supply);
    let mut left = deletions;
    let mut failures = Vec::new();
    for size in slow_start(left.len()) {
        let (batch, rest) = left.split_at(size);
        left = rest;
        let requests = batch.iter().map(|deletion| async move {
            let version = &deletion.version;
            let queued = SandboxKey {
                namespace: key.namespace.to_string(),
                name: version.name.clone(),
            };
            if !supply.set_aside(&queued) {
                return (deletion, None);
            }
            let order = Deletion {
                precondition: Precondition {
                    uid: Some(version.uid.clone()),
                    resource_version: Some(version.resource_version.clone()),
                },
                ..Deletion::default()
            };
            let answer = sandboxes.delete(&key.sibling(&version.name), order).await;
            if answer.is_err() {
                supply.put_back(&queued);
            }
            (deletion, Some(answer))
        });
        for (deletion, answer) in join_all(requests).await {
            let version = &deletion.version;
            match answer {
                None => {}
                Some(Ok(())) => {
                    let now = keeper.context.clock.now();
                    expectations.deleted(&version.name, &version.uid, now);
                    if deletion.cause == Cause::Stuck {
                        tell_stuck(keeper, &version.name);
                    }
                }
                Some(Err(error)) => failures.push(error),
            }
        }
        if failures.iter().any(|error| !error.is_conflict()) {
            break;
        }
    }
    failures
}

async fn create<K: Resource<DynamicType = ()>>(
    keeper: &Keeper<'_, K>,
    sandboxes: &Writer<'_, Sandbox>,
    count: usize,
    blueprint: &Sandbox,
    expectations: &mut Expectations,
) -> Vec<WriteError> {
    let mut failures = Vec::new();
    for size in slow_start(count) {
        let requests = (0..size).map(|_| sandboxes.create(keeper.key, blueprint));
        for answer in join_all(requests).await {
            match answer {
                Ok(made) => {
                    let uid = made.metadata.uid.as_deref().unwrap_or_default();
                    expectations.made(&made.name_any(), uid, keeper.context.clock.now());
                }
                Err(error) => failures.push(error),
            }
        }
        let may_have_happened = |error: &WriteError| matches!(error.failure, Failure::Transient(_));
        if failures.iter().any(may_have_happened) {
            expectations.doubt();
        }
        if !failures.is_empty() {
            tell_failure(keeper, &failures);
            break;
        }
    }
    failures
}

fn tell_stuck<K: Resource<DynamicType = ()>>(keeper: &Keeper<'_, K>, sandbox: &str) {
    let occurrence = Occurrence {
        severity: Severity::Warning,
        reason: "SandboxStuck",
        action: "Delete",
        note: format!("Sandbox {sandbox:?} did not become Ready in time and is replaced"),
    };
    tell(keeper, occurrence);
}

fn tell<K: Resource<DynamicType = ()>>(keeper: &Keeper<'_, K>, occurrence: Occurrence) {
    let events = &keeper.context.events;
    events.record(keeper.controller, keeper.pool, occurrence);
}

/// Tells the first thing that stands in the way and that somebody can do something about.
fn tell_failure<K: Resource<DynamicType = ()>>(keeper: &Keeper<'_, K>, failures: &[WriteError]) {
    let refusal = failures.iter().find_map(|error| match &error.failure {
        Failure::Invalid(message) | Failure::Forbidden(message) => Some(message),
        _ => None,
    });
    if let Some(message) = refusal {
        let occurrence = Occurrence {
            severity: Severity::Warning,
            reason: "FailedCreate",
            action: "Create",
            note: format!("A sandbox of the pool could not be made: {message}"),
        };
        tell(keeper, occurrence);
    }
}

/// Applies the status if it says anything new.
pub(super) async fn publish(
    context: &Context,
    key: &ObjectKey,
    pool: &SandboxWarmPool,
    status: &SandboxWarmPoolStatus,
) -> Result<(), Error> {
    if pool.status.as_ref() == Some(status) {
        return Ok(());
    }
    let pools = Writer::new(context, &context.caches.warm_pools, FIELD_MANAGER);
    // Zeros are said, for those who read the object without its schema.
    let said = json!({
        "replicas": status.replicas,
        "readyReplicas": status.ready_replicas,
        "updatedReplicas": status.updated_replicas,
        "selector": status.selector,
        "observedGeneration": status.observed_generation,
        "conditions": status.conditions,
    });
    match pools.apply_status(key, said).await {
        Ok(_) => {}
        Err(error) if error.is_not_found() => return Ok(()),
        Err(error) => return Err(Error::Publish(error)),
    }
    tell_missing_template(context, pool, status);
    Ok(())
}

/// Tells that the pool has nothing to make sandboxes of, once each time it is so.
fn tell_missing_template(
    context: &Context,
    pool: &SandboxWarmPool,
    status: &SandboxWarmPoolStatus,
) {
    let is_missing = |status: &SandboxWarmPoolStatus| {
        conditions::find(&status.conditions, ConditionType::Updated)
            .filter(|updated| updated.reason == Reason::TemplateNotFound.as_str())
            .map(|updated| updated.message.clone())
    };
    let Some(note) = is_missing(status) else {
        return;
    };
    if pool.status.as_ref().and_then(is_missing).as_ref() == Some(&note) {
        return;
    }
    let occurrence = Occurrence {
        severity: Severity::Warning,
        reason: Reason::TemplateNotFound.as_str(),
        action: "Refill",
        note,
    };
    context.events.record(CONTROLLER, pool, occurrence);
}
