//! The lifecycle of a sandbox from the user's side: creation, rollback, attaching, suspension and deletion.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use api::sandbox::OperatingMode;
use kube::ResourceExt;
use kube::api::{DeleteParams, PatchParams};
use sdk::trace::RemoteContext;
use sdk::{CreateOptions, ErrorKind, ListOptions, Options, Phase, SuspensionType, WarmPool};
use support::http_server::{ScriptedRouter, answer};
use support::{FAILING, Injected, MISSING, NEVER, World, is_delete, is_watch, options};

/// Nothing listens there: for tests that send no request to a sandbox.
const NOWHERE: &str = "http://127.0.0.1:9";

async fn start() -> (World, sdk::Client) {
    let world = World::start().await;
    let client = world.client(options(NOWHERE));
    (world, client)
}

#[tokio::test]
async fn a_claim_becomes_ready_with_two_requests() {
    let (world, client) = start().await;
    let request = CreateOptions::from_template("python")
        .warm_pool(WarmPool::Named("fast".into()))
        .label("team", "search");
    let sandbox = client.create(request).await.unwrap();

    let requests = world.requests();
    assert_eq!(requests.len(), 2, "{requests:#?}");
    assert!(requests[0].starts_with("POST "), "{requests:#?}");
    assert!(requests[1].contains("watch=true"), "{requests:#?}");
    let selector = format!("fieldSelector=metadata.name%3D{}", sandbox.id());
    assert!(requests[1].contains(&selector), "{requests:#?}");
    assert!(!requests[1].contains("resourceVersion=0"), "{requests:#?}");

    assert!(sandbox.id().starts_with("sandbox-claim-"));
    assert_eq!(
        sandbox.sandbox_name().unwrap(),
        format!("warm-{}", sandbox.id())
    );
    let claim = world.claims().get(sandbox.id()).await.unwrap();
    assert_eq!(claim.labels()["team"], "search");
    assert_eq!(
        claim.labels()["agents.x-k8s.io/created-by"],
        "agent-sandbox-rust-sdk"
    );
    assert!(
        claim
            .annotations()
            .contains_key("agents.x-k8s.io/client-first-requested-at")
    );
    assert_eq!(claim.spec.warmpool.as_deref(), Some("fast"));
    assert_eq!(sandbox.status().await.unwrap().phase, Phase::Ready);

    sandbox.terminate().await.unwrap();
    world.wait_for_no_claims().await;
    assert!(!sandbox.is_open());
}

#[tokio::test]
async fn sandboxes_are_listed_by_the_labels_of_their_claims() {
    let (_world, client) = start().await;
    let mut ids = Vec::new();
    for team in ["search", "search", "ads"] {
        let request = CreateOptions::from_pool("p").label("team", team);
        ids.push(client.create(request).await.unwrap().id().to_owned());
    }
    let search = ListOptions::default().label_selector("team=search");
    let mut found = client.list_with(&search).await.unwrap();
    found.sort();
    ids[..2].sort();
    assert_eq!(found, ids[..2]);
    let others = ListOptions::default().label_selector("team notin (search)");
    assert_eq!(client.list_with(&others).await.unwrap(), ids[2..]);
    assert_eq!(client.list().await.unwrap().len(), 3);
    let elsewhere = search.namespace("elsewhere");
    assert!(client.list_with(&elsewhere).await.unwrap().is_empty());
    let nonsense = ListOptions::default().label_selector("team=(");
    client.list_with(&nonsense).await.unwrap_err();
}

#[tokio::test]
async fn a_sandbox_names_its_pod() {
    let (world, client) = start().await;
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    let name = sandbox.sandbox_name().unwrap();
    assert_eq!(sandbox.pod_name().await.unwrap(), name);
    let annotated =
        serde_json::json!({"metadata": {"annotations": {"agents.x-k8s.io/pod-name": "its-pod"}}});
    let patch = kube::api::Patch::Merge(annotated);
    let sandboxes = world.sandboxes();
    let params = PatchParams::default();
    sandboxes.patch(&name, &params, &patch).await.unwrap();
    assert_eq!(sandbox.pod_name().await.unwrap(), "its-pod");
}

