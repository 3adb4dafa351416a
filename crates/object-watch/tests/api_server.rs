//! A watch of the embedded API server whose answers a test changes.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use api::decoding::Decoded;
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::api::{DeleteParams, PostParams};
use kube::core::Status;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use object_watch::{Events, Failure, Watched};
use serde_json::json;
use testkit::rewriting::rewriting;
use testkit::{Cluster, Tap};

const PATH: &str = "/configmaps";

fn maps(client: &Client) -> Api<ConfigMap> {
    Api::default_namespaced(client.clone())
}

fn watch(client: &Client) -> Events<ConfigMap> {
    // Without the server's own config map.
    object_watch::watch(maps(client), watcher::Config::default().labels("app=test"))
}

async fn create(client: &Client, name: &str) {
    let object =
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {"app": "test"}}}))
            .unwrap();
    let created = maps(client).create(&PostParams::default(), &object).await;
    created.unwrap();
}

async fn next<K>(events: &mut Events<K>) -> Result<Event<K>, Failure> {
    let deadline = Duration::from_secs(60);
    let next = tokio::time::timeout(deadline, events.next()).await;
    next.expect("an event in time")
        .expect("a watch does not end")
}

/// The names that the watch lists next, whatever fails before.
async fn listed(events: &mut Events<ConfigMap>) -> Vec<String> {
    let mut names = Vec::new();
    loop {
        match next(events).await {
            Ok(Event::Init) => names.clear(),
            Ok(Event::InitApply(map)) => names.push(map.name_any()),
            Ok(Event::InitDone) => return names,
            Ok(event) => panic!("no list: {event:?}"),
            Err(_) => {}
        }
    }
}

/// A gate that lets its first `count` requests fail.
fn first(count: usize) -> impl Fn() -> bool + Send + Sync {
    let left = AtomicUsize::new(count);
    move || {
        let take = |left: usize| left.checked_sub(1);
        let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
        left.fetch_update(set, fetch, take).is_ok()
    }
}

#[tokio::test]
async fn a_user_who_is_refused_is_told_so_and_sees_the_objects_once_permitted() {
    let cluster = Cluster::start().await;
    let (tap, client) = Tap::on(cluster.client());
    create(&client, "a").await;
    tap.answer(|seen| {
        let refusal = Status::failure("not for you", "Forbidden").with_code(403);
        seen.path.ends_with(PATH).then_some(refusal)
    });
    let mut events = watch(&client);
    assert!(matches!(next(&mut events).await, Ok(Event::Init)));
    let message = "not for you".to_owned();
    let refused = next(&mut events).await.unwrap_err();
    assert_eq!(refused, Failure::Forbidden { message });
    assert!(refused.is_refusal());
    tap.refuse_nothing();
    assert_eq!(listed(&mut events).await, ["a"]);
}

