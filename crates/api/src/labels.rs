//! All label and annotation keys that more than one component uses.

use kube::ResourceExt;

/// Label of a pod and its service: the hash of the sandbox's name.
pub const SANDBOX_NAME_HASH: &str = "agents.x-k8s.io/sandbox-name-hash";
/// Label of a warm sandbox and its pod: the hash of the template content it was made from.
pub const SANDBOX_POD_TEMPLATE_HASH: &str = "agents.x-k8s.io/sandbox-pod-template-hash";
/// Label of a warm sandbox and its pod: the hash of its pool's name. Gone once the sandbox is claimed.
pub const WARM_POOL_SANDBOX: &str = "agents.x-k8s.io/warm-pool-sandbox";
/// Label of a sandbox's pod, and of a warm sandbox: the hash of its template's name. The template's network policy selects it.
pub const SANDBOX_TEMPLATE_REF_HASH: &str = "agents.x-k8s.io/sandbox-template-ref-hash";
/// Label of a claimed sandbox and its pod: the claim's UID.
pub const CLAIM_UID: &str = "agents.x-k8s.io/claim-uid";
/// Label of a sandbox of a pool or a claim: whether it was made in advance ([`LAUNCH_TYPE_WARM`]) or for its claim
/// ([`LAUNCH_TYPE_COLD`]).
pub const LAUNCH_TYPE: &str = "agents.x-k8s.io/launch-type";
pub const LAUNCH_TYPE_WARM: &str = "warm";
pub const LAUNCH_TYPE_COLD: &str = "cold";
/// Label and annotation of a claim: the name of the sandbox bound to it.
pub const ASSIGNED_SANDBOX_NAME: &str = "agents.x-k8s.io/sandbox-name";
/// Label that objects must carry to be adopted, where `--require-adoptable-label` is set.
pub const ADOPTABLE: &str = "agents.x-k8s.io/adoptable";
/// Label that SDKs put on the objects that they create.
pub const CREATED_BY: &str = "agents.x-k8s.io/created-by";

/// Annotation of a sandbox that was taken from a warm pool: the name of its pod. Its presence marks a warm start.
pub const POD_NAME: &str = "agents.x-k8s.io/pod-name";
/// Annotation of a sandbox: the name of the template it was made from.
pub const SANDBOX_TEMPLATE_REF: &str = "agents.x-k8s.io/sandbox-template-ref";
/// Annotation of a pod: the label keys that were copied from the sandbox's pod template.
pub const PROPAGATED_LABELS: &str = "agents.x-k8s.io/propagated-labels";
/// Annotation of a pod: the annotation keys that were copied from the sandbox's pod template.
pub const PROPAGATED_ANNOTATIONS: &str = "agents.x-k8s.io/propagated-annotations";
/// Annotation of a pod that replaces a lost one: how many were lost in a row.
pub const POD_RECREATIONS: &str = "agents.x-k8s.io/pod-recreations";
/// Annotation of a pod: "true" asks the pod's node to freeze all of its processes, until the annotation is gone. The node answers with
/// the pod condition [`crate::freezing::FROZEN`].
pub const FREEZE: &str = "node.agents.x-k8s.io/freeze";
/// Annotation of claim, sandbox and pod: a W3C trace context as a JSON carrier.
pub const TRACE_CONTEXT: &str = "opentelemetry.io/trace-context";
/// Annotation of a mirror pod: a pod object that represents a process which no node started. No node runs it.
pub const MIRROR: &str = "kubernetes.io/config.mirror";
/// Annotation of a claim: when admission first saw it.
pub const WEBHOOK_FIRST_OBSERVED_AT: &str = "agents.x-k8s.io/webhook-first-observed-at";
/// Annotation of a claim: when the controller first saw it.
pub const CONTROLLER_FIRST_OBSERVED_AT: &str = "agents.x-k8s.io/controller-first-observed-at";
/// Annotation of a claim, set by SDKs: when the user asked for it.
pub const CLIENT_FIRST_REQUESTED_AT: &str = "agents.x-k8s.io/client-first-requested-at";

/// The pod label by which the default network policy selects the router.
pub const ROUTER_APP: (&str, &str) = ("app", "sandbox-router");

/// Keys of the OpenKruise API.
pub mod kruise {
    /// Label of an unclaimed sandbox: the SandboxSet it belongs to.
    pub const SANDBOX_POOL: &str = "agents.kruise.io/sandbox-pool";
    /// Label of a sandbox: the SandboxSet it was made by, also once claimed.
    pub const SANDBOX_TEMPLATE: &str = "agents.kruise.io/sandbox-template";
    /// Label of a sandbox: "true" once claimed.
    pub const SANDBOX_CLAIMED: &str = "agents.kruise.io/sandbox-claimed";
    /// Label of a claimed sandbox: the claim's name.
    pub const CLAIM_NAME: &str = "agents.kruise.io/claim-name";
    /// Label of a sandbox: the revision it was made from.
    pub const TEMPLATE_HASH: &str = "agents.kruise.io/template-hash";
    /// Label of a sandbox: its ID for the router and for E2B clients.
    pub const SANDBOX_ID: &str = "agents.kruise.io/sandbox-id";
    /// Annotation of a claimed sandbox: the token of the claim attempt that holds it.
    pub const LOCK: &str = "agents.kruise.io/lock";
    /// Annotation of a claimed sandbox: the holder of the sandbox.
    pub const OWNER: &str = "agents.kruise.io/owner";
    /// Annotation of a claimed sandbox: when it was claimed.
    pub const CLAIM_TIMESTAMP: &str = "agents.kruise.io/claim-timestamp";
    /// Annotation of a claimed sandbox that was set aside rather than released: why it could not be initialised.
    pub const INIT_FAILURE: &str = "agents.kruise.io/init-failure";
}

/// Whether a pod object is a mirror pod.
pub fn is_mirror(pod: &impl ResourceExt) -> bool {
    pod.annotations().contains_key(MIRROR)
}