#[tokio::test]
async fn a_final_reason_ends_the_wait_and_deletes_the_claim() {
    let (world, client) = start().await;
    let error = client
        .create(CreateOptions::from_template(MISSING))
        .await
        .unwrap_err();
    assert_eq!(error.reason(), Some("TemplateNotFound"));
    assert!(
        error
            .to_string()
            .starts_with("sandbox[default/sandbox-claim-"),
        "{error}"
    );
    assert!(error.to_string().contains("Ready is False"), "{error}");
    world.has_no_claims().await;
    assert!(client.active().is_empty());
}

#[tokio::test]
async fn a_claim_that_times_out_is_deleted() {
    let (world, client) = start().await;
    let request = CreateOptions::from_template(NEVER).ready_timeout(Duration::from_millis(50));
    let error = client.create(request).await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ReadyTimeout { .. }),
        "{error:?}"
    );
    world.has_no_claims().await;
}

#[tokio::test]
async fn a_claim_that_times_out_reports_what_it_waited_for() {
    let (world, client) = start().await;
    let request = CreateOptions::from_template(FAILING).ready_timeout(Duration::from_secs(60));
    let sandbox = client.sandbox(request).unwrap();
    let mut progress = sandbox.waiting();
    let handle = sandbox.clone();
    let opening = tokio::spawn(async move { handle.open().await });
    let waiting = progress.wait_for(Option::is_some).await.unwrap().clone();
    assert_eq!(
        waiting.unwrap().problem.as_deref(),
        Some("container \"main\": ErrImagePull: registry.example does not answer")
    );
    sandbox.terminate().await.unwrap();
    assert!(opening.await.unwrap().is_err());

    let request = CreateOptions::from_template(FAILING).ready_timeout(Duration::from_secs(2));
    let error = client.create(request).await.unwrap_err();
    assert!(
        error
            .to_string()
            .contains("ErrImagePull: registry.example does not answer"),
        "{error}"
    );
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn a_claim_that_failed_can_be_kept_for_inspection() {
    let (world, client) = start().await;
    let request = CreateOptions::from_template(MISSING).keep_on_failure();
    let error = client.create(request).await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::OrphanedClaim { cleanup: None, .. }),
        "{error:?}"
    );
    assert_eq!(error.reason(), Some("TemplateNotFound"));
    let name = &error.sandbox().unwrap().claim;
    assert_eq!(world.claim_names().await, std::slice::from_ref(name));
    client.delete(name).await.unwrap();
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn a_claim_that_cannot_be_deleted_stays_tracked() {
    let (world, client) = start().await;
    world.inject(|request| is_delete(request).then_some(Injected::Instead(500)));
    let error = client
        .create(CreateOptions::from_template(MISSING))
        .await
        .unwrap_err();
    assert!(
        matches!(
            error.kind(),
            ErrorKind::OrphanedClaim {
                cleanup: Some(_),
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(error.reason(), Some("TemplateNotFound"));
    assert_eq!(
        world.claim_names().await,
        [error.sandbox().unwrap().claim.clone()]
    );

    assert_eq!(
        client.delete_all().await.len(),
        1,
        "it still cannot be deleted"
    );
    world.heal();
    assert_eq!(client.delete_all().await.len(), 0);
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn opening_an_orphaned_claim_attaches_to_it() {
    let (world, client) = start().await;
    let request = CreateOptions::from_template(NEVER).ready_timeout(Duration::from_millis(50));
    let sandbox = client.sandbox(request).unwrap();
    world.inject(|request| is_delete(request).then_some(Injected::Instead(503)));
    let error = sandbox.open().await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::OrphanedClaim { .. }),
        "{error:?}"
    );
    assert!(sandbox.is_orphaned());
    let orphan = world.claims().get(sandbox.id()).await.unwrap();

    // The sandbox becomes ready after all.
    let ready = support::condition("Ready", "True", "DependenciesReady", Some(1));
    let patch = serde_json::json!({"status": {"conditions": [ready], "sandbox": {"name": "late"}}});
    let patch = kube::api::Patch::Merge(patch);
    let patched = world
        .claims()
        .patch_status(sandbox.id(), &PatchParams::default(), &patch)
        .await;
    patched.unwrap();
    sandbox.open().await.unwrap();
    assert_eq!(sandbox.sandbox_name().as_deref(), Some("late"));
    assert_eq!(
        world.claims().get(sandbox.id()).await.unwrap().uid(),
        orphan.uid()
    );
    world.heal();
    sandbox.terminate().await.unwrap();
}

#[tokio::test]
async fn a_cancelled_create_deletes_its_claim() {
    let (world, client) = start().await;
    let creating =
        tokio::spawn(async move { client.create(CreateOptions::from_template(NEVER)).await });
    testkit::eventually("the claim to exist", async || {
        (world.claim_names().await.len() == 1).then_some(())
    })
    .await;
    creating.abort();
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn terminating_cancels_an_opening() {
    let (world, client) = start().await;
    let sandbox = client.sandbox(CreateOptions::from_template(NEVER)).unwrap();
    let opening = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.open().await }
    });
    testkit::eventually("the claim to exist", async || {
        (world.claim_names().await.len() == 1).then_some(())
    })
    .await;
    sandbox.terminate().await.unwrap();
    let error = opening.await.unwrap().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Cancelled), "{error:?}");
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn a_refused_claim_does_not_delete_another_of_its_name() {
    let (world, client) = start().await;
    let first = client
        .create(CreateOptions::from_pool("p").name("mine"))
        .await
        .unwrap();
    let error = client
        .create(CreateOptions::from_pool("p").name("mine"))
        .await
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ClaimFailed { .. }),
        "{error:?}"
    );
    let unopened = client
        .sandbox(CreateOptions::from_pool("p").name("mine"))
        .unwrap();
    unopened.terminate().await.unwrap();
    assert_eq!(world.claim_names().await, ["mine"]);

    let adopted = client
        .create(CreateOptions::from_pool("p").name("mine").adopt_existing())
        .await
        .unwrap();
    assert_eq!(adopted.sandbox_name(), first.sandbox_name());
    first.terminate().await.unwrap();
}

