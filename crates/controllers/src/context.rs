//! What every reconciler gets: the client, the caches, the clock, and the recorders of events and metrics.

use std::fmt;
use std::sync::Arc;

use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, kruise, labels};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::Client;
use planner::sandbox::ObservedPod;

use crate::cache::Cache;
use crate::clock::{Clock, Random};
use crate::config::Config;
use crate::events::Recorder;
use crate::initialise::Initialise;
use crate::instrumentation::Instrumentation;

/// Shared by all reconcilers of a process.
#[derive(Clone)]
pub struct Context {
    pub client: Client,
    pub caches: Caches,
    pub clock: Clock,
    pub random: Random,
    pub events: Recorder,
    pub instrumentation: Arc<dyn Instrumentation>,
    /// Sends the environment variables of claims to their sandboxes.
    pub initialise: Arc<dyn Initialise>,
    pub config: Arc<Config>,
}

/// One cache per kind. A cache that no controller follows stays empty.
#[derive(Clone, Debug)]
pub struct Caches {
    pub sandboxes: Cache<Sandbox>,
    /// Only pods that carry a sandbox's name hash: a cluster may run far more of others.
    pub pods: Cache<ObservedPod>,
    /// All services: a service of the sandbox's name matters even if the sandbox does not own it.
    pub services: Cache<Service>,
    /// Only claims that carry a sandbox's name hash.
    pub volume_claims: Cache<PersistentVolumeClaim>,
    pub templates: Cache<SandboxTemplate>,
    pub warm_pools: Cache<SandboxWarmPool>,
    pub claims: Cache<SandboxClaim>,
    pub network_policies: Cache<NetworkPolicy>,
    pub sandbox_sets: Cache<kruise::SandboxSet>,
    pub batch_claims: Cache<kruise::SandboxClaim>,
}

impl Default for Caches {
    fn default() -> Self {
        Self {
            sandboxes: Cache::new(None),
            pods: Cache::new(Some(labels::SANDBOX_NAME_HASH)),
            services: Cache::new(None),
            volume_claims: Cache::new(Some(labels::SANDBOX_NAME_HASH)),
            templates: Cache::new(None),
            warm_pools: Cache::new(None),
            claims: Cache::new(None),
            network_policies: Cache::new(None),
            sandbox_sets: Cache::new(None),
            batch_claims: Cache::new(None),
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Context")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}
