//! The OpenKruise API (`agents.kruise.io/v1alpha1`): `SandboxSet`, a pool, and a batch `SandboxClaim` that takes several
//! sandboxes.
//!
//! Both use the core [`crate::Sandbox`]; there is no second Sandbox kind. The kinds have the same names as ours, so use them
//! through their module: `kruise::SandboxClaim`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::CustomResource;
use kube::core::Duration;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lenient::lenient;
use crate::sandbox::{PersistentVolumeClaimTemplate, PodTemplate, is_zero};

/// The desired state of a SandboxSet.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "agents.kruise.io",
    version = "v1alpha1",
    kind = "SandboxSet",
    plural = "sandboxsets",
    singular = "sandboxset",
    shortname = "sbs",
    namespaced,
    status = "SandboxSetStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A pool of unused sandboxes.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Replicas", type_ = "integer", json_path = ".status.replicas"),
    printcolumn(
        name = "Available",
        type_ = "integer",
        json_path = ".status.availableReplicas"
    ),
    printcolumn(
        name = "Updated",
        type_ = "integer",
        json_path = ".status.updatedReplicas"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[cfg_attr(
    feature = "schema",
    schemars(extend("x-kubernetes-validations" = [{
        "rule": "has(self.template) != has(self.templateRef)",
        "message": "exactly one of template and templateRef must be set",
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxSetSpec {
    /// How many unused sandboxes to keep.
    #[cfg_attr(feature = "schema", schemars(range(min = 0)))]
    pub replicas: i32,

    /// The pod each sandbox runs. Exactly one of this and `templateRef` is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,

    /// A SandboxTemplate in the same namespace to take the pod from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_ref: Option<TemplateRef>,

    /// Volumes that are created for each sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("x-kubernetes-list-type" = "atomic")))]
    pub volume_claim_templates: Option<Vec<PersistentVolumeClaimTemplate>>,

    /// How fast the set grows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale_strategy: Option<ScaleStrategy>,

    /// How fast the set is updated to a new revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<SetUpdateStrategy>,
}

/// The observed state of a SandboxSet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SandboxSetStatus {
    /// How many unused sandboxes exist.
    #[serde(default)]
    pub replicas: i32,

    /// How many of them can be claimed now.
    #[serde(default)]
    pub available_replicas: i32,

    /// How many of them are of the update revision.
    #[serde(default)]
    pub updated_replicas: i32,

    /// How many of the update revision can be claimed now.
    #[serde(default)]
    pub updated_available_replicas: i32,

    /// The revision to which the set is updated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_revision: Option<String>,

    /// The revision of all sandboxes when the last update was complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_revision: Option<String>,

    /// The label selector of the set's sandboxes, in string form, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,

    /// The set's conditions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "schema",
        schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))
    )]
    pub conditions: Vec<Condition>,

    /// The generation from which this status was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// A template for the set's sandboxes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct TemplateRef {
    /// The template's name.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub name: String,

    /// SandboxTemplate, which is also the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,

    /// extensions.agents.x-k8s.io with any version, which is also the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_version: Option<String>,
}

/// How fast a set grows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct ScaleStrategy {
    /// How many sandboxes may be unavailable while the set grows, as a number or a percentage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("pattern" = AMOUNT_PATTERN, "minimum" = 0)))]
    pub max_unavailable: Option<IntOrString>,
}

/// How fast a set moves to a new revision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SetUpdateStrategy {
    /// How many sandboxes may be replaced at a time, as a number or a percentage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("default" = "20%", "pattern" = AMOUNT_PATTERN, "minimum" = 0)))]
    pub max_unavailable: Option<IntOrString>,
}