#[tokio::test]
async fn a_kind_that_is_not_installed_is_not_served() {
    let cluster = Cluster::start().await;
    let (tap, client) = Tap::on(cluster.client());
    tap.answer(|seen| {
        let missing = Status::failure(
            "the server could not find the requested resource",
            "NotFound",
        );
        seen.path.ends_with(PATH).then(|| missing.with_code(404))
    });
    let mut events = watch(&client);
    assert!(matches!(next(&mut events).await, Ok(Event::Init)));
    assert_eq!(next(&mut events).await.unwrap_err(), Failure::NotServed);
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_tried_again() {
    let cluster = Cluster::start().await;
    let (tap, client) = Tap::on(cluster.client());
    let fails = first(2);
    tap.refuse(move |seen| {
        let fails = seen.path.ends_with(PATH) && fails();
        if fails {
            return Err("connection refused".to_owned());
        }
        Ok(())
    });
    let mut events = watch(&client);
    let mut failures = 0;
    loop {
        match next(&mut events).await {
            Ok(Event::InitDone) => break,
            Ok(_) => {}
            Err(failure) => {
                assert!(failure.to_string().contains("connection refused"));
                assert!(!failure.is_refusal());
                failures += 1;
            }
        }
    }
    assert_eq!(failures, 2);
    create(&client, "later").await;
    let Ok(Event::Apply(map)) = next(&mut events).await else {
        panic!("the watch works");
    };
    assert_eq!(map.name_any(), "later");
}

/// `kube` alone would ask for a watch from the same version for ever.
#[tokio::test]
async fn a_watch_that_is_refused_as_expired_lists_again() {
    let cluster = Cluster::start().await;
    let (tap, client) = Tap::on(cluster.client());
    let is_first = first(1);
    tap.answer(move |seen| {
        let expired = Status::failure("too old resource version", "Expired").with_code(410);
        (seen.is_watch && seen.path.ends_with(PATH) && is_first()).then_some(expired)
    });
    let mut events = watch(&client);
    assert!(listed(&mut events).await.is_empty());
    create(&client, "missed").await;
    assert!(matches!(next(&mut events).await, Ok(Event::Init)));
    assert_eq!(listed(&mut events).await, ["missed"]);
}

#[tokio::test]
async fn a_connection_that_breaks_loses_no_event() {
    let cluster = Cluster::start().await;
    let (tap, client) = Tap::on(cluster.client());
    let mut events = watch(&client);
    listed(&mut events).await;
    create(&client, "a").await;
    assert!(matches!(next(&mut events).await, Ok(Event::Apply(_))));
    tap.refuse(|seen| {
        if seen.is_watch {
            return Err("connection refused".to_owned());
        }
        Ok(())
    });
    tap.break_watches(PATH);
    create(&client, "b").await;
    assert!(next(&mut events).await.is_err());
    tap.refuse_nothing();
    loop {
        match next(&mut events).await {
            Ok(Event::Apply(map)) => {
                assert_eq!(map.name_any(), "b");
                break;
            }
            Ok(event) => panic!("the watch goes on where it was: {event:?}"),
            Err(_) => {}
        }
    }
}

#[tokio::test]
async fn an_object_that_cannot_be_read_hides_no_other_and_its_deletion_is_seen() {
    let cluster = Cluster::start().await;
    let client = rewriting(cluster.client(), |text| {
        text.replace(":77}", ":7700000000}")
    });
    let services = Api::<Service>::default_namespaced(cluster.client());
    let mut uids = Vec::new();
    for (name, seconds) in [("odd", 77), ("plain", 78)] {
        let service = json!({"metadata": {"name": name}, "spec": {"ports": [{"port": 80}], "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": seconds}}}});
        let service = serde_json::from_value(service).unwrap();
        let created = services.create(&PostParams::default(), &service).await;
        uids.push(created.unwrap().uid());
    }
    let api = Api::<Decoded<Service>>::default_namespaced(client);
    let mut events = object_watch::watch_readable(api, watcher::Config::default());
    let mut watched = Watched::default();
    while !watched.complete {
        watched.take(next(&mut events).await.unwrap(), |service: Service| {
            service.name_any()
        });
    }
    let names: Vec<&String> = watched.objects.values().collect();
    assert!(names.contains(&&"plain".to_owned()), "{names:?}");
    assert!(!names.contains(&&"odd".to_owned()), "{names:?}");
    let deleted = services.delete("odd", &DeleteParams::default()).await;
    deleted.unwrap();
    loop {
        match next(&mut events).await.unwrap() {
            Event::Apply(service) => assert_ne!(service.name_any(), "odd"),
            Event::Delete(gone) => {
                assert_eq!(gone.uid(), uids[0]);
                break;
            }
            event => panic!("no list: {event:?}"),
        }
    }
}

#[tokio::test]
async fn a_watch_without_log_reports_the_same_failures() {
    let cluster = Cluster::start().await;
    let (tap, client) = Tap::on(cluster.client());
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    tap.answer(move |seen| {
        let refusal = Status::failure("unknown user", "Unauthorized").with_code(401);
        counted.fetch_add(1, Ordering::SeqCst);
        seen.path.ends_with(PATH).then_some(refusal)
    });
    let mut events = object_watch::watch_without_log(maps(&client), watcher::Config::default());
    assert!(matches!(next(&mut events).await, Ok(Event::Init)));
    let message = "unknown user".to_owned();
    let failure = next(&mut events).await.unwrap_err();
    assert_eq!(failure, Failure::Unauthorized { message });
    assert_eq!(requests.load(Ordering::SeqCst), 1);
}
