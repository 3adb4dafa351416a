//! Of a pod, what decisions about its sandbox rest on.
//!
//! A pod repeats its sandbox's pod template and tells of every container. Nobody here reads that back, and a controller that kept it
//! for each of ten thousand sandboxes would keep little else. What is not named below is passed over when a pod is read.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::{Pod, PodIP};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Serialize};

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

/// How far the pod has come.
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
