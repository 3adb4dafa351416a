//! Deletes the contents of namespaces and CustomResourceDefinitions before they are removed. It also creates the default objects
//! of a namespace, its default service account and the config map with the server's CA certificate, and restores them after a
//! deletion.

use std::{sync::Arc, time::Duration};

use apimachinery::status::Status;
use serde_json::{Value, json};
use store::{Event, EventKind, Key, Object, Range, ResourceId};
use tokio::task::JoinSet;

use super::ensure;
use crate::{
    metadata,
    operations::{Api, DeleteOptions, ListOptions, Propagation},
    registry::Resource,
    strategy::custom_resource_definition::CLEANUP,
    target::{Part, Target, WriteOptions},
};

/// The service account of pods that name no other.
const ACCOUNT: &str = "default";
/// The config map with the CA certificate of the server.
const AUTHORITY: &str = "kube-root-ca.crt";

const FIRST_RETRY_DELAY: Duration = Duration::from_millis(10);
const MAXIMUM_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Deletes the contents of terminating namespaces, and creates the default objects of new namespaces.
pub async fn run_namespaces(api: Arc<Api>, namespace_defaults: Arc<NamespaceDefaults>) {
    let resource = ResourceId::new("", "namespaces");
    follow(
        &api,
        &resource,
        is_created_or_marked_for_deletion,
        |api, object| {
            let namespace_defaults = namespace_defaults.clone();
            async move {
                if object.is_deleting() {
                    delete_contents_of_namespace(&api, object.key.name()).await;
                } else {
                    namespace_defaults.restore(&api, object.key.name()).await;
                }
            }
        },
    )
    .await;
}

/// Deletes the objects of terminating CustomResourceDefinitions.
pub async fn run_definitions(api: Arc<Api>) {
    let resource = ResourceId::new("apiextensions.k8s.io", "customresourcedefinitions");
    follow(
        &api,
        &resource,
        is_created_or_marked_for_deletion,
        |api, object| async move {
            if object.is_deleting() {
                delete_objects_of_definition(&api, &object).await;
            }
        },
    )
    .await;
}

/// Restores deleted default service accounts.
pub async fn run_default_accounts(api: Arc<Api>, namespace_defaults: Arc<NamespaceDefaults>) {
    namespace_defaults
        .restore_when_lost(&api, "serviceaccounts", ACCOUNT)
        .await;
}

/// Restores deleted or changed config maps with the CA certificate.
pub async fn run_ca_config_maps(api: Arc<Api>, namespace_defaults: Arc<NamespaceDefaults>) {
    namespace_defaults
        .restore_when_lost(&api, "configmaps", AUTHORITY)
        .await;
}

/// The default objects of every namespace.
#[derive(Debug)]
pub struct NamespaceDefaults {
    /// The CA certificate by which pods verify the server.
    pub authority_pem: String,
}

impl NamespaceDefaults {
    /// Creates the default service account of a namespace, and the config map with the CA certificate.
    pub async fn ensure(&self, api: &Api, namespace: &str) -> Result<(), Status> {
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": namespace}});
        let data = json!({"ca.crt": self.authority_pem});
        let authority = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "data": data,
            "metadata": {
                "name": AUTHORITY, "namespace": namespace,
                "annotations": {"kubernetes.io/description": "The certificate of this API server's authority."},
            },
        });
        let (account, authority) = tokio::join!(
            ensure(api, "", "serviceaccounts", namespace, account),
            ensure(api, "", "configmaps", namespace, authority),
        );
        account.and(authority)?;
        let Some(resource) = api.registry().find("", "v1", "configmaps") else {
            return Ok(());
        };
        let target = Target {
            resource,
            namespace: namespace.to_owned(),
            name: AUTHORITY.to_owned(),
        };
        if api.get(&target)?.value()["data"] == data {
            return Ok(());
        }
        let transform = |old: &Value| {
            let mut changed = old.clone();
            changed["data"] = data.clone();
            Ok(changed)
        };
        api.modify(&target, Part::Main, &transform, &options())
            .await
            .map(drop)
    }

    async fn restore(&self, api: &Api, namespace: &str) {
        let found = api
            .store
            .get(&ResourceId::new("", "namespaces"), &Key::new("", namespace));
        if found.is_none_or(|namespace| namespace.is_deleting()) {
            return;
        }
        if let Err(status) = self.ensure(api, namespace).await {
            tracing::debug!(error = %status, namespace, "cannot restore the default objects of a namespace");
        }
    }

    async fn restore_when_lost(self: &Arc<Self>, api: &Arc<Api>, plural: &str, name: &'static str) {
        let is_lost =
            move |event: &Event| event.kind != EventKind::Added && event.object.key.name() == name;
        follow(api, &ResourceId::new("", plural), is_lost, |api, object| {
            let namespace_defaults = self.clone();
            async move {
                if object.key.name() == name {
                    namespace_defaults
                        .restore(&api, object.key.namespace())
                        .await;
                }
            }
        })
        .await;
    }
}

/// Whether an object was created, or marked for deletion.
fn is_created_or_marked_for_deletion(event: &Event) -> bool {
    let was_deleting = event
        .previous
        .as_ref()
        .is_some_and(|previous| previous.is_deleting());
    event.kind == EventKind::Added
        || (event.kind == EventKind::Modified && event.object.is_deleting() && !was_deleting)
}

