//! Controller references: who owns an object, and how to say so.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;

/// The owner that controls the object, if there is one.
pub fn controller_of(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata
        .owner_references
        .iter()
        .flatten()
        .find(|reference| reference.controller == Some(true))
}

/// Whether the object is controlled by the owner of this UID.
pub fn is_controlled_by(metadata: &ObjectMeta, uid: &str) -> bool {
    controller_of(metadata).is_some_and(|reference| reference.uid == uid)
}

/// Whether the reference is to an object of this group and kind, in any version.
pub fn refers_to<K: Resource<DynamicType = ()>>(reference: &OwnerReference) -> bool {
    let group = reference
        .api_version
        .rsplit_once('/')
        .map_or("", |(group, _)| group);
    group == K::group(&()) && reference.kind == K::kind(&())
}

/// A reference that makes `owner` the controller. Deleting the owner in the foreground waits for what refers to it so.
pub fn controller_reference<K: Resource<DynamicType = ()>>(owner: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        kind: K::kind(&()).into_owned(),
        name: owner.meta().name.clone().unwrap_or_default(),
        uid: owner.meta().uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

#[cfg(test)]
mod tests {
    use api::{SandboxClaim, SandboxWarmPool};

    use super::*;

    #[test]
    fn a_reference_is_known_by_group_and_kind_whatever_its_version() {
        let mut pool = SandboxWarmPool::default();
        pool.metadata.name = Some("pool".into());
        pool.metadata.uid = Some("u".into());
        let mut reference = controller_reference(&pool);
        assert!(refers_to::<SandboxWarmPool>(&reference));
        assert!(!refers_to::<SandboxClaim>(&reference));
        reference.api_version = "extensions.agents.x-k8s.io/v1alpha1".into();
        assert!(refers_to::<SandboxWarmPool>(&reference));
        reference.api_version = "example.com/v1".into();
        assert!(!refers_to::<SandboxWarmPool>(&reference));
    }

    #[test]
    fn an_owner_that_does_not_control_is_no_controller() {
        let metadata = ObjectMeta {
            owner_references: Some(vec![OwnerReference {
                uid: "u".into(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        };
        assert_eq!(controller_of(&metadata), None);
        assert!(!is_controlled_by(&metadata, "u"));
    }
}
