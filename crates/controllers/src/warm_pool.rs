//! The controller of `SandboxWarmPool`: keeps a pool at its size and revision, as [`planner::warm_pool`] decides.

use api::SandboxWarmPool;
use api::rbac::{MANAGE, Rule, SUBRESOURCE};

use crate::cache::Cache;
use crate::context::Caches;
use crate::pool::{self, PoolController};
use crate::rbac::{EVENTS, SANDBOXES};
use crate::runtime::Runtime;
use crate::warm_queue::SharedWarmQueue;

/// What the controller needs to be allowed.
pub const RBAC: &[Rule] = &[
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxwarmpools", "sandboxtemplates"],
        verbs: MANAGE,
    },
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxwarmpools/finalizers", "sandboxwarmpools/status"],
        verbs: SUBRESOURCE,
    },
    SANDBOXES,
    EVENTS,
];

/// Adds the controller to a runtime.
pub fn register(runtime: &mut Runtime, warm_queue: &SharedWarmQueue) {
    pool::register::<SandboxWarmPool>(runtime, warm_queue);
}

impl PoolController for SandboxWarmPool {
    const CONTROLLER: &'static str = "sandboxwarmpool";
    const FIELD_MANAGER: &'static str = "warmpool-controller";

    fn cache(caches: &Caches) -> &Cache<Self> {
        &caches.warm_pools
    }
}
