//! The UID of a pod: the key under which the node keeps everything of a pod. Names are reused, UIDs are not.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::runtime::ContainerId;

/// The UID of a pod. It is never empty, so that an object without a UID cannot be mistaken for another.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PodUid(Arc<str>);

impl PodUid {
    /// A text as a UID, unless it is empty.
    pub fn parse(text: &str) -> Option<Self> {
        (!text.is_empty()).then(|| Self(text.into()))
    }

    /// The UID in an object's metadata. Only an object that the API server has not stored lacks one.
    pub fn of(metadata: &ObjectMeta) -> Option<Self> {
        Self::parse(metadata.uid.as_deref()?)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// One run of a container of this pod, as the runtime identifies it.
    pub fn container(&self, name: &str, run: u32) -> ContainerId {
        ContainerId {
            pod: self.0.to_string(),
            container: name.to_owned(),
            attempt: run,
        }
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Borrow<str> for PodUid {
    fn borrow(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_or_empty_uid_is_no_key() {
        let with = |uid: Option<&str>| ObjectMeta {
            uid: uid.map(str::to_owned),
            ..ObjectMeta::default()
        };
        assert_eq!(PodUid::of(&with(None)), None);
        assert_eq!(PodUid::of(&with(Some(""))), None);
        let uid = PodUid::of(&with(Some("u"))).unwrap();
        assert_eq!(uid.as_str(), "u");
        assert_eq!(uid.container("c", 2).pod, "u");
    }
}
