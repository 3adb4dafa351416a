//! The driver of every pass: answers the requests of [`planner::pass`] from the caches and the API server.

use std::sync::Arc;

use api::decoding::Unreadable;
use kube::api::PropagationPolicy;
use kube::core::ObjectMeta;
use planner::pass::{Failure, Objects, Precondition, Propagation, RequestError};
use serde::Serialize;
use serde_json::Value;

use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::writes::{Deletion, WriteError, Writer, list_metadata};

/// The objects of one kind in the namespace of an object, on behalf of its controller.
#[derive(Debug)]
pub(crate) struct NamespacedObjects<'a, K> {
    context: &'a Context,
    cache: &'a Cache<K>,
    writer: Writer<'a, K>,
    /// The object of the pass.
    object: &'a ObjectKey,
}

impl<'a, K: Cached> NamespacedObjects<'a, K> {
    pub fn new(
        context: &'a Context,
        cache: &'a Cache<K>,
        field_manager: &'static str,
        object: &'a ObjectKey,
    ) -> Self {
        Self {
            context,
            cache,
            writer: Writer::new(context, cache, field_manager),
            object,
        }
    }

    fn key(&self, name: &str) -> ObjectKey {
        if *self.object.name == *name {
            self.object.clone()
        } else {
            self.object.sibling(name)
        }
    }
}

impl<K: Cached> Objects<K> for NamespacedObjects<'_, K> {
    type Error = WriteError;

    fn cached(&self, name: &str) -> Option<Arc<K>> {
        self.cache.get(&self.key(name))
    }

    fn controlled_by(&self, uid: &str) -> Vec<Arc<K>> {
        let mut controlled = self.cache.controlled_by(uid);
        // An owner reference cannot cross namespaces, so the same UID in another namespace is ignored.
        controlled.retain(|object| {
            object.meta().namespace.as_deref() == Some(self.object.namespace.as_ref())
        });
        controlled
    }

    fn unreadable(&self, name: &str) -> Option<Arc<Unreadable>> {
        self.cache.unreadable(&self.key(name))
    }

    fn all_unreadable(&self) -> Vec<Arc<Unreadable>> {
        self.cache.unreadable_in(&self.object.namespace)
    }

    fn unreadable_error(&self, object: &Unreadable) -> WriteError {
        let name = object.metadata.name.as_deref().unwrap_or_default();
        WriteError::unreadable::<K>(&self.key(name), object)
    }

    async fn get(&self, name: &str) -> Result<Option<Arc<K>>, WriteError> {
        self.writer.get(&self.key(name)).await
    }

    async fn list_metadata(&self, selector: &str) -> Result<Vec<ObjectMeta>, WriteError> {
        list_metadata::<K>(self.context, &self.object.namespace, selector)
            .await
            .map_err(|error| WriteError::list::<K>(&self.object.namespace, error))
    }

    async fn create<T: Serialize + Sync>(
        &self,
        name: &str,
        object: &T,
    ) -> Result<Arc<K>, WriteError> {
        self.writer.create(&self.key(name), object).await
    }

    async fn patch(
        &self,
        name: &str,
        precondition: &Precondition,
        patch: Value,
    ) -> Result<Arc<K>, WriteError> {
        let key = self.key(name);
        self.writer.patch(&key, precondition, patch).await
    }

    async fn patch_status(
        &self,
        name: &str,
        precondition: &Precondition,
        status: Value,
    ) -> Result<Arc<K>, WriteError> {
        let key = self.key(name);
        self.writer.patch_status(&key, precondition, status).await
    }

    async fn apply_status(&self, name: &str, status: Value) -> Result<Arc<K>, WriteError> {
        self.writer.apply_status(&self.key(name), status).await
    }

    async fn delete(
        &self,
        name: &str,
        precondition: Precondition,
        propagation: Propagation,
    ) -> Result<(), WriteError> {
        let deletion = Deletion {
            propagation: match propagation {
                Propagation::Default => None,
                Propagation::Foreground => Some(PropagationPolicy::Foreground),
                Propagation::Orphan => Some(PropagationPolicy::Orphan),
            },
            ..Deletion::given(precondition)
        };
        self.writer.delete(&self.key(name), deletion).await
    }
}

impl RequestError for WriteError {
    fn failure(&self) -> &Failure {
        &self.failure
    }

    fn message(&self) -> String {
        match &self.failure {
            Failure::Unreadable(problem) => {
                let name = &self.object.name;
                format!("{} {name:?} cannot be read: {problem}", self.kind)
            }
            Failure::Impossible(message) => {
                let name = &self.object.name;
                format!("{:?} {} {name:?}: {message}", self.verb, self.kind)
            }
            failure => failure.to_string(),
        }
    }
}
