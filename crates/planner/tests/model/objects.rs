//! Answers the requests of a pass from the model: the driver of the simulations.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_sandbox_planner::owner::is_controlled_by;
use agent_sandbox_planner::pass::{Failure, Objects, Precondition, Propagation, RequestError};
use api::decoding::Unreadable;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::writes::patched;

/// The faults of one pass.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    /// The process ends after this many writes.
    pub crash_after: usize,
    /// The answer to the first write of a sandbox is lost.
    pub loses_answer: bool,
}

impl Faults {
    pub const NONE: Self = Self {
        crash_after: usize::MAX,
        loses_answer: false,
    };
}

/// A failed request.
#[derive(Debug)]
pub struct RequestFailed(Failure);

impl fmt::Display for RequestFailed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

impl std::error::Error for RequestFailed {}

impl RequestError for RequestFailed {
    fn failure(&self) -> &Failure {
        &self.0
    }

    fn message(&self) -> String {
        self.0.to_string()
    }
}

/// A server of the model.
pub trait Cluster {
    /// What a process knows.
    type Process: Send;

    fn now(&self) -> Timestamp;

    fn next_revision(&mut self) -> String;

    /// Garbage collection: removes objects whose owner is gone.
    fn collect_ownerless(&mut self);

    /// What must hold after every write.
    fn check(&self);
}

/// A kind of the model.
pub trait Modelled<S: Cluster>:
    Resource<DynamicType = ()> + Clone + Serialize + DeserializeOwned + Send + Sync
{
    fn stored(server: &S) -> &BTreeMap<String, Self>;

    fn stored_mut(server: &mut S) -> &mut BTreeMap<String, Self>;

    /// The objects as the cache of a process shows them. Kinds that no process writes are cached without delay.
    fn cached<'a>(server: &'a S, _process: &'a S::Process) -> &'a BTreeMap<String, Self> {
        Self::stored(server)
    }

    /// The cache learns the object as the server has it.
    fn learn(_process: &mut S::Process, _server: &S, _name: &str) {}

    /// What must hold of an object that was created.
    fn check_creation(_created: &Self, _server: &S) {}

    /// What must hold of a write, given what the process knew before.
    fn check_write(_before: &Self, _after: &Self, _server: &S, _process: &S::Process) {}
}

pub fn create<S: Cluster, K: Modelled<S>>(server: &mut S, mut object: K) -> Result<K, Failure> {
    let (revision, now) = (server.next_revision(), server.now());
    let prefix = object.meta().generate_name.clone().unwrap_or_default();
    let name = object.meta().name.clone();
    let name = name.unwrap_or_else(|| format!("{prefix}{revision}"));
    if K::stored(server).contains_key(&name) {
        return Err(Failure::AlreadyExists);
    }
    let metadata = object.meta_mut();
    metadata.name = Some(name.clone());
    metadata.uid = Some(format!("{}-{revision}", K::kind(&())));
    metadata.resource_version = Some(revision);
    metadata.creation_timestamp = Some(Time(now));
    K::stored_mut(server).insert(name, object.clone());
    server.collect_ownerless();
    Ok(object)
}

fn change<S: Cluster, K: Modelled<S>>(
    server: &mut S,
    name: &str,
    precondition: &Precondition,
    patch: &Value,
) -> Result<K, Failure> {
    let mut object = patched(current::<S, K>(server, name, precondition)?, patch);
    object.meta_mut().resource_version = Some(server.next_revision());
    K::stored_mut(server).insert(name.to_owned(), object.clone());
    server.collect_ownerless();
    Ok(object)
}

fn delete<S: Cluster, K: Modelled<S>>(
    server: &mut S,
    name: &str,
    precondition: &Precondition,
) -> Result<(), Failure> {
    current::<S, K>(server, name, precondition)?;
    K::stored_mut(server).remove(name);
    server.collect_ownerless();
    Ok(())
}

/// The object that a write is about, if its precondition holds.
fn current<'a, S: Cluster, K: Modelled<S>>(
    server: &'a S,
    name: &str,
    precondition: &Precondition,
) -> Result<&'a K, Failure> {
    let object = K::stored(server).get(name).ok_or(Failure::NotFound)?;
    let differs = |required: &Option<String>, actual: &Option<String>| {
        required.is_some() && required != actual
    };
    let metadata = object.meta();
    if differs(&precondition.uid, &metadata.uid)
        || differs(&precondition.resource_version, &metadata.resource_version)
    {
        return Err(Failure::Conflict);
    }
    Ok(object)
}

/// The requests of one pass of a process to the server.
pub struct Requests<'a, S: Cluster> {
    server: Mutex<&'a mut S>,
    process: Mutex<&'a mut S::Process>,
    faults: Mutex<Faults>,
}

impl<'a, S: Cluster> Requests<'a, S> {
    pub fn new(server: &'a mut S, process: &'a mut S::Process, faults: Faults) -> Self {
        Self {
            server: Mutex::new(server),
            process: Mutex::new(process),
            faults: Mutex::new(faults),
        }
    }

    pub fn server(&self) -> MutexGuard<'_, &'a mut S> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn process(&self) -> MutexGuard<'_, &'a mut S::Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a write. One that the process does not live to make is never answered.
    async fn spend(&self) {
        let crashes = {
            let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
            let left = faults.crash_after.checked_sub(1);
            faults.crash_after = left.unwrap_or_default();
            left.is_none()
        };
        if crashes {
            std::future::pending::<()>().await;
        }
    }

