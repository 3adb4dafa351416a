//! Objects with a field that cannot be decoded, and references that cannot be looked up: their conditions name the field, other
//! objects are not affected, and the objects work once they are corrected.

use api::claim::{ClaimShutdownPolicy, Lifecycle};
use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxClaim, SandboxSpec, SandboxTemplate, SandboxWarmPool};
use controllers::clock::Clock;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use testkit::eventually;
use testkit::rewriting::{rewriting, seventy_seven_is_too_large};

use crate::support::{Cluster, claim, message_of, pool, template};

fn sandbox(name: &str, port: i32) -> Sandbox {
    let mut sandbox = testkit::cluster::sandbox(name, SandboxSpec::default());
    sandbox.spec.pod_template = pod_template(port);
    sandbox
}

fn pod_template(port: i32) -> api::sandbox::PodTemplate {
    serde_json::from_value(with_port(port)).unwrap()
}

fn with_port(port: i32) -> Value {
    json!({ "spec": { "containers": [{ "name": "main", "image": "i", "ports": [{ "containerPort": port }] }] } })
}

fn ready(conditions: &[Condition]) -> Option<(String, String, String)> {
    let ready = conditions::find(conditions, ConditionType::Ready)?;
    Some((
        ready.status.clone(),
        ready.reason.clone(),
        ready.message.clone(),
    ))
}

async fn sandbox_with(cluster: &Cluster, name: &str, status: &str) -> String {
    eventually(
        &format!("sandbox {name} to be Ready={status}"),
        async || {
            let sandbox = cluster.get::<Sandbox>(name).await?;
            let (is, reason, message) = ready(&sandbox.status?.conditions)?;
            (is == status && reason != "DependenciesNotReady").then_some(message)
        },
    )
    .await
}

