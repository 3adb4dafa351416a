//! The operations on objects, independent of the transport: create, get, list, watch, update, patch, delete.
//!
//! Every caller goes through [`Api`]: the in-process client, HTTPS, and the background controllers.

mod create;
pub mod delete;
mod list;
pub mod modify;
mod pod_security;
pub mod selection;
pub mod subresource;
pub mod watch;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use apimachinery::nesting::{MOST_LEVELS, levels};
use apimachinery::status::{Cause, Status};
use arc_swap::ArcSwap;
use jiff::Timestamp;
use serde_json::Value;
use store::{Draft, Object, Range, ResourceId, Store, WriteError};
use tokio_util::sync::CancellationToken;

pub use self::{
    delete::{DeleteOptions, DeleteOutcome, Propagation},
    list::{ListOptions, ListPage, VersionMatch},
    watch::{WatchOptions, WatchStream},
};
use crate::{
    admission::{Admission, AdmissionRequest, GroupVersionResource, Operation},
    auth::{access::Access, escalation::RbacWrite},
    clock::Clock,
    registry::{Registry, Resource, Rules},
    strategy,
    target::{Part, Target, WriteOptions},
};

/// The result of a write.
#[derive(Clone, Debug)]
pub struct WriteOutcome {
    /// The object as stored.
    pub object: Arc<Object>,
    /// Whether the write created the object.
    pub created: bool,
    /// Warnings for the client.
    pub warnings: Vec<String>,
}

impl WriteOutcome {
    /// Inserts earlier warnings before the present ones.
    fn with_earlier_warnings(mut self, mut earlier: Vec<String>) -> Self {
        earlier.append(&mut self.warnings);
        self.warnings = earlier;
        self
    }
}

/// The operations over one store.
#[derive(Debug)]
pub struct Api {
    pub(crate) store: Store,
    pub(crate) shutdown: CancellationToken,
    /// Set when the server is initialized. Before that, only the server itself writes.
    pub(crate) access: OnceLock<Arc<Access>>,
    registry: ArcSwap<Registry>,
    refresh: Mutex<()>,
    admission: Vec<Arc<dyn Admission>>,
    clock: Clock,
}

impl Api {
    /// Creates the operations over `store`.
    pub fn new(store: Store, admission: Vec<Arc<dyn Admission>>, clock: Clock) -> Self {
        let api = Self {
            store,
            shutdown: CancellationToken::new(),
            access: OnceLock::new(),
            registry: ArcSwap::default(),
            refresh: Mutex::new(()),
            admission,
            clock,
        };
        api.refresh_registry();
        api
    }

