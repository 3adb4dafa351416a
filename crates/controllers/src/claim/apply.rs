//! Carries out what was decided for a claim, one effect after the other, each with its preconditions.

use std::sync::Arc;

use api::{Sandbox, SandboxClaim, labels};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::ResourceExt;
use kube::api::PropagationPolicy;
use planner::claim::Effect;
use planner::version::Version;
use serde_json::Value;
use tracing::warn;

use super::FIELD_MANAGER;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::writes::{Deletion, Failure, Precondition, WriteError, Writer};

/// What came of a plan.
#[derive(Debug, Default)]
pub(super) struct Applied {
    /// The claim as it was last written, if it was.
    pub claim: Option<Arc<SandboxClaim>>,
    /// The sandbox as it was last written, if it was.
    pub sandbox: Option<Arc<Sandbox>>,
    /// A warm sandbox became the claim's.
    pub transferred: bool,
    /// A sandbox was made for the claim.
    pub created: bool,
    /// The sandbox that became the claim's, or may have: the answer to the write can be lost.
    pub acquired: Option<String>,
    pub deleted_sandbox: bool,
    /// What stopped the plan, if something did.
    pub failure: Option<WriteError>,
}

impl Applied {
    /// Whether the plan was made upon what is no longer true.
    pub fn is_outdated(&self) -> bool {
        self.failure.as_ref().is_some_and(|error| {
            matches!(
                error.failure,
                Failure::Conflict | Failure::NotFound | Failure::AlreadyExists
            )
        })
    }
}

pub(super) fn claims(context: &Context) -> Writer<'_, SandboxClaim> {
    Writer::new(context, &context.caches.claims, FIELD_MANAGER)
}

fn sandboxes(context: &Context) -> Writer<'_, Sandbox> {
    Writer::new(context, &context.caches.sandboxes, FIELD_MANAGER)
}

/// Carries out effects in order until one fails: each relies on the one before.
pub(super) async fn apply(
    context: &Context,
    key: &ObjectKey,
    claim: &Arc<SandboxClaim>,
    effects: &[Effect],
) -> Applied {
    let mut applied = Applied::default();
    for effect in effects {
        if let Err(error) = carry_out(context, key, claim, effect, &mut applied).await {
            applied.failure = Some(error);
            break;
        }
    }
    applied
}

async fn carry_out(
    context: &Context,
    key: &ObjectKey,
    claim: &Arc<SandboxClaim>,
    effect: &Effect,
    applied: &mut Applied,
) -> Result<(), WriteError> {
    match effect {
        Effect::Bind { patch, .. } | Effect::Unbind { patch } => {
            let precondition = Precondition::unchanged(claim.as_ref());
            let mut patch = patch.clone();
            if let Some(carried) = trace_to_carry(claim, effect) {
                patch["metadata"]["annotations"][labels::TRACE_CONTEXT] = carried;
            }
            let bound = claims(context).patch(key, &precondition, patch).await?;
            applied.claim = Some(bound);
        }
        Effect::Transfer { sandbox, patch } => {
            let answer = change(context, key, sandbox, patch).await;
            applied.acquired = may_have_happened(&answer).then(|| sandbox.name.clone());
            applied.sandbox = Some(answer?);
            applied.transferred = true;
        }
        Effect::SyncMetadata { sandbox, patch } => {
            applied.sandbox = Some(change(context, key, sandbox, patch).await?);
        }
        Effect::Create { sandbox } => {
            let answer = sandboxes(context).create(key, sandbox).await;
            applied.acquired = may_have_happened(&answer).then(|| key.name.to_string());
            match answer {
                Ok(made) => {
                    applied.sandbox = Some(made);
                    applied.created = true;
                }
                Err(error) => {
                    if error.failure == Failure::AlreadyExists {
                        // The cache did not know; it does once it was asked for.
                        sandboxes(context).get(key).await?;
                    }
                    return Err(error);
                }
            }
        }
        Effect::DeleteSandbox { sandbox } => {
            let deletion = Deletion::given(same(sandbox));
            sandboxes(context)
                .delete(&key.sibling(&sandbox.name), deletion)
                .await?;
            applied.deleted_sandbox = true;
        }
        Effect::DeleteClaim { foreground } => {
            let deletion = Deletion {
                propagation: foreground.then_some(PropagationPolicy::Foreground),
                // Its time may just have been extended.
                ..Deletion::given(Precondition::unchanged(claim.as_ref()))
            };
            claims(context).delete(key, deletion).await?;
        }
        Effect::DeleteLegacyPolicy { policy } => delete_legacy_policy(context, key, policy).await,
    }
    Ok(())
}

/// Whether the server may have carried a write out: it did, or nothing tells that it did not.
fn may_have_happened<T>(answer: &Result<T, WriteError>) -> bool {
    match answer {
        Ok(_) => true,
        Err(error) => matches!(
            error.failure,
            Failure::Transient(_) | Failure::Unreadable(_)
        ),
    }
}

/// The trace that a claim is to carry from its binding on, while traces are exported.
fn trace_to_carry(claim: &SandboxClaim, effect: &Effect) -> Option<Value> {
    let is_bound = matches!(effect, Effect::Bind { .. });
    if !is_bound || !telemetry::spans::are_exported() {
        return None;
    }
    claim
        .annotations()
        .get(labels::TRACE_CONTEXT)
        .map(|carried| Value::from(carried.as_str()))
}

/// Changes a sandbox that must still be as it was seen. On a conflict the cache is told the truth, for the next attempt.
async fn change(
    context: &Context,
    key: &ObjectKey,
    sandbox: &Version,
    patch: &Value,
) -> Result<Arc<Sandbox>, WriteError> {
    let target = key.sibling(&sandbox.name);
    let answer = sandboxes(context)
        .patch(&target, &sandbox.into(), patch.clone())
        .await;
    if let Err(error) = &answer
        && error.is_conflict()
    {
        sandboxes(context).get(&target).await?;
    }
    answer
}

/// A leftover is not worth failing a claim for: it is tried again with the next reconcile.
async fn delete_legacy_policy(context: &Context, key: &ObjectKey, policy: &Version) {
    let policies =
        Writer::<NetworkPolicy>::new(context, &context.caches.network_policies, FIELD_MANAGER);
    let deletion = Deletion::given(same(policy));
    if let Err(error) = policies.delete(&key.sibling(&policy.name), deletion).await {
        warn!(
            error = &error as &dyn std::error::Error,
            "cannot delete the claim's old network policy; it is tried again"
        );
    }
}

fn same(version: &Version) -> Precondition {
    Precondition::uid(version.uid.clone())
}
