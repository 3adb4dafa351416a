//! `Sandbox`: a single pod with a stable name, optional volumes and an optional headless service.
//!
//! Two generations of clients suspend a sandbox differently: the older sets `replicas: 0`, the newer `operatingMode: Suspended`.
//! Only [`SandboxSpec::suspension`] reads these two fields.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{PersistentVolumeClaimSpec, PodSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
#[cfg(feature = "schema")]
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lenient::lenient;

/// The desired state of a Sandbox.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[cfg_attr(not(feature = "schema"), kube(schema = "disabled"))]
#[kube(
    group = "agents.x-k8s.io",
    version = "v1beta1",
    kind = "Sandbox",
    plural = "sandboxes",
    singular = "sandbox",
    shortname = "sandbox",
    namespaced,
    status = "SandboxStatus",
    derive = "PartialEq",
    derive = "Default",
    doc = "An isolated, stateful, single-pod environment for an agent.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].reason"#
    ),
    printcolumn(
        name = "Pod IPs",
        type_ = "string",
        json_path = ".status.podIPs",
        priority = 1
    ),
    printcolumn(
        name = "Node",
        type_ = "string",
        json_path = ".status.nodeName",
        priority = 1
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
        "rule": "has(self.volumeClaimTemplates) == has(oldSelf.volumeClaimTemplates)",
        "message": "volumeClaimTemplates is immutable",
        "fieldPath": ".volumeClaimTemplates",
    }]))
)]
#[serde(rename_all = "camelCase")]
pub struct SandboxSpec {
    /// The pod that the sandbox runs. It is named after the sandbox.
    pub pod_template: PodTemplate,

    /// Volumes the pod may mount by name. Each becomes a claim named `<template>-<sandbox>`, which exists as long as the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(
        feature = "schema",
        schemars(extend(
            "x-kubernetes-list-type" = "atomic",
            "x-kubernetes-validations" = [{"rule": "self == oldSelf", "message": "volumeClaimTemplates is immutable"}]
        ))
    )]
    pub volume_claim_templates: Option<Vec<PersistentVolumeClaimTemplate>>,

    /// When the sandbox expires, as an absolute time. Unset means never.
    #[serde(
        default,
        deserialize_with = "crate::decoding::time",
        skip_serializing_if = "Option::is_none"
    )]
    pub shutdown_time: Option<Time>,

    /// What happens to the Sandbox object when it expires. Its pod and service are always deleted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(extend("default" = "Retain")))]
    pub shutdown_policy: Option<ShutdownPolicy>,

    /// 1 runs the pod, 0 suspends the sandbox and keeps its volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schemars(range(min = 0, max = 1), extend("default" = 1)))]
    pub replicas: Option<i32>,

    /// Whether the sandbox runs or is suspended. The sandbox is suspended if this is `Suspended` or `replicas` is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operating_mode: Option<OperatingMode>,

    /// How the sandbox is suspended when a suspension is requested. Unset means `Stop`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspension_strategy: Option<SuspensionStrategy>,

    /// True creates a headless service named after the sandbox, false removes it; unset does not change an existing one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<bool>,
}

/// How a sandbox is suspended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct SuspensionStrategy {
    /// `Stop` deletes the pod and keeps the volumes. `Freeze` keeps the pod and stops all of its processes where they are; it needs a
    /// node of agent-sandbox. `Hibernate` writes the memory of the processes to disk; no node can do that yet.
    #[serde(rename = "type")]
    pub kind: SuspensionType,
}

/// The observed state of a Sandbox.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct SandboxStatus {
    /// The DNS name of the service, valid inside the cluster.
    #[serde(
        default,
        rename = "serviceFQDN",
        skip_serializing_if = "Option::is_none"
    )]
    pub service_fqdn: Option<String>,

    /// The name of the service, if it exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,

    /// Ready, Suspended, PodScheduled and Finished.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(
        feature = "schema",
        schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))
    )]
    pub conditions: Vec<Condition>,

    /// How many pods exist: 0 or 1.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub replicas: i32,

    /// The label selector of the pod, in string form, for the scale subresource.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,

    /// The pod's addresses, one per family.
    #[serde(default, rename = "podIPs", skip_serializing_if = "Vec::is_empty")]
    pub pod_ips: Vec<String>,

    /// The node the pod runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
}

/// A pod's spec with the part of its metadata that may be chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct PodTemplate {
    /// The pod's spec, as in core/v1.
    // An `Arc`, because thousands of sandboxes may share the spec of one template in memory.
    pub spec: Arc<PodSpec>,

    /// Labels and annotations of the pod.
    #[serde(default, skip_serializing_if = "PodMetadata::is_empty")]
    pub metadata: PodMetadata,
}

impl PodTemplate {
    /// The pod's spec for modification. Clones it if it is shared.
    pub fn spec_mut(&mut self) -> &mut PodSpec {
        Arc::make_mut(&mut self.spec)
    }
}

