//! The interface between a pass over an object and the process that runs it.
//!
//! A pass (observe, decide, apply, publish) is an `async fn` of this crate that is generic over its environment. The compiler turns it
//! into a state machine that performs no I/O and needs no runtime: each `.await` is a request to the API server, made through
//! [`Objects`]. `controllers` answers requests from a Kubernetes API, the simulations in `tests/` from a model. Both run the same pass.
//! A simulation ends a process between two writes by dropping the future.
//!
//! The meaning of a response is decided here; an environment only translates requests and errors.

mod not_ready;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use api::decoding::Unreadable;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::Serialize;
use serde_json::Value;

pub(crate) use not_ready::end_unobserved;
pub use not_ready::publish_not_ready;

use crate::version::Version;

/// When an object is reconciled again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// When something that its controller watches changes.
    AwaitChange,
    /// After this time, or sooner on a change.
    RequeueAfter(Duration),
    /// Soon, though nothing failed: the pass saw outdated objects.
    Retry,
}

/// Why a pass failed. It is retried, later each time.
#[derive(Debug, thiserror::Error)]
pub enum Error<E: std::error::Error + 'static> {
    #[error("cannot look up what the object depends on")]
    Observe(#[source] E),
    #[error("cannot list the object's sandboxes")]
    List(#[source] E),
    #[error("cannot carry out what was decided for the object")]
    Apply(#[source] E),
    #[error("cannot publish the object's status")]
    Publish(#[source] E),
    #[error("cannot serialize the object's status")]
    Serialize(#[source] serde_json::Error),
}

/// Why a request failed, by what the failure calls for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The object does not exist (any more).
    NotFound,
    /// An object of that name exists already.
    AlreadyExists,
    /// A precondition did not hold: the object has changed.
    Conflict,
    /// The server will never accept this (its message).
    Invalid(String),
    /// The server does not allow this now, such as for want of quota or of permission (its message).
    Forbidden(String),
    /// The namespace is being deleted, so nothing can be created in it.
    NamespaceTerminating,
    /// The request succeeded, or would have, but the object cannot be decoded (which field, and why).
    Unreadable(String),
    /// The request cannot be built (why).
    Impossible(String),
    /// A failure that may pass: timeouts, lost connections, overload (the message).
    Transient(String),
}

impl Failure {
    /// Whether the object changed, went or came since it was observed: the pass observes again.
    pub fn is_outdated(&self) -> bool {
        matches!(self, Self::Conflict | Self::NotFound | Self::AlreadyExists)
    }

    /// Whether a retry is of no use until the object or something that it refers to changes.
    pub fn is_lasting(&self) -> bool {
        matches!(
            self,
            Self::Invalid(_) | Self::Unreadable(_) | Self::Impossible(_)
        )
    }

    /// Whether the server may have carried the write out all the same: its answer was lost, or cannot be decoded.
    pub fn may_have_happened(&self) -> bool {
        matches!(self, Self::Transient(_) | Self::Unreadable(_))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => formatter.write_str("not found"),
            Self::AlreadyExists => formatter.write_str("already exists"),
            Self::Conflict => formatter.write_str("changed in the meantime"),
            Self::NamespaceTerminating => formatter.write_str("its namespace is being deleted"),
            Self::Unreadable(problem) => write!(formatter, "it cannot be read: {problem}"),
            Self::Invalid(message)
            | Self::Forbidden(message)
            | Self::Impossible(message)
            | Self::Transient(message) => formatter.write_str(message),
        }
    }
}

/// A failed request.
pub trait RequestError: std::error::Error + Send + Sync + 'static {
    fn failure(&self) -> &Failure;

    /// The failure in words for the owner of the object.
    fn message(&self) -> String;
}

/// Whether the server may have carried a write out: it did, or its answer was lost.
pub(crate) fn may_have_happened<T, E: RequestError>(answer: &Result<T, E>) -> bool {
    match answer {
        Ok(_) => true,
        Err(error) => error.failure().may_have_happened(),
    }
}

/// Whether an event is a warning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Severity {
    Normal,
    Warning,
}

