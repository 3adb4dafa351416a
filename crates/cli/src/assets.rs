//! The generated files of `deploy/`, carried in the binary: `generate` prints them, `up` installs them.

/// The kind of the core.
pub const CORE_CRD: &str = include_str!("../../../deploy/crds/agents.x-k8s.io_sandboxes.yaml");

/// The kinds of the core and extension groups.
pub const CRDS: [&str; 4] = [
    CORE_CRD,
    include_str!("../../../deploy/crds/extensions.agents.x-k8s.io_sandboxclaims.yaml"),
    include_str!("../../../deploy/crds/extensions.agents.x-k8s.io_sandboxtemplates.yaml"),
    include_str!("../../../deploy/crds/extensions.agents.x-k8s.io_sandboxwarmpools.yaml"),
];

/// The kinds of the OpenKruise dialect.
pub const KRUISE_CRDS: &str = include_str!("../../../deploy/kruise/crds.yaml");

/// What the controllers may do on a cluster without their extensions.
pub const CORE_RBAC: &str = include_str!("../../../deploy/rbac.generated.yaml");

/// What the controllers may do on a cluster with their extensions.
pub const RBAC: [&str; 2] = [
    CORE_RBAC,
    include_str!("../../../deploy/extensions-rbac.generated.yaml"),
];

/// What the controllers of the OpenKruise dialect may do, with its binding.
pub const KRUISE_RBAC: &str = include_str!("../../../deploy/kruise/rbac.yaml");

/// Namespace, service account, binding, service and the Deployment without extensions.
pub const CORE_MANIFESTS: &str = include_str!("../../../deploy/controller.yaml");

/// On top of the core: the binding of the extensions' role, and the Deployment that takes the place of the core's.
pub const EXTENSIONS_MANIFESTS: [&str; 2] = [
    include_str!("../../../deploy/extensions.yaml"),
    include_str!("../../../deploy/extensions.controller.yaml"),
];

/// The router with all it needs, and the ways to put a Gateway in front of it.
pub const ROUTER: &str = include_str!("../../../deploy/router/router.yaml");
pub const GATEWAY_GKE: &str = include_str!("../../../deploy/router/gateway-gke.yaml");
pub const GATEWAY_KIND: &str = include_str!("../../../deploy/router/gateway-kind.yaml");

/// What a node needs on a cluster beyond what Kubernetes gives every node.
pub const NODE_RBAC: &str = include_str!("../../../deploy/node/rbac.yaml");
