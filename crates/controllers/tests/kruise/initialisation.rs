//! Sandboxes that do not let themselves be initialised.

use std::collections::BTreeSet;
use std::time::Instant;

use api::Sandbox;
use api::kruise::SandboxClaim;
use api::labels::kruise as keys;
use k8s_openapi::api::events::v1::Event;
use kube::ResourceExt;
use kube::api::ListParams;
use planner::kruise_claim::Initialisation;
use serde_json::{Value, json};
use testkit::eventually;

use crate::fixture::{Scene, claim, claimed, condition};

/// The first sandbox that is asked refuses; those after it do not.
fn first_refuses(before: usize) -> Initialisation {
    if before > 0 {
        return Initialisation::Done;
    }
    Initialisation::Refused("POST /init was answered with 401".to_owned())
}

fn with_env(replicas: u32) -> Value {
    json!({ "replicas": replicas, "envVars": { "A": "1" } })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_refuses_is_released_reported_and_not_counted() {
    let scene = Scene::start_with(first_refuses).await;
    scene.full_set("python", 3).await;
    let made: SandboxClaim = scene.create(claim("careful", "python", with_env(2))).await;
    let done = scene.completed("careful").await;
    let status = done.status.as_ref().unwrap();
    assert_eq!((status.claimed_replicas, status.failed_replicas), (2, 1));
    let held = scene.until_held(&made, 2).await;
    let calls = scene.runtimes.calls.lock().unwrap().clone();
    let released = calls[0].sandbox.to_string();
    for sandbox in &held {
        assert_ne!(
            sandbox.status.as_ref().unwrap().pod_ips,
            std::slice::from_ref(&released)
        );
    }
    let tokens: BTreeSet<&str> = calls.iter().map(|call| call.token.as_str()).collect();
    assert_eq!(tokens.len(), 3, "each sandbox has a token of its own");
    eventually("an event that tells of it", async || {
        let events = scene
            .cluster
            .api::<Event>()
            .list(&ListParams::default())
            .await
            .ok()?;
        let reported = events
            .items
            .into_iter()
            .find(|event| event.reason.as_deref() == Some("InitialisationFailed"))?;
        reported.note?.contains("401").then_some(())
    })
    .await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_does_not_answer_at_first_is_asked_again_with_the_same_token() {
    let scene = Scene::start_with(|before| {
        if before < 2 {
            Initialisation::Unanswered("connection refused".to_owned())
        } else {
            Initialisation::Done
        }
    })
    .await;
    scene.full_set("python", 1).await;
    scene
        .create::<SandboxClaim>(claim("waiting", "python", with_env(1)))
        .await;
    let done = scene.completed("waiting").await;
    assert_eq!(
        (claimed(&done), done.status.unwrap().failed_replicas),
        (1, 0)
    );
    let calls = scene.runtimes.calls.lock().unwrap().clone();
    assert_eq!(calls.len(), 3);
    assert!(calls.iter().all(|call| *call == calls[0]));
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_without_init_is_reported_soon_and_its_sandbox_is_kept() {
    let unserved = |_| Initialisation::Unserved("connection refused".to_owned());
    let scene = Scene::start_with(unserved).await;
    scene.full_set("python", 1).await;
    let made: SandboxClaim = scene.create(claim("reported", "python", with_env(1))).await;
    let rejected = "EnvVarsInjectionRejected";
    let is_blocked = |claim: &SandboxClaim| {
        claim.status.is_some() && condition(claim) == ("False".into(), rejected.into())
    };
    let blocked: SandboxClaim = scene
        .cluster
        .until(
            "reported",
            "to report that envVars cannot be set",
            is_blocked,
        )
        .await;
    let status = blocked.status.unwrap();
    let message = status.message.unwrap();
    assert!(message.contains("spec.envVars") && message.contains("connection refused"));
    assert_eq!((status.claimed_replicas, status.failed_replicas), (0, 0));
    let held = scene.until_held(&made, 1).await;
    eventually("an event that tells of it", async || {
        let events = scene.cluster.api::<Event>();
        let events = events.list(&ListParams::default()).await.ok()?;
        let is_it = |event: &Event| event.reason.as_deref() == Some(rejected);
        events.items.iter().any(is_it).then_some(())
    })
    .await;

    // The claim goes on with its sandbox once it requires no `/init`.
    let patch = json!({ "spec": { "skipInitRuntime": true } });
    scene
        .try_patch::<SandboxClaim>("reported", patch)
        .await
        .unwrap();
    let done = scene.completed("reported").await;
    assert_eq!(claimed(&done), 1);
    assert_eq!(scene.held_by(&made).await[0].uid(), held[0].uid());
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_never_answers_is_given_up_by_the_claims_timeout() {
    let scene = Scene::start_with(|_| Initialisation::Unanswered("no route".to_owned())).await;
    scene.full_set("python", 1).await;
    let began = Instant::now();
    let mut fields = with_env(1);
    fields["claimTimeout"] = json!("1h");
    let made: SandboxClaim = scene.create(claim("hasty", "python", fields)).await;
    eventually("the sandbox to be asked", async || {
        (!scene.runtimes.calls.lock().unwrap().is_empty()).then_some(())
    })
    .await;
    scene.time_out("hasty", began).await;
    let done = scene.completed("hasty").await;
    let status = done.status.as_ref().unwrap();
    assert_eq!((status.claimed_replicas, status.failed_replicas), (0, 1));
    scene.until_held(&made, 0).await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_sandbox_is_set_aside_for_those_who_want_to_see_it() {
    let scene = Scene::start_with(first_refuses).await;
    scene.full_set("python", 2).await;
    let mut fields = with_env(1);
    fields["reserveFailedSandbox"] = json!(true);
    let made: SandboxClaim = scene.create(claim("curious", "python", fields)).await;
    let done = scene.completed("curious").await;
    assert_eq!(claimed(&done), 1);
    let held = scene.until_held(&made, 2).await;
    let is_failed = |sandbox: &&Sandbox| sandbox.annotations().contains_key(keys::INIT_FAILURE);
    let failed: Vec<&Sandbox> = held.iter().filter(is_failed).collect();
    assert_eq!(failed.len(), 1);
    assert!(failed[0].annotations()[keys::INIT_FAILURE].contains("401"));
    scene.stop().await;
}
