//! The fields of a pod that decisions about its sandbox use.
//!
//! The remaining fields, above all the repeated pod template, would be most of the controller's memory with ten thousand sandboxes.
//! Deserialization skips them, and keeps only the statuses of containers that wait for a reason.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{Pod, PodIP};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Deserializer, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ObservedPod {
    #[serde(default)]
    pub metadata: ObjectMeta,
    pub spec: Option<Placement>,
    pub status: Option<State>,
}

/// Where the pod runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Placement {
    pub node_name: Option<String>,
}

/// The pod's status.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct State {
    pub phase: Option<String>,
    pub reason: Option<String>,
    #[serde(rename = "podIP")]
    pub pod_ip: Option<String>,
    #[serde(rename = "podIPs")]
    pub pod_ips: Option<Vec<PodIP>>,
    pub conditions: Option<Vec<StateCondition>>,
    /// The init containers that wait for a reason.
    #[serde(default, deserialize_with = "stalled")]
    pub init_container_statuses: Vec<ContainerStatus>,
    /// The containers that wait for a reason.
    #[serde(default, deserialize_with = "stalled")]
    pub container_statuses: Vec<ContainerStatus>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StateCondition {
    #[serde(rename = "type")]
    pub type_: String,
    pub status: String,
    pub reason: Option<String>,
    pub message: Option<String>,
    pub last_transition_time: Option<Time>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerStatus {
    #[serde(default)]
    pub name: String,
    pub state: Option<ContainerState>,
    pub last_state: Option<ContainerState>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerState {
    pub waiting: Option<Waiting>,
    pub terminated: Option<Terminated>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    pub reason: Option<String>,
    pub message: Option<String>,
}

/// How a run of a container ended. The termination message is left out: it may contain secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Terminated {
    #[serde(default)]
    pub exit_code: i32,
    pub reason: Option<String>,
}

impl ContainerStatus {
    pub fn waiting(&self) -> Option<&Waiting> {
        self.state.as_ref()?.waiting.as_ref()
    }

    /// How the run before this one ended, if there was one.
    pub fn last_end(&self) -> Option<&Terminated> {
        self.last_state.as_ref()?.terminated.as_ref()
    }
}

impl Waiting {
    /// Whether the container waits because of a problem, and not only for its start.
    fn is_stall(&self) -> bool {
        match self.reason.as_deref() {
            None | Some("PodInitializing") => false,
            // Without a message it is being created.
            Some("ContainerCreating") => self.message.is_some(),
            Some(_) => true,
        }
    }
}

/// Keeps the containers that wait for a reason.
fn stalled<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<ContainerStatus>, D::Error> {
    let mut containers =
        Option::<Vec<ContainerStatus>>::deserialize(deserializer)?.unwrap_or_default();
    containers.retain(|container| container.waiting().is_some_and(Waiting::is_stall));
    containers.shrink_to_fit();
    Ok(containers)
}

impl Resource for ObservedPod {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        Pod::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        Pod::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        Pod::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        Pod::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
