//! `SandboxTemplate`: the template from which claims and warm pools create sandboxes, and the network policy of those sandboxes.

use k8s_openapi::api::networking::v1::{NetworkPolicyEgressRule, NetworkPolicyIngressRule};
use kube::CustomResource;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lenient::lenient;
use crate::sandbox::{
    PersistentVolumeClaimTemplate, PodTemplate, SuspensionStrategy, SuspensionType,
};

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

    /// How the sandboxes are suspended, and which other ways a claim may choose. Unset means `Stop`, and no other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspension_strategy: Option<TemplateSuspensionStrategy>,

    /// Copied to each sandbox: true creates a headless service, false removes it, unset does not change it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<bool>,
}

/// How the sandboxes of a template are suspended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct TemplateSuspensionStrategy {
    /// The strategy of sandboxes whose claim does not choose one.
    #[serde(rename = "type")]
    pub kind: SuspensionType,

    /// The strategies that a claim may choose, besides `type`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("x-kubernetes-list-type" = "set")))]
    pub allowed: Option<Vec<SuspensionType>>,
}

/// A claim chooses a strategy that its template does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "spec.suspensionStrategy.type: the template does not allow {chosen}; it allows {}",
    .allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
)]
pub struct StrategyNotAllowed {
    pub chosen: SuspensionType,
    pub allowed: Vec<SuspensionType>,
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
    /// The strategy of a sandbox whose claim chooses this one, or none. An object keeps no field that neither of them sets.
    pub fn suspension_strategy(
        &self,
        chosen: Option<SuspensionStrategy>,
    ) -> Result<Option<SuspensionStrategy>, StrategyNotAllowed> {
        let own = self.suspension_strategy.as_ref();
        let Some(chosen) = chosen else {
            return Ok(own.map(|own| SuspensionStrategy { kind: own.kind }));
        };
        let mut allowed = vec![own.map_or(SuspensionType::default(), |own| own.kind)];
        for other in own.iter().flat_map(|own| own.allowed.iter().flatten()) {
            if !allowed.contains(other) {
                allowed.push(*other);
            }
        }
        if chosen.kind == SuspensionType::Unknown || !allowed.contains(&chosen.kind) {
            let chosen = chosen.kind;
            return Err(StrategyNotAllowed { chosen, allowed });
        }
        Ok(Some(chosen))
    }

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

#[cfg(test)]
mod tests {
    use SuspensionType::{Freeze, Hibernate, Stop, Unknown};

    use super::*;

    #[test]
    fn a_claim_chooses_among_the_strategies_of_its_template() {
        let choose = |template: Option<(SuspensionType, &[SuspensionType])>, chosen| {
            let strategy = template.map(|(kind, allowed)| TemplateSuspensionStrategy {
                kind,
                allowed: (!allowed.is_empty()).then(|| allowed.to_vec()),
            });
            let spec = SandboxTemplateSpec {
                suspension_strategy: strategy,
                ..SandboxTemplateSpec::default()
            };
            let chosen = Option::map(chosen, |kind| SuspensionStrategy { kind });
            spec.suspension_strategy(chosen)
                .map(|strategy| strategy.map(|strategy| strategy.kind))
                .map_err(|refused| refused.allowed)
        };
        let table = [
            (None, None, Ok(None)),
            (None, Some(Stop), Ok(Some(Stop))),
            (None, Some(Freeze), Err(vec![Stop])),
            (Some((Freeze, &[][..])), None, Ok(Some(Freeze))),
            (Some((Freeze, &[])), Some(Stop), Err(vec![Freeze])),
            (
                Some((Freeze, &[Stop, Freeze])),
                Some(Hibernate),
                Err(vec![Freeze, Stop]),
            ),
            (Some((Stop, &[Freeze])), Some(Freeze), Ok(Some(Freeze))),
            (Some((Unknown, &[])), Some(Unknown), Err(vec![Unknown])),
        ];
        for (template, chosen, expected) in table {
            assert_eq!(
                choose(template, chosen),
                expected,
                "{template:?} {chosen:?}"
            );
        }
    }

    #[test]
    fn a_refused_strategy_names_the_field_and_what_is_allowed() {
        let refused = StrategyNotAllowed {
            chosen: Freeze,
            allowed: vec![Stop, Hibernate],
        };
        assert_eq!(
            refused.to_string(),
            "spec.suspensionStrategy.type: the template does not allow Freeze; it allows Stop, Hibernate"
        );
    }
}
