//! The life of a claim, from its first sandbox to its end.

use std::time::Instant;

use api::Sandbox;
use api::kruise::{ClaimPhase, SandboxClaim, SandboxSet};
use api::labels::kruise as keys;
use kube::ResourceExt;
use serde_json::{Value, json};
use testkit::eventually;

use crate::fixture::{Scene, claim, claimed, condition};

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_for_one_gets_one_with_all_it_asked_for() {
    let scene = Scene::start().await;
    scene.full_set("python", 2).await;
    let fields = json!({
        "shutdownTime": "2099-12-30T12:00:00Z",
        "envVars": { "API_KEY": "sk-1" },
        "labels": { "project": "x" },
        "annotations": { "purpose": "a test" },
    });
    scene
        .create::<SandboxClaim>(claim("one", "python", fields))
        .await;
    let done = scene.completed("one").await;
    assert_eq!(
        condition(&done),
        ("True".into(), "AllReplicasClaimed".into())
    );
    let status = done.status.clone().unwrap();
    assert_eq!(
        (status.claimed_replicas, status.observed_generation),
        (1, Some(1))
    );
    assert!(status.claim_start_time.is_some() && status.completion_time.is_some());
    assert!(status.claiming.is_empty());
    assert_eq!(done.spec.replicas, Some(1), "the schema's default");

    let held = scene.held_by(&done).await;
    let [sandbox] = held.as_slice() else {
        panic!("{held:?}");
    };
    assert_eq!(sandbox.owner_references().len(), 1);
    assert_eq!(sandbox.labels()["project"], "x");
    assert_eq!(sandbox.labels()[keys::SANDBOX_CLAIMED], "true");
    assert_eq!(sandbox.labels()[keys::CLAIM_NAME], "one");
    assert_eq!(
        sandbox.labels()[keys::SANDBOX_ID],
        format!("default--{}", sandbox.name_any())
    );
    assert_eq!(sandbox.annotations()["purpose"], "a test");
    assert_eq!(sandbox.annotations()[keys::OWNER], done.uid().unwrap());
    assert!(sandbox.annotations().contains_key(keys::CLAIM_TIMESTAMP));
    let shutdown = sandbox.spec.shutdown_time.as_ref().unwrap().0.to_string();
    assert_eq!(shutdown, "2099-12-30T12:00:00Z");

    let calls = scene.runtimes.calls.lock().unwrap().clone();
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0].variables["API_KEY"], "sk-1");
    assert_eq!(calls[0].token, sandbox.annotations()[keys::LOCK]);
    let address = calls[0].sandbox.to_string();
    assert_eq!(sandbox.status.as_ref().unwrap().pod_ips, [address]);
    scene.set_available("python", 2).await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_taken_in_bounded_steps_and_the_set_fills_up_again() {
    let scene = Scene::start().await;
    scene.full_set("tests", 25).await;
    scene
        .create::<SandboxClaim>(claim("batch", "tests", json!({ "replicas": 25 })))
        .await;
    let done = scene.completed("batch").await;
    assert_eq!(claimed(&done), 25);
    assert_eq!(scene.held_by(&done).await.len(), 25);
    scene.until_members("tests", 25).await;
    scene.set_available("tests", 25).await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_takes_what_there_is_and_ends_with_its_timeout() {
    let mut scene = Scene::start().await;
    scene.full_set("python", 3).await;
    scene.stop_node();
    let began = Instant::now();
    let fields = json!({ "replicas": 5, "claimTimeout": "1h" });
    scene
        .create::<SandboxClaim>(claim("timed", "python", fields))
        .await;
    let waiting = scene
        .cluster
        .until::<SandboxClaim>("timed", "to wait", |it| {
            it.status
                .as_ref()
                .is_some_and(|it| it.claimed_replicas == 3)
        })
        .await;
    assert_eq!(
        waiting.status.as_ref().unwrap().phase,
        Some(ClaimPhase::Claiming)
    );
    scene.time_out("timed", began).await;
    let done = scene.completed("timed").await;
    assert_eq!(condition(&done), ("True".into(), "TimeoutReached".into()));
    assert_eq!(claimed(&done), 3);
    assert_eq!(scene.held_by(&done).await.len(), 3);
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_waits_gets_what_comes() {
    let scene = Scene::start().await;
    scene
        .create::<SandboxSet>(crate::fixture::set("late", 0))
        .await;
    scene
        .create::<SandboxClaim>(claim("waiting", "late", json!({ "replicas": 3 })))
        .await;
    scene
        .cluster
        .until::<SandboxClaim>("waiting", "to find nothing", |claim| {
            claim.status.is_some() && condition(claim).1 == "OutOfStock"
        })
        .await;
    let scale = json!({ "spec": { "replicas": 2 } });
    scene.try_patch::<SandboxSet>("late", scale).await.unwrap();
    assert_eq!(claimed(&scene.completed("waiting").await), 3);
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_to_live_ends_the_claim_alone_and_its_sandboxes_are_still_found() {
    let scene = Scene::start().await;
    scene.full_set("python", 3).await;
    let fields = json!({ "replicas": 3, "labels": { "claim-id": "batch-7" } });
    let made: SandboxClaim = scene.create(claim("brief", "python", fields)).await;
    scene.completed("brief").await;
    scene.until_held(&made, 3).await;
    let brief = json!({ "spec": { "ttlAfterCompleted": "2s" } });
    scene
        .try_patch::<SandboxClaim>("brief", brief)
        .await
        .unwrap();
    scene.cluster.until_gone::<SandboxClaim>("brief").await;
    let found = eventually("the sandboxes to have no owner", async || {
        let found = scene.sandboxes("claim-id=batch-7").await;
        found
            .iter()
            .all(|sandbox| sandbox.owner_references().is_empty())
            .then_some(found)
    })
    .await;
    assert_eq!(found.len(), 3);
    assert!(
        found
            .iter()
            .all(|sandbox| sandbox.metadata.deletion_timestamp.is_none())
    );
    // The set does not take them back.
    scene.until_members("python", 3).await;
    scene.set_available("python", 3).await;
    let members = scene.members("python").await;
    let was_found = |member: &Sandbox| found.iter().any(|it| it.uid() == member.uid());
    assert!(!members.iter().any(was_found));
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_a_claim_releases_its_sandboxes() {
    let scene = Scene::start().await;
    scene.full_set("python", 2).await;
    scene
        .create::<SandboxClaim>(claim("short", "python", json!({ "replicas": 2 })))
        .await;
    let done = scene.completed("short").await;
    scene.delete::<SandboxClaim>("short").await;
    scene.until_held(&done, 0).await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_deleted_while_claiming_is_replaced_and_one_deleted_later_is_not() {
    let mut scene = Scene::start().await;
    scene.full_set("python", 2).await;
    scene.stop_node();
    let made: SandboxClaim = scene
        .create(claim("three", "python", json!({ "replicas": 3 })))
        .await;
    let held = scene.until_held(&made, 2).await;
    scene
        .cluster
        .until::<SandboxClaim>("three", "to count two", |it| {
            it.status
                .as_ref()
                .is_some_and(|it| it.claimed_replicas == 2)
        })
        .await;
    scene.delete::<Sandbox>(&held[0].name_any()).await;
    scene
        .cluster
        .until::<SandboxClaim>("three", "to count one", |it| {
            it.status
                .as_ref()
                .is_some_and(|it| it.claimed_replicas == 1)
        })
        .await;
    let _node = testkit::FakeNode::start(scene.cluster.client());
    let done = scene.completed("three").await;
    assert_eq!(claimed(&done), 3);
    let held = scene.until_held(&done, 3).await;
    scene.delete::<Sandbox>(&held[0].name_any()).await;
    scene.until_held(&done, 2).await;
    assert_eq!(
        claimed(&scene.completed("three").await),
        3,
        "it says what was so at its completion"
    );
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_set_that_goes_or_never_was_completes_its_claims() {
    let mut scene = Scene::start().await;
    scene
        .create::<SandboxClaim>(claim("lost", "nowhere", json!({ "claimTimeout": "100ms" })))
        .await;
    let done = scene.completed("lost").await;
    assert_eq!(
        condition(&done),
        ("True".into(), "SandboxSetNotFound".into())
    );
    assert!(
        done.status
            .unwrap()
            .message
            .unwrap()
            .contains("\"nowhere\" does not exist")
    );

    scene.full_set("python", 1).await;
    scene.stop_node();
    let made: SandboxClaim = scene
        .create(claim("half", "python", json!({ "replicas": 2 })))
        .await;
    scene.until_held(&made, 1).await;
    scene.delete::<SandboxSet>("python").await;
    let done = scene.completed("half").await;
    assert_eq!(
        condition(&done),
        ("True".into(), "SandboxSetNotFound".into())
    );
    assert_eq!(
        (claimed(&done), scene.held_by(&done).await.len()),
        (1, 1),
        "what it has stays its own"
    );
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_applied_before_its_set_is_served_when_the_set_comes() {
    let scene = Scene::start().await;
    scene
        .create::<SandboxClaim>(claim("early", "python", json!({})))
        .await;
    scene
        .cluster
        .until::<SandboxClaim>("early", "to wait for its set", |it| {
            it.status.is_some() && condition(it) == ("False".into(), "SandboxSetNotFound".into())
        })
        .await;
    scene.full_set("python", 1).await;
    assert_eq!(claimed(&scene.completed("early").await), 1);
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sandboxes_are_made_for_a_claim_that_asks_for_it_when_the_set_has_none() {
    let scene = Scene::start().await;
    scene.full_set("python", 1).await;
    let fields = json!({ "replicas": 3, "createOnNoStock": true });
    scene
        .create::<SandboxClaim>(claim("made", "python", fields))
        .await;
    let done = scene.completed("made").await;
    assert_eq!(claimed(&done), 3);
    let held = scene.held_by(&done).await;
    assert_eq!(held.len(), 3);
    for sandbox in &held {
        assert_eq!(sandbox.labels()[keys::SANDBOX_TEMPLATE], "python");
        assert!(sandbox.annotations().contains_key(keys::LOCK));
    }
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_input_is_refused_or_explained() {
    let scene = Scene::start().await;
    scene.full_set("python", 1).await;
    for (fields, reported) in [
        (json!({ "replicas": 0 }), "spec.replicas"),
        (json!({ "replicas": -1 }), "spec.replicas"),
        (json!({ "claimTimeout": "-5m" }), "spec.claimTimeout"),
        (
            json!({ "ttlAfterCompleted": "99999999999h" }),
            "spec.ttlAfterCompleted",
        ),
    ] {
        let refused = scene
            .try_create::<SandboxClaim>(claim("bad", "python", fields))
            .await;
        let kube::Error::Api(status) = refused.unwrap_err() else {
            panic!("{reported}");
        };
        assert_eq!(status.code, 422, "{status:?}");
        assert!(status.message.contains(reported), "{}", status.message);
    }
    let malformed = claim("bad", "python", json!({ "claimTimeout": "ten minutes" }));
    let refused = create_raw(&scene, &malformed).await;
    assert!(refused.contains("spec.claimTimeout"), "{refused}");

    scene
        .create::<SandboxClaim>(claim("fixed", "python", json!({ "replicas": 1 })))
        .await;
    let changed = scene
        .try_patch::<SandboxClaim>("fixed", json!({ "spec": { "replicas": 2 } }))
        .await;
    assert!(
        changed
            .unwrap_err()
            .to_string()
            .contains("replicas is immutable")
    );

    let fields = json!({ "labels": { "team": "not valid" } });
    scene
        .create::<SandboxClaim>(claim("corrected", "python", fields))
        .await;
    let blocked = scene
        .cluster
        .until::<SandboxClaim>("corrected", "to be explained", |claim| {
            claim.status.is_some()
        })
        .await;
    assert_eq!(
        condition(&blocked),
        ("False".into(), "InvalidMetadata".into())
    );
    let status = blocked.status.unwrap();
    assert_eq!(status.phase, Some(ClaimPhase::Pending));
    assert!(status.message.unwrap().contains("spec.labels: \"team\""));
    let corrected = json!({ "spec": { "labels": { "team": "valid" } } });
    scene
        .try_patch::<SandboxClaim>("corrected", corrected)
        .await
        .unwrap();
    assert_eq!(claimed(&scene.completed("corrected").await), 1);
    scene.stop().await;
}

/// Creates an object that no Rust type can represent, and returns why the server refused it.
async fn create_raw(scene: &Scene, manifest: &Value) -> String {
    let path = "/apis/agents.kruise.io/v1alpha1/namespaces/default/sandboxclaims";
    let request = http::Request::post(path)
        .header("content-type", "application/json")
        .body(serde_json::to_vec(manifest).unwrap())
        .unwrap();
    let answer = scene.cluster.client().request::<Value>(request).await;
    answer.unwrap_err().to_string()
}
