//! The controllers that `--extensions` adds, and what they share.

use crate::runtime::Runtime;
use crate::warm_queue::SharedWarmQueue;
use crate::{claim, retained_policy, template, warm_pool};

/// Adds the controllers of SandboxTemplate, SandboxWarmPool and SandboxClaim to a runtime. They share the warm queue, which counts
/// the waiting claims.
pub fn register(runtime: &mut Runtime) -> SharedWarmQueue {
    let caches = &runtime.context.caches;
    let warm_queue = SharedWarmQueue::new(&caches.sandboxes, &caches.templates, &caches.warm_pools);
    template::register(runtime);
    retained_policy::register(runtime);
    claim::register(runtime, &warm_queue);
    warm_pool::register(runtime, &warm_queue);
    warm_queue
}
