//! The trait of cached kinds, and the fields that are dropped from their objects to keep the cache small.

use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::Arc;

use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service, ServiceSpec};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::Resource;
use kube::core::NamespaceResourceScope;
use planner::sandbox::ObservedPod;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::pod_specs::PodSpecs;

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
    /// Whether its status has conditions.
    const HAS_CONDITIONS: bool = true;

    /// The kind as metrics name it, where another kind has the same name in another group.
    const NAME_IN_METRICS: Option<&'static str> = None;

    /// The kind as metrics name it.
    fn name_in_metrics() -> Cow<'static, str> {
        Self::NAME_IN_METRICS.map_or_else(|| Self::kind(&()), Cow::Borrowed)
    }

    /// Drops the fields that no controller reads.
    fn strip(&mut self) {
        self.meta_mut().managed_fields = None;
    }

    /// Shares fields with equal ones of other objects. `before` is the cached version of the object.
    fn share(&mut self, _before: Option<&Self>, _specs: &PodSpecs) {}
}

impl Cached for Sandbox {
    /// Sandboxes of one template share the pod spec, which is the largest part of each.
    fn share(&mut self, before: Option<&Self>, specs: &PodSpecs) {
        let spec = &mut self.spec.pod_template.spec;
        match before.map(|before| &before.spec.pod_template.spec) {
            Some(known) if known == spec => *spec = Arc::clone(known),
            _ => specs.share(spec),
        }
    }
}

impl Cached for ObservedPod {}
impl Cached for SandboxClaim {}
impl Cached for SandboxTemplate {
    const HAS_CONDITIONS: bool = false;
}

impl Cached for SandboxWarmPool {}
impl Cached for NetworkPolicy {}
impl Cached for api::kruise::SandboxSet {}
impl Cached for api::kruise::SandboxClaim {
    const NAME_IN_METRICS: Option<&'static str> = Some("SandboxClaim.agents.kruise.io");
}

impl Cached for Service {
    /// Of services, only identity, ownership, selector and cluster address matter.
    fn strip(&mut self) {
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
    fn strip(&mut self) {
        self.metadata.managed_fields = None;
        self.spec = None;
        self.status = None;
    }
}

/// The object's `resourceVersion` as a number.
pub fn resource_version<K: Resource>(object: &K) -> Option<u64> {
    object.meta().resource_version.as_deref()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_one_name_differ_in_metrics() {
        assert_eq!(SandboxClaim::name_in_metrics(), "SandboxClaim");
        assert_eq!(
            api::kruise::SandboxClaim::name_in_metrics(),
            "SandboxClaim.agents.kruise.io"
        );
        assert_eq!(ObservedPod::name_in_metrics(), "Pod");
        let kruise = format!(".{}", api::KRUISE_GROUP);
        assert!(api::kruise::SandboxClaim::name_in_metrics().ends_with(&kruise));
    }
}