/// The desired state of a batch SandboxClaim.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "agents.kruise.io",
    version = "v1alpha1",
    kind = "SandboxClaim",
    plural = "sandboxclaims",
    singular = "sandboxclaim",
    shortname = "sbc",
    namespaced,
    status = "SandboxClaimStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A request for some sandboxes of a SandboxSet.",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Template", type_ = "string", json_path = ".spec.templateName"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(
        name = "Claimed",
        type_ = "integer",
        json_path = ".status.claimedReplicas"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxClaimSpec {
    /// The SandboxSet to claim from, in the same namespace.
    #[cfg_attr(feature = "schema", schemars(length(min = 1)))]
    pub template_name: String,

    /// How many sandboxes to claim. It cannot be changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "schema",
        schemars(
            range(min = 1),
            extend(
                "default" = 1,
                "x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "replicas is immutable"}]
            )
        )
    )]
    pub replicas: Option<i32>,

    /// When the claimed sandboxes expire, as an absolute time.
    #[serde(
        default,
        deserialize_with = "crate::decoding::time",
        skip_serializing_if = "Option::is_none"
    )]
    pub shutdown_time: Option<Time>,

    /// How long to claim sandboxes, such as 10m. Then the claim is Completed with the sandboxes it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("pattern" = DURATION_PATTERN)))]
    pub claim_timeout: Option<Duration>,

    /// How long the claim object exists after it is Completed, such as 1h. The sandboxes stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("pattern" = DURATION_PATTERN)))]
    pub ttl_after_completed: Option<Duration>,

    /// Labels to add to the claimed sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,

    /// Annotations to add to the claimed sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,

    /// Environment variables for later commands, sent to each sandbox's init endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,

    /// Whether to create sandboxes when the set has none left. The default is false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create_on_no_stock: Option<bool>,

    /// Whether to keep a sandbox whose initialisation failed, for inspection, rather than release it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reserve_failed_sandbox: Option<bool>,

    /// How long to wait for a sandbox's response to its initialisation, such as 30s.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("pattern" = DURATION_PATTERN)))]
    pub wait_ready_timeout: Option<Duration>,

    /// Whether to skip the call to the init endpoint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip_init_runtime: Option<bool>,
}

/// The pattern of a non-negative Go duration, so that a malformed one is refused when it is written. The number of digits is
/// limited, because a duration that no clock can represent could not be read again.
#[cfg(feature = "schema")]
const DURATION_PATTERN: &str =
    r"^(0|(([0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9})(ns|us|µs|μs|ms|s|m|h)){1,8})$";

/// The pattern of a number or percentage of sandboxes that is written as a string.
#[cfg(feature = "schema")]
pub(crate) const AMOUNT_PATTERN: &str = r"^([0-9]{1,9}|(100|[0-9]{1,2})%)$";

/// The observed state of a batch SandboxClaim.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SandboxClaimStatus {
    /// The generation from which this status was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// The progress of the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<ClaimPhase>,

    /// A description of the phase for users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,

    /// How many sandboxes were claimed. It does not change once the claim is Completed.
    #[serde(default)]
    pub claimed_replicas: i32,

    /// How many sandboxes were taken but could not be initialised, and were released or set aside.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub failed_replicas: i32,

    /// The sandboxes that are currently being claimed. No other sandbox is claimed until the result for these is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(extend("x-kubernetes-list-type" = "atomic")))]
    pub claiming: Vec<String>,

    /// The sandboxes that are being created for the claim because the set has none left.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "schema", schemars(extend("x-kubernetes-list-type" = "atomic")))]
    pub creating: Vec<String>,

    /// When claiming began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claim_start_time: Option<Time>,

    /// When the claim was Completed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,

    /// Completed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "schema",
        schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))
    )]
    pub conditions: Vec<Condition>,
}

/// How far a batch claim is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum ClaimPhase {
    #[default]
    Pending,
    Claiming,
    Completed,
}

lenient!(ClaimPhase: Pending, Claiming, Completed; else Pending);

/// The default timeout for the initialisation of a sandbox.
const WAIT_READY_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

impl SandboxClaimSpec {
    /// The number of requested sandboxes, with the schema's default.
    pub fn desired_replicas(&self) -> i32 {
        self.replicas.unwrap_or(1)
    }

    /// The timeout for a sandbox to become Ready and to answer its initialisation.
    pub fn wait_ready_timeout(&self) -> std::time::Duration {
        self.wait_ready_timeout
            .map_or(WAIT_READY_TIMEOUT, std::time::Duration::from)
    }

    /// The environment variables to send to each sandbox, if there are any.
    pub fn variables(&self) -> Option<&BTreeMap<String, String>> {
        let skips = self.skip_init_runtime.unwrap_or(false);
        self.env_vars
            .as_ref()
            .filter(|variables| !skips && !variables.is_empty())
    }
}
