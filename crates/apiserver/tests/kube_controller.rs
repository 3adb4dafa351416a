//! kube-rs' `Controller` and its finalizer helper, on which most Rust controllers are built.

mod support;

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
    runtime::{
        Controller,
        controller::Action,
        finalizer::{self, finalizer},
        watcher,
    },
};
use serde_json::json;
use support::server;
use testkit::eventually;
use tokio_util::sync::CancellationToken;

const FINALIZER: &str = "example.com/cleaned-up";

struct Context {
    client: kube::Client,
    cleaned: Mutex<Vec<String>>,
}

/// Maintains a secret for each config map, and delays the removal of the map until its cleanup is done.
async fn reconcile(
    map: Arc<ConfigMap>,
    context: Arc<Context>,
) -> Result<Action, finalizer::Error<kube::Error>> {
    let maps: Api<ConfigMap> = Api::default_namespaced(context.client.clone());
    finalizer(&maps, FINALIZER, map, |event| async {
        match event {
            finalizer::Event::Apply(map) => {
                let secrets: Api<Secret> = Api::default_namespaced(context.client.clone());
                let secret = json!({
                    "apiVersion": "v1", "kind": "Secret",
                    "metadata": {"name": map.name_any(), "ownerReferences": [map.controller_owner_ref(&())]},
                    "stringData": map.data,
                });
                let apply = PatchParams::apply("copier").force();
                secrets.patch(&map.name_any(), &apply, &Patch::Apply(secret)).await?;
            }
            finalizer::Event::Cleanup(map) => {
                let mut cleaned = context.cleaned.lock().expect("the lock is poisoned");
                cleaned.push(map.name_any());
            }
        }
        Ok(Action::await_change())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_reconciles_owned_objects_and_runs_its_finalizer() {
    let server = server().await;
    let context = Arc::new(Context {
        client: server.client(),
        cleaned: Mutex::default(),
    });
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    let secrets: Api<Secret> = Api::default_namespaced(server.client());
    let stop = CancellationToken::new();
    let running = tokio::spawn(
        Controller::new(
            maps.clone(),
            watcher::Config::default().labels("app=copied"),
        )
        .owns(secrets.clone(), watcher::Config::default())
        .graceful_shutdown_on(stop.clone().cancelled_owned())
        .run(
            reconcile,
            |_, _, _| Action::requeue(Duration::from_millis(50)),
            context.clone(),
        )
        .for_each(|_| futures::future::ready(())),
    );

    let map = serde_json::from_value(
        json!({"metadata": {"name": "one", "labels": {"app": "copied"}}, "data": {"key": "value"}}),
    )
    .unwrap();
    maps.create(&PostParams::default(), &map).await.unwrap();
    let holds = async |value: &str| {
        eventually("the secret holds the value", || async {
            let secret = secrets.get_opt("one").await.unwrap()?;
            let found = secret.data?.remove("key")?;
            (found.0 == value.as_bytes()).then_some(secret.metadata.uid)
        })
        .await
    };
    let first = holds("value").await;
    assert_eq!(maps.get("one").await.unwrap().finalizers(), [FINALIZER]);

    secrets
        .delete("one", &DeleteParams::default())
        .await
        .unwrap();
    assert_ne!(holds("value").await, first, "the secret was created again");
    let change = json!({"data": {"key": "other"}});
    maps.patch("one", &PatchParams::default(), &Patch::Merge(change))
        .await
        .unwrap();
    holds("other").await;

    maps.delete("one", &DeleteParams::default()).await.unwrap();
    eventually("both are gone", || async {
        let left = (
            maps.get_opt("one").await.unwrap(),
            secrets.get_opt("one").await.unwrap(),
        );
        (left == (None, None)).then_some(())
    })
    .await;
    // Secrets and config maps have separate watches, so the controller may clean up once more before it sees that the map is
    // removed.
    let cleaned: BTreeSet<String> = context.cleaned.lock().unwrap().drain(..).collect();
    assert_eq!(cleaned, BTreeSet::from(["one".to_owned()]));
    stop.cancel();
    running.await.unwrap();
    server.shutdown().await;
}
