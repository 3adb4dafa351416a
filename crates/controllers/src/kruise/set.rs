//! The controller of `SandboxSet`: keeps a set at its size and revision, as [`planner::sandbox_set`] decides.

use api::kruise::SandboxSet;
use kube::ResourceExt;

use crate::cache::Cache;
use crate::context::Caches;
use crate::pool::{self, PoolController};
use crate::runtime::Runtime;
use crate::warm_queue::SharedWarmQueue;

/// Adds the controller to a runtime.
pub(super) fn register(runtime: &mut Runtime, warm_queue: &SharedWarmQueue) {
    pool::register::<SandboxSet>(runtime, warm_queue);
    let warm_queue = warm_queue.clone();
    let sets = &runtime.context.caches.sandbox_sets;
    sets.subscribe(move |change| {
        if let Some(set) = change.departed() {
            let namespace = set.namespace().unwrap_or_default();
            warm_queue.forget(&namespace, &set.uid().unwrap_or_default());
        }
    });
}

impl PoolController for SandboxSet {
    const CONTROLLER: &'static str = "sandboxset";
    const FIELD_MANAGER: &'static str = "sandboxset-controller";

    fn cache(caches: &Caches) -> &Cache<Self> {
        &caches.sandbox_sets
    }
}