#[tokio::test]
async fn a_claim_whose_creation_is_unconfirmed_is_found_and_deleted() {
    let (world, client) = start().await;
    // As if a response was lost: the claim exists, and the client does not know it.
    world
        .inject(|request| (request.method() == http::Method::POST).then_some(Injected::After(500)));
    let request = CreateOptions::from_pool("p");
    let error = client.create(request).await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ClaimFailed { .. }),
        "{error:?}"
    );
    world.has_no_claims().await;
}

#[tokio::test]
async fn an_expired_watch_is_restarted() {
    let (world, client) = start().await;
    let watches = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&watches);
    world.inject(move |request| {
        if !is_watch(request) {
            return None;
        }
        // First the watch expires, then the server fails.
        match seen.fetch_add(1, Ordering::Relaxed) {
            0 => Some(Injected::Instead(410)),
            1 => Some(Injected::Instead(503)),
            _ => None,
        }
    });
    let request = CreateOptions::from_template(NEVER).name("waiting");
    let creating = tokio::spawn(async move { client.create(request).await });
    testkit::eventually("the third watch", async || {
        (watches.load(Ordering::Relaxed) >= 2).then_some(())
    })
    .await;
    let ready = support::condition("Ready", "True", "DependenciesReady", Some(1));
    let patch = serde_json::json!({"status": {"conditions": [ready], "sandbox": {"name": "s"}}});
    let patch = kube::api::Patch::Merge(patch);
    world
        .claims()
        .patch_status("waiting", &PatchParams::default(), &patch)
        .await
        .unwrap();
    creating.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_claim_deleted_by_another_client_ends_the_wait() {
    let (world, client) = start().await;
    let request = CreateOptions::from_template(NEVER).name("doomed");
    let creating = tokio::spawn(async move { client.create(request).await });
    testkit::eventually("the watch", async || {
        world
            .requests()
            .iter()
            .any(|request| request.contains("watch=true"))
            .then_some(())
    })
    .await;
    world
        .claims()
        .delete("doomed", &DeleteParams::default())
        .await
        .unwrap();
    let error = creating.await.unwrap().unwrap_err();
    assert!(error.is_not_found(), "{error:?}");
}

