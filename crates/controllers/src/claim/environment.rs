//! The environment of a pass over a claim: the API server, the caches, and what the controller remembers of claims.

use std::sync::Arc;
use std::time::Duration;

use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::Timestamp;
use planner::claim::{Announcement, Environment};
use planner::pass::Objects;
use planner::warm_queue::Request;

use super::announce::announce;
use super::{BY_UNFINISHED_BINDING, Claims, FIELD_MANAGER};
use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::objects::NamespacedObjects;
use crate::trace;
use crate::warm_queue::{Acquiring, Reservation};
use crate::writes::WriteError;

/// What a pass over one claim works with.
#[derive(Debug)]
pub(super) struct ClaimEnvironment<'a> {
    pub context: &'a Context,
    pub claims: &'a Claims,
    pub key: &'a ObjectKey,
}

impl<'a> ClaimEnvironment<'a> {
    fn objects<K: Cached>(&self, cache: &'a Cache<K>) -> NamespacedObjects<'a, K> {
        NamespacedObjects::new(self.context, cache, FIELD_MANAGER, self.key)
    }
}

impl Environment for ClaimEnvironment<'_> {
    type Error = WriteError;
    type Reservation = Reservation;
    type Acquiring = Acquiring;

    fn now(&self) -> Timestamp {
        self.context.clock.now()
    }

    fn claims(&self) -> impl Objects<SandboxClaim, Error = WriteError> {
        self.objects(&self.context.caches.claims)
    }

    fn sandboxes(&self) -> impl Objects<Sandbox, Error = WriteError> {
        self.objects(&self.context.caches.sandboxes)
    }

    fn templates(&self) -> impl Objects<SandboxTemplate, Error = WriteError> {
        self.objects(&self.context.caches.templates)
    }

    fn warm_pools(&self) -> impl Objects<SandboxWarmPool, Error = WriteError> {
        self.objects(&self.context.caches.warm_pools)
    }

    fn network_policies(&self) -> impl Objects<NetworkPolicy, Error = WriteError> {
        self.objects(&self.context.caches.network_policies)
    }

    fn first_observed(&self) -> Timestamp {
        self.claims.first_seen.of(self.key, self.now())
    }

    fn reserve(&self, request: &Request) -> Option<Reservation> {
        self.claims.warm_queue.reserve(request)
    }

    fn claims_bound_to(&self, sandbox: &str) -> Vec<Arc<SandboxClaim>> {
        let value = format!("{}/{sandbox}", self.key.namespace);
        let claims = &self.context.caches.claims;
        claims.indexed(BY_UNFINISHED_BINDING, &value)
    }

    fn acquiring(&self) -> Acquiring {
        self.claims.warm_queue.acquiring(&self.context.clock)
    }

    fn note_acquired(&self, claim: &SandboxClaim, sandbox: &str) {
        let claims = &self.context.caches.claims;
        self.claims.acquired.note(claims, claim, sandbox);
    }

    fn acquired(&self, claim: &SandboxClaim) -> Option<String> {
        self.claims.acquired.unconfirmed(claim)
    }

    fn forget_acquired(&self, claim: &SandboxClaim) {
        self.claims.acquired.settle(claim);
    }

    fn delay_first_status(&self) -> Option<Duration> {
        self.claims.status_delay.left(self.key)
    }

    fn end_status_delay(&self) {
        self.claims.status_delay.forget(self.key);
    }

    fn is_first_ready(&self, claim: &SandboxClaim) -> bool {
        self.claims.first_ready.is_now(claim)
    }

    fn with_trace(&self, claim: &Arc<SandboxClaim>) -> Arc<SandboxClaim> {
        trace::with_context(claim)
    }

    fn persists_trace(&self) -> bool {
        telemetry::spans::are_exported()
    }

    fn announce(&self, claim: &SandboxClaim, announcement: Announcement<'_, WriteError>) {
        announce(self.context, claim, &announcement);
    }
}
