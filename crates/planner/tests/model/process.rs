//! What a process of controllers knows, and how it learns of changes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_sandbox_planner::blueprint::Blueprint;
use agent_sandbox_planner::claim::candidate;
use agent_sandbox_planner::pool::Memory;
use agent_sandbox_planner::warm_queue::WarmQueue;
use api::names::name_hash;
use api::{Sandbox, SandboxClaim};
use kube::ResourceExt;

use super::server::{POOLS, Server};
use super::writes::{NAMESPACE, key_of};

/// What the process knows, and loses when it ends.
#[derive(Default)]
pub struct Process {
    pub(super) claims: BTreeMap<String, SandboxClaim>,
    pub sandboxes: BTreeMap<String, Sandbox>,
    /// Shared with the reservations of claims.
    pub(super) queue: Arc<Mutex<WarmQueue>>,
    /// The memory of each pool, by the pool's UID.
    pub pools: BTreeMap<String, Memory>,
    /// The sandboxes that claims have or may have, though the answer to the write was lost, by the claim's UID.
    pub(super) acquired: BTreeMap<String, String>,
}

impl Process {
    pub fn started(server: &Server) -> Self {
        let mut process = Self::default();
        process.catch_up(server);
        process
    }

    pub fn queue(&self) -> MutexGuard<'_, WarmQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every event that the watches still owe.
    pub fn catch_up(&mut self, server: &Server) {
        self.claims = server.claims.clone();
        for (name, template) in &server.templates {
            let revision = Blueprint::new(template).revision.unwrap();
            self.queue()
                .set_current_revision(NAMESPACE, &name_hash(name), &revision);
        }
        for (name, _, _) in POOLS {
            if !server.pools.contains_key(name) {
                self.queue().forget_pool(NAMESPACE, &name_hash(name));
            }
        }
        self.pools.retain(|uid, _| {
            server
                .pools
                .values()
                .any(|pool| pool.uid().as_ref() == Some(uid))
        });
        let known = self.sandboxes.keys().chain(server.sandboxes.keys());
        let names: Vec<String> = known.cloned().collect();
        for name in names {
            self.see_sandbox(server, &name);
        }
    }

    /// An event of the watch, about one sandbox.
    pub fn see_sandbox(&mut self, server: &Server, name: &str) {
        let Some(sandbox) = server.sandboxes.get(name) else {
            self.queue().withdraw(&key_of(name));
            self.sandboxes.remove(name);
            return;
        };
        match candidate(sandbox) {
            Some(candidate) => self.queue().observe(candidate),
            None => self.queue().withdraw(&key_of(name)),
        }
        self.sandboxes.insert(name.to_owned(), sandbox.clone());
    }

    /// An event of the watch, about one claim.
    pub fn see_claim(&mut self, server: &Server, name: &str) {
        match server.claims.get(name) {
            Some(claim) => self.claims.insert(name.to_owned(), claim.clone()),
            None => self.claims.remove(name),
        };
    }
}
