//! What it takes for a kind to be cached, and what is dropped from its objects to keep the cache small.

use std::fmt::Debug;

use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, Pod, PodSpec, PodStatus, Service, ServiceSpec,
};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// A namespaced kind that is watched and cached as a whole.
pub trait Cached:
    Resource<DynamicType = (), Scope = NamespaceResourceScope>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
    + Send
    + Sync
    + 'static
{
    /// Drops what no controller reads.
    fn slim(&mut self) {
        self.meta_mut().managed_fields = None;
    }
}

impl Cached for Sandbox {}
impl Cached for SandboxClaim {}
impl Cached for SandboxTemplate {}
impl Cached for SandboxWarmPool {}
impl Cached for NetworkPolicy {}
impl Cached for api::kruise::SandboxSet {}
impl Cached for api::kruise::SandboxClaim {}

impl Cached for Pod {
    /// A pod's spec is decided by its sandbox and never read back, but for the node it was bound to. A pod is most of what the
    /// cache would hold otherwise.
    fn slim(&mut self) {
        self.metadata.managed_fields = None;
        self.spec = self.spec.take().map(|spec| PodSpec {
            node_name: spec.node_name,
            ..PodSpec::default()
        });
        self.status = self.status.take().map(|status| PodStatus {
            conditions: status.conditions,
            message: status.message,
            phase: status.phase,
            pod_ip: status.pod_ip,
            pod_ips: status.pod_ips,
            reason: status.reason,
            ..PodStatus::default()
        });
    }
}

impl Cached for Service {
    /// Of services, only identity, ownership, selector and cluster address matter.
    fn slim(&mut self) {
        self.metadata.managed_fields = None;
        self.spec = self.spec.take().map(|spec| ServiceSpec {
            cluster_ip: spec.cluster_ip,
            selector: spec.selector,
            ..ServiceSpec::default()
        });
        self.status = None;
    }
}

impl Cached for PersistentVolumeClaim {
    /// Of volume claims, only identity and ownership matter.
    fn slim(&mut self) {
        self.metadata.managed_fields = None;
        self.spec = None;
        self.status = None;
    }
}

/// The owner reference that says which object controls this one.
pub fn controller_of<K: Resource>(object: &K) -> Option<&OwnerReference> {
    object
        .meta()
        .owner_references
        .iter()
        .flatten()
        .find(|owner| owner.controller == Some(true))
}

/// The object's `resourceVersion` as the number it is in practice.
pub fn resource_version<K: Resource>(object: &K) -> Option<u64> {
    object.meta().resource_version.as_deref()?.parse().ok()
}
