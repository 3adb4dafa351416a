//! The object, and its version, that a decision was about: the preconditions of the write that applies it.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;

/// One version of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Version {
    pub name: String,
    pub uid: String,
    pub resource_version: String,
}

impl Version {
    pub fn of<K: Resource>(object: &K) -> Self {
        Self::of_metadata(object.meta())
    }

    pub fn of_metadata(metadata: &ObjectMeta) -> Self {
        Self {
            name: metadata.name.clone().unwrap_or_default(),
            uid: metadata.uid.clone().unwrap_or_default(),
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
        }
    }
}
