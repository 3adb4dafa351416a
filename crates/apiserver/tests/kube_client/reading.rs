//! Lists and watches.

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt,
    api::{ListParams, WatchEvent, WatchParams},
    runtime::{reflector, watcher},
};
use serde_json::json;
use testkit::eventually;

use crate::requests::{config_map, create, delete, merge, names};
use crate::support::{DEADLINE, code, server};

#[tokio::test(flavor = "multi_thread")]
async fn lists_come_in_consistent_pages_and_by_selector() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    for index in 0..7 {
        create(&maps, &config_map(&format!("m{index}"))).await;
    }
    // The first config map is the CA certificate that every namespace gets soon after its creation.
    eventually("the certificate", || async {
        maps.get_opt("kube-root-ca.crt").await.unwrap()
    })
    .await;
    let first = maps.list(&ListParams::default().limit(4)).await.unwrap();
    assert_eq!(first.items.len(), 4);
    assert_eq!(first.metadata.remaining_item_count, Some(4));
    delete(&maps, "m4").await;
    create(&maps, &config_map("m33")).await;
    let token = first.metadata.continue_.unwrap();
    assert_eq!(
        names(&maps, &ListParams::default().continue_token(&token)).await,
        ["m3", "m4", "m5", "m6"],
        "as of the first page"
    );

    for (selected, count) in [
        (ListParams::default().labels("app=test"), 7),
        (ListParams::default().labels("app!=test"), 1),
        (ListParams::default().fields("metadata.name=m5"), 1),
    ] {
        assert_eq!(names(&maps, &selected).await.len(), count, "{selected:?}");
    }
    let nonsense = ListParams::default().fields("spec.nonsense=1");
    assert_eq!(code(maps.list(&nonsense).await), 400);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_reports_objects_that_enter_and_leave_its_selection() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    let before = maps.list(&ListParams::default()).await.unwrap();
    let version = before.metadata.resource_version.unwrap();
    create(&maps, &config_map("one")).await;
    for label in ["other", "test"] {
        let relabelled = json!({"metadata": {"labels": {"app": label}}});
        merge(&maps, "one", relabelled).await;
    }
    delete(&maps, "one").await;
    let mut stream = maps
        .watch(&WatchParams::default().labels("app=test"), &version)
        .await
        .unwrap()
        .boxed();
    let mut seen = Vec::new();
    let mut versions = Vec::new();
    while seen.len() < 4 {
        let event = tokio::time::timeout(DEADLINE, stream.try_next())
            .await
            .unwrap()
            .unwrap()
            .unwrap();
        let (kind, object) = match event {
            WatchEvent::Added(object) => ("ADDED", object),
            WatchEvent::Modified(object) => ("MODIFIED", object),
            WatchEvent::Deleted(object) => ("DELETED", object),
            other => panic!("{other:?}"),
        };
        assert_eq!(
            object.labels()["app"],
            "test",
            "a watcher sees only objects that match its selector"
        );
        versions.push(object.resource_version().unwrap().parse::<u64>().unwrap());
        seen.push(kind);
    }
    assert_eq!(seen, ["ADDED", "DELETED", "ADDED", "DELETED"]);
    assert!(
        versions.is_sorted() && versions[0] != versions[1],
        "{versions:?}"
    );
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watchers_and_reflectors_work_in_both_list_modes() {
    let server = server().await;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    create(&maps, &config_map("before")).await;
    for config in [
        watcher::Config::default(),
        watcher::Config::default().streaming_lists(),
    ] {
        let config = config.any_semantic().labels("app=test");
        let (reader, writer) = reflector::store();
        let stream = reflector(writer, watcher(maps.clone(), config));
        let follow = tokio::spawn(async move {
            stream
                .for_each(|event| async { event.map(drop).unwrap() })
                .await;
        });
        reader.wait_until_ready().await.unwrap();
        assert_eq!(reader.len(), 1);
        let until_there_are = async |count: usize| {
            let what = format!("{count} objects in the store");
            eventually(&what, || async { (reader.len() == count).then_some(()) }).await;
        };
        create(&maps, &config_map("after")).await;
        until_there_are(2).await;
        delete(&maps, "after").await;
        until_there_are(1).await;
        follow.abort();
    }
    server.shutdown().await;
}