/// An event about an object, for its owner.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Event {
    pub severity: Severity,
    /// Why it happened, as one CamelCase word that tools may compare.
    pub reason: &'static str,
    /// What was done, as one CamelCase word.
    pub action: &'static str,
    /// The message for people.
    pub note: String,
}

impl Event {
    pub(crate) fn normal(reason: &'static str, action: &'static str, note: String) -> Self {
        Self {
            severity: Severity::Normal,
            reason,
            action,
            note,
        }
    }

    pub(crate) fn warning(reason: &'static str, action: &'static str, note: String) -> Self {
        Self {
            severity: Severity::Warning,
            ..Self::normal(reason, action, note)
        }
    }
}

/// The preconditions of a write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Precondition {
    pub uid: Option<String>,
    pub resource_version: Option<String>,
}

impl Precondition {
    /// Exactly this version of exactly this object.
    pub fn unchanged<K: Resource>(object: &K) -> Self {
        Self {
            uid: object.meta().uid.clone(),
            resource_version: object.meta().resource_version.clone(),
        }
    }

    /// This object in any version; not another one of the same name.
    pub fn same<K: Resource>(object: &K) -> Self {
        Self::uid(object.meta().uid.clone())
    }

    /// The object of this UID in any version.
    pub fn uid(uid: impl Into<Option<String>>) -> Self {
        Self {
            uid: uid.into(),
            resource_version: None,
        }
    }
}

impl From<&Version> for Precondition {
    fn from(version: &Version) -> Self {
        Self {
            uid: Some(version.uid.clone()),
            resource_version: Some(version.resource_version.clone()),
        }
    }
}

/// What garbage collection does with the dependents of a deleted object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Propagation {
    /// The default of the kind.
    #[default]
    Default,
    /// The dependents go first.
    Foreground,
    /// The dependents stay.
    Orphan,
}

/// The objects of one kind in the namespace of the pass: a cache of them, and requests to the API server. The cache stores every response.
pub trait Objects<K>: Send + Sync {
    type Error: RequestError;

    /// The object as the cache shows it.
    fn cached(&self, name: &str) -> Option<Arc<K>>;

    /// The objects that the cache shows under the controller of this UID.
    fn controlled_by(&self, uid: &str) -> Vec<Arc<K>>;

    /// The object of this name if the cache could not decode it.
    fn unreadable(&self, name: &str) -> Option<Arc<Unreadable>>;

    /// Every object that the cache could not decode.
    fn all_unreadable(&self) -> Vec<Arc<Unreadable>>;

    /// The error that a request for this object would end in.
    fn unreadable_error(&self, object: &Unreadable) -> Self::Error;

    /// The object as the API server has it, for decisions that must not rest on a cache.
    fn get(&self, name: &str) -> impl Future<Output = Result<Option<Arc<K>>, Self::Error>> + Send;

    /// The metadata of the objects that a label selector selects, as the API server has them.
    fn list_metadata(
        &self,
        selector: &str,
    ) -> impl Future<Output = Result<Vec<ObjectMeta>, Self::Error>> + Send;

    fn create<T: Serialize + Sync>(
        &self,
        name: &str,
        object: &T,
    ) -> impl Future<Output = Result<Arc<K>, Self::Error>> + Send;

    /// Changes an object by a JSON merge patch.
    fn patch(
        &self,
        name: &str,
        precondition: &Precondition,
        patch: Value,
    ) -> impl Future<Output = Result<Arc<K>, Self::Error>> + Send;

    /// Changes an object's status by a JSON merge patch of that status.
    fn patch_status(
        &self,
        name: &str,
        precondition: &Precondition,
        status: Value,
    ) -> impl Future<Output = Result<Arc<K>, Self::Error>> + Send;

    /// Applies an object's status by server-side apply, taking over every field of it.
    fn apply_status(
        &self,
        name: &str,
        status: Value,
    ) -> impl Future<Output = Result<Arc<K>, Self::Error>> + Send;

    /// Deletes an object. An object that does not exist is success.
    fn delete(
        &self,
        name: &str,
        precondition: Precondition,
        propagation: Propagation,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send;
}
