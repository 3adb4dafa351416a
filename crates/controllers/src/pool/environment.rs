//! The environment of a pass over a pool: the API server, the caches and the warm queue.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{Sandbox, SandboxTemplate};
use k8s_openapi::jiff::Timestamp;
use planner::pacing::Demand;
use planner::pass::{Event, Objects};
use planner::pool::Environment;
use planner::warm_queue::SandboxKey;
use tokio::time::Instant;

use super::PoolController;
use super::memory::Rest;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::objects::NamespacedObjects;
use crate::warm_queue::{SharedWarmQueue, sandbox_key};
use crate::writes::WriteError;

/// What a pass over one pool works with.
#[derive(Debug)]
pub(super) struct PoolEnvironment<'a> {
    context: &'a Context,
    warm_queue: &'a SharedWarmQueue,
    key: &'a ObjectKey,
    rest: Mutex<&'a mut Rest>,
}

impl<'a> PoolEnvironment<'a> {
    pub fn new(
        context: &'a Context,
        warm_queue: &'a SharedWarmQueue,
        key: &'a ObjectKey,
        rest: &'a mut Rest,
    ) -> Self {
        Self {
            context,
            warm_queue,
            key,
            rest: Mutex::new(rest),
        }
    }

    fn queued(&self, sandbox: &str) -> SandboxKey {
        SandboxKey {
            namespace: self.key.namespace.to_string(),
            name: sandbox.to_owned(),
        }
    }

    fn resting(&self) -> MutexGuard<'_, &'a mut Rest> {
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: PoolController> Environment<P> for PoolEnvironment<'_> {
    type Error = WriteError;

    fn now(&self) -> Timestamp {
        self.context.clock.now()
    }

    fn pools(&self) -> impl Objects<P, Error = WriteError> {
        let cache = P::cache(&self.context.caches);
        NamespacedObjects::new(self.context, cache, P::FIELD_MANAGER, self.key)
    }

    fn pools_as_reporter(&self) -> impl Objects<P, Error = WriteError> {
        let cache = P::cache(&self.context.caches);
        NamespacedObjects::new(self.context, cache, P::CONTROLLER, self.key)
    }

    fn sandboxes(&self) -> impl Objects<Sandbox, Error = WriteError> {
        let cache = &self.context.caches.sandboxes;
        NamespacedObjects::new(self.context, cache, P::FIELD_MANAGER, self.key)
    }

    fn templates(&self) -> impl Objects<SandboxTemplate, Error = WriteError> {
        let cache = &self.context.caches.templates;
        NamespacedObjects::new(self.context, cache, P::FIELD_MANAGER, self.key)
    }

    fn labelled(&self, value: &str) -> Vec<Arc<Sandbox>> {
        let value = format!("{}/{value}", self.key.namespace);
        let sandboxes = &self.context.caches.sandboxes;
        sandboxes.indexed(P::LABEL, &value)
    }

    fn demand(&self) -> Demand {
        self.warm_queue.demand()
    }

    fn is_reserved(&self, sandbox: &Sandbox) -> bool {
        self.warm_queue.is_reserved(&sandbox_key(sandbox))
    }

    fn withhold(&self, sandbox: &str) -> bool {
        self.warm_queue.withhold(&self.queued(sandbox))
    }

    fn put_back(&self, sandbox: &str) {
        self.warm_queue.put_back(&self.queued(sandbox));
    }

    fn set_current_revision(&self, pool: &P, revision: &str) {
        let uid = pool.meta().uid.as_deref().unwrap_or_default();
        let namespace = &self.key.namespace;
        self.warm_queue
            .set_current_revision(namespace, uid, revision);
    }

    fn max_batch(&self) -> usize {
        self.context.config.warm_pool_max_batch_size.get()
    }

    fn rest(&self) -> Option<Duration> {
        self.resting().left()
    }

    fn measured<T>(&self, decide: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let decision = decide();
        self.resting().begin(started.elapsed());
        decision
    }

    fn emit(&self, pool: &P, event: Event) {
        self.context.events.record(P::CONTROLLER, pool, event);
    }
}
