//! Containers of objects that must be emptied before they go: namespaces and CustomResourceDefinitions. A namespace that appears gets
//! what every namespace has, its default service account and the certificate of the server's authority, and gets it again when
//! somebody takes it away.

use std::{sync::Arc, time::Duration};

use apimachinery::status::Status;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::ensure;
use crate::{
    operations::{
        Api, DeleteOptions, ListOptions, Part, Propagation, Target, WriteOptions, metadata,
    },
    registry::Resource,
    store::{Event, EventKind, Key, Object, Range, ResourceId},
    strategy::definition::CLEANUP,
};

/// The account that pods of a namespace run under, unless they name another.
const ACCOUNT: &str = "default";
/// The config map in which pods find the certificate of the server's authority.
const AUTHORITY: &str = "kube-root-ca.crt";

const FIRST_LOOK_AGAIN: Duration = Duration::from_millis(10);
const LAST_LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Empties namespaces that are being deleted, and gives new ones what every namespace has.
pub async fn run_namespaces(api: Arc<Api>, furnishing: Arc<Furnishing>) {
    let resource = ResourceId::new("", "namespaces");
    follow(&api, &resource, begins_or_ends, |api, object| {
        let furnishing = furnishing.clone();
        async move {
            if object.is_deleting() {
                finish_namespace(&api, object.key.name()).await;
            } else {
                furnishing.restore(&api, object.key.name()).await;
            }
        }
    })
    .await;
}

/// Empties definitions that are being deleted.
pub async fn run_definitions(api: Arc<Api>) {
    let resource = ResourceId::new("apiextensions.k8s.io", "customresourcedefinitions");
    follow(&api, &resource, begins_or_ends, |api, object| async move {
        if object.is_deleting() {
            finish_definition(&api, &object).await;
        }
    })
    .await;
}

/// Makes the default service accounts again that somebody deletes.
pub async fn run_accounts(api: Arc<Api>, furnishing: Arc<Furnishing>) {
    furnishing.keep(&api, "serviceaccounts", ACCOUNT).await;
}

/// Makes the certificates of the authority again that somebody deletes or changes.
pub async fn run_authorities(api: Arc<Api>, furnishing: Arc<Furnishing>) {
    furnishing.keep(&api, "configmaps", AUTHORITY).await;
}

/// What every namespace has.
#[derive(Debug)]
pub struct Furnishing {
    /// The certificate by which pods know the server.
    pub authority_pem: String,
}

impl Furnishing {
    /// Gives a namespace the account that its pods run under, and the certificate by which they know the server.
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
            tracing::debug!(error = %status, namespace, "a namespace lacks what every namespace has");
        }
    }

    async fn keep(self: &Arc<Self>, api: &Arc<Api>, plural: &str, name: &'static str) {
        let is_lost =
            move |event: &Event| event.kind != EventKind::Added && event.object.key.name() == name;
        follow(api, &ResourceId::new("", plural), is_lost, |api, object| {
            let furnishing = self.clone();
            async move {
                if object.key.name() == name {
                    furnishing.restore(&api, object.key.namespace()).await;
                }
            }
        })
        .await;
    }
}

/// Whether an object appears, or starts to be deleted.
fn begins_or_ends(event: &Event) -> bool {
    let was_deleting = event
        .previous
        .as_ref()
        .is_some_and(|previous| previous.is_deleting());
    event.kind == EventKind::Added
        || (event.kind == EventKind::Modified && event.object.is_deleting() && !was_deleting)
}

/// Runs `work` for every object of a kind that exists, and for every one that something happens to which matters.
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
            // Falling out of the window means looking at everything again.
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

/// Deletes what a resource has in a namespace, or everywhere when that is empty.
async fn empty(api: &Api, resource: &Arc<Resource>, namespace: &str) -> Result<(), Status> {
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

/// Waits a little longer each time, or until the server stops.
async fn pause(api: &Api, delay: &mut Duration) -> bool {
    let waited = api
        .shutdown
        .run_until_cancelled(tokio::time::sleep(*delay))
        .await
        .is_some();
    *delay = delay.saturating_mul(2).min(LAST_LOOK_AGAIN);
    waited
}

async fn finish_namespace(api: &Api, name: &str) {
    let namespaces = ResourceId::new("", "namespaces");
    let mut delay = FIRST_LOOK_AGAIN;
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
            tracing::warn!(error = %status, namespace = name, "cannot finish a namespace");
        }
        for resource in &held {
            if let Err(status) = empty(api, resource, name).await {
                tracing::warn!(error = %status, namespace = name, resource = %resource.id, "cannot empty a namespace");
            }
        }
        // What was just emptied may be finished at once; what is held or could not be finished is looked at again.
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

async fn finish_definition(api: &Api, definition: &Object) {
    let (name, uid) = (definition.key.name(), &definition.facts.uid);
    let Some((plural, group)) = name.split_once('.') else {
        return;
    };
    let definitions = ResourceId::new("apiextensions.k8s.io", "customresourcedefinitions");
    // Somebody may take its finalizer away, and make another of its name, whose objects are none of ours.
    let is_going = || {
        let found = api.store.get(&definitions, &definition.key);
        found.is_some_and(|found| found.facts.uid == *uid && found.is_deleting())
    };
    let id = ResourceId::new(group, plural);
    let mut delay = FIRST_LOOK_AGAIN;
    while is_going() && !api.store.is_empty(&id, "") {
        if let Some(resource) = api.registry().find_id(&id)
            && let Err(status) = empty(api, &resource, "").await
        {
            tracing::warn!(error = %status, definition = name, "cannot empty a definition");
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
        tracing::warn!(error = %status, definition = name, "cannot finish a definition");
    }
}
