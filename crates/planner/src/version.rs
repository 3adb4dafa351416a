//! Which object, in which state, a decision was about: the preconditions of the write that carries it out.

use kube::Resource;

/// An object at one moment of its life.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version {
    pub name: String,
    pub uid: String,
    pub resource_version: String,
}

impl Version {
    pub fn of<K: Resource>(object: &K) -> Self {
        let metadata = object.meta();
        Self {
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
        }
    }
}
