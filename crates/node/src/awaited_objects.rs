//! Waiting for objects that a pod refers to: a claim to be bound, a config map, a secret, a service account or a runtime class to
//! appear or to change.
//!
//! An attempt that fails because of an object returns the objects that it read, with their versions. The next attempt is due when the
//! API has another version of one of them, even if it changed between the attempt and the watch.

use std::collections::BTreeMap;
use std::time::Duration;

use api::decoding::Decoded;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::{
    ConfigMap, PersistentVolume, PersistentVolumeClaim, Secret, ServiceAccount,
};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::api_objects::{Objects, References};

/// How long to wait where the API does not let the node watch.
const RETRY: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Reference {
    ConfigMap(String),
    Secret(String),
    Claim(String),
    Volume(String),
    ServiceAccount(String),
    RuntimeClass(String),
}

/// The objects that an attempt depended on, each in the version it saw; none if the object was missing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Awaited {
    namespace: String,
    seen: BTreeMap<Reference, Option<String>>,
}

impl Awaited {
    pub fn in_namespace(namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            seen: BTreeMap::new(),
        }
    }

    /// Those of a pod's references that were looked up as `found`.
    pub fn references(mut self, references: &References, found: &Objects) -> Self {
        for name in &references.config_maps {
            let seen = found.config_maps.get(name).and_then(version);
            self.seen.insert(Reference::ConfigMap(name.clone()), seen);
        }
        for name in &references.secrets {
            let seen = found.secrets.get(name).and_then(version);
            self.seen.insert(Reference::Secret(name.clone()), seen);
        }
        for name in &references.claims {
            let seen = found.claims.get(name).and_then(version);
            self.seen.insert(Reference::Claim(name.clone()), seen);
        }
        for name in found.claims.values().filter_map(api::volumes::named_volume) {
            let seen = found.volumes.get(name).and_then(version);
            self.seen.insert(Reference::Volume(name.to_owned()), seen);
        }
        self
    }

    pub fn secret(&mut self, name: &str, found: Option<&Secret>) {
        let seen = found.and_then(version);
        self.seen.insert(Reference::Secret(name.to_owned()), seen);
    }

    pub fn service_account(&mut self, name: &str, found: Option<&ServiceAccount>) {
        let seen = found.and_then(version);
        let reference = Reference::ServiceAccount(name.to_owned());
        self.seen.insert(reference, seen);
    }

    pub fn missing_runtime_class(name: &str) -> Self {
        let reference = Reference::RuntimeClass(name.to_owned());
        Self {
            namespace: String::new(),
            seen: BTreeMap::from([(reference, None)]),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// Completes once one of the objects differs from what was seen in a way that can matter. A claim matters once it is bound.
    pub async fn changed(&self, client: &Client) {
        let mut changes: FuturesUnordered<_> = self
            .seen
            .iter()
            .map(|(reference, seen)| self.change_of(client, reference, seen.as_deref()))
            .collect();
        changes.next().await;
    }

    fn change_of<'a>(
        &self,
        client: &Client,
        reference: &'a Reference,
        seen: Option<&'a str>,
    ) -> BoxFuture<'a, ()> {
        let client = client.clone();
        match reference {
            Reference::ConfigMap(name) => {
                let api = Api::<PartialObjectMeta<ConfigMap>>::namespaced(client, &self.namespace);
                differs(api, name, seen, |_| true).boxed()
            }
            Reference::Secret(name) => {
                let api = Api::<PartialObjectMeta<Secret>>::namespaced(client, &self.namespace);
                differs(api, name, seen, |_| true).boxed()
            }
            Reference::ServiceAccount(name) => {
                let api =
                    Api::<PartialObjectMeta<ServiceAccount>>::namespaced(client, &self.namespace);
                differs(api, name, seen, |_| true).boxed()
            }
            Reference::Volume(name) => {
                let api = Api::<PartialObjectMeta<PersistentVolume>>::all(client);
                differs(api, name, seen, |_| true).boxed()
            }
            Reference::RuntimeClass(name) => {
                let api = Api::<PartialObjectMeta<RuntimeClass>>::all(client);
                differs(api, name, seen, |_| true).boxed()
            }
            Reference::Claim(name) => {
                let api =
                    Api::<Decoded<PersistentVolumeClaim>>::namespaced(client, &self.namespace);
                // Binding takes several writes, and only the last of them helps.
                let was_missing = seen.is_none();
                let matters = move |claim: &Decoded<PersistentVolumeClaim>| match claim {
                    Decoded::Readable(claim) => was_missing || api::volumes::is_bound(claim),
                    Decoded::Unreadable(_) => true,
                };
                differs(api, name, seen, matters).boxed()
            }
        }
    }
}

