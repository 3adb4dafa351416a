//! The UID of an object, as the key of what a controller knows about it.

use kube::{Resource, ResourceExt};

/// The UID of an object. `None`, with a warning, for an object without one: an empty key would mix up different objects. The API server
/// gives every stored object a UID.
pub(crate) fn object_uid<K: Resource>(object: &K) -> Option<String> {
    let uid = object.uid().filter(|uid| !uid.is_empty());
    if uid.is_none() {
        let (name, namespace) = (object.name_any(), object.namespace());
        tracing::warn!(name, namespace, "skipping an object without a UID");
    }
    uid
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;

    use super::*;

    #[test]
    fn an_absent_or_empty_uid_is_no_key() {
        let with = |uid: Option<&str>| {
            let mut pod = Pod::default();
            pod.metadata.uid = uid.map(str::to_owned);
            object_uid(&pod)
        };
        assert_eq!(with(None), None);
        assert_eq!(with(Some("")), None);
        assert_eq!(with(Some("u")).as_deref(), Some("u"));
    }
}
