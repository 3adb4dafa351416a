//! Carries out the effects of a plan for a claim, each with its preconditions.

use std::sync::Arc;

use api::{Sandbox, SandboxClaim, labels};
use kube::ResourceExt;
use serde_json::Value;

use super::super::Effect;
use super::{Announcement, Environment};
use crate::pass::{Failure, Objects, Precondition, Propagation, RequestError, may_have_happened};
use crate::version::Version;

/// The outcome of a plan.
#[derive(Debug)]
pub(super) struct Applied<E> {
    /// The claim as the last write left it, if it was written.
    pub claim: Option<Arc<SandboxClaim>>,
    /// The sandbox as the last write left it, if it was written.
    pub sandbox: Option<Arc<Sandbox>>,
    /// A warm sandbox became the claim's.
    pub transferred: bool,
    /// A sandbox was created for the claim.
    pub created: bool,
    pub deleted_sandbox: bool,
    /// What stopped the plan, if something did.
    pub failure: Option<E>,
}

impl<E: RequestError> Applied<E> {
    /// Whether the plan was made from outdated objects.
    pub fn is_outdated(&self) -> bool {
        let failure = self.failure.as_ref();
        failure.is_some_and(|error| error.failure().is_outdated())
    }
}

/// Carries out effects in order until one fails: each relies on the one before.
pub(super) async fn apply<E: Environment>(
    env: &E,
    claim: &Arc<SandboxClaim>,
    effects: &[Effect],
) -> Applied<E::Error> {
    let mut applied = Applied {
        claim: None,
        sandbox: None,
        transferred: false,
        created: false,
        deleted_sandbox: false,
        failure: None,
    };
    for effect in effects {
        if let Err(error) = carry_out(env, claim, effect, &mut applied).await {
            applied.failure = Some(error);
            break;
        }
    }
    applied
}

async fn carry_out<E: Environment>(
    env: &E,
    claim: &Arc<SandboxClaim>,
    effect: &Effect,
    applied: &mut Applied<E::Error>,
) -> Result<(), E::Error> {
    let name = claim.name_any();
    match effect {
        Effect::Bind { patch, .. } => {
            let patch = with_trace(env, claim, patch);
            applied.claim = Some(change_claim(env, claim, patch).await?);
        }
        Effect::Unbind { patch } => {
            applied.claim = Some(change_claim(env, claim, patch.clone()).await?);
        }
        Effect::Transfer { sandbox, patch } => {
            let answer = change_sandbox(env, sandbox, patch).await;
            if may_have_happened(&answer) {
                env.note_acquired(claim, &sandbox.name);
            }
            applied.sandbox = Some(answer?);
            applied.transferred = true;
        }
        Effect::SyncMetadata { sandbox, patch } => {
            applied.sandbox = Some(change_sandbox(env, sandbox, patch).await?);
        }
        Effect::Create { sandbox } => {
            let answer = env.sandboxes().create(&name, sandbox).await;
            if may_have_happened(&answer) {
                env.note_acquired(claim, &name);
            }
            if let Err(error) = &answer
                && *error.failure() == Failure::AlreadyExists
            {
                // The cache did not show it. It learns the answer, for the next attempt.
                env.sandboxes().get(&name).await?;
            }
            applied.sandbox = Some(answer?);
            applied.created = true;
        }
        Effect::DeleteSandbox { sandbox } => {
            delete(&env.sandboxes(), sandbox).await?;
            applied.deleted_sandbox = true;
        }
        Effect::DeleteClaim { foreground } => {
            let propagation = if *foreground {
                Propagation::Foreground
            } else {
                Propagation::Default
            };
            // Its deadline may just have been extended.
            let precondition = Precondition::unchanged(claim.as_ref());
            let claims = env.claims();
            claims.delete(&name, precondition, propagation).await?;
        }
        // A leftover does not fail the claim: the next pass tries again.
        Effect::DeleteLegacyPolicy { policy } => {
            if let Err(error) = delete(&env.network_policies(), policy).await {
                env.announce(claim, Announcement::LegacyPolicyNotDeleted(&error));
            }
        }
    }
    Ok(())
}

/// The binding, which also carries the trace of the claim while traces are exported.
fn with_trace<E: Environment>(env: &E, claim: &SandboxClaim, patch: &Value) -> Value {
    let mut patch = patch.clone();
    if let Some(context) = claim.annotations().get(labels::TRACE_CONTEXT)
        && env.persists_trace()
    {
        patch["metadata"]["annotations"][labels::TRACE_CONTEXT] = Value::from(context.as_str());
    }
    patch
}

async fn change_claim<E: Environment>(
    env: &E,
    claim: &Arc<SandboxClaim>,
    patch: Value,
) -> Result<Arc<SandboxClaim>, E::Error> {
    let precondition = Precondition::unchanged(claim.as_ref());
    let claims = env.claims();
    claims.patch(&claim.name_any(), &precondition, patch).await
}

/// Changes a sandbox that must still be as it was observed. On a conflict the cache learns the live one, for the next attempt.
async fn change_sandbox<E: Environment>(
    env: &E,
    sandbox: &Version,
    patch: &Value,
) -> Result<Arc<Sandbox>, E::Error> {
    let (sandboxes, name) = (env.sandboxes(), &sandbox.name);
    let answer = sandboxes.patch(name, &sandbox.into(), patch.clone()).await;
    if let Err(error) = &answer
        && *error.failure() == Failure::Conflict
    {
        sandboxes.get(name).await?;
    }
    answer
}

async fn delete<K, O: Objects<K>>(objects: &O, version: &Version) -> Result<(), O::Error> {
    let precondition = Precondition::uid(version.uid.clone());
    objects
        .delete(&version.name, precondition, Propagation::Default)
        .await
}
