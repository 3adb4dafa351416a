//! Requests to the API server with preconditions, and the classification of their errors.
//!
//! Responses are stored in the caches, so that the next decision sees them. This module decides neither what to write nor whether to
//! retry.

use std::sync::Arc;
use std::time::Instant;

use api::decoding::{Decoded, Unreadable};
use http::Request as HttpRequest;
use kube::Resource;
use kube::api::{
    DeleteParams, GetParams, ListParams, ObjectList, Patch, PatchParams, PostParams, Preconditions,
    PropagationPolicy,
};
use kube::core::{ObjectMeta, PartialObjectMeta, Request, request};
pub use planner::pass::{Failure, Precondition};
use serde::Serialize;
use serde_json::{Value, json};
use tracing::{debug, info};

use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::instrumentation::{RequestReport, Verb};
use crate::key::ObjectKey;
use crate::trimmed::Trimmed;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[error("{verb:?} {kind} {object}: {failure}")]
pub struct WriteError {
    pub(crate) verb: Verb,
    pub(crate) kind: String,
    pub(crate) object: ObjectKey,
    pub failure: Failure,
    #[source]
    source: Option<Box<kube::Error>>,
}

impl WriteError {
    /// The object cannot be decoded.
    pub fn unreadable<K: Cached>(object: &ObjectKey, left: &Unreadable) -> Self {
        Self {
            verb: Verb::Get,
            kind: K::kind(&()).into_owned(),
            object: object.clone(),
            failure: Failure::Unreadable(left.problem.to_string()),
            source: None,
        }
    }

    /// A list of a namespace failed.
    pub fn list<K: Cached>(namespace: &str, error: kube::Error) -> Self {
        Self {
            verb: Verb::List,
            kind: K::kind(&()).into_owned(),
            object: ObjectKey::new(namespace, ""),
            failure: failure_of(&error),
            source: Some(Box::new(error)),
        }
    }

    pub fn is_conflict(&self) -> bool {
        self.failure == Failure::Conflict
    }

    pub fn is_not_found(&self) -> bool {
        self.failure == Failure::NotFound
    }

    pub fn is_unreadable(&self) -> bool {
        matches!(self.failure, Failure::Unreadable(_))
    }

    pub fn is_namespace_terminating(&self) -> bool {
        self.failure == Failure::NamespaceTerminating
    }
}

/// Classifies an error of the client.
pub fn failure_of(error: &kube::Error) -> Failure {
    let status = match error {
        kube::Error::Api(status) => status,
        kube::Error::BuildRequest(error) => return Failure::Impossible(error.to_string()),
        // The error's text may quote the object, which may contain secrets.
        kube::Error::SerdeError(_) => {
            return Failure::Transient("the answer cannot be read".to_owned());
        }
        error => return Failure::Transient(error.to_string()),
    };
    let message = || status.message.clone();
    if status.is_already_exists() {
        return Failure::AlreadyExists;
    }
    if changes_identity(status) {
        return Failure::Conflict;
    }
    match status.code {
        404 => Failure::NotFound,
        409 => Failure::Conflict,
        400 | 422 => Failure::Invalid(message()),
        403 if is_namespace_terminating(status) => Failure::NamespaceTerminating,
        403 => Failure::Forbidden(message()),
        _ => Failure::Transient(message()),
    }
}

/// Whether a write failed because its UID is not that of the object: the server reports an invalid change of an immutable field. It
/// means that the object was replaced by another one of its name.
fn changes_identity(status: &kube::core::Status) -> bool {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 422 && causes.any(|cause| cause.field == "metadata.uid")
}

fn is_namespace_terminating(status: &kube::core::Status) -> bool {
    status
        .details
        .iter()
        .flat_map(|details| &details.causes)
        .any(|cause| cause.reason == "NamespaceTerminating")
}

/// A request, if it could be made.
type Prepared = Result<HttpRequest<Vec<u8>>, request::Error>;

/// How to delete an object.
#[derive(Clone, Debug, Default)]
pub struct Deletion {
    pub precondition: Precondition,
    pub propagation: Option<PropagationPolicy>,
    pub grace_period_seconds: Option<u32>,
}

impl Deletion {
    /// A deletion with a precondition.
    pub fn given(precondition: impl Into<Precondition>) -> Self {
        Self {
            precondition: precondition.into(),
            ..Self::default()
        }
    }
}

/// Requests on one kind, on behalf of one controller.
#[derive(Clone, Copy, Debug)]
pub struct Writer<'a, K> {
    context: &'a Context,
    cache: &'a Cache<K>,
    field_manager: &'static str,
}