/// Runs `work` for every existing object of a kind, and for every later event that `matters`.
pub(super) async fn follow<W, F>(
    api: &Arc<Api>,
    resource: &ResourceId,
    matters: impl Fn(&Event) -> bool,
    work: W,
) where
    W: Fn(Arc<Api>, Arc<Object>) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let mut tasks = JoinSet::new();
    loop {
        let Ok(present) = api.store.list(resource, &Range::namespace(""), None) else {
            return;
        };
        for object in present.objects {
            tasks.spawn(work(api.clone(), object));
        }
        let Ok(mut watch) = api.store.watch(resource, present.revision) else {
            continue;
        };
        loop {
            let events = tokio::select! {
                () = api.shutdown.cancelled() => return,
                events = watch.next() => events,
            };
            // The watch fell out of the window, so list everything again.
            let Ok(events) = events else { break };
            for event in events {
                if matters(&event) {
                    tasks.spawn(work(api.clone(), event.object));
                }
            }
            while tasks.try_join_next().is_some() {}
        }
    }
}

fn options() -> WriteOptions {
    WriteOptions::system("namespace-controller")
}

/// Deletes all objects of a resource in a namespace. An empty namespace means all namespaces.
async fn delete_all(api: &Api, resource: &Arc<Resource>, namespace: &str) -> Result<(), Status> {
    let target = Target {
        resource: resource.clone(),
        namespace: namespace.to_owned(),
        name: String::new(),
    };
    let delete = DeleteOptions {
        propagation_policy: Some(Propagation::Background),
        ..DeleteOptions::default()
    };
    api.delete_collection(&target, &ListOptions::default(), &delete, &options())
        .await
        .map(drop)
}

/// Waits with exponential backoff. Returns false if the server stops.
async fn pause(api: &Api, delay: &mut Duration) -> bool {
    let waited = api
        .shutdown
        .run_until_cancelled(tokio::time::sleep(*delay))
        .await
        .is_some();
    *delay = delay.saturating_mul(2).min(MAXIMUM_RETRY_DELAY);
    waited
}

async fn delete_contents_of_namespace(api: &Api, name: &str) {
    let namespaces = ResourceId::new("", "namespaces");
    let mut delay = FIRST_RETRY_DELAY;
    while api
        .store
        .get(&namespaces, &Key::new("", name))
        .is_some_and(|namespace| namespace.is_deleting())
    {
        let registry = api.registry();
        let held: Vec<Arc<Resource>> = api
            .store
            .resources_in(name)
            .iter()
            .filter_map(|id| registry.find_id(id))
            .collect();
        if held.is_empty()
            && let Err(status) = finalize_namespace(api, name).await
            && !status.is_not_found()
        {
            tracing::warn!(error = %status, namespace = name, "cannot remove the finalizer of a namespace");
        }
        for resource in &held {
            if let Err(status) = delete_all(api, resource, name).await {
                tracing::warn!(error = %status, namespace = name, resource = %resource.id, "cannot delete the contents of a namespace");
            }
        }
        // A namespace that just became empty can be finalized at once. Otherwise check again after a delay.
        let emptied = !held.is_empty() && api.store.resources_in(name).is_empty();
        if !emptied && !pause(api, &mut delay).await {
            return;
        }
    }
}

async fn finalize_namespace(api: &Api, name: &str) -> Result<(), Status> {
    let resource = api
        .registry()
        .find("", "v1", "namespaces")
        .ok_or_else(Status::unknown_path)?;
    let target = Target {
        resource,
        namespace: String::new(),
        name: name.to_owned(),
    };
    let transform = |old: &Value| {
        let mut namespace = old.clone();
        if let Some(finalizers) = namespace
            .pointer_mut("/spec/finalizers")
            .and_then(Value::as_array_mut)
        {
            finalizers.retain(|finalizer| finalizer != "kubernetes");
        }
        Ok(namespace)
    };
    api.modify(&target, Part::Finalize, &transform, &options())
        .await
        .map(drop)
}

async fn delete_objects_of_definition(api: &Api, definition: &Object) {
    let (name, uid) = (definition.key.name(), &definition.metadata.uid);
    let Some((plural, group)) = name.split_once('.') else {
        return;
    };
    let definitions = ResourceId::new("apiextensions.k8s.io", "customresourcedefinitions");
    // A client may remove the finalizer and create another definition of the same name, whose objects must not be deleted.
    let is_terminating = || {
        let found = api.store.get(&definitions, &definition.key);
        found.is_some_and(|found| found.metadata.uid == *uid && found.is_deleting())
    };
    let id = ResourceId::new(group, plural);
    let mut delay = FIRST_RETRY_DELAY;
    while is_terminating() && !api.store.is_empty(&id, "") {
        if let Some(resource) = api.registry().find_id(&id)
            && let Err(status) = delete_all(api, &resource, "").await
        {
            tracing::warn!(error = %status, definition = name, "cannot delete the objects of a CustomResourceDefinition");
        }
        if !api.store.is_empty(&id, "") && !pause(api, &mut delay).await {
            return;
        }
    }
    let Some(resource) =
        api.registry()
            .find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    else {
        return;
    };
    let target = Target {
        resource,
        namespace: String::new(),
        name: name.to_owned(),
    };
    let transform = |old: &Value| {
        let mut definition = old.clone();
        if metadata::text(old, "uid") == &**uid
            && let Some(finalizers) = metadata::of(&mut definition)
                .get_mut("finalizers")
                .and_then(Value::as_array_mut)
        {
            finalizers.retain(|finalizer| finalizer != CLEANUP);
        }
        Ok(definition)
    };
    if let Err(status) = api
        .modify(&target, Part::Main, &transform, &options())
        .await
        && !status.is_not_found()
    {
        tracing::warn!(error = %status, definition = name, "cannot remove the finalizer of a CustomResourceDefinition");
    }
}
