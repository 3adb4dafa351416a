//! How claims end: by their own deadline, some time after their pod has ended, and with what is left behind.

use std::time::Duration;

use api::claim::{ClaimShutdownPolicy, Lifecycle};
use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxClaim};
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::{WatchEvent, WatchParams};
use serde_json::json;
use testkit::eventually;

use crate::support::{Cluster, claim, expiring, ready_of, template};

/// The time this far from now, in whole seconds as in the API.
fn in_seconds(seconds: i64) -> Time {
    Time(Timestamp::from_second(Timestamp::now().as_second() + seconds).unwrap())
}

fn with_lifecycle(mut claim: SandboxClaim, lifecycle: Lifecycle) -> SandboxClaim {
    claim.spec.lifecycle = Some(lifecycle);
    claim
}

#[tokio::test(flavor = "multi_thread")]
async fn each_shutdown_policy_leaves_what_it_says() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    for (name, policy) in [
        ("retain", ClaimShutdownPolicy::Retain),
        ("delete", ClaimShutdownPolicy::Delete),
        ("foreground", ClaimShutdownPolicy::DeleteForeground),
    ] {
        cluster.create(&expiring(claim(name, "py"), policy)).await;
        cluster.claim_ready(name).await;
        cluster.finish_pod(name, "Succeeded").await;
    }
    let retained = cluster.claim_with("retain", "False", "ClaimExpired").await;
    cluster.gone::<Sandbox>("retain").await;
    let retained = eventually("the status to let the sandbox go", async || {
        let claim = cluster.get::<SandboxClaim>(&retained.name_any()).await?;
        claim.status.as_ref()?.sandbox.is_none().then_some(claim)
    })
    .await;
    let conditions = &retained.status.as_ref().unwrap().conditions;
    assert!(
        conditions
            .iter()
            .any(|condition| condition.type_ == "Finished")
    );
    for name in ["delete", "foreground"] {
        cluster.gone::<SandboxClaim>(name).await;
        cluster.gone::<Sandbox>(name).await;
    }
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_deleted_in_the_foreground_is_gone_only_after_its_pod() {
    const HELD: &str = "example.com/held";
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    let policy = ClaimShutdownPolicy::DeleteForeground;
    cluster.create(&expiring(claim("mine", "py"), policy)).await;
    cluster.claim_ready("mine").await;
    // A pod that is slow to be deleted.
    let hold = json!({ "metadata": { "finalizers": [HELD] } });
    cluster.patch::<Pod>("mine", hold).await;
    cluster.finish_pod("mine", "Succeeded").await;

    let going = eventually("the claim to be going", async || {
        let claim = cluster.get::<SandboxClaim>("mine").await?;
        claim.metadata.deletion_timestamp.is_some().then_some(claim)
    })
    .await;
    assert_eq!(going.finalizers(), ["foregroundDeletion"]);
    assert_eq!(
        ready_of(&going).unwrap(),
        ("False".to_owned(), "ClaimExpired".to_owned())
    );
    eventually("the pod to be asked to go", async || {
        let pod = cluster.get::<Pod>("mine").await?;
        pod.metadata.deletion_timestamp.map(drop)
    })
    .await;
    assert!(cluster.get::<Sandbox>("mine").await.is_some());

    let claims = cluster.api::<SandboxClaim>();
    let since = going.resource_version().unwrap();
    let mut events = std::pin::pin!(claims.watch(&WatchParams::default(), &since).await.unwrap());
    let release = json!({ "metadata": { "finalizers": null } });
    cluster.patch::<Pod>("mine", release).await;
    while let Some(event) = events.try_next().await.unwrap() {
        if let WatchEvent::Deleted(_) = event {
            break;
        }
    }
    assert!(cluster.get::<Pod>("mine").await.is_none());
    assert!(cluster.get::<Sandbox>("mine").await.is_none());
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_outlives_its_pod_by_its_time_to_live() {
    const TTL_SECONDS: i32 = 2;
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(1).await;
    let lifecycle = Lifecycle {
        ttl_seconds_after_finished: Some(TTL_SECONDS),
        shutdown_policy: Some(ClaimShutdownPolicy::Delete),
        ..Lifecycle::default()
    };
    cluster
        .create(&with_lifecycle(claim("mine", "py"), lifecycle))
        .await;
    let ready = cluster.claim_ready("mine").await;
    let sandbox = cluster.sandbox_of(&ready).await.name_any();
    // The claim reports the end of its pod until it is deleted, so that a slow watcher sees it, too.
    let claims = cluster.api::<SandboxClaim>();
    let since = ready.resource_version().unwrap();
    let mut events = std::pin::pin!(claims.watch(&WatchParams::default(), &since).await.unwrap());
    cluster.finish_pod(&sandbox, "Failed").await;
    let (finished, (status, reason)) = loop {
        let claim = match events.try_next().await.unwrap() {
            Some(WatchEvent::Modified(claim)) => claim,
            Some(WatchEvent::Bookmark(_)) => continue,
            other => panic!("the claim does not say that its pod has ended: {other:?}"),
        };
        let conditions = &claim.status.as_ref().unwrap().conditions;
        if let Some(finished) = conditions::find(conditions, ConditionType::Finished) {
            break (finished.clone(), ready_of(&claim).unwrap());
        }
    };
    assert_eq!((status.as_str(), reason.as_str()), ("False", "PodFailed"));
    cluster.gone::<SandboxClaim>("mine").await;
    let due =
        finished.last_transition_time.0 + Duration::from_secs(TTL_SECONDS.unsigned_abs().into());
    assert!(Timestamp::now() >= due, "gone before {due}");
    cluster.gone::<Sandbox>(&sandbox).await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_ends_at_its_shutdown_time() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    let until = |time: Time, policy| Lifecycle {
        shutdown_time: Some(time),
        shutdown_policy: Some(policy),
        ..Lifecycle::default()
    };
    let names = ["retained", "deleted"];
    let policies = [ClaimShutdownPolicy::Retain, ClaimShutdownPolicy::Delete];
    for (name, policy) in names.into_iter().zip(policies) {
        let lifecycle = until(in_seconds(3_600), policy);
        cluster
            .create(&with_lifecycle(claim(name, "py"), lifecycle))
            .await;
        cluster.claim_ready(name).await;
    }
    // Both have their sandboxes, however long that took; from here on they have three seconds.
    let soon = in_seconds(3);
    for name in names {
        let end = json!({ "spec": { "lifecycle": { "shutdownTime": soon } } });
        cluster.patch::<SandboxClaim>(name, end).await;
    }
    let retained = cluster
        .claim_with("retained", "False", "ClaimExpired")
        .await;
    assert!(Timestamp::now() >= soon.0, "expired before {}", soon.0);
    cluster.gone::<Sandbox>("retained").await;
    cluster.gone::<SandboxClaim>("deleted").await;
    cluster.gone::<Sandbox>("deleted").await;
    let kept = cluster.get::<SandboxClaim>("retained").await.unwrap();
    assert_eq!(kept.uid(), retained.uid());

    // Moved into the future, the deadline no longer counts, and the claim gets a sandbox again.
    let later = json!({ "spec": { "lifecycle": { "shutdownTime": in_seconds(3_600) } } });
    cluster.patch::<SandboxClaim>("retained", later).await;
    cluster.claim_ready("retained").await;

    // A claim that comes too late never gets one.
    let lifecycle = until(in_seconds(-10), ClaimShutdownPolicy::Retain);
    cluster
        .create(&with_lifecycle(claim("late", "py"), lifecycle))
        .await;
    cluster.claim_with("late", "False", "ClaimExpired").await;
    assert!(cluster.get::<Sandbox>("late").await.is_none());
    controllers.stop().await;
    cluster.stop().await;
}
