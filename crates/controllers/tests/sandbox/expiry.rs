use std::time::Duration;

use api::conditions::ConditionType;
use api::sandbox::ShutdownPolicy;
use api::{Sandbox, SandboxSpec};
use k8s_openapi::api::core::v1::{Pod, Service};
use serde_json::json;
use testkit::node::end_pod;

use crate::fixture::{Fixture, condition, status};

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_sandbox_is_retained_without_its_pod_and_with_its_end() {
    let fixture = Fixture::start().await;
    let spec = SandboxSpec {
        shutdown_time: Some(fixture.in_seconds(3_600)),
        service: Some(true),
        ..SandboxSpec::default()
    };
    fixture.cluster.create_sandbox("kept", spec).await;
    fixture.until_ready("kept").await;
    end_pod(&fixture.cluster.api(), "kept", "Succeeded", None).await;
    fixture
        .until_reported("kept", "PodSucceeded", "Pod completed successfully")
        .await;

    fixture.clock.advance(Duration::from_secs(3_600));
    // Advancing the fake clock fires no timer: a change of the object does.
    fixture
        .patch_sandbox("kept", json!({"metadata": {"labels": {"touched": "yes"}}}))
        .await;
    fixture.cluster.until_gone::<Pod>("kept").await;
    fixture.cluster.until_gone::<Service>("kept").await;
    let kept = fixture
        .cluster
        .until("kept", "to be cleaned up", |sandbox: &Sandbox| {
            status(sandbox).selector.is_none()
        })
        .await;
    let ready = condition(&kept, ConditionType::Ready).unwrap();
    assert_eq!(
        (ready.reason.as_str(), ready.message.as_str()),
        ("SandboxExpired", "Sandbox has expired")
    );
    let finished = condition(&kept, ConditionType::Finished).unwrap();
    assert_eq!(finished.reason, "PodSucceeded");

    let later = fixture.in_seconds(3_600);
    fixture
        .patch_sandbox("kept", json!({"spec": {"shutdownTime": later}}))
        .await;
    fixture.until_ready("kept").await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_delete_policy_removes_everything() {
    let fixture = Fixture::start().await;
    let spec = SandboxSpec {
        shutdown_time: Some(fixture.in_seconds(0)),
        shutdown_policy: Some(ShutdownPolicy::Delete),
        ..SandboxSpec::default()
    };
    fixture.cluster.create_sandbox("gone", spec).await;
    fixture.cluster.until_gone::<Sandbox>("gone").await;
    fixture.cluster.until_gone::<Pod>("gone").await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expiry_comes_by_itself_when_its_time_is_there() {
    let fixture = Fixture::start().await;
    let spec = SandboxSpec {
        // The fake clock stands still, but the requeue timer runs: it fires after two seconds at the earliest.
        shutdown_time: Some(fixture.in_seconds(1)),
        ..SandboxSpec::default()
    };
    fixture.cluster.create_sandbox("timed", spec).await;
    fixture.until_ready("timed").await;
    fixture.clock.advance(Duration::from_secs(1));
    fixture
        .until_reported("timed", "SandboxExpired", "Sandbox has expired")
        .await;
    fixture.cluster.until_gone::<Pod>("timed").await;
    fixture.stop().await;
}
