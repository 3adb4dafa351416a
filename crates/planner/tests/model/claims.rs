//! The environment of a pass over a claim, and of the faults in it.

use std::sync::Arc;
use std::time::Duration;

use agent_sandbox_planner::claim::{Announcement, Environment, reconcile, unfinished_binding};
use agent_sandbox_planner::pass::Objects;
use agent_sandbox_planner::warm_queue::Request;
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use futures::FutureExt;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::Timestamp;

use super::objects::{Cluster, Faults, ModelledObjects, RequestFailed, Requests};
use super::process::Process;
use super::server::Server;
use super::writes::{Crash, Reserved};

impl Process {
    /// One pass over a claim, with these faults.
    pub fn reconcile_claim(
        &mut self,
        server: &mut Server,
        name: &str,
        faults: Faults,
    ) -> Result<(), Crash> {
        let Some(claim) = self.claims.get(name).cloned() else {
            return Ok(());
        };
        let pass = ClaimPass(Requests::new(server, self, faults));
        // A request that is never answered ends the process. A failed pass is retried by a later step.
        let ended = reconcile(&pass, Arc::new(claim)).now_or_never();
        ended.map(|_| ()).ok_or(Crash)
    }
}

struct ClaimPass<'a>(Requests<'a, Server>);

impl<'b> ClaimPass<'b> {
    fn objects<K>(&self) -> ModelledObjects<'_, 'b, Server, K> {
        ModelledObjects::new(&self.0)
    }
}

impl Environment for ClaimPass<'_> {
    type Error = RequestFailed;
    type Reservation = Reserved;
    type Acquiring = ();

    fn now(&self) -> Timestamp {
        self.0.server().now()
    }

    fn claims(&self) -> impl Objects<SandboxClaim, Error = RequestFailed> {
        self.objects()
    }

    fn sandboxes(&self) -> impl Objects<Sandbox, Error = RequestFailed> {
        self.objects()
    }

    fn templates(&self) -> impl Objects<SandboxTemplate, Error = RequestFailed> {
        self.objects()
    }

    fn warm_pools(&self) -> impl Objects<SandboxWarmPool, Error = RequestFailed> {
        self.objects()
    }

    fn network_policies(&self) -> impl Objects<NetworkPolicy, Error = RequestFailed> {
        self.objects()
    }

    fn first_observed(&self) -> Timestamp {
        self.now()
    }

    fn reserve(&self, request: &Request) -> Option<Reserved> {
        let process = self.0.process();
        let key = process.queue().take(request)?.key;
        let sandbox = process.sandboxes.get(&key.name).cloned();
        Some(Reserved::new(&process.queue, key, sandbox.unwrap()))
    }

    fn claims_bound_to(&self, sandbox: &str) -> Vec<Arc<SandboxClaim>> {
        let process = self.0.process();
        let claims = process.claims.values();
        claims
            .filter(|claim| unfinished_binding(claim) == Some(sandbox))
            .map(|claim| Arc::new(claim.clone()))
            .collect()
    }

    fn acquiring(&self) {}

    fn note_acquired(&self, claim: &SandboxClaim, sandbox: &str) {
        let mut process = self.0.process();
        process.acquired.insert(uid(claim), sandbox.to_owned());
    }

    fn acquired(&self, claim: &SandboxClaim) -> Option<String> {
        self.0.process().acquired.get(&uid(claim)).cloned()
    }

    fn forget_acquired(&self, claim: &SandboxClaim) {
        self.0.process().acquired.remove(&uid(claim));
    }

    fn delay_first_status(&self) -> Option<Duration> {
        None
    }

    fn end_status_delay(&self) {}

    fn is_first_ready(&self, _: &SandboxClaim) -> bool {
        false
    }

    fn with_trace(&self, claim: &Arc<SandboxClaim>) -> Arc<SandboxClaim> {
        Arc::clone(claim)
    }

    fn persists_trace(&self) -> bool {
        false
    }

    fn announce(&self, _: &SandboxClaim, _: Announcement<'_, RequestFailed>) {}
}

fn uid(claim: &SandboxClaim) -> String {
    claim.metadata.uid.clone().unwrap()
}
