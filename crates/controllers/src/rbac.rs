//! The permissions of the whole process, collected from the controllers' own declarations. Manifests are generated from these.

use api::rbac::{MANAGE, Rule};

/// The permissions to create sandboxes.
pub(crate) const SANDBOXES: Rule = Rule {
    groups: &[api::CORE_GROUP],
    resources: &["sandboxes"],
    verbs: MANAGE,
};

/// The permissions to record events.
pub(crate) const EVENTS: Rule = Rule {
    groups: &["", "events.k8s.io"],
    resources: &["events"],
    verbs: &["create", "patch", "update"],
};

/// Of the core role, `agent-sandbox-controller`.
pub const CORE: &[&[Rule]] = &[crate::sandbox::RBAC];

/// Of the role that `--extensions` needs, `agent-sandbox-controller-extensions`.
pub const EXTENSIONS: &[&[Rule]] = &[
    crate::template::RBAC,
    crate::warm_pool::RBAC,
    crate::claim::RBAC,
];

/// Of the role that `--kruise` needs, `agent-sandbox-controller-kruise`.
pub const KRUISE: &[&[Rule]] = &[crate::kruise::RBAC];
