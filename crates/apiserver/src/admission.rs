//! In-process admission hooks: a program that embeds the server can inspect, change or reject every write before it is validated.

use std::fmt;

use apimachinery::status::Status;
use serde_json::Value;

use crate::{auth::User, registry::Resource};

/// The kind of operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Create,
    Update,
    Delete,
    Connect,
}

/// Group, version and resource of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupVersionResource {
    /// API group, empty for core.
    pub group: String,
    /// The requested version.
    pub version: String,
    /// Plural name.
    pub resource: String,
}

impl GroupVersionResource {
    pub(crate) fn of(resource: &Resource) -> Self {
        Self {
            group: resource.group.to_string(),
            version: resource.version.to_string(),
            resource: resource.plural.to_string(),
        }
    }
}

/// One write before it is stored.
#[derive(Clone, Debug)]
pub struct AdmissionRequest {
    /// The kind of operation.
    pub operation: Operation,
    /// The resource that is written.
    pub gvr: GroupVersionResource,
    /// Kind of the object.
    pub kind: String,
    /// Subresource, empty for the object itself.
    pub subresource: String,
    /// Namespace, empty for cluster-scoped objects.
    pub namespace: String,
    /// Name; empty if it is not generated yet.
    pub name: String,
    /// The new object; null for a deletion. A hook may change it.
    pub object: Value,
    /// The stored object; null for a creation.
    pub old_object: Value,
    /// The user who made the request.
    pub user: User,
    /// Whether this is a dry run, which stores nothing.
    pub dry_run: bool,
}

/// An in-process admission hook.
pub trait Admission: Send + Sync {
    /// Fills in a default that depends on other fields, which no schema can express. The object is as the client sent it, or as its
    /// patch left it, without the defaults of its schema.
    fn fill_in(&self, _resource: &GroupVersionResource, _object: &mut Value) {}

    /// Accepts the write, possibly after changing the object, or rejects it.
    fn admit(&self, request: &mut AdmissionRequest) -> Result<(), Status>;
}

impl fmt::Debug for dyn Admission {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Admission")
    }
}
