//! Carries out what was decided for a pool: adoptions, deletions, creations, and its status.

use api::{Sandbox, SandboxWarmPool, SandboxWarmPoolStatus};
use futures::future::join_all;
use kube::ResourceExt;
use planner::expectations::Expectations;
use planner::pool::{Cause, slow_start};
use planner::warm_pool::Plan;
use planner::warm_queue::SandboxKey;
use serde_json::json;

use super::{CONTROLLER, Error, FIELD_MANAGER};
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::key::ObjectKey;
use crate::warm_supply::WarmSupply;
use crate::writes::{Deletion, Failure, Precondition, WriteError, Writer};

/// Does all that can be done, and returns the first failure that is worth a retry.
pub(super) async fn apply(
    context: &Context,
    supply: &WarmSupply,
    key: &ObjectKey,
    pool: &SandboxWarmPool,
    plan: &Plan,
    expectations: &mut Expectations,
) -> Option<WriteError> {
    let sandboxes = Writer::new(context, &context.caches.sandboxes, FIELD_MANAGER);
    let mut failures = Vec::new();
    failures.extend(adopt(&sandboxes, key, plan).await);
    failures.extend(delete(context, supply, &sandboxes, key, pool, plan, expectations).await);
    if let Some((count, blueprint)) = &plan.creations {
        failures.extend(
            create(
                context,
                &sandboxes,
                key,
                pool,
                *count,
                blueprint,
                expectations,
            )
            .await,
        );
    }
    // What changed or went in the meantime comes back as an event.
    failures.into_iter().find(|error| {
        !matches!(
            error.failure,
            Failure::Conflict | Failure::NotFound | Failure::NamespaceTerminating
        )
    })
}

async fn adopt(sandboxes: &Writer<'_, Sandbox>, key: &ObjectKey, plan: &Plan) -> Vec<WriteError> {
    let requests = plan.adoptions.iter().map(|adoption| async move {
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
async fn delete(
    context: &Context,
    supply: &WarmSupply,
    sandboxes: &Writer<'_, Sandbox>,
    key: &ObjectKey,
    pool: &SandboxWarmPool,
    plan: &Plan,
    expectations: &mut Expectations,
) -> Vec<WriteError> {
    let mut left = plan.deletions.as_slice();
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
                    expectations.deleted(&version.name, &version.uid, context.clock.now());
                    if deletion.cause == Cause::Stuck {
                        tell_stuck(context, pool, &version.name);
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

async fn create(
    context: &Context,
    sandboxes: &Writer<'_, Sandbox>,
    key: &ObjectKey,
    pool: &SandboxWarmPool,
    count: usize,
    blueprint: &Sandbox,
    expectations: &mut Expectations,
) -> Vec<WriteError> {
    let mut failures = Vec::new();
    for size in slow_start(count) {
        let requests = (0..size).map(|_| sandboxes.create(key, blueprint));
        for answer in join_all(requests).await {
            match answer {
                Ok(made) => {
                    let uid = made.metadata.uid.as_deref().unwrap_or_default();
                    expectations.made(&made.name_any(), uid, context.clock.now());
                }
                Err(error) => failures.push(error),
            }
        }
        if let Some(error) = failures.first() {
            if matches!(error.failure, Failure::Transient(_)) {
                // The answer may have been lost after the deed was done.
                expectations.doubt();
            }
            tell_failure(context, pool, error);
            break;
        }
    }
    failures
}

fn tell_stuck(context: &Context, pool: &SandboxWarmPool, sandbox: &str) {
    let occurrence = Occurrence {
        severity: Severity::Warning,
        reason: "SandboxStuck",
        action: "Delete",
        note: format!("Sandbox {sandbox:?} did not become Ready in time and is replaced"),
    };
    context.events.record(CONTROLLER, pool, occurrence);
}

fn tell_failure(context: &Context, pool: &SandboxWarmPool, error: &WriteError) {
    if let Failure::Invalid(message) | Failure::Forbidden(message) = &error.failure {
        let occurrence = Occurrence {
            severity: Severity::Warning,
            reason: "FailedCreate",
            action: "Create",
            note: format!("A sandbox of the pool could not be made: {message}"),
        };
        context.events.record(CONTROLLER, pool, occurrence);
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
    let status = json!({
        "replicas": status.replicas,
        "readyReplicas": status.ready_replicas,
        "updatedReplicas": status.updated_replicas,
        "selector": status.selector,
        "observedGeneration": status.observed_generation,
        "conditions": status.conditions,
    });
    match pools.apply_status(key, status).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(Error::Publish(error)),
    }
}
