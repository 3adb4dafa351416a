//! The controllers that `--kruise` adds, of SandboxSet and of the SandboxClaim that takes many sandboxes at once, and what they
//! share.

mod claim;
mod set;
mod waiting;

use api::rbac::{FOLLOW, MANAGE, Rule, SUBRESOURCE};
use planner::sandbox_set::candidate;

use crate::rbac::{EVENTS, SANDBOXES};
use crate::runtime::Runtime;
use crate::warm_queue::SharedWarmQueue;

/// What the controllers need to be allowed.
pub const RBAC: &[Rule] = &[
    Rule {
        groups: &[api::KRUISE_GROUP],
        resources: &["sandboxsets", "sandboxclaims"],
        verbs: MANAGE,
    },
    Rule {
        groups: &[api::KRUISE_GROUP],
        resources: &[
            "sandboxsets/finalizers",
            "sandboxsets/status",
            "sandboxclaims/finalizers",
            "sandboxclaims/status",
        ],
        verbs: SUBRESOURCE,
    },
    SANDBOXES,
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxtemplates"],
        verbs: FOLLOW,
    },
    EVENTS,
];

/// Adds the controllers of SandboxSet and of the batch SandboxClaim to a runtime.
pub fn register(runtime: &mut Runtime) {
    let warm_queue = SharedWarmQueue::of(&runtime.context.caches.sandboxes, candidate);
    set::register(runtime, &warm_queue);
    claim::register(runtime, &warm_queue);
}