impl<'a, K: Cached> Writer<'a, K> {
    pub fn new(context: &'a Context, cache: &'a Cache<K>, field_manager: &'static str) -> Self {
        Self {
            context,
            cache,
            field_manager,
        }
    }

    /// Reads an object from the server, for decisions that must not rest on a cache.
    pub async fn get(&self, key: &ObjectKey) -> Result<Option<Arc<K>>, WriteError> {
        let epoch = self.cache.epoch();
        let started = Instant::now();
        let request = Self::request(key).get(&key.name, &GetParams::default());
        let answer = match self.send(request).await {
            Err(kube::Error::Api(status)) if status.is_not_found() => Ok(None),
            answer => answer.map(Some),
        };
        let Some(answer) = self.report(Verb::Get, key, started, answer)? else {
            return Ok(None);
        };
        let object = Self::read(Verb::Get, key, answer)?;
        Ok(Some(self.cache.learn(object, epoch)))
    }

    pub async fn create(
        &self,
        key: &ObjectKey,
        object: &impl Serialize,
    ) -> Result<Arc<K>, WriteError> {
        let params = self.post_params();
        let request = body(object).and_then(|body| Self::request(key).create(&params, body));
        self.exchange(Verb::Create, key, request).await
    }

    /// Changes an object by a JSON merge patch.
    pub async fn patch(
        &self,
        key: &ObjectKey,
        precondition: &Precondition,
        patch: Value,
    ) -> Result<Arc<K>, WriteError> {
        let patch = with_precondition(patch, precondition);
        let request =
            Self::request(key).patch(&key.name, &self.patch_params(), &Patch::Merge(&patch));
        self.exchange(Verb::Patch, key, request).await
    }

    /// Replaces fields of an object's status by a JSON merge patch of that status.
    pub async fn patch_status(
        &self,
        key: &ObjectKey,
        precondition: &Precondition,
        status: impl Serialize,
    ) -> Result<Arc<K>, WriteError> {
        let patch = with_precondition(json!({ "status": status }), precondition);
        let request = Self::request(key).patch_subresource(
            "status",
            &key.name,
            &self.patch_params(),
            &Patch::Merge(&patch),
        );
        self.exchange(Verb::PatchStatus, key, request).await
    }

    /// Replaces a whole object, as of the resource version it carries.
    pub async fn replace(&self, key: &ObjectKey, object: &K) -> Result<Arc<K>, WriteError> {
        let params = self.post_params();
        let request =
            body(object).and_then(|body| Self::request(key).replace(&key.name, &params, body));
        self.exchange(Verb::Update, key, request).await
    }

    /// Applies an object's status by server-side apply, taking over every field it names.
    pub async fn apply_status(
        &self,
        key: &ObjectKey,
        status: impl Serialize,
    ) -> Result<Arc<K>, WriteError> {
        let configuration = json!({
            "apiVersion": K::api_version(&()),
            "kind": K::kind(&()),
            "metadata": { "name": key.name.as_ref() },
            "status": status,
        });
        let params = PatchParams::apply(self.field_manager).force();
        let request = Self::request(key).patch_subresource(
            "status",
            &key.name,
            &params,
            &Patch::Apply(&configuration),
        );
        self.exchange(Verb::PatchStatus, key, request).await
    }

