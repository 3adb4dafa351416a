//! The controller of `Sandbox`.

use api::rbac::{MANAGE, Rule, SUBRESOURCE};

/// What the controller needs to be allowed, leader election and events included.
pub const RBAC: &[Rule] = &[
    Rule {
        groups: &[""],
        resources: &["pods", "services", "persistentvolumeclaims"],
        verbs: MANAGE,
    },
    Rule {
        groups: &[api::CORE_GROUP],
        resources: &["sandboxes"],
        verbs: MANAGE,
    },
    Rule {
        groups: &[api::CORE_GROUP],
        resources: &["sandboxes/finalizers", "sandboxes/status"],
        verbs: SUBRESOURCE,
    },
    Rule {
        groups: &["coordination.k8s.io"],
        resources: &["leases"],
        verbs: &["create", "get", "list", "patch", "update", "watch"],
    },
    Rule {
        groups: &["events.k8s.io"],
        resources: &["events"],
        verbs: &["create", "patch"],
    },
];
