//! Carries out what was decided for a pool: adoptions, deletions, creations, and the status.

use api::Sandbox;
use futures::future::join_all;
use kube::ResourceExt;
use planner::expectations::Expectations;
use planner::pool::{self, Cause, slow_start};
use planner::stock::{Adoption, Plan};
use planner::warm_queue::SandboxKey;
use serde_json::json;

use super::memory::Memory;
use super::{Keeper, Pool};
use crate::events::{Occurrence, Severity};
use crate::writes::{Deletion, Failure, Precondition, WriteError, Writer};

impl<P: Pool> Keeper<'_, P> {
    /// Does all that can be done, and returns the first failure that is worth a retry.
    pub(super) async fn apply(
        &self,
        plan: &Plan<P::Status>,
        memory: &mut Memory,
    ) -> Option<WriteError> {
        let expectations = &mut memory.expectations;
        let mut failures = self.adopt(&plan.adoptions).await;
        failures.extend(self.delete(&plan.deletions, expectations).await);
        // A sandbox that changed or went in the meantime comes back as an event. One that could not be made does not: servers also answer
        // with a conflict when many creations count against one quota.
        failures.retain(|error| !error.is_conflict() && !error.is_not_found());
        if let Some((count, sandbox)) = &plan.creations {
            failures.extend(self.create(*count, sandbox, expectations).await);
        }
        memory.namespace_is_ending = failures.iter().any(WriteError::is_namespace_terminating);
        failures
            .into_iter()
            .find(|error| !error.is_namespace_terminating())
    }

    fn sandboxes(&self) -> Writer<'_, Sandbox> {
        let cache = &self.context.caches.sandboxes;
        Writer::new(self.context, cache, P::FIELD_MANAGER)
    }

    async fn adopt(&self, adoptions: &[Adoption]) -> Vec<WriteError> {
        let sandboxes = &self.sandboxes();
        let requests = adoptions.iter().map(|adoption| async move {
            let precondition = Precondition::from(&adoption.sandbox);
            let patch = json!({ "metadata": { "ownerReferences": adoption.owner_references } });
            let target = self.key.sibling(&adoption.sandbox.name);
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
        &self,
        deletions: &[pool::Deletion],
        expectations: &mut Expectations,
    ) -> Vec<WriteError> {
        let (key, supply, sandboxes) = (self.key, self.supply, &self.sandboxes());
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
                let order = Deletion::given(version);
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
                        let now = self.context.clock.now();
                        expectations.deleted(&version.name, &version.uid, now);
                        if deletion.cause == Cause::Stuck {
                            self.warn_of_stuck(&version.name);
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
        &self,
        count: usize,
        sandbox: &Sandbox,
        expectations: &mut Expectations,
    ) -> Vec<WriteError> {
        let sandboxes = &self.sandboxes();
        let mut failures = Vec::new();
        for size in slow_start(count) {
            let requests = (0..size).map(|_| sandboxes.create(self.key, sandbox));
            for answer in join_all(requests).await {
                match answer {
                    Ok(made) => {
                        let uid = made.metadata.uid.as_deref().unwrap_or_default();
                        expectations.made(&made.name_any(), uid, self.context.clock.now());
                    }
                    Err(error) => failures.push(error),
                }
            }
            let may_have_happened = |error: &WriteError| {
                matches!(
                    error.failure,
                    Failure::Transient(_) | Failure::Unreadable(_)
                )
            };
            if failures.iter().any(may_have_happened) {
                expectations.doubt();
            }
            if !failures.is_empty() {
                self.warn_of_failure(&failures);
                break;
            }
        }
        failures
    }

    fn warn_of_stuck(&self, sandbox: &str) {
        let note = format!("Sandbox {sandbox:?} did not become Ready in time and is replaced");
        self.warn("SandboxStuck", "Delete", note);
    }

    /// Tells the first thing that stands in the way and that somebody can do something about.
    fn warn_of_failure(&self, failures: &[WriteError]) {
        let refusal = failures.iter().find_map(|error| match &error.failure {
            Failure::Invalid(message) | Failure::Forbidden(message) => Some(message),
            _ => None,
        });
        if let Some(message) = refusal {
            let note = format!("A sandbox of the pool could not be made: {message}");
            self.warn("FailedCreate", "Create", note);
        }
    }

    fn warn(&self, reason: &'static str, action: &'static str, note: String) {
        let occurrence = Occurrence {
            severity: Severity::Warning,
            reason,
            action,
            note,
        };
        let events = &self.context.events;
        events.record(P::CONTROLLER, self.pool, occurrence);
    }

    /// Applies the status if it says anything new.
    pub(super) async fn publish(&self, status: &P::Status) -> Result<(), WriteError> {
        let (context, pool) = (self.context, self.pool);
        if pool.status() == Some(status) {
            return Ok(());
        }
        let pools = Writer::new(context, P::cache(&context.caches), P::FIELD_MANAGER);
        let said = |status: &P::Status| P::conditions(status).len();
        let written = if pool
            .status()
            .is_some_and(|before| said(before) > said(status))
        {
            // What was said while the pool could not be reconciled is not the apply's to take back.
            let precondition = Precondition::same(pool);
            let status = P::written(status);
            pools.patch_status(self.key, &precondition, status).await
        } else {
            pools.apply_status(self.key, P::written(status)).await
        };
        match written {
            Ok(_) => pool.tell(status, context),
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}
