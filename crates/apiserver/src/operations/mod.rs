//! What can be done with objects, apart from how requests arrive: create, get, list, watch, update, patch, delete.
//!
//! Every way into the server, the in-process client, HTTPS and the collectors in the background, goes through [`Api`].

mod create;
pub mod delete;
mod list;
pub mod metadata;
pub mod modify;
mod pod_security;
pub mod selection;
pub mod subresource;
pub mod watch;

use std::{
    fmt,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use apimachinery::nesting::{MOST_LEVELS, levels};
use apimachinery::status::{Cause, Status};
use arc_swap::ArcSwap;
use jiff::Timestamp;
use serde_json::Value;
use tokio_util::sync::CancellationToken;

pub use self::{
    delete::{DeleteOptions, Deleted, Propagation},
    list::{ListOptions, Listed, VersionMatch},
    watch::{WatchOptions, Watching},
};
use crate::{
    admission::{Admission, AdmissionRequest, GroupVersionResource, Operation},
    auth::{User, access::Access, escalation::Attempt},
    registry::{Registry, Resource, Rules},
    store::{Draft, Key, Object, Range, ResourceId, Store, WriteError},
    strategy,
};

/// Where the time comes from.
#[derive(Clone)]
pub struct Clock(pub Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl fmt::Debug for Clock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Clock")
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self(Arc::new(Timestamp::now))
    }
}

/// Which object, or which collection, a request is about.
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

    fn not_found(&self) -> Status {
        Status::not_found(&self.resource.group, &self.resource.plural, &self.name)
    }
}

/// Which part of an object a write touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Everything but what is written apart.
    Main,
    /// `status` alone.
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

/// What happens to fields that the schema does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FieldValidation {
    /// They are dropped silently.
    Ignore,
    /// They are dropped with a warning.
    #[default]
    Warn,
    /// The request fails.
    Strict,
}

/// How a write is done, and by whom.
#[derive(Clone, Debug, Default)]
pub struct WriteOptions {
    /// Go through everything and store nothing.
    pub dry_run: bool,
    /// Unknown fields.
    pub field_validation: FieldValidation,
    /// Fields that the body gave twice.
    pub duplicate_fields: Vec<String>,
    /// Name under which fields are managed.
    pub field_manager: String,
    /// Whether the object comes out of a server-side apply, which has recorded its managed fields already.
    pub applies: bool,
    /// Who writes.
    pub user: User,
}

impl WriteOptions {
    /// The options of the server's own background work, under the name it has on a cluster.
    pub fn system(controller: &str) -> Self {
        Self {
            user: User::system(controller),
            field_manager: "kube-controller-manager".into(),
            ..Self::default()
        }
    }
}

/// A finished write.
#[derive(Clone, Debug)]
pub struct Written {
    /// The object as stored.
    pub object: Arc<Object>,
    /// Whether it is new.
    pub created: bool,
    /// What the client should be told.
    pub warnings: Vec<String>,
}

impl Written {
    /// Puts what was found earlier before its warnings.
    fn warned_before(mut self, mut earlier: Vec<String>) -> Self {
        earlier.append(&mut self.warnings);
        self.warnings = earlier;
        self
    }
}

/// The server's operations over one store.
#[derive(Debug)]
pub struct Api {
    pub(crate) store: Store,
    pub(crate) shutdown: CancellationToken,
    /// Set when the server is complete; until then only the server itself writes.
    pub(crate) access: OnceLock<Arc<Access>>,
    registry: ArcSwap<Registry>,
    refresh: Mutex<()>,
    admission: Vec<Arc<dyn Admission>>,
    clock: Clock,
}

impl Api {
    /// Operations over `store`.
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

    /// The time.
    pub fn now(&self) -> Timestamp {
        (self.clock.0)()
    }

    /// What is served at this moment.
    pub fn registry(&self) -> Arc<Registry> {
        self.registry.load_full()
    }

    /// Reads the definitions again; called after every write to one.
    pub(crate) fn refresh_registry(&self) {
        let _one_at_a_time = self.refresh.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// One object.
    pub fn get(&self, target: &Target) -> Result<Arc<Object>, Status> {
        self.store
            .get(&target.resource.id, &target.key())
            .ok_or_else(|| target.not_found())
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
            gvr: GroupVersionResource {
                group: resource.group.to_string(),
                version: resource.version.to_string(),
                resource: resource.plural.to_string(),
            },
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
            // A hook may have added what the schema does not know or what has defaults.
            strategy::settle(resource, object);
        }
        Ok(())
    }

    /// Refuses roles and bindings that would give their writer more than it has.
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
        let attempt = Attempt {
            user: &options.user,
            rules: resource.rules,
            object,
            old,
        };
        access.check_escalation(self, &attempt)
    }

    /// Refuses what nobody could read again. What is that deep already may still be changed and deleted.
    fn check_levels(object: &Value, old: Option<&Value>) -> Result<(), Status> {
        let found = levels(object);
        if found <= MOST_LEVELS || old.is_some_and(|old| found <= levels(old)) {
            return Ok(());
        }
        Err(Status::bad_request(format!(
            "an object cannot have more than {MOST_LEVELS} levels of maps and lists, what the server adds included; this one has {found}"
        )))
    }

    /// The draft of an object in the form it is stored in.
    fn draft(resource: &Resource, mut object: Value) -> Result<Draft, Status> {
        strategy::to_storage(resource, &mut object);
        Draft::new(&object).map_err(|error| {
            let cause = std::error::Error::source(&error)
                .map(|cause| format!(": {cause}"))
                .unwrap_or_default();
            Status::bad_request(format!("{error}{cause}"))
        })
    }

    /// A stored object as a value of the requested version.
    pub fn value_of(resource: &Resource, object: &Object) -> Value {
        let mut value = object.value();
        strategy::from_storage(resource, &mut value);
        value
    }

    fn written(&self, resource: &Resource) {
        if resource.rules == Rules::CustomResourceDefinition {
            self.refresh_registry();
        }
    }
}

/// What the store's refusals mean to a client.
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

/// Group and resource of the definitions of custom kinds.
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
