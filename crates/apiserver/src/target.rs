//! What an operation is about, independent of HTTP: the object that it addresses, the part that a write changes, and the options
//! of a write.

use std::sync::Arc;

use apimachinery::status::Status;
use store::Key;

use crate::{auth::User, registry::Resource};

/// The object or collection that a request addresses.
#[derive(Clone, Debug)]
pub struct Target {
    /// The resource in the requested version.
    pub resource: Arc<Resource>,
    /// Namespace, empty for cluster scope or all namespaces.
    pub namespace: String,
    /// Name, empty for the collection.
    pub name: String,
}

impl Target {
    /// The key of the object in the store.
    pub fn key(&self) -> Key {
        Key::new(&self.namespace, &self.name)
    }

    /// The 404 response for this object.
    pub fn not_found(&self) -> Status {
        Status::not_found(&self.resource.group, &self.resource.plural, &self.name)
    }
}

/// The part of an object that a write changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Everything except the parts that have their own subresource.
    Main,
    /// Only `status`.
    Status,
    /// The finalizers of a namespace's spec.
    Finalize,
    /// The ephemeral containers of a pod's spec.
    EphemeralContainers,
}

impl Part {
    /// The subresource in paths.
    pub fn subresource(self) -> &'static str {
        match self {
            Self::Main => "",
            Self::Status => "status",
            Self::Finalize => "finalize",
            Self::EphemeralContainers => "ephemeralcontainers",
        }
    }
}

/// How unknown and duplicate fields are handled (`fieldValidation`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldValidation {
    /// Drop them silently.
    Ignore,
    /// Drop them and return a warning.
    #[default]
    Warn,
    /// Reject the request.
    Strict,
}

/// The options of a write, and its user.
#[derive(Clone, Debug, Default)]
pub struct WriteOptions {
    /// Validate everything and store nothing.
    pub dry_run: bool,
    /// How unknown fields are handled.
    pub field_validation: FieldValidation,
    /// Fields that occur more than once in the body.
    pub duplicate_fields: Vec<String>,
    /// The name of the field manager.
    pub field_manager: String,
    /// Whether the object is the result of a server-side apply, which has already set `managedFields`.
    pub applies: bool,
    /// The user who writes.
    pub user: User,
}

impl WriteOptions {
    /// The options of a built-in background controller, under its name in Kubernetes.
    pub fn system(controller: &str) -> Self {
        Self {
            user: User::system(controller),
            field_manager: "kube-controller-manager".into(),
            ..Self::default()
        }
    }
}
