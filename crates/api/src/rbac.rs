//! Permission declarations: each controller declares the permissions that it needs next to its code. The RBAC manifests are
//! generated from them.

/// The verbs that a controller may use on some resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    pub groups: &'static [&'static str],
    pub resources: &'static [&'static str],
    pub verbs: &'static [&'static str],
}

/// The verbs for a resource that a controller manages.
pub const MANAGE: &[&str] = &[
    "create", "delete", "get", "list", "patch", "update", "watch",
];
/// The verbs for a subresource.
pub const SUBRESOURCE: &[&str] = &["get", "patch", "update"];
/// The verbs for a resource that a controller only watches.
pub const FOLLOW: &[&str] = &["get", "list", "watch"];

/// The cluster role that a node's user needs on a cluster, in addition to the permissions of `system:node`.
pub const NODE_ROLE: &str = "agent-sandbox-node";
/// The label, and the taint, of nodes that run `agent-sandbox node` beside nodes with a kubelet. The value is the runtime handler.
pub const NODE_RUNTIME_LABEL: (&str, &str) = ("node.agents.x-k8s.io/runtime", "agent-sandbox");

/// The rules of that role: watching the objects that network policies select, and services for their names. They are defined here
/// so that manifests can be generated without building the node.
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
