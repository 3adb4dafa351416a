//! How a controller declares the permissions it needs, next to its code. The manifests are generated from these.

/// What a controller may do with some resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    pub groups: &'static [&'static str],
    pub resources: &'static [&'static str],
    pub verbs: &'static [&'static str],
}

/// Everything one does with a resource one manages.
pub const MANAGE: &[&str] = &[
    "create", "delete", "get", "list", "patch", "update", "watch",
];
/// What one does with a subresource.
pub const SUBRESOURCE: &[&str] = &["get", "patch", "update"];
/// What one does with a resource one only follows.
pub const FOLLOW: &[&str] = &["get", "list", "watch"];

/// The cluster role that a node's user needs on a cluster, beyond what Kubernetes gives every `system:node`.
pub const NODE_ROLE: &str = "agent-sandbox-node";

/// What that role allows: to follow what network policies select, and what services are called. It stands here so that manifests can be
/// generated without building the node.
pub const NODE: &[Rule] = &[
    Rule {
        groups: &[""],
        resources: &["namespaces", "pods", "services"],
        verbs: FOLLOW,
    },
    Rule {
        groups: &["discovery.k8s.io"],
        resources: &["endpointslices"],
        verbs: FOLLOW,
    },
    Rule {
        groups: &["networking.k8s.io"],
        resources: &["networkpolicies"],
        verbs: FOLLOW,
    },
];
