//! Passes over a pool.

use std::collections::BTreeMap;
use std::sync::Arc;

use agent_sandbox_planner::expectations::Expectations;
use agent_sandbox_planner::pacing::{Demand, Pacing};
use agent_sandbox_planner::stock::{Sandboxes, Stock};
use agent_sandbox_planner::warm_pool::{self, pool_hash};
use agent_sandbox_planner::warm_queue::WarmQueue;
use api::{Sandbox, SandboxWarmPool, labels};
use kube::ResourceExt;

use super::process::Process;
use super::server::{POOLS, Server};
use super::writes::key_of;

#[derive(Debug)]
struct Taken<'a>(&'a WarmQueue);

impl Sandboxes for Taken<'_> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        self.0.is_taken(&key_of(&sandbox.name_any()))
    }
}

#[derive(Debug)]
struct Going<'a>(&'a Expectations);

impl Sandboxes for Going<'_> {
    fn holds(&self, sandbox: &Sandbox) -> bool {
        self.0
            .is_deleted(&sandbox.name_any(), &sandbox.uid().unwrap())
    }
}

impl Process {
    /// One pass over a pool, as the controller makes it. Of the creations, one answer may be lost.
    pub fn reconcile_pool(&mut self, server: &mut Server, index: usize, loses_an_answer: bool) {
        let Some(pool) = server.pools.get(POOLS[index].0).cloned() else {
            return;
        };
        let uid = pool.uid().unwrap();
        let mut expectations = self.expectations.remove(&uid).unwrap_or_default();
        self.settle_expectations(server, &pool, &mut expectations);
        let labelled: Vec<Arc<Sandbox>> = self
            .sandboxes
            .values()
            .filter(|sandbox| is_labelled(sandbox, &pool))
            .cloned()
            .map(Arc::new)
            .collect();
        let template = server.templates.get(&pool.spec.sandbox_template_ref.name);
        let plan = warm_pool::decide(
            &warm_pool::Observed {
                pool: &pool,
                template,
                stock: Stock {
                    sandboxes: &labelled,
                    spoken_for: &Taken(&self.queue()),
                    going: &Going(&expectations),
                    unseen: expectations.unseen(),
                    demand: Demand::default(),
                    held_back_since: None,
                    max_batch: 3,
                },
            },
            &Pacing::default(),
            server.now(),
        );
        for deletion in &plan.deletions {
            let version = &deletion.version;
            let key = key_of(&version.name);
            if self.queue().is_taken(&key) {
                continue;
            }
            self.queue().take_exactly(&key);
            match server.delete::<Sandbox>(&version.name, &version.into()) {
                Ok(()) => expectations.deleted(&version.name, &version.uid, server.now()),
                Err(_) => self.queue().release(&key),
            }
        }
        let (count, blueprint) = plan.creations.unwrap_or_default();
        for index in 0..count {
            let made = server.create::<Sandbox>((*blueprint).clone()).unwrap();
            if loses_an_answer && index == 0 {
                expectations.doubt();
            } else {
                let uid = made.uid().unwrap();
                expectations.made(&made.name_any(), &uid, server.now());
            }
        }
        let desired = usize::try_from(pool.spec.desired_replicas()).unwrap();
        let members = server.members(&pool);
        assert!(
            count == 0 || members <= desired,
            "{members} members where {desired} were asked for"
        );
        self.expectations.insert(uid, expectations);
    }

    fn settle_expectations(
        &self,
        server: &Server,
        pool: &SandboxWarmPool,
        expectations: &mut Expectations,
    ) {
        let sandboxes = &self.sandboxes;
        expectations.settle(|name| {
            let sandbox = sandboxes.get(name)?;
            Some((sandbox.uid().unwrap(), false))
        });
        if expectations.needs_confirmation(server.now()) {
            let identities = |sandboxes: &BTreeMap<String, Sandbox>| -> Vec<(String, String)> {
                sandboxes
                    .values()
                    .filter(|sandbox| is_labelled(sandbox, pool))
                    .map(|sandbox| (sandbox.name_any(), sandbox.uid().unwrap()))
                    .collect()
            };
            let (listed, cached) = (identities(&server.sandboxes), identities(sandboxes));
            expectations.confirm(&listed, &cached, server.now());
        }
    }
}

fn is_labelled(sandbox: &Sandbox, pool: &SandboxWarmPool) -> bool {
    sandbox.labels().get(labels::WARM_POOL_SANDBOX) == Some(&pool_hash(pool))
}
