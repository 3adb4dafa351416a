//! Carries out the plan for a pool: adoptions, deletions, creations.

use api::Sandbox;
use futures::future::join_all;
use kube::ResourceExt;
use serde_json::json;

use super::super::{Cause, Deletion, slow_start};
use super::{Environment, Memory, Pool};
use crate::expectations::Expectations;
use crate::pass::{Event, Failure, Objects, Precondition, Propagation, RequestError};
use crate::pool_view::{Adoption, PoolPlan};

/// Does everything that can be done, and returns the first failure that is worth a retry.
pub(super) async fn apply<P: Pool, E: Environment<P>>(
    env: &E,
    pool: &P,
    plan: &PoolPlan<P::Status>,
    memory: &mut Memory,
) -> Option<E::Error> {
    let expectations = &mut memory.expectations;
    let mut failures = adopt(env, &plan.adoptions).await;
    failures.extend(delete(env, pool, &plan.deletions, expectations).await);
    // A changed or deleted sandbox causes an event of the watch. One that could not be created does not: servers also answer
    // with a conflict when many creations count against one quota.
    failures.retain(|error| !matches!(error.failure(), Failure::Conflict | Failure::NotFound));
    if let Some((count, sandbox)) = &plan.creations {
        failures.extend(create(env, pool, *count, sandbox, expectations).await);
    }
    let is_terminating = |error: &E::Error| *error.failure() == Failure::NamespaceTerminating;
    memory.namespace_is_terminating = failures.iter().any(is_terminating);
    failures.into_iter().find(|error| !is_terminating(error))
}

async fn adopt<P, E: Environment<P>>(env: &E, adoptions: &[Adoption]) -> Vec<E::Error> {
    let sandboxes = &env.sandboxes();
    let requests = adoptions.iter().map(|adoption| async move {
        let precondition = Precondition::from(&adoption.sandbox);
        let patch = json!({ "metadata": { "ownerReferences": adoption.owner_references } });
        let name = &adoption.sandbox.name;
        sandboxes.patch(name, &precondition, patch).await
    });
    let answers = join_all(requests).await;
    answers.into_iter().filter_map(Result::err).collect()
}

/// Deletes in batches that double. Each deletion succeeds only on the sandbox as it was observed: one that has been claimed since stays.
async fn delete<P: Pool, E: Environment<P>>(
    env: &E,
    pool: &P,
    deletions: &[Deletion],
    expectations: &mut Expectations,
) -> Vec<E::Error> {
    let sandboxes = &env.sandboxes();
    let mut left = deletions;
    let mut failures = Vec::new();
    for size in slow_start(left.len()) {
        let (batch, rest) = left.split_at(size);
        left = rest;
        let requests = batch.iter().map(|deletion| async move {
            let name = &deletion.version.name;
            if !env.withhold(name) {
                return (deletion, None);
            }
            let precondition = Precondition::from(&deletion.version);
            let answer = sandboxes
                .delete(name, precondition, Propagation::Default)
                .await;
            if answer.is_err() {
                env.put_back(name);
            }
            (deletion, Some(answer))
        });
        for (deletion, answer) in join_all(requests).await {
            let version = &deletion.version;
            match answer {
                None => {}
                Some(Ok(())) => {
                    expectations.deleted(&version.name, &version.uid, env.now());
                    if deletion.cause == Cause::Stuck {
                        env.emit(pool, stuck(&version.name));
                    }
                }
                Some(Err(error)) => failures.push(error),
            }
        }
        if failures
            .iter()
            .any(|error| *error.failure() != Failure::Conflict)
        {
            break;
        }
    }
    failures
}

async fn create<P: Pool, E: Environment<P>>(
    env: &E,
    pool: &P,
    count: usize,
    sandbox: &Sandbox,
    expectations: &mut Expectations,
) -> Vec<E::Error> {
    let sandboxes = &env.sandboxes();
    let name = pool.meta().name.as_deref().unwrap_or_default();
    let mut failures: Vec<E::Error> = Vec::new();
    for size in slow_start(count) {
        let requests = (0..size).map(|_| sandboxes.create(name, sandbox));
        for answer in join_all(requests).await {
            match answer {
                Ok(created) => {
                    let uid = created.metadata.uid.as_deref().unwrap_or_default();
                    expectations.made(&created.name_any(), uid, env.now());
                }
                Err(error) => failures.push(error),
            }
        }
        if failures
            .iter()
            .any(|error| error.failure().may_have_happened())
        {
            expectations.doubt();
        }
        if !failures.is_empty() {
            report_refusal(env, pool, &failures);
            break;
        }
    }
    failures
}

fn stuck(sandbox: &str) -> Event {
    let note = format!("Sandbox {sandbox:?} did not become Ready in time and is replaced");
    Event::warning("SandboxStuck", "Delete", note)
}

/// Emits an event about the first failure that the owner of the pool can correct.
fn report_refusal<P: Pool, E: Environment<P>>(env: &E, pool: &P, failures: &[E::Error]) {
    let refusal = failures.iter().find_map(|error| match error.failure() {
        Failure::Invalid(message) | Failure::Forbidden(message) => Some(message),
        _ => None,
    });
    if let Some(message) = refusal {
        let note = format!("A sandbox of the pool could not be made: {message}");
        env.emit(pool, Event::warning("FailedCreate", "Create", note));
    }
}