    /// Whether the answer to a write of this kind is lost.
    fn loses_answer<K: Resource<DynamicType = ()>>(&self) -> bool {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        K::kind(&()) == "Sandbox" && std::mem::take(&mut faults.loses_answer)
    }

    /// Makes a write, and has the process learn the answer.
    fn exchange<K: Modelled<S>, T>(
        &self,
        write: impl FnOnce(&mut S, &S::Process) -> (String, Result<T, Failure>),
    ) -> Result<T, RequestFailed> {
        let (mut server, mut process) = (self.server(), self.process());
        let (name, answer) = write(&mut server, &process);
        server.check();
        if self.loses_answer::<K>() {
            let lost = Failure::Transient("the answer was lost".to_owned());
            return Err(RequestFailed(lost));
        }
        if answer.is_ok() {
            K::learn(&mut process, &server, &name);
        }
        answer.map_err(RequestFailed)
    }
}

/// The objects of one kind in the model.
pub struct ModelledObjects<'a, 'b, S: Cluster, K> {
    requests: &'a Requests<'b, S>,
    kind: PhantomData<fn() -> K>,
}

impl<'a, 'b, S: Cluster, K> ModelledObjects<'a, 'b, S, K> {
    pub fn new(requests: &'a Requests<'b, S>) -> Self {
        Self {
            requests,
            kind: PhantomData,
        }
    }
}

impl<S: Cluster, K: Modelled<S>> ModelledObjects<'_, '_, S, K> {
    async fn change(
        &self,
        name: &str,
        precondition: &Precondition,
        patch: Value,
    ) -> Result<Arc<K>, RequestFailed> {
        self.requests.spend().await;
        self.requests.exchange::<K, _>(|server, process| {
            let before = K::stored(server).get(name).cloned();
            let answer = change::<S, K>(server, name, precondition, &patch);
            if let (Some(before), Ok(after)) = (before, &answer) {
                K::check_write(&before, after, server, process);
            }
            (name.to_owned(), answer.map(Arc::new))
        })
    }
}

impl<S: Cluster + Send, K: Modelled<S>> Objects<K> for ModelledObjects<'_, '_, S, K> {
    type Error = RequestFailed;

    fn cached(&self, name: &str) -> Option<Arc<K>> {
        let (server, process) = (self.requests.server(), self.requests.process());
        let cached = K::cached(&server, &process).get(name);
        cached.cloned().map(Arc::new)
    }

    fn controlled_by(&self, uid: &str) -> Vec<Arc<K>> {
        let (server, process) = (self.requests.server(), self.requests.process());
        let cached = K::cached(&server, &process).values();
        cached
            .filter(|object| is_controlled_by(object.meta(), uid))
            .map(|object| Arc::new(object.clone()))
            .collect()
    }

    fn unreadable(&self, _: &str) -> Option<Arc<Unreadable>> {
        None
    }

    fn all_unreadable(&self) -> Vec<Arc<Unreadable>> {
        Vec::new()
    }

    fn unreadable_error(&self, object: &Unreadable) -> RequestFailed {
        panic!("the model has no {object:?}")
    }

    async fn get(&self, name: &str) -> Result<Option<Arc<K>>, RequestFailed> {
        let (server, mut process) = (self.requests.server(), self.requests.process());
        K::learn(&mut process, &server, name);
        Ok(K::stored(&server).get(name).cloned().map(Arc::new))
    }

    async fn list_metadata(&self, selector: &str) -> Result<Vec<ObjectMeta>, RequestFailed> {
        let (key, value) = selector.split_once('=').unwrap();
        let server = self.requests.server();
        let listed = K::stored(&server).values().map(Resource::meta);
        let is_selected = |metadata: &&ObjectMeta| {
            let labels = metadata.labels.as_ref();
            labels
                .and_then(|labels| labels.get(key))
                .map(String::as_str)
                == Some(value)
        };
        Ok(listed.filter(is_selected).cloned().collect())
    }

    async fn create<T: Serialize + Sync>(
        &self,
        _: &str,
        object: &T,
    ) -> Result<Arc<K>, RequestFailed> {
        let object: K = serde_json::from_value(json!(object)).unwrap();
        self.requests.spend().await;
        self.requests.exchange::<K, _>(|server, _| {
            let answer = create::<S, K>(server, object);
            if let Ok(created) = &answer {
                K::check_creation(created, server);
            }
            let name = answer.as_ref().map(ResourceExt::name_any);
            (name.unwrap_or_default(), answer.map(Arc::new))
        })
    }

    async fn patch(
        &self,
        name: &str,
        precondition: &Precondition,
        patch: Value,
    ) -> Result<Arc<K>, RequestFailed> {
        self.change(name, precondition, patch).await
    }

    async fn patch_status(
        &self,
        name: &str,
        precondition: &Precondition,
        status: Value,
    ) -> Result<Arc<K>, RequestFailed> {
        let patch = json!({ "status": status });
        self.change(name, precondition, patch).await
    }

    async fn apply_status(&self, name: &str, status: Value) -> Result<Arc<K>, RequestFailed> {
        let patch = json!({ "status": status });
        self.change(name, &Precondition::default(), patch).await
    }

    async fn delete(
        &self,
        name: &str,
        precondition: Precondition,
        _: Propagation,
    ) -> Result<(), RequestFailed> {
        self.requests.spend().await;
        let answer = self.requests.exchange::<K, _>(|server, _| {
            let answer = delete::<S, K>(server, name, &precondition);
            (name.to_owned(), answer)
        });
        match answer {
            Err(RequestFailed(Failure::NotFound)) => Ok(()),
            answer => answer,
        }
    }
}
