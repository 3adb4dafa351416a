//! Answers the requests of a pass from the model: the driver of the simulations.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use agent_sandbox_planner::claim::unfinished_binding;
use agent_sandbox_planner::owner::is_controlled_by;
use agent_sandbox_planner::pass::{Failure, Objects, Precondition, Propagation, RequestError};
use api::decoding::Unreadable;
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, labels};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::process::Process;
use super::server::Server;

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

/// A kind of the model.
pub trait Modelled:
    Resource<DynamicType = ()> + Clone + Serialize + DeserializeOwned + Send + Sync
{
    fn stored(server: &Server) -> &BTreeMap<String, Self>;

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self>;

    /// The objects as the cache of a process shows them. Kinds that no process writes are cached without delay.
    fn cached<'a>(server: &'a Server, _process: &'a Process) -> &'a BTreeMap<String, Self> {
        Self::stored(server)
    }

    /// The cache learns the object as the server has it.
    fn learn(_process: &mut Process, _server: &Server, _name: &str) {}

    /// What must hold of an object that was created.
    fn check_creation(_created: &Self, _server: &Server) {}

    /// What must hold of a write, given what the process knew before.
    fn check_write(_before: &Self, _after: &Self, _server: &Server, _process: &Process) {}
}

impl Modelled for Sandbox {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.sandboxes
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.sandboxes
    }

    fn cached<'a>(_: &'a Server, process: &'a Process) -> &'a BTreeMap<String, Self> {
        &process.sandboxes
    }

    fn learn(process: &mut Process, server: &Server, name: &str) {
        process.see_sandbox(server, name);
    }

    /// A pool never creates more sandboxes than it was asked for.
    fn check_creation(created: &Self, server: &Server) {
        let is_owner =
            |pool: &&SandboxWarmPool| is_controlled_by(&created.metadata, &pool.uid().unwrap());
        if let Some(pool) = server.pools.values().find(is_owner) {
            let desired = usize::try_from(pool.spec.desired_replicas()).unwrap();
            let members = server.members(pool);
            assert!(
                members <= desired,
                "{members} members where {desired} were asked for"
            );
        }
    }
}

impl Modelled for SandboxClaim {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.claims
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.claims
    }

    fn cached<'a>(_: &'a Server, process: &'a Process) -> &'a BTreeMap<String, Self> {
        &process.claims
    }

    fn learn(process: &mut Process, server: &Server, name: &str) {
        process.see_claim(server, name);
    }

    /// A claim is bound to no warm sandbox that the process knows another claim to be bound to.
    fn check_write(before: &Self, after: &Self, server: &Server, process: &Process) {
        let bound = |claim: &Self| {
            let annotations = claim.annotations();
            annotations.get(labels::ASSIGNED_SANDBOX_NAME).cloned()
        };
        let Some(sandbox) = bound(after).filter(|name| bound(before).as_ref() != Some(name)) else {
            return;
        };
        let is_its_own = server.sandboxes.get(&sandbox).is_none_or(|sandbox| {
            is_controlled_by(&sandbox.metadata, after.metadata.uid.as_deref().unwrap())
        });
        let other = process.claims.values().find(|other| {
            other.uid() != after.uid() && unfinished_binding(other) == Some(&sandbox)
        });
        if let (false, Some(other)) = (is_its_own || sandbox == after.name_any(), other) {
            let (name, other) = (after.name_any(), other.name_any());
            panic!("claim {name} is bound to sandbox {sandbox}, which claim {other} is bound to");
        }
    }
}

impl Modelled for SandboxTemplate {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.templates
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.templates
    }
}

impl Modelled for SandboxWarmPool {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.pools
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.pools
    }
}

impl Modelled for NetworkPolicy {
    fn stored(server: &Server) -> &BTreeMap<String, Self> {
        &server.network_policies
    }

    fn stored_mut(server: &mut Server) -> &mut BTreeMap<String, Self> {
        &mut server.network_policies
    }
}

/// The requests of one pass of a process to the server.
pub struct Requests<'a> {
    server: Mutex<&'a mut Server>,
    process: Mutex<&'a mut Process>,
    faults: Mutex<Faults>,
}

impl<'a> Requests<'a> {
    pub fn new(server: &'a mut Server, process: &'a mut Process, faults: Faults) -> Self {
        Self {
            server: Mutex::new(server),
            process: Mutex::new(process),
            faults: Mutex::new(faults),
        }
    }

    pub fn server(&self) -> MutexGuard<'_, &'a mut Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn process(&self) -> MutexGuard<'_, &'a mut Process> {
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
    fn exchange<K: Modelled, T>(
        &self,
        write: impl FnOnce(&mut Server, &Process) -> (String, Result<T, Failure>),
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
pub struct ModelledObjects<'a, 'b, K> {
    requests: &'a Requests<'b>,
    kind: PhantomData<fn() -> K>,
}

impl<'a, 'b, K> ModelledObjects<'a, 'b, K> {
    pub fn new(requests: &'a Requests<'b>) -> Self {
        Self {
            requests,
            kind: PhantomData,
        }
    }
}

impl<K: Modelled> ModelledObjects<'_, '_, K> {
    async fn change(
        &self,
        name: &str,
        precondition: &Precondition,
        patch: Value,
    ) -> Result<Arc<K>, RequestFailed> {
        self.requests.spend().await;
        self.requests.exchange::<K, _>(|server, process| {
            let before = K::stored(server).get(name).cloned();
            let answer = server.change::<K>(name, precondition, &patch);
            if let (Some(before), Ok(after)) = (before, &answer) {
                K::check_write(&before, after, server, process);
            }
            (name.to_owned(), answer.map(Arc::new))
        })
    }
}

impl<K: Modelled> Objects<K> for ModelledObjects<'_, '_, K> {
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
            let answer = server.create::<K>(object);
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
            let answer = server.delete::<K>(name, &precondition);
            (name.to_owned(), answer)
        });
        match answer {
            Err(RequestFailed(Failure::NotFound)) => Ok(()),
            answer => answer,
        }
    }
}
