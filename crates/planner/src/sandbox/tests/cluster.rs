//! The environment of a pass in the [`World`]: the pass that the controller runs, over a small model of the API.

use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use api::Sandbox;
use api::decoding::Unreadable;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::{Environment, ObservedPod, Part, Settings, Stage};
use super::world::World;
use crate::owner::is_controlled_by;
use crate::pass::{Event, Failure, Objects, Precondition, Propagation, RequestError};
use crate::patch::tests::patched;

/// Nothing fails in the world: writes are made from what it shows.
#[derive(Debug, thiserror::Error)]
#[error("no request fails in this world")]
pub struct Never;

impl RequestError for Never {
    fn failure(&self) -> &Failure {
        &Failure::NotFound
    }

    fn message(&self) -> String {
        self.to_string()
    }
}

/// A kind of the world, as it stores it.
pub trait Stored:
    Resource<DynamicType = ()> + Clone + Serialize + DeserializeOwned + Send + Sync
{
    fn all(world: &World) -> Vec<Self>;

    fn put(world: &mut World, object: Self);

    fn remove(world: &mut World, name: &str);
}

impl Stored for Sandbox {
    fn all(world: &World) -> Vec<Self> {
        world.sandbox.iter().cloned().collect()
    }

    fn put(world: &mut World, object: Self) {
        world.sandbox = Some(object);
    }

    fn remove(world: &mut World, _: &str) {
        world.sandbox = None;
    }
}

impl Stored for Service {
    fn all(world: &World) -> Vec<Self> {
        world.service.iter().cloned().collect()
    }

    fn put(world: &mut World, object: Self) {
        world.service = Some(object);
    }

    fn remove(world: &mut World, _: &str) {
        world.service = None;
    }
}

impl Stored for Pod {
    fn all(world: &World) -> Vec<Self> {
        world.pods.clone()
    }

    fn put(world: &mut World, object: Self) {
        put(&mut world.pods, object);
    }

    fn remove(world: &mut World, name: &str) {
        world.pods.retain(|pod| pod.name_any() != name);
    }
}

impl Stored for PersistentVolumeClaim {
    fn all(world: &World) -> Vec<Self> {
        world.volume_claims.clone()
    }

    fn put(world: &mut World, object: Self) {
        put(&mut world.volume_claims, object);
    }

    fn remove(world: &mut World, name: &str) {
        world.volume_claims.retain(|claim| claim.name_any() != name);
    }
}

fn put<K: Resource>(objects: &mut Vec<K>, object: K) {
    let name = &object.meta().name;
    match objects.iter_mut().find(|it| it.meta().name == *name) {
        Some(known) => *known = object,
        None => objects.push(object),
    }
}

/// A pass over the sandbox of a world.
pub struct WorldPass<'a>(pub Mutex<&'a mut World>);

impl<'a> WorldPass<'a> {
    fn world(&self) -> MutexGuard<'_, &'a mut World> {
        self.0.lock().unwrap()
    }

    fn objects<S>(&self) -> WorldObjects<'_, 'a, S> {
        WorldObjects(self, PhantomData)
    }
}

impl Environment for WorldPass<'_> {
    type Error = Never;

    fn now(&self) -> Timestamp {
        self.world().now
    }

    fn settings(&self) -> Settings<'_> {
        self.world().settings()
    }

    fn sandboxes(&self) -> impl Objects<Sandbox, Error = Never> {
        self.objects::<Sandbox>()
    }

    fn sandboxes_as_reporter(&self) -> impl Objects<Sandbox, Error = Never> {
        self.objects::<Sandbox>()
    }

    fn pods(&self) -> impl Objects<ObservedPod, Error = Never> {
        self.objects::<Pod>()
    }

    fn services(&self) -> impl Objects<Service, Error = Never> {
        self.objects::<Service>()
    }

    fn volume_claims(&self) -> impl Objects<PersistentVolumeClaim, Error = Never> {
        self.objects::<PersistentVolumeClaim>()
    }

    fn delay_first_status(&self) -> Option<Duration> {
        None
    }

    fn end_status_delay(&self) {}

    fn traced<F: Future>(&self, _: Part, _: Stage, work: F) -> impl Future<Output = F::Output> {
        work
    }

    fn trace_pod(&self, _: &ObservedPod) {}

    fn emit(&self, _: &Sandbox, _: Event) {}
}

