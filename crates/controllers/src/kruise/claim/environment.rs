//! The environment of a pass over a batch claim: the API server, the caches, and the memory of the controller.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use api::kruise::{SandboxClaim, SandboxSet};
use api::{Sandbox, SandboxTemplate};
use k8s_openapi::jiff::Timestamp;
use planner::kruise_claim::{Environment, Initialisation};
use planner::pass::{Event, Objects};
use planner::warm_queue::Request;

use super::{CONTROLLER, Claims, FIELD_MANAGER};
use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::initialise::Settings;
use crate::key::ObjectKey;
use crate::objects::NamespacedObjects;
use crate::warm_queue::{Acquiring, Reservation};
use crate::writes::WriteError;

/// What a pass over one claim works with.
#[derive(Debug)]
pub(super) struct BatchClaimEnvironment<'a> {
    pub context: &'a Context,
    pub claims: &'a Claims,
    pub key: &'a ObjectKey,
}

impl<'a> BatchClaimEnvironment<'a> {
    fn objects<K: Cached>(&self, cache: &'a Cache<K>) -> NamespacedObjects<'a, K> {
        NamespacedObjects::new(self.context, cache, FIELD_MANAGER, self.key)
    }
}

impl Environment for BatchClaimEnvironment<'_> {
    type Error = WriteError;
    type Reservation = Reservation;
    type Acquiring = Acquiring;

    fn now(&self) -> Timestamp {
        self.context.clock.now()
    }

    fn claims(&self) -> impl Objects<SandboxClaim, Error = WriteError> {
        self.objects(&self.context.caches.batch_claims)
    }

    fn claims_as_reporter(&self) -> impl Objects<SandboxClaim, Error = WriteError> {
        let cache = &self.context.caches.batch_claims;
        NamespacedObjects::new(self.context, cache, CONTROLLER, self.key)
    }

    fn sandboxes(&self) -> impl Objects<Sandbox, Error = WriteError> {
        self.objects(&self.context.caches.sandboxes)
    }

    fn sandbox_sets(&self) -> impl Objects<SandboxSet, Error = WriteError> {
        self.objects(&self.context.caches.sandbox_sets)
    }

    fn templates(&self) -> impl Objects<SandboxTemplate, Error = WriteError> {
        self.objects(&self.context.caches.templates)
    }

    fn max_batch(&self) -> usize {
        self.context.config.batch_claim_max_batch_size.get()
    }

    fn acquiring(&self) -> Acquiring {
        self.claims.warm_queue.acquiring(&self.context.clock)
    }

    fn reserve(&self, request: &Request) -> Option<Reservation> {
        self.claims.warm_queue.reserve(request)
    }

    fn hold(&self, reservations: Vec<Reservation>) {
        self.claims.notes.keep(self.key, reservations);
    }

    fn wait_in_line(&self, set_uid: &str) {
        self.claims.waiting.join(set_uid, self.key);
    }

    fn pause(&self, now: Timestamp, pause: Duration) {
        self.claims.notes.pause(self.key, now, pause);
    }

    fn paused_until(&self) -> Option<Timestamp> {
        self.claims.notes.paused_until(self.key)
    }

    fn random_number(&self) -> u64 {
        self.context.random.number()
    }

    fn random_token(&self) -> String {
        let bits = u128::from(self.random_number()) << 64 | u128::from(self.random_number());
        uuid::Builder::from_random_bytes(bits.to_be_bytes())
            .into_uuid()
            .to_string()
    }

    async fn initialise(
        &self,
        address: IpAddr,
        env_vars: &BTreeMap<String, String>,
        token: &str,
    ) -> Initialisation {
        let settings = Settings {
            env_vars,
            access_token: token,
        };
        self.context.initialise.initialise(address, &settings).await
    }

    fn emit(&self, claim: &SandboxClaim, event: Event) {
        self.context.events.record(CONTROLLER, claim, event);
    }
}
