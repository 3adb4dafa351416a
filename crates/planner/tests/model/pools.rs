//! The environment of a pass over a pool.

use std::sync::Arc;
use std::time::Duration;

use agent_sandbox_planner::pacing::Demand;
use agent_sandbox_planner::pass::{Event, Objects};
use agent_sandbox_planner::pool::{Environment, Pool, reconcile};
use api::{Sandbox, SandboxTemplate, SandboxWarmPool};
use futures::FutureExt;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::objects::{Cluster, Faults, ModelledObjects, RequestFailed, Requests};
use super::process::Process;
use super::server::{POOLS, Server};
use super::writes::key_of;

impl Process {
    /// One pass over a pool. The answer to its first write may be lost.
    pub fn reconcile_pool(&mut self, server: &mut Server, index: usize, loses_answer: bool) {
        let Some(pool) = server.pools.get(POOLS[index].0).cloned() else {
            return;
        };
        let uid = pool.uid().unwrap();
        let mut memory = self.pools.remove(&uid).unwrap_or_default();
        let faults = Faults {
            loses_answer,
            ..Faults::NONE
        };
        let pass = PoolPass(Requests::new(server, self, faults));
        // A failed pass is retried by a later step.
        let ended = reconcile(&pass, &pool, &mut memory).now_or_never();
        assert!(ended.is_some(), "every request is answered");
        self.pools.insert(uid, memory);
    }
}

struct PoolPass<'a>(Requests<'a, Server>);

impl Environment<SandboxWarmPool> for PoolPass<'_> {
    type Error = RequestFailed;

    fn now(&self) -> Timestamp {
        self.0.server().now()
    }

    fn pools(&self) -> impl Objects<SandboxWarmPool, Error = RequestFailed> {
        ModelledObjects::new(&self.0)
    }

    fn pools_as_reporter(&self) -> impl Objects<SandboxWarmPool, Error = RequestFailed> {
        ModelledObjects::new(&self.0)
    }

    fn sandboxes(&self) -> impl Objects<Sandbox, Error = RequestFailed> {
        ModelledObjects::new(&self.0)
    }

    fn templates(&self) -> impl Objects<SandboxTemplate, Error = RequestFailed> {
        ModelledObjects::new(&self.0)
    }

    fn labelled(&self, value: &str) -> Vec<Arc<Sandbox>> {
        let process = self.0.process();
        let label = |sandbox: &&Sandbox| {
            let labels = sandbox.labels();
            labels.get(SandboxWarmPool::LABEL).map(String::as_str) == Some(value)
        };
        let labelled = process.sandboxes.values().filter(label);
        labelled.map(|sandbox| Arc::new(sandbox.clone())).collect()
    }

    fn demand(&self) -> Demand {
        Demand::default()
    }

    fn is_reserved(&self, sandbox: &Sandbox) -> bool {
        let process = self.0.process();
        process.queue().is_taken(&key_of(&sandbox.name_any()))
    }

    fn withhold(&self, sandbox: &str) -> bool {
        let (process, key) = (self.0.process(), key_of(sandbox));
        let mut queue = process.queue();
        let is_free = !queue.is_taken(&key);
        if is_free {
            queue.take_exactly(&key);
        }
        is_free
    }

    fn put_back(&self, sandbox: &str) {
        self.0.process().queue().release(&key_of(sandbox));
    }

    fn set_current_revision(&self, _: &SandboxWarmPool, revision: &str) {
        panic!("the template determines the revision, not the pool: {revision}")
    }

    fn max_batch(&self) -> usize {
        3
    }

    fn rest(&self) -> Option<Duration> {
        None
    }

    fn measured<T>(&self, decide: impl FnOnce() -> T) -> T {
        decide()
    }

    fn emit(&self, _: &SandboxWarmPool, _: Event) {}
}