#[tokio::test]
async fn a_strategy_that_the_node_does_not_have_is_refused_at_once() {
    let world = World::start().await;
    let router = ScriptedRouter::always(200, "{}").await;
    let client = world.client(options(&router.url));
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    for (strategy, expected) in [
        (SuspensionType::Freeze, "FreezeNotSupported"),
        (SuspensionType::Hibernate, "HibernateNotSupported"),
    ] {
        let error = sandbox.suspend_with(strategy).await.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::Refused { reason, .. } if reason == expected),
            "{error:?}"
        );
        sandbox.resume().await.unwrap();
    }
    sandbox.terminate().await.unwrap();
}

#[tokio::test]
async fn a_handle_survives_suspension_and_works_in_another_process() {
    let world = World::start().await;
    let router =
        ScriptedRouter::always(200, r#"{"stdout":"hi\n","stderr":"","exit_code":0}"#).await;
    let creator = world.client(options(&router.url));
    let sandbox = creator.create(CreateOptions::from_pool("p")).await.unwrap();
    sandbox.suspend().await.unwrap();
    let object = world
        .sandboxes()
        .get(&sandbox.sandbox_name().unwrap())
        .await
        .unwrap();
    assert_eq!(object.spec.replicas, Some(0));
    assert_eq!(object.spec.operating_mode, Some(OperatingMode::Suspended));
    assert_eq!(sandbox.status().await.unwrap().phase, Phase::Suspended);

    let other = world.client(options(&router.url));
    let attached = other.attach(sandbox.id()).await.unwrap();
    attached.resume().await.unwrap();
    let object = world
        .sandboxes()
        .get(&sandbox.sandbox_name().unwrap())
        .await
        .unwrap();
    assert_eq!(object.spec.replicas, Some(1));
    assert_eq!(object.spec.operating_mode, Some(OperatingMode::Running));
    assert_eq!(
        attached.commands().run("echo hi").await.unwrap().stdout,
        "hi\n"
    );
    assert_eq!(
        sandbox.commands().run("echo hi").await.unwrap().stdout,
        "hi\n"
    );
    attached.terminate().await.unwrap();
    world.wait_for_no_claims().await;
    let error = other.attach(sandbox.id()).await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ClaimNotFound),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_disconnected_handle_sends_nothing_until_it_is_opened_again() {
    let world = World::start().await;
    let router = ScriptedRouter::always(200, r#"{"exists":true}"#).await;
    let client = world.client(options(&router.url));
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    let error = sandbox.open().await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::AlreadyOpen), "{error:?}");

    sandbox.disconnect().await.unwrap();
    let error = sandbox.files().exists("a").await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::NotReady { .. }),
        "{error:?}"
    );
    assert_eq!(router.received().len(), 0);
    assert!(client.active().is_empty());

    sandbox.open().await.unwrap();
    assert!(sandbox.files().exists("a").await.unwrap());
    sandbox.terminate().await.unwrap();
}