    /// What the rules of a kind may read.
    fn context(&self) -> strategy::Context<'_> {
        strategy::Context {
            store: &self.store,
            clock: &self.clock,
        }
    }

    /// The current time.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// The resources that are served now.
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.load_full()
    }

    /// Reads the CustomResourceDefinitions again. Called after every write to one of them.
    pub(crate) fn refresh_registry(&self) {
        let _serialized = self.refresh.lock().unwrap_or_else(PoisonError::into_inner);
        let definitions = ResourceId::new("apiextensions.k8s.io", "customresourcedefinitions");
        let listed = self.store.list(&definitions, &Range::namespace(""), None);
        let values: Vec<Value> = listed
            .map(|snapshot| {
                snapshot
                    .objects
                    .iter()
                    .map(|object| object.value())
                    .collect()
            })
            .unwrap_or_default();
        self.registry
            .store(Arc::new(Registry::new(&self.registry(), values.iter())));
    }

    /// Gets one object.
    pub fn get(&self, target: &Target) -> Result<Arc<Object>, Status> {
        self.store
            .get(&target.resource.id, &target.key())
            .ok_or_else(|| target.not_found())
    }

    /// Lets hooks fill in defaults, before the schema's.
    fn fill_in(&self, resource: &Resource, object: &mut Value) {
        if self.admission.is_empty() {
            return;
        }
        let resource = GroupVersionResource::of(resource);
        for hook in &self.admission {
            hook.fill_in(&resource, object);
        }
    }

    fn admit(
        &self,
        target: &Target,
        part: Part,
        operation: Operation,
        object: &mut Value,
        old: Option<&Value>,
        options: &WriteOptions,
    ) -> Result<(), Status> {
        if self.admission.is_empty() {
            return Ok(());
        }
        let resource = &target.resource;
        let mut request = AdmissionRequest {
            operation,
            gvr: GroupVersionResource::of(resource),
            kind: resource.kind.to_string(),
            subresource: part.subresource().to_owned(),
            namespace: target.namespace.clone(),
            name: target.name.clone(),
            object: object.take(),
            old_object: old.cloned().unwrap_or_default(),
            user: options.user.clone(),
            dry_run: options.dry_run,
        };
        for hook in &self.admission {
            hook.admit(&mut request)?;
        }
        *object = request.object;
        if operation != Operation::Delete {
            // A hook may have added unknown fields, or fields that need defaults.
            strategy::prune_and_default(resource, object);
        }
        Ok(())
    }

    /// Rejects roles and bindings that would grant permissions that the writer does not have (privilege escalation).
    fn check_escalation(
        &self,
        resource: &Resource,
        object: &Value,
        old: Option<&Value>,
        options: &WriteOptions,
    ) -> Result<(), Status> {
        let Some(access) = self.access.get() else {
            return Ok(());
        };
        let write = RbacWrite {
            user: &options.user,
            rules: resource.rules,
            object,
            old,
        };
        access.check_escalation(&write)
    }

    /// Rejects an object that is nested too deeply to be parsed again. An object that is already that deep can still be changed
    /// and deleted.
    fn check_nesting(object: &Value, old: Option<&Value>) -> Result<(), Status> {
        let found = levels(object);
        if found <= MOST_LEVELS || old.is_some_and(|old| found <= levels(old)) {
            return Ok(());
        }
        Err(Status::bad_request(format!(
            "an object cannot have more than {MOST_LEVELS} levels of nested maps and lists, including the fields that the server adds; this object has {found}"
        )))
    }

    /// Converts an object to its storage form.
    fn draft(resource: &Resource, mut object: Value) -> Result<Draft, Status> {
        strategy::to_storage(resource, &mut object);
        Draft::new(&object).map_err(|error| {
            let cause = std::error::Error::source(&error)
                .map(|cause| format!(": {cause}"))
                .unwrap_or_default();
            Status::bad_request(format!("{error}{cause}"))
        })
    }

    /// A stored object, converted to the requested version.
    pub fn value_of(resource: &Resource, object: &Object) -> Value {
        let mut value = object.value();
        strategy::from_storage(resource, &mut value);
        value
    }

    fn after_write(&self, resource: &Resource) {
        if resource.rules == Rules::CustomResourceDefinition {
            self.refresh_registry();
        }
    }
}

/// Converts an error of the store to a `Status`.
fn storage_failure(target: &Target, error: &WriteError) -> Status {
    match error {
        WriteError::Conflict { .. } => Status::conflict(
            &target.resource.group,
            &target.resource.plural,
            &target.name,
        ),
        WriteError::Requirement(missing)
            if *missing == ResourceId::new(DEFINITIONS.0, DEFINITIONS.1) =>
        {
            terminating_definition(target)
        }
        WriteError::Requirement(_) => terminating_namespace(target),
        WriteError::Storage(cause) if cause.is_disk_full() => Status::insufficient_storage(
            "the disk that holds the data directory is full: free some space and try again",
        ),
        WriteError::Storage(cause) => {
            let detail = std::error::Error::source(&**cause)
                .map_or_else(|| cause.to_string(), |source| format!("{cause}: {source}"));
            Status::internal(format_args!("{error}: {detail}"))
        }
        WriteError::Closed => Status::service_unavailable("the server is shutting down"),
    }
}

/// Group and resource of CustomResourceDefinitions.
const DEFINITIONS: (&str, &str) = ("apiextensions.k8s.io", "customresourcedefinitions");

fn terminating_definition(target: &Target) -> Status {
    let (group, plural) = (&target.resource.group, &target.resource.plural);
    let mut status = Status::method_not_supported(group, plural, "create");
    "create not allowed while custom resource definition is terminating"
        .clone_into(&mut status.message);
    status
}

fn terminating_namespace(target: &Target) -> Status {
    let message = format!(
        "unable to create new content in namespace {} because it is being terminated",
        target.namespace
    );
    let cause = Cause {
        reason: "NamespaceTerminating".into(),
        message: format!("namespace {} is being terminated", target.namespace),
        field: "metadata.namespace".into(),
    };
    let mut status = Status::forbidden(
        &target.resource.group,
        &target.resource.plural,
        &target.name,
        &message,
    );
    if let Some(details) = &mut status.details {
        details.causes = vec![cause];
    }
    status
}