fn version<K: ResourceExt>(object: &K) -> Option<String> {
    object.resource_version()
}

/// Completes once the API holds the named object in another version than `seen`, and it matters; or once the object is gone. Where
/// the watch is refused, completes after a while, so that the caller looks for itself.
async fn differs<K>(api: Api<K>, name: &str, seen: Option<&str>, matters: impl Fn(&K) -> bool)
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
    // Failures are not logged: a pod that waits for an object says so in its status.
    let mut events = object_watch::watch_without_log(api, only);
    let mut is_there = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => is_there = false,
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                is_there = true;
                if object.meta().resource_version.as_deref() != seen && matters(&object) {
                    return;
                }
            }
            Ok(Event::InitDone) if is_there || seen.is_none() => {}
            Ok(Event::InitDone | Event::Delete(_)) => return,
            Err(failure) => {
                tracing::debug!(name, error = %failure, "an object cannot be watched");
                return tokio::time::sleep(RETRY).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use futures::FutureExt;
    use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
    use serde_json::json;

    use super::*;
    use crate::api_objects;

    const NAMESPACE: &str = "default";

    async fn api() -> (apiserver::Server, Client) {
        let config = apiserver::Config::in_memory();
        let server = apiserver::Server::open(config).await.unwrap();
        let client = server.client();
        (server, client)
    }

    fn references() -> References {
        let of = |name: &str| BTreeSet::from([name.to_owned()]);
        References {
            config_maps: of("settings"),
            secrets: of("password"),
            claims: of("data"),
        }
    }

    async fn seen(client: &Client) -> Awaited {
        let references = references();
        let found = api_objects::fetch(client, NAMESPACE, &references).await;
        Awaited::in_namespace(NAMESPACE).references(&references, &found.unwrap())
    }

    async fn soon(change: impl Future<Output = ()>) {
        let deadline = Duration::from_secs(60);
        let changed = tokio::time::timeout(deadline, change).await;
        changed.expect("the change is seen");
    }

    async fn create_claim(client: &Client) {
        let claim = json!({"metadata": {"name": "data"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}});
        let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), NAMESPACE);
        let claim = serde_json::from_value(claim).unwrap();
        claims.create(&PostParams::default(), &claim).await.unwrap();
    }

    #[tokio::test]
    async fn an_object_that_appears_changes_or_goes_is_seen_also_before_the_watch() {
        let (_server, client) = api().await;
        let config_maps = Api::<ConfigMap>::namespaced(client.clone(), NAMESPACE);
        let missing = seen(&client).await;
        let settings = serde_json::from_value(json!({"metadata": {"name": "settings"}})).unwrap();
        let mut waiting = missing.changed(&client).boxed();
        assert_eq!(futures::poll!(&mut waiting), std::task::Poll::Pending);
        let parameters = PostParams::default();
        config_maps.create(&parameters, &settings).await.unwrap();
        soon(waiting).await;
        // It is there before the watch begins.
        soon(missing.changed(&client)).await;

        let there = seen(&client).await;
        let change = Patch::Merge(json!({"data": {"key": "value"}}));
        let parameters = PatchParams::default();
        let changed = config_maps.patch("settings", &parameters, &change).await;
        changed.unwrap();
        soon(there.changed(&client)).await;

        let there = seen(&client).await;
        let deleted = config_maps
            .delete("settings", &DeleteParams::default())
            .await;
        deleted.unwrap();
        soon(there.changed(&client)).await;
    }

    #[tokio::test]
    async fn of_a_claim_only_its_appearance_and_its_binding_matter() {
        let (_server, client) = api().await;
        let missing = seen(&client).await;
        create_claim(&client).await;
        soon(missing.changed(&client)).await;

        let unbound = seen(&client).await;
        let claims = Api::<PersistentVolumeClaim>::namespaced(client.clone(), NAMESPACE);
        let parameters = PatchParams::default();
        let named = Patch::Merge(json!({"spec": {"volumeName": "pv"}}));
        claims.patch("data", &parameters, &named).await.unwrap();
        let mut waiting = unbound.changed(&client).boxed();
        let pause = tokio::time::timeout(Duration::from_millis(50), &mut waiting).await;
        assert!(pause.is_err(), "it is not bound yet");
        let bound = Patch::Merge(json!({"status": {"phase": "Bound"}}));
        let patched = claims.patch_status("data", &parameters, &bound).await;
        patched.unwrap();
        soon(waiting).await;
    }
}
