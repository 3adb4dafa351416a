use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use api::{Sandbox, SandboxSpec};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use serde_json::json;
use testkit::{Tap, eventually};

use crate::fixture::{Fixture, condition};

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_pod_template_is_reported_with_the_servers_message_without_a_loop() {
    let fixture = Fixture::start().await;
    let mut spec = SandboxSpec::default();
    spec.pod_template.metadata.labels =
        Some([("app".to_owned(), "not a label value".to_owned())].into());
    fixture.cluster.create_sandbox("bad", spec).await;
    let bad = fixture
        .cluster
        .until("bad", "to be refused", |sandbox: &Sandbox| {
            condition(sandbox, api::conditions::ConditionType::Ready)
                .is_some_and(|ready| ready.reason == "InvalidConfiguration")
        })
        .await;
    let ready = condition(&bad, api::conditions::ConditionType::Ready).unwrap();
    assert!(
        ready.message.contains("not a label value"),
        "{}",
        ready.message
    );
    // Another sandbox comes and goes while nothing more is tried for this one.
    fixture
        .cluster
        .create_sandbox("good", SandboxSpec::default())
        .await;
    fixture.until_ready("good").await;
    let attempts = fixture.tap.writes("/pods").len();
    assert!(attempts <= 3, "{attempts} pods were tried");

    let patch = json!({"spec": {"podTemplate": {"metadata": {"labels": {"app": "fine"}}}}});
    fixture.patch_sandbox("bad", patch).await;
    fixture.until_ready("bad").await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_fails_for_a_while_is_tried_again() {
    let fixture = Fixture::start().await;
    let failures = Arc::new(AtomicUsize::new(3));
    let left = Arc::clone(&failures);
    fixture.tap.refuse(move |request| {
        let creates_pod = request.is_write() && request.path.ends_with("/pods");
        let refuse = creates_pod
            && left
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                    left.checked_sub(1)
                })
                .is_ok();
        if refuse {
            Err("connection lost".to_owned())
        } else {
            Ok(())
        }
    });
    fixture
        .cluster
        .create_sandbox("stubborn", SandboxSpec::default())
        .await;
    fixture.until_ready("stubborn").await;
    assert_eq!(failures.load(Ordering::SeqCst), 0);
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_who_keeps_changing_the_sandbox_does_not_keep_it_from_settling() {
    let fixture = Fixture::start().await;
    fixture
        .cluster
        .create_sandbox("busy", SandboxSpec::default())
        .await;
    for round in 0..50 {
        let patch = json!({"metadata": {"annotations": {"round": round.to_string()}}, "spec": {"replicas": round % 2}});
        fixture.patch_sandbox("busy", patch).await;
    }
    // The last round set 1.
    let sandbox = fixture.until_ready("busy").await;
    assert_eq!(sandbox.spec.replicas, Some(1));
    assert_eq!(sandbox.metadata.annotations.unwrap()["round"], "49");
    fixture.stop().await;
}

/// Refuses every new list and watch of pods. Open watches go on.
fn cut_pod_watches(tap: &Tap) {
    tap.refuse(|request| {
        if request.path.ends_with("/pods") && !request.is_write() {
            Err("connection lost".to_owned())
        } else {
            Ok(())
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happens_while_a_watch_is_down_is_found_afterwards() {
    let cluster = testkit::Cluster::start().await;
    let node = testkit::FakeNode::start(cluster.client());
    let fixture = Fixture::assemble(cluster, node, controllers::Config::default()).await;
    fixture
        .cluster
        .create_sandbox("blind", SandboxSpec::default())
        .await;
    fixture.until_ready("blind").await;
    let pods = fixture.cluster.api::<Pod>();
    let first = pods.get("blind").await.unwrap().metadata.uid;

    cut_pod_watches(&fixture.tap);
    fixture.tap.break_watches("/pods");
    eventually("the watch to be tried again in vain", async || {
        let seen = fixture.tap.seen();
        let refused = seen
            .iter()
            .filter(|it| it.path.ends_with("/pods") && !it.is_write());
        (refused.count() >= 3).then_some(())
    })
    .await;
    pods.delete("blind", &DeleteParams::default())
        .await
        .unwrap();
    fixture.tap.refuse_nothing();
    fixture
        .cluster
        .until("blind", "another pod", |pod: &Pod| {
            pod.metadata.uid != first
        })
        .await;
    fixture.until_ready("blind").await;
    fixture.stop().await;
}
