//! The hook through which a program that embeds the server looks at every write before it is validated, and may change or refuse it.

use std::fmt;

use apimachinery::status::Status;
use serde_json::Value;

use crate::auth::User;

/// What a write does.
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

/// One write on its way to the store.
#[derive(Clone, Debug)]
pub struct AdmissionRequest {
    /// What the write does.
    pub operation: Operation,
    /// What it is about.
    pub gvr: GroupVersionResource,
    /// Kind of the object.
    pub kind: String,
    /// Subresource, empty for the object itself.
    pub subresource: String,
    /// Namespace, empty for cluster-scoped objects.
    pub namespace: String,
    /// Name; empty while it is still to be generated.
    pub name: String,
    /// The object as it will be stored; null for a deletion. A hook may change it.
    pub object: Value,
    /// The object as it is stored; null for a creation.
    pub old_object: Value,
    /// Who asks.
    pub user: User,
    /// Whether nothing will be stored.
    pub dry_run: bool,
}

/// An in-process admission hook.
pub trait Admission: Send + Sync {
    /// Lets the write pass, changed or not, or refuses it.
    fn admit(&self, request: &mut AdmissionRequest) -> Result<(), Status>;
}

impl fmt::Debug for dyn Admission {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Admission")
    }
}
