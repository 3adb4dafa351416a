//! The controller of an object, from its owner references. An object of another controller is never changed.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;

/// The relation of an object to a possible controller.
#[derive(Clone, Debug, PartialEq)]
pub enum Ownership<'a> {
    /// It is controlled by the object in question.
    Ours,
    /// It has no controller.
    Unowned,
    /// Another object controls it.
    Others(&'a OwnerReference),
}

/// The relation of an object to the controller with this UID.
pub fn ownership<'a>(metadata: &'a ObjectMeta, uid: Option<&str>) -> Ownership<'a> {
    match controller_of(metadata) {
        None => Ownership::Unowned,
        Some(owner) if Some(owner.uid.as_str()) == uid => Ownership::Ours,
        Some(owner) => Ownership::Others(owner),
    }
}

/// The reference to an object's controller, if it has one.
pub fn controller_of(metadata: &ObjectMeta) -> Option<&OwnerReference> {
    metadata
        .owner_references
        .iter()
        .flatten()
        .find(|owner| owner.controller == Some(true))
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

/// Whether a reference is to an earlier object of this kind and name. That one no longer exists, since a name is taken by one object at
/// a time, and garbage collection is about to remove what it controlled.
pub fn refers_to_predecessor<K: Resource<DynamicType = ()>>(
    reference: &OwnerReference,
    name: &str,
    uid: Option<&str>,
) -> bool {
    refers_to::<K>(reference) && reference.name == name && Some(reference.uid.as_str()) != uid
}

/// The reference by which an object becomes another's controller. The owner comes from the API server and has a name and UID.
pub fn controller_reference<K: Resource<DynamicType = ()>>(owner: &K) -> OwnerReference {
    let metadata = owner.meta();
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        kind: K::kind(&()).into_owned(),
        name: metadata.name.clone().unwrap_or_default(),
        uid: metadata.uid.clone().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }
}

/// An unowned object's references with a controller added. Other owners, which do not control it, stay.
pub fn with_controller(metadata: &ObjectMeta, controller: OwnerReference) -> Vec<OwnerReference> {
    let mut owners: Vec<_> = metadata
        .owner_references
        .iter()
        .flatten()
        .filter(|owner| owner.uid != controller.uid)
        .cloned()
        .collect();
    owners.push(controller);
    owners
}

/// A controller's kind and name, for messages.
#[derive(Debug)]
pub struct Named<'a>(pub &'a OwnerReference);

impl fmt::Display for Named<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {:?}", self.0.kind, self.0.name)
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
