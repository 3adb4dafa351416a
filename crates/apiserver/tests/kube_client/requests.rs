//! Request helpers that panic on failure, and sample objects.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};
use testkit::eventually;

/// A kind of object that the client can read and write.
pub trait Kind: Resource + Clone + Debug + DeserializeOwned + Serialize {}

impl<K: Resource + Clone + Debug + DeserializeOwned + Serialize> Kind for K {}

pub fn parsed<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the object is well formed")
}

pub fn pod(name: &str) -> Pod {
    parsed(
        json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "main", "image": "host"}]}}),
    )
}

pub fn config_map(name: &str) -> ConfigMap {
    parsed(json!({"metadata": {"name": name, "labels": {"app": "test"}}, "data": {"a": "b"}}))
}

/// A config map with a finalizer, which delays its removal until [`release`].
pub fn held_config_map(name: &str) -> ConfigMap {
    let mut held = config_map(name);
    held.finalizers_mut().push("example.com/hold".into());
    held
}

pub async fn release(maps: &Api<ConfigMap>, name: &str) {
    merge(maps, name, json!({"metadata": {"finalizers": null}})).await;
}

pub async fn try_create<K: Kind>(api: &Api<K>, object: &K) -> kube::Result<K> {
    api.create(&PostParams::default(), object).await
}

pub async fn create<K: Kind>(api: &Api<K>, object: &K) -> K {
    try_create(api, object)
        .await
        .unwrap_or_else(|error| panic!("{object:?} is not created: {error}"))
}

pub async fn try_merge<K: Kind>(api: &Api<K>, name: &str, patch: Value) -> kube::Result<K> {
    api.patch(name, &PatchParams::default(), &Patch::Merge(patch))
        .await
}

pub async fn merge<K: Kind>(api: &Api<K>, name: &str, patch: Value) -> K {
    try_merge(api, name, patch.clone())
        .await
        .unwrap_or_else(|error| panic!("{name} is not patched with {patch}: {error}"))
}

/// Deletes an object. Returns the terminating object, if it is not removed at once.
pub async fn delete<K: Kind>(api: &Api<K>, name: &str) -> Option<K> {
    api.delete(name, &DeleteParams::default())
        .await
        .unwrap_or_else(|error| panic!("{name} is not deleted: {error}"))
        .left()
}

pub async fn until_gone<K: Kind>(api: &Api<K>, name: &str) {
    let what = format!("the removal of {name}");
    eventually(&what, || async {
        let found = api.get_opt(name).await.expect("the request failed");
        found.is_none().then_some(())
    })
    .await;
}

pub async fn names<K: Kind>(api: &Api<K>, which: &ListParams) -> Vec<String> {
    let list = api.list(which).await;
    let list = list.unwrap_or_else(|error| panic!("{which:?} are not listed: {error}"));
    list.iter().map(ResourceExt::name_any).collect()
}
