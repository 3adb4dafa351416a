//! What a process knows, and the environment of its passes over claims.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use agent_sandbox_planner::kruise_claim::{Environment, Initialisation, reconcile};
use agent_sandbox_planner::pass::{Event, Objects};
use agent_sandbox_planner::sandbox_set::candidate;
use agent_sandbox_planner::warm_queue::{Request, WarmQueue};
use api::kruise::{SandboxClaim, SandboxSet};
use api::{Sandbox, SandboxTemplate};
use futures::FutureExt;
use k8s_openapi::jiff::Timestamp;

use super::objects::{Cluster, Faults, ModelledObjects, RequestFailed, Requests};
use super::server::Server;
use super::writes::{Crash, Reserved, key_of};

/// What a process knows, and loses when it ends.
#[derive(Default)]
pub struct Process {
    pub(super) claims: BTreeMap<String, SandboxClaim>,
    pub(super) sandboxes: BTreeMap<String, Sandbox>,
    /// Shared with the reservations of claims.
    queue: Arc<Mutex<WarmQueue>>,
    /// The reservations of each claim's batch.
    reservations: BTreeMap<String, Vec<Reserved>>,
    pauses: BTreeMap<String, Timestamp>,
}

impl Process {
    pub fn started(server: &Server) -> Self {
        let mut process = Self::default();
        process.catch_up(server);
        process
    }

    pub fn catch_up(&mut self, server: &Server) {
        self.claims = server.claims.clone();
        let known = self.sandboxes.keys().chain(server.sandboxes.keys());
        let names: Vec<String> = known.cloned().collect();
        for name in names {
            self.see(server, &name);
        }
    }

    /// An event of the watch, or an answer of the server, about one sandbox.
    pub fn see(&mut self, server: &Server, name: &str) {
        let sandbox = server.sandboxes.get(name);
        match sandbox.and_then(candidate) {
            Some(candidate) => self.queue().observe(candidate),
            None => self.queue().withdraw(&key_of(name)),
        }
        match sandbox {
            Some(sandbox) => self.sandboxes.insert(name.to_owned(), sandbox.clone()),
            None => self.sandboxes.remove(name),
        };
    }

    pub fn see_claim(&mut self, server: &Server, name: &str) {
        match server.claims.get(name) {
            Some(claim) => self.claims.insert(name.to_owned(), claim.clone()),
            None => self.claims.remove(name),
        };
    }

    /// One pass over a claim, in a process that ends after so many writes.
    pub fn reconcile(
        &mut self,
        server: &mut Server,
        name: &str,
        crash_after: usize,
    ) -> Result<(), Crash> {
        let Some(claim) = self.claims.get(name).cloned() else {
            return Ok(());
        };
        let faults = Faults {
            crash_after,
            ..Faults::NONE
        };
        let pass = ClaimPass {
            requests: Requests::new(server, self, faults),
            claim: name,
        };
        // A request that is never answered ends the process.
        let ended = reconcile(&pass, Arc::new(claim)).now_or_never();
        ended.map(|_| ()).ok_or(Crash)
    }

    fn queue(&self) -> MutexGuard<'_, WarmQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct ClaimPass<'a> {
    requests: Requests<'a, Server>,
    claim: &'a str,
}

impl<'a> ClaimPass<'a> {
    fn objects<K>(&self) -> ModelledObjects<'_, 'a, Server, K> {
        ModelledObjects::new(&self.requests)
    }
}

impl Environment for ClaimPass<'_> {
    type Error = RequestFailed;
    type Reservation = Reserved;
    type Acquiring = ();

    fn now(&self) -> Timestamp {
        self.requests.server().now()
    }

    fn claims(&self) -> impl Objects<SandboxClaim, Error = RequestFailed> {
        self.objects()
    }

    fn claims_as_reporter(&self) -> impl Objects<SandboxClaim, Error = RequestFailed> {
        self.objects()
    }

    fn sandboxes(&self) -> impl Objects<Sandbox, Error = RequestFailed> {
        self.objects()
    }

    fn sandbox_sets(&self) -> impl Objects<SandboxSet, Error = RequestFailed> {
        self.objects()
    }

    fn templates(&self) -> impl Objects<SandboxTemplate, Error = RequestFailed> {
        self.objects()
    }

    fn max_batch(&self) -> usize {
        2
    }

    fn acquiring(&self) {}

    fn reserve(&self, request: &Request) -> Option<Reserved> {
        let process = self.requests.process();
        let key = process.queue().take(request)?.key;
        let sandbox = process.sandboxes.get(&key.name).cloned();
        Some(Reserved::new(&process.queue, key, sandbox.unwrap()))
    }

    fn hold(&self, reservations: Vec<Reserved>) {
        let mut process = self.requests.process();
        process
            .reservations
            .insert(self.claim.to_owned(), reservations);
    }

    fn wait_in_line(&self, _: &str) {}

    fn pause(&self, now: Timestamp, pause: Duration) {
        let until = now.checked_add(pause).unwrap();
        let mut process = self.requests.process();
        process.pauses.insert(self.claim.to_owned(), until);
    }

    fn paused_until(&self) -> Option<Timestamp> {
        self.requests.process().pauses.get(self.claim).copied()
    }

    /// No two processes draw the same number.
    fn random_number(&self) -> u64 {
        let revision = self.requests.server().next_revision();
        revision.parse().unwrap()
    }

    fn random_token(&self) -> String {
        "token".to_owned()
    }

    async fn initialise(
        &self,
        address: IpAddr,
        _: &BTreeMap<String, String>,
        _: &str,
    ) -> Initialisation {
        if self.requests.server().is_broken(address) {
            Initialisation::Refused("broken".into())
        } else {
            Initialisation::Done
        }
    }

    fn emit(&self, _: &SandboxClaim, _: Event) {}
}