#[tokio::test]
async fn terminating_waits_for_running_operations() {
    let world = World::start().await;
    let release = Arc::new(tokio::sync::Notify::new());
    let released = Arc::clone(&release);
    let router = ScriptedRouter::start(move |_, _| {
        let released = Arc::clone(&released);
        Box::pin(async move {
            released.notified().await;
            answer(200, r#"{"stdout":"done","stderr":"","exit_code":0}"#).await
        })
    })
    .await;
    let client = world.client(options(&router.url));
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    let running = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.commands().run("slow").await }
    });
    testkit::eventually("the command to arrive", async || {
        (router.received().len() == 1).then_some(())
    })
    .await;
    let deleted = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&deleted);
    world.inject(move |request| {
        seen.fetch_or(is_delete(request), Ordering::Relaxed);
        None
    });
    let terminating = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.terminate().await }
    });
    testkit::eventually("the connection to be closed", async || {
        (!sandbox.is_open()).then_some(())
    })
    .await;
    assert!(
        sandbox.commands().run("another").await.is_err(),
        "no operation may begin"
    );
    assert!(
        !deleted.load(Ordering::Relaxed),
        "the claim was deleted under a running command"
    );
    release.notify_one();
    assert_eq!(running.await.unwrap().unwrap().stdout, "done");
    terminating.await.unwrap().unwrap();
    assert_eq!(router.received().len(), 1);
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn terminating_waits_for_a_running_download() {
    let world = World::start().await;
    let router = ScriptedRouter::always(200, "content").await;
    let client = world.client(options(&router.url));
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    let mut content = sandbox.files().read_stream("file").await.unwrap();
    let terminating = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.terminate().await }
    });
    testkit::eventually("the connection to be closed", async || {
        (!sandbox.is_open()).then_some(())
    })
    .await;
    assert_eq!(content.next().await.unwrap().unwrap(), "content");
    assert!(!terminating.is_finished());
    assert_eq!(world.claim_names().await.len(), 1);
    drop(content);
    terminating.await.unwrap().unwrap();
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn delete_all_includes_a_sandbox_that_is_not_ready_yet() {
    let (world, client) = start().await;
    let creating = tokio::spawn({
        let client = client.clone();
        async move { client.create(CreateOptions::from_template(NEVER)).await }
    });
    testkit::eventually("the claim to exist", async || {
        (world.claim_names().await.len() == 1).then_some(())
    })
    .await;
    assert!(client.active().is_empty(), "it is not open yet");
    assert!(client.delete_all().await.is_empty());
    world.has_no_claims().await;
    let error = creating.await.unwrap().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Cancelled), "{error:?}");
}

#[tokio::test]
async fn the_registry_tracks_open_sandboxes_and_deletes_them() {
    let (world, client) = start().await;
    let one = client
        .create(CreateOptions::from_pool("p").name("one"))
        .await
        .unwrap();
    client
        .create(CreateOptions::from_pool("p").name("two"))
        .await
        .unwrap();
    let stranger = world.client(options(NOWHERE));
    stranger
        .create(CreateOptions::from_pool("p").name("three"))
        .await
        .unwrap();

    let mut active: Vec<_> = client
        .active()
        .iter()
        .map(|sandbox| sandbox.id().to_owned())
        .collect();
    active.sort();
    assert_eq!(active, ["one", "two"]);
    assert_eq!(client.list().await.unwrap(), ["one", "three", "two"]);
    let again = client.attach("one").await.unwrap();
    let requests = world.requests().len();
    assert!(again.is_open());
    assert_eq!(world.requests().len(), requests);

    client.delete("one").await.unwrap();
    assert!(!one.is_open());
    client.delete("three").await.unwrap();
    client.delete("never-was").await.unwrap();
    assert_eq!(client.delete_all().await.len(), 0);
    world.wait_for_no_claims().await;
}

#[tokio::test]
async fn claims_and_requests_carry_the_trace_context() {
    let world = World::start().await;
    let router = ScriptedRouter::always(200, r#"{"exists":false}"#).await;
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let client = world.client(Options {
        propagator: Some(Arc::new(RemoteContext {
            traceparent: traceparent.into(),
            tracestate: None,
        })),
        ..options(&router.url)
    });
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    let claim = world.claims().get(sandbox.id()).await.unwrap();
    assert_eq!(
        claim.annotations()["opentelemetry.io/trace-context"],
        format!(r#"{{"traceparent":"{traceparent}"}}"#)
    );
    sandbox.files().exists("a").await.unwrap();
    assert_eq!(router.received()[0].header("traceparent"), traceparent);
}