async fn pool_with(cluster: &Cluster, name: &str, reason: &str) -> String {
    eventually(&format!("pool {name} to be {reason}"), async || {
        let pool = cluster.get::<SandboxWarmPool>(name).await?;
        let (_, is, message) = ready(&pool.status?.conditions)?;
        (is == reason).then_some(message)
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_cannot_be_decoded_names_its_field_and_stops_no_other() {
    let cluster = Cluster::start().await;
    cluster.create(&template("py")).await;
    cluster.create(&sandbox("bad", 77)).await;
    cluster.create(&sandbox("good", 80)).await;
    let mut bad_claim = claim("bad-claim", "py");
    bad_claim.spec.lifecycle = Some(Lifecycle {
        ttl_seconds_after_finished: Some(77),
        ..Lifecycle::default()
    });
    cluster.create(&bad_claim).await;
    cluster.create(&claim("good-claim", "py")).await;
    cluster.create(&pool("bad-pool", "py", 77)).await;
    let mut bad_template = template("bad-template");
    bad_template.spec.pod_template = pod_template(77);
    cluster.create(&bad_template).await;
    cluster.create(&claim("claim-of-it", "bad-template")).await;
    let client = rewriting(cluster.client.clone(), seventy_seven_is_too_large);
    let controllers = cluster.controllers_by(client, Clock::default());

    sandbox_with(&cluster, "good", "True").await;
    cluster.claim_ready("good-claim").await;
    let message = sandbox_with(&cluster, "bad", "False").await;
    assert!(
        message.contains("spec.podTemplate.spec.containers[0].ports[0].containerPort"),
        "{message}"
    );
    let refused = cluster
        .claim_with("bad-claim", "False", "InvalidConfiguration")
        .await;
    let message = message_of(&refused);
    assert!(
        message.contains("spec.lifecycle.ttlSecondsAfterFinished"),
        "{message}"
    );
    let message = pool_with(&cluster, "bad-pool", "InvalidConfiguration").await;
    assert!(message.contains("spec.replicas"), "{message}");
    let waiting = cluster
        .claim_with("claim-of-it", "False", "ReconcilerError")
        .await;
    assert!(message_of(&waiting).contains("SandboxTemplate \"bad-template\" cannot be read"));
    for name in ["bad", "bad-claim", "bad-pool", "bad-template"] {
        cluster.event(name, "InvalidConfiguration").await;
    }

    let corrected = json!({ "spec": { "podTemplate": with_port(80) } });
    cluster.patch::<Sandbox>("bad", corrected.clone()).await;
    cluster
        .patch::<SandboxTemplate>("bad-template", corrected)
        .await;
    let ttl = json!({ "spec": { "lifecycle": { "ttlSecondsAfterFinished": 5 } } });
    cluster.patch::<SandboxClaim>("bad-claim", ttl).await;
    let replicas = json!({ "spec": { "replicas": 1 } });
    cluster.patch::<SandboxWarmPool>("bad-pool", replicas).await;
    sandbox_with(&cluster, "bad", "True").await;
    cluster.claim_ready("bad-claim").await;
    cluster.claim_ready("claim-of-it").await;
    eventually("the pool to say no more that it is not ready", async || {
        let pool = cluster.get::<SandboxWarmPool>("bad-pool").await?;
        let status = pool.status?;
        (status.ready_replicas == 1 && ready(&status.conditions).is_none()).then_some(())
    })
    .await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_becomes_unreadable_is_not_made_again_nor_lost_to_its_claim() {
    let cluster = Cluster::start().await;
    let client = rewriting(cluster.client.clone(), seventy_seven_is_too_large);
    let controllers = cluster.controllers_by(client, Clock::default());
    cluster.full_pool(2).await;
    cluster.create(&claim("mine", "py")).await;
    let held = cluster.claim_ready("mine").await;
    let held = cluster.sandbox_of(&held).await;
    cluster.pool_ready("warm", 2).await;

    let spoiled = json!({ "spec": { "podTemplate": with_port(77) } });
    let member = cluster.members("warm").await.remove(0);
    for sandbox in [&member, &held] {
        let name = sandbox.metadata.name.as_deref().unwrap();
        cluster.patch::<Sandbox>(name, spoiled.clone()).await;
    }
    let claim = cluster.claim_with("mine", "False", "ReconcilerError").await;
    assert!(message_of(&claim).contains("cannot be read"));
    let bound = claim.status.unwrap().sandbox.unwrap();
    assert_eq!(Some(bound.name), held.metadata.name);
    cluster.writes_when_quiet().await;
    assert_eq!(cluster.members("warm").await.len(), 2);
    assert_eq!(cluster.list::<Sandbox>().await.len(), 3);
    controllers.stop().await;
    cluster.stop().await;
}

/// Shows references to `nothing` as empty, as they may be in objects that were stored before the schema refused them.
fn nothing_is_empty(text: &str) -> String {
    text.replace(r#""name":"nothing""#, r#""name":"""#)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn references_without_a_name_are_reported_and_the_claim_still_expires() {
    let cluster = Cluster::start().await;
    let client = rewriting(cluster.client.clone(), nothing_is_empty);
    let controllers = cluster.controllers_by(client, Clock::default());
    cluster.create(&template("py")).await;
    cluster.create(&pool("of-nothing", "nothing", 1)).await;
    cluster.create(&claim("for-nothing", "nothing")).await;
    let claim = cluster
        .claim_with("for-nothing", "False", "ReconcilerError")
        .await;
    assert!(message_of(&claim).contains("SandboxTemplate"), "{claim:?}");
    pool_with(&cluster, "of-nothing", "ReconcilerError").await;
    let writes = cluster.writes_when_quiet().await;
    assert_eq!(cluster.writes_when_quiet().await, writes);

    let soon = Timestamp::now() + SignedDuration::from_secs(1);
    let lifecycle = Lifecycle {
        shutdown_time: Some(Time(soon)),
        shutdown_policy: Some(ClaimShutdownPolicy::Delete),
        ..Lifecycle::default()
    };
    cluster
        .patch::<SandboxClaim>("for-nothing", json!({ "spec": { "lifecycle": lifecycle } }))
        .await;
    cluster.gone::<SandboxClaim>("for-nothing").await;

    let named = json!({ "spec": { "sandboxTemplateRef": { "name": "py" } } });
    cluster.patch::<SandboxWarmPool>("of-nothing", named).await;
    eventually(
        "the pool to be filled and to complain no more",
        async || {
            let status = cluster.get::<SandboxWarmPool>("of-nothing").await?.status?;
            (status.ready_replicas == 1 && ready(&status.conditions).is_none()).then_some(())
        },
    )
    .await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_time_that_is_a_usual_never_is_no_trouble() {
    let cluster = Cluster::start().await;
    let client = rewriting(cluster.client.clone(), |text| {
        text.replace("9999-12-30T00:00:00Z", "9999-12-31T23:59:59Z")
    });
    let controllers = cluster.controllers_by(client, Clock::default());
    let mut sandbox = sandbox("lasting", 80);
    sandbox.spec.shutdown_time = Some(Time("9999-12-30T00:00:00Z".parse().unwrap()));
    cluster.create(&sandbox).await;
    sandbox_with(&cluster, "lasting", "True").await;
    controllers.stop().await;
    cluster.stop().await;
}
