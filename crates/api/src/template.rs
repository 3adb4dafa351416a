//! `SandboxTemplate`: the template from which claims and warm pools create sandboxes, and the network policy of those sandboxes.

use k8s_openapi::api::networking::v1::{NetworkPolicyEgressRule, NetworkPolicyIngressRule};
use kube::CustomResource;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lenient::lenient;
use crate::sandbox::{PersistentVolumeClaimTemplate, PodTemplate};

/// The desired state of a SandboxTemplate.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxTemplate",
    plural = "sandboxtemplates",
    singular = "sandboxtemplate",
    shortname = "sandboxtemplate",
    namespaced,
    derive = "PartialEq",
    derive = "Default",
    doc = "A template for sandboxes.",
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxTemplateSpec {
    /// The pod that each sandbox runs.
    pub pod_template: PodTemplate,

    /// Volumes that are created for each sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("x-kubernetes-list-type" = "atomic")))]
    pub volume_claim_templates: Option<Vec<PersistentVolumeClaimTemplate>>,

    /// Whether a claim may add its own volume claim templates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("default" = "Disallowed")))]
    pub volume_claim_templates_policy: Option<VolumeClaimTemplatesPolicy>,

    /// Ingress and egress rules of all sandboxes of this template. Unset means the secure default: only the router may connect, and only public addresses are reachable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicyRules>,

    /// Whether the controller keeps a NetworkPolicy for this template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("default" = "Managed")))]
    pub network_policy_management: Option<NetworkPolicyManagement>,

    /// Whether a claim may inject environment variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("default" = "Disallowed")))]
    pub env_vars_injection_policy: Option<EnvVarsInjectionPolicy>,

    /// Copied to each sandbox: true creates a headless service, false removes it, unset does not change it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<bool>,
}

/// Network rules without the pod selector and policy types, which the controller fills in so that the default is deny.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "schema",
    derive(JsonSchema),
    schemars(rename = "NetworkPolicySpec")
)]
pub struct NetworkPolicyRules {
    /// Which clients may connect to the sandboxes. All others are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("x-kubernetes-list-type" = "atomic")))]
    pub ingress: Option<Vec<NetworkPolicyIngressRule>>,

    /// Which destinations the sandboxes may connect to. All others are unreachable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("x-kubernetes-list-type" = "atomic")))]
    pub egress: Option<Vec<NetworkPolicyEgressRule>>,
}

/// Who keeps the template's NetworkPolicy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum NetworkPolicyManagement {
    #[default]
    Managed,
    Unmanaged,
}

lenient!(NetworkPolicyManagement: Managed, Unmanaged; else Managed);

/// Whether claims may inject environment variables: new ones, also in place of the template's, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum EnvVarsInjectionPolicy {
    Allowed,
    Overrides,
    #[default]
    Disallowed,
}

lenient!(EnvVarsInjectionPolicy: Allowed, Overrides, Disallowed; else Disallowed);

/// Whether claims may bring volume claim templates: new ones, also in place of the template's, or none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum VolumeClaimTemplatesPolicy {
    #[default]
    Disallowed,
    Allowed,
    Overrides,
}

lenient!(VolumeClaimTemplatesPolicy: Disallowed, Allowed, Overrides; else Disallowed);

/// A template in the same namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct SandboxTemplateRef {
    /// The name of the SandboxTemplate.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub name: String,
}

impl SandboxTemplateSpec {
    pub fn network_policy_management(&self) -> NetworkPolicyManagement {
        self.network_policy_management.unwrap_or_default()
    }

    pub fn env_vars_injection_policy(&self) -> EnvVarsInjectionPolicy {
        self.env_vars_injection_policy.unwrap_or_default()
    }

    pub fn volume_claim_templates_policy(&self) -> VolumeClaimTemplatesPolicy {
        self.volume_claim_templates_policy.unwrap_or_default()
    }

    /// Whether the controller manages the NetworkPolicy and the template has no rules of its own, so that the secure default
    /// policy and DNS settings apply.
    pub fn is_secure_by_default(&self) -> bool {
        self.network_policy.is_none()
            && self.network_policy_management() == NetworkPolicyManagement::Managed
    }
}
