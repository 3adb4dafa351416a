//! The name under which an object is cached and queued. It contains neither the kind nor the UID.

use std::fmt;
use std::sync::Arc;

use kube::Resource;

/// Namespace and name of an object. Cheap to clone; the namespace is empty for cluster-scoped objects.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectKey {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

impl ObjectKey {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self {
            namespace: Arc::from(namespace),
            name: Arc::from(name),
        }
    }

    /// The key of an object that the API server returned, and which therefore has a name.
    pub fn of<K: Resource>(object: &K) -> Self {
        let metadata = object.meta();
        Self::new(
            metadata.namespace.as_deref().unwrap_or_default(),
            metadata.name.as_deref().unwrap_or_default(),
        )
    }

    /// The key of another object in the same namespace.
    #[must_use]
    pub fn sibling(&self, name: &str) -> Self {
        Self {
            namespace: Arc::clone(&self.namespace),
            name: Arc::from(name),
        }
    }
}

/// An index key for a value that is meaningful only within a namespace.
pub(crate) fn within<K: Resource>(object: &K, value: &str) -> String {
    let namespace = object.meta().namespace.as_deref().unwrap_or_default();
    format!("{namespace}/{value}")
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            formatter.write_str(&self.name)
        } else {
            write!(formatter, "{}/{}", self.namespace, self.name)
        }
    }
}
