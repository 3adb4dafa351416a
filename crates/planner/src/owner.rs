//! Questions about an object's controller that claims and pools ask. References themselves are [`ownership`](crate::ownership)'s.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;

pub use crate::ownership::{controller as controller_of, controller_reference};

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