/// The objects that are stored as `S`.
struct WorldObjects<'a, 'b, S>(&'a WorldPass<'b>, PhantomData<fn() -> S>);

impl<S: Stored> WorldObjects<'_, '_, S> {
    fn find(&self, name: &str) -> Option<S> {
        let all = S::all(&self.0.world());
        all.into_iter().find(|object| object.name_any() == name)
    }

    /// The object that a write is about, whose precondition holds.
    fn current(&self, name: &str, precondition: &Precondition) -> S {
        let object = self.find(name).expect("the object of a write exists");
        let known = Precondition::unchanged(&object);
        assert!(precondition.uid.is_none() || precondition.uid == known.uid);
        let version = &precondition.resource_version;
        assert!(version.is_none() || *version == known.resource_version);
        object
    }

    fn store(&self, mut object: S) -> S {
        let mut world = self.0.world();
        let version = world.next_version().to_string();
        object.meta_mut().resource_version = Some(version);
        S::put(&mut world, object.clone());
        object
    }

    fn change(&self, name: &str, precondition: &Precondition, patch: &Value) -> S {
        self.store(patched(&self.current(name, precondition), patch))
    }
}

/// An object as a controller reads it.
fn read<S: Stored, K: DeserializeOwned>(object: &S) -> Arc<K> {
    Arc::new(serde_json::from_value(json!(object)).unwrap())
}

impl<K, S> Objects<K> for WorldObjects<'_, '_, S>
where
    S: Stored,
    K: Resource + DeserializeOwned + Send + Sync,
{
    type Error = Never;

    fn cached(&self, name: &str) -> Option<Arc<K>> {
        self.find(name).map(|object| read(&object))
    }

    fn controlled_by(&self, uid: &str) -> Vec<Arc<K>> {
        let all = S::all(&self.0.world()).into_iter();
        all.filter(|object| is_controlled_by(object.meta(), uid))
            .map(|object| read(&object))
            .collect()
    }

    fn unreadable(&self, _: &str) -> Option<Arc<Unreadable>> {
        None
    }

    fn all_unreadable(&self) -> Vec<Arc<Unreadable>> {
        Vec::new()
    }

    fn unreadable_error(&self, _: &Unreadable) -> Never {
        Never
    }

    async fn get(&self, name: &str) -> Result<Option<Arc<K>>, Never> {
        Ok(self.find(name).map(|object| read(&object)))
    }

    async fn list_metadata(&self, selector: &str) -> Result<Vec<ObjectMeta>, Never> {
        panic!("no pass over a sandbox lists {selector}")
    }

    async fn create<T: Serialize + Sync>(&self, _: &str, object: &T) -> Result<Arc<K>, Never> {
        let mut object: S = serde_json::from_value(json!(object)).unwrap();
        let name = object.name_any();
        assert!(self.find(&name).is_none(), "the name {name} is taken");
        let (version, now) = {
            let mut world = self.0.world();
            (world.next_version(), world.now)
        };
        object.meta_mut().uid = Some(format!("uid-of-{name}-{version}"));
        object.meta_mut().creation_timestamp = Some(Time(now));
        Ok(read(&self.store(object)))
    }

    async fn patch(
        &self,
        name: &str,
        precondition: &Precondition,
        patch: Value,
    ) -> Result<Arc<K>, Never> {
        Ok(read(&self.change(name, precondition, &patch)))
    }

    async fn patch_status(
        &self,
        name: &str,
        precondition: &Precondition,
        status: Value,
    ) -> Result<Arc<K>, Never> {
        let patch = json!({ "status": status });
        Ok(read(&self.change(name, precondition, &patch)))
    }

    async fn apply_status(&self, name: &str, _: Value) -> Result<Arc<K>, Never> {
        panic!("the status of {name} is patched")
    }

    async fn delete(
        &self,
        name: &str,
        precondition: Precondition,
        _: Propagation,
    ) -> Result<(), Never> {
        self.current(name, &precondition);
        S::remove(&mut self.0.world(), name);
        Ok(())
    }
}
