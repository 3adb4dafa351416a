//! What a cluster's controller manager does for every API server: garbage collection, namespaces that finish their contents,
//! default service accounts, definitions that finish their objects, volume claims that wait for their pods, and events that expire.

mod collector;
mod contents;
mod events;
pub mod graph;
mod protection;

pub use contents::Furnishing;

use std::{sync::Arc, time::Duration};

use apimachinery::status::Status;
use futures::future::try_join_all;
use serde_json::json;
use tokio::task::JoinSet;

use crate::{
    auth::defaults,
    operations::{Api, Target, WriteOptions},
};

const COMPACTION_INTERVAL: Duration = Duration::from_secs(30);
const RBAC: &str = "rbac.authorization.k8s.io";
const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];

/// Makes what every cluster starts with.
pub async fn bootstrap(api: &Api, furnishing: &Furnishing) -> Result<(), Status> {
    let made = NAMESPACES.map(|name| async move {
        ensure(
            api,
            "",
            "namespaces",
            "",
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}),
        )
        .await?;
        furnishing.ensure(api, name).await
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

/// Starts the background work; it ends when the server stops.
pub fn start(api: &Arc<Api>, furnishing: &Arc<Furnishing>, tasks: &mut JoinSet<()>) {
    let (existing, feed) = api.store.feed();
    tasks.spawn(collector::run(api.clone(), existing, feed));
    tasks.spawn(contents::run_namespaces(api.clone(), furnishing.clone()));
    tasks.spawn(contents::run_accounts(api.clone(), furnishing.clone()));
    tasks.spawn(contents::run_authorities(api.clone(), furnishing.clone()));
    tasks.spawn(contents::run_definitions(api.clone()));
    tasks.spawn(protection::run_claims(api.clone()));
    tasks.spawn(protection::run_pods(api.clone()));
    tasks.spawn(events::run(api.clone()));
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

/// Creates an object unless it is there.
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
