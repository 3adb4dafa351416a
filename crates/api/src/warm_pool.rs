//! `SandboxWarmPool`: sandboxes that are created in advance for claims.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::CustomResource;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lenient::lenient;
use crate::sandbox::is_zero;
use crate::template::SandboxTemplateRef;

/// The desired state of a SandboxWarmPool.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "extensions.agents.x-k8s.io",
    version = "v1beta1",
    kind = "SandboxWarmPool",
    plural = "sandboxwarmpools",
    singular = "sandboxwarmpool",
    shortname = "swp",
    namespaced,
    status = "SandboxWarmPoolStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "A pool of sandboxes created in advance.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(
        name = "Updated",
        type_ = "integer",
        json_path = ".status.updatedReplicas",
        priority = 1
    ),
    printcolumn(
        name = "Template",
        type_ = "string",
        json_path = ".spec.sandboxTemplateRef.name",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxWarmPoolSpec {
    /// How many unclaimed sandboxes to keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 0), extend("default" = 1)))]
    pub replicas: Option<i32>,

    /// The template of the sandboxes.
    pub sandbox_template_ref: SandboxTemplateRef,

    /// What happens to sandboxes of an older template revision.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub update_strategy: Option<UpdateStrategy>,
}

/// The observed state of a SandboxWarmPool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SandboxWarmPoolStatus {
    /// How many unclaimed sandboxes exist.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub replicas: i32,

    /// How many of them are Ready.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub ready_replicas: i32,

    /// How many of them are of the current template revision.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub updated_replicas: i32,

    /// The label selector of the pool's sandboxes, in string form, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,

    /// The generation from which this status was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// The progress of a rolling update.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "schema",
        schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))
    )]
    pub conditions: Vec<Condition>,
}

/// What happens to sandboxes of an older template revision.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct UpdateStrategy {
    /// OnReplenish keeps them until they are claimed, Recreate deletes them at once, RollingUpdate replaces a few at a time.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("default" = "OnReplenish")))]
    pub kind: Option<UpdateStrategyKind>,

    /// For RollingUpdate: how many may be missing at a time, as a number or a percentage. The default is 20%.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "schema",
        schemars(extend("pattern" = crate::kruise::AMOUNT_PATTERN, "minimum" = 0))
    )]
    pub max_unavailable: Option<IntOrString>,
}

/// The kinds of update strategy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum UpdateStrategyKind {
    Recreate,
    #[default]
    OnReplenish,
    RollingUpdate,
}

lenient!(UpdateStrategyKind: Recreate, OnReplenish, RollingUpdate; else OnReplenish);

impl SandboxWarmPoolSpec {
    /// The number of requested sandboxes, with the schema's default.
    pub fn desired_replicas(&self) -> i32 {
        self.replicas.unwrap_or(1)
    }

    pub fn update_strategy_kind(&self) -> UpdateStrategyKind {
        self.update_strategy
            .as_ref()
            .and_then(|strategy| strategy.kind)
            .unwrap_or_default()
    }
}