    /// Deletes an object. An object that does not exist is success.
    pub async fn delete(&self, key: &ObjectKey, deletion: Deletion) -> Result<(), WriteError> {
        let epoch = self.cache.epoch();
        let started = Instant::now();
        let precondition = deletion.precondition;
        let params = DeleteParams {
            grace_period_seconds: deletion.grace_period_seconds,
            propagation_policy: deletion.propagation,
            preconditions: Some(Preconditions {
                uid: precondition.uid,
                resource_version: precondition.resource_version,
            }),
            ..DeleteParams::default()
        };
        let answer = match Self::request(key).delete(&key.name, &params) {
            Ok(request) => {
                let client = &self.context.client;
                client.request_status::<Decoded<Trimmed<K>>>(request).await
            }
            Err(error) => Err(kube::Error::BuildRequest(error)),
        };
        match self.report(Verb::Delete, key, started, answer) {
            Ok(either) => {
                // An object that stays for a while (finalizers, a grace period) is answered with its deletion timestamp.
                if let Some(Decoded::Readable(Trimmed(object))) = either.left() {
                    self.cache.learn_deletion(object, epoch);
                }
                Ok(())
            }
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn request(key: &ObjectKey) -> Request {
        Request::new(K::url_path(&(), Some(&key.namespace)))
    }

    /// Sends a request whose response is the object, and stores the object in the cache.
    async fn exchange(
        &self,
        verb: Verb,
        key: &ObjectKey,
        request: Prepared,
    ) -> Result<Arc<K>, WriteError> {
        let epoch = self.cache.epoch();
        let started = Instant::now();
        let answer = self.send(request).await;
        let answer = self.report(verb, key, started, answer)?;
        let object = Self::read(verb, key, answer)?;
        Ok(self.cache.learn(object, epoch))
    }

    async fn send(&self, request: Prepared) -> Result<Decoded<Trimmed<K>>, kube::Error> {
        let request = request.map_err(kube::Error::BuildRequest)?;
        self.context.client.request(request).await
    }

    /// The object of an answer, if it can be read.
    fn read(verb: Verb, key: &ObjectKey, answer: Decoded<Trimmed<K>>) -> Result<K, WriteError> {
        match answer {
            Decoded::Readable(Trimmed(object)) => Ok(object),
            Decoded::Unreadable(left) => Err(WriteError {
                verb,
                ..WriteError::unreadable::<K>(key, &left)
            }),
        }
    }

    fn post_params(&self) -> PostParams {
        PostParams {
            dry_run: false,
            field_manager: Some(self.field_manager.to_owned()),
        }
    }

    fn patch_params(&self) -> PatchParams {
        PatchParams {
            field_manager: Some(self.field_manager.to_owned()),
            ..PatchParams::default()
        }
    }

    fn report<T>(
        &self,
        verb: Verb,
        key: &ObjectKey,
        started: Instant,
        answer: Result<T, kube::Error>,
    ) -> Result<T, WriteError> {
        let kind = K::kind(&());
        self.context.instrumentation.requested(&RequestReport {
            kind: &K::name_in_metrics(),
            verb,
            code: code_of(verb, &answer),
            took: started.elapsed(),
        });
        if answer.is_ok() {
            tell(verb, &kind, key);
        }
        answer.map_err(|source| WriteError {
            verb,
            kind: kind.into_owned(),
            object: key.clone(),
            failure: failure_of(&source),
            source: Some(Box::new(source)),
        })
    }
}

/// The metadata of the objects of a kind that a selector selects, from the server itself. Each is decoded by itself.
pub async fn list_metadata<K: Cached>(
    context: &Context,
    namespace: &str,
    selector: &str,
) -> Result<Vec<ObjectMeta>, kube::Error> {
    let params = ListParams::default().labels(selector);
    let request = Request::new(K::url_path(&(), Some(namespace)))
        .list_metadata(&params)
        .map_err(kube::Error::BuildRequest)?;
    let listed: ObjectList<Decoded<PartialObjectMeta<K>>> = context.client.request(request).await?;
    let items = listed.items.into_iter();
    Ok(items.map(|item| item.meta().clone()).collect())
}

fn body(object: &impl Serialize) -> Result<Vec<u8>, request::Error> {
    serde_json::to_vec(object).map_err(request::Error::SerializeBody)
}

/// Reports a change in the log and in the trace of the reconcile.
fn tell(verb: Verb, kind: &str, object: &ObjectKey) {
    match verb {
        Verb::Get | Verb::List => {}
        Verb::Create => info!(kind, %object, "created"),
        Verb::Update | Verb::Patch => info!(kind, %object, "changed"),
        Verb::PatchStatus => debug!(kind, %object, "published status"),
        Verb::Delete => info!(kind, %object, "deleted"),
    }
}

/// The HTTP status of a response. The client reports it only for errors; for a success it follows from the verb.
fn code_of<T>(verb: Verb, answer: &Result<T, kube::Error>) -> Option<u16> {
    match answer {
        Ok(_) if verb == Verb::Create => Some(201),
        Ok(_) => Some(200),
        Err(kube::Error::Api(status)) => Some(status.code),
        Err(_) => None,
    }
}

fn with_precondition(mut patch: Value, precondition: &Precondition) -> Value {
    let mut require = |field: &str, value: &Option<String>| {
        if let Some(value) = value {
            patch["metadata"][field] = Value::from(value.as_str());
        }
    };
    // No two objects share a resource version, so it also identifies the object.
    if precondition.resource_version.is_some() {
        require("resourceVersion", &precondition.resource_version);
    } else {
        require("uid", &precondition.uid);
    }
    patch
}