/// Labels and annotations for a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct PodMetadata {
    /// Labels of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,

    /// Annotations of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

impl PodMetadata {
    pub fn is_empty(&self) -> bool {
        self.labels.is_none() && self.annotations.is_none()
    }
}

/// A volume claim to make for each sandbox.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct PersistentVolumeClaimTemplate {
    /// The template's name, by which pods mount it, and labels and annotations of the claim.
    #[serde(default)]
    pub metadata: EmbeddedObjectMetadata,

    /// The claim's spec, as in core/v1.
    pub spec: PersistentVolumeClaimSpec,
}

/// The part of an embedded object's metadata that may be chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub struct EmbeddedObjectMetadata {
    /// The name of the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,

    /// Labels of the object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,

    /// Annotations of the object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub annotations: Option<BTreeMap<String, String>>,
}

/// What happens to a Sandbox object at its shutdown time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum ShutdownPolicy {
    Delete,
    #[default]
    Retain,
}

lenient!(ShutdownPolicy: Delete, Retain; else Retain);

/// The newer way to say whether a sandbox runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum OperatingMode {
    Running,
    Suspended,
}

lenient!(OperatingMode: Running, Suspended; else Running);

/// The ways to suspend a sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(JsonSchema))]
pub enum SuspensionType {
    #[default]
    Stop,
    Freeze,
    Hibernate,
    /// A value that this version does not know. It must not be taken for `Stop`, which loses the memory of the processes.
    #[cfg_attr(feature = "schema", schemars(skip))]
    Unknown,
}

lenient!(SuspensionType: Stop, Freeze, Hibernate; else Unknown);

impl std::fmt::Display for SuspensionType {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Stop => "Stop",
            Self::Freeze => "Freeze",
            Self::Hibernate => "Hibernate",
            Self::Unknown => "Unknown",
        })
    }
}

/// Whether a suspension is requested, and by which field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspension {
    /// No suspension is requested: the sandbox should run.
    None,
    /// `replicas` is 0 while `operatingMode` does not say Suspended.
    ByReplicas,
    /// `operatingMode` is Suspended while `replicas` is not 0.
    ByOperatingMode,
    /// Both fields request it.
    ByBoth,
}

impl Suspension {
    pub fn is_requested(self) -> bool {
        self != Self::None
    }
}

/// The generation of the API whose conditions an object is given.
///
/// Clients that know `operatingMode` (upstream 0.5.6 and later) expect `Suspended` at all times and `PodScheduled`; clients that
/// know only `replicas` take the presence of `Suspended` for a suspension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConditionForm {
    /// `Suspended` is present only while suspension is asked for.
    Replicas,
    /// `Suspended` is always present, and `PodScheduled` while there is a pod.
    OperatingMode,
}

impl SandboxSpec {
    /// Which conditions the object is given: those of the newer generation if it sets `operatingMode`.
    pub fn condition_form(&self) -> ConditionForm {
        match self.operating_mode {
            None => ConditionForm::Replicas,
            Some(_) => ConditionForm::OperatingMode,
        }
    }

    /// How the sandbox is to be suspended.
    pub fn suspension_type(&self) -> SuspensionType {
        self.suspension_strategy.unwrap_or_default().kind
    }

    /// Whether a suspension is requested, and by which field.
    pub fn suspension(&self) -> Suspension {
        let by_mode = self.operating_mode == Some(OperatingMode::Suspended);
        let by_replicas = self.replicas == Some(0);
        match (by_replicas, by_mode) {
            (false, false) => Suspension::None,
            (true, false) => Suspension::ByReplicas,
            (false, true) => Suspension::ByOperatingMode,
            (true, true) => Suspension::ByBoth,
        }
    }
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
pub(crate) fn is_zero(number: &i32) -> bool {
    *number == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_is_suspended_if_either_field_says_so() {
        let spec = |replicas, operating_mode| SandboxSpec {
            replicas,
            operating_mode,
            ..SandboxSpec::default()
        };
        let table = [
            (None, None, Suspension::None),
            (Some(1), None, Suspension::None),
            (Some(1), Some(OperatingMode::Running), Suspension::None),
            (Some(0), None, Suspension::ByReplicas),
            (
                Some(0),
                Some(OperatingMode::Running),
                Suspension::ByReplicas,
            ),
            (
                Some(1),
                Some(OperatingMode::Suspended),
                Suspension::ByOperatingMode,
            ),
            (
                None,
                Some(OperatingMode::Suspended),
                Suspension::ByOperatingMode,
            ),
            (Some(0), Some(OperatingMode::Suspended), Suspension::ByBoth),
        ];
        for (replicas, mode, expected) in table {
            assert_eq!(
                spec(replicas, mode).suspension(),
                expected,
                "{replicas:?} {mode:?}"
            );
        }
    }
}
