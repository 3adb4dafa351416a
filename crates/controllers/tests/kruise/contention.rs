//! Many claims at once, more than one controller, crashes, and people who lock sandboxes by hand.

use std::collections::BTreeSet;

use api::Sandbox;
use api::kruise::{SandboxClaim, SandboxSet};
use api::labels::kruise as keys;
use kube::ResourceExt;
use serde_json::json;

use crate::fixture::{Scene, claim, claimed, controllers_on, set};

/// Waits for all claims, checks that each holds what it says and asked for, and that no sandbox is held twice.
async fn check_all(scene: &Scene, sizes: &[(String, usize)]) {
    let mut seen = BTreeSet::new();
    for (name, size) in sizes {
        let done = scene.completed(name).await;
        assert_eq!(usize::try_from(claimed(&done)).unwrap(), *size, "{name}");
        let held = scene.held_by(&done).await;
        assert_eq!(held.len(), *size, "{name}");
        for sandbox in held {
            assert_eq!(sandbox.owner_references().len(), 1);
            assert_eq!(sandbox.annotations()[keys::OWNER], done.uid().unwrap());
            assert!(seen.insert(sandbox.uid()), "held twice");
        }
    }
}

async fn create_claims(scene: &Scene, count: usize) -> Vec<(String, usize)> {
    let mut sizes = Vec::new();
    for index in 0..count {
        let (name, size) = (format!("claim-{index}"), 1 + index % 7);
        scene
            .create::<SandboxClaim>(claim(&name, "shared", json!({ "replicas": size })))
            .await;
        sizes.push((name, size));
    }
    sizes
}

#[tokio::test(flavor = "multi_thread")]
async fn two_controllers_and_a_crash_give_no_sandbox_twice_and_no_claim_too_much() {
    let mut scene = Scene::start().await;
    scene.full_set("shared", 30).await;
    let second = controllers_on(scene.cluster.client(), scene.runtimes.clone());
    let sizes = create_claims(&scene, 14).await;
    scene.crash_and_restart().await;
    check_all(&scene, &sizes).await;
    second.stop().await;
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_locked_by_hand_is_left_to_its_locker() {
    let scene = Scene::start().await;
    scene.full_set("shared", 4).await;
    let members = scene.members("shared").await;
    let lock = json!({ "metadata": { "annotations": { keys::LOCK: "mine" } } });
    let name = members[0].name_any();
    scene.try_patch::<Sandbox>(&name, lock).await.unwrap();
    scene
        .create::<SandboxClaim>(claim("all", "shared", json!({ "replicas": 6 })))
        .await;
    let done = scene.completed("all").await;
    let held = scene.held_by(&done).await;
    assert_eq!(held.len(), 6);
    assert!(held.iter().all(|sandbox| sandbox.name_any() != name));
    let locked = scene
        .sandboxes("")
        .await
        .into_iter()
        .find(|it| it.name_any() == name)
        .unwrap();
    assert_eq!(locked.annotations()[keys::LOCK], "mine");
    scene.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_larger_than_the_set_are_all_met_as_it_fills_again() {
    let scene = Scene::start().await;
    scene.create::<SandboxSet>(set("shared", 5)).await;
    let sizes = create_claims(&scene, 10).await;
    check_all(&scene, &sizes).await;
    scene.set_available("shared", 5).await;
    scene.stop().await;
}
