//! Background controllers, which kube-controller-manager runs in a cluster: garbage collection, deletion of the contents of
//! namespaces and CustomResourceDefinitions, default service accounts, protection of volume claims in use, and expiry of events.

mod claim_protection;
mod content_deletion;
mod event_expiry;
mod garbage_collector;
pub mod owner_graph;

pub use content_deletion::NamespaceDefaults;

use std::{sync::Arc, time::Duration};

use apimachinery::status::Status;
use futures::future::try_join_all;
use serde_json::json;
use tokio::task::JoinSet;

use crate::{
    auth::defaults,
    operations::Api,
    target::{Target, WriteOptions},
};

const COMPACTION_INTERVAL: Duration = Duration::from_secs(30);
const RBAC: &str = "rbac.authorization.k8s.io";
const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];

/// Creates the objects that every cluster starts with.
pub async fn bootstrap(api: &Api, namespace_defaults: &NamespaceDefaults) -> Result<(), Status> {
    let made = NAMESPACES.map(|name| async move {
        ensure(
            api,
            "",
            "namespaces",
            "",
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}),
        )
        .await?;
        namespace_defaults.ensure(api, name).await
    });
    let roles = defaults::cluster_roles()
        .into_iter()
        .map(|role| ensure(api, RBAC, "clusterroles", "", role));
    let bindings = defaults::cluster_role_bindings();
    let bindings = bindings
        .into_iter()
        .map(|binding| ensure(api, RBAC, "clusterrolebindings", "", binding));
    let (namespaces, roles, bindings) = tokio::join!(
        try_join_all(made),
        try_join_all(roles),
        try_join_all(bindings)
    );
    namespaces.and(roles).and(bindings).map(drop)
}

/// Starts the background controllers. They end when the server stops.
pub fn start(api: &Arc<Api>, namespace_defaults: &Arc<NamespaceDefaults>, tasks: &mut JoinSet<()>) {
    let (existing, feed) = api.store.feed();
    tasks.spawn(garbage_collector::run(api.clone(), existing, feed));
    tasks.spawn(content_deletion::run_namespaces(
        api.clone(),
        namespace_defaults.clone(),
    ));
    tasks.spawn(content_deletion::run_default_accounts(
        api.clone(),
        namespace_defaults.clone(),
    ));
    tasks.spawn(content_deletion::run_ca_config_maps(
        api.clone(),
        namespace_defaults.clone(),
    ));
    tasks.spawn(content_deletion::run_definitions(api.clone()));
    tasks.spawn(claim_protection::run_claims(api.clone()));
    tasks.spawn(claim_protection::run_pods(api.clone()));
    tasks.spawn(event_expiry::run(api.clone()));
    let api = api.clone();
    tasks.spawn(async move {
        while api
            .shutdown
            .run_until_cancelled(tokio::time::sleep(COMPACTION_INTERVAL))
            .await
            .is_some()
        {
            api.store.compact().await;
        }
    });
}

/// Creates an object if it does not exist.
async fn ensure(
    api: &Api,
    group: &str,
    plural: &str,
    namespace: &str,
    object: serde_json::Value,
) -> Result<(), Status> {
    let resource = api
        .registry()
        .find(group, "v1", plural)
        .ok_or_else(Status::unknown_path)?;
    let name = object["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let target = Target {
        resource,
        namespace: namespace.to_owned(),
        name,
    };
    if api.get(&target).is_ok() {
        return Ok(());
    }
    let options = WriteOptions::system("bootstrap");
    match api.create(&target, object, &options).await {
        Err(status) if status.reason != "AlreadyExists" => Err(status),
        _ => Ok(()),
    }
}
