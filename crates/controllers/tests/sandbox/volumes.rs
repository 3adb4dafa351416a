use api::sandbox::{EmbeddedObjectMetadata, PersistentVolumeClaimTemplate};
use api::{Sandbox, SandboxSpec};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::api::{DeleteParams, PostParams};
use planner::owner::controller_of;
use serde_json::{Value, json};
use testkit::cluster::object;

use crate::fixture::Fixture;

fn template(name: &str) -> PersistentVolumeClaimTemplate {
    PersistentVolumeClaimTemplate {
        metadata: EmbeddedObjectMetadata {
            name: Some(name.to_owned()),
            ..EmbeddedObjectMetadata::default()
        },
        spec: object(json!({
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        })),
    }
}

fn spec(names: &[&str]) -> SandboxSpec {
    SandboxSpec {
        volume_claim_templates: Some(names.iter().map(|name| template(name)).collect()),
        ..SandboxSpec::default()
    }
}

fn claim(name: &str, owners: &Value) -> PersistentVolumeClaim {
    object(json!({
        "metadata": {"name": name, "ownerReferences": owners},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }))
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_are_made_mounted_kept_over_suspension_and_go_with_the_sandbox() {
    let fixture = Fixture::start().await;
    fixture
        .cluster
        .create_sandbox("store", spec(&["work"]))
        .await;
    let sandbox = fixture.until_ready("store").await;
    let claims = fixture.cluster.api::<PersistentVolumeClaim>();
    let made = claims.get("work-store").await.unwrap();
    assert_eq!(
        Some(&controller_of(&made.metadata).unwrap().uid),
        sandbox.metadata.uid.as_ref()
    );
    let pod = fixture.cluster.api::<Pod>().get("store").await.unwrap();
    let volumes = pod.spec.unwrap().volumes.unwrap();
    let work = volumes.iter().find(|volume| volume.name == "work").unwrap();
    let source = work.persistent_volume_claim.as_ref().unwrap();
    assert_eq!(source.claim_name, "work-store");

    fixture
        .patch_sandbox("store", json!({"spec": {"replicas": 0}}))
        .await;
    fixture.cluster.until_gone::<Pod>("store").await;
    fixture
        .patch_sandbox("store", json!({"spec": {"replicas": 1}}))
        .await;
    fixture.until_ready("store").await;
    let kept = claims.get("work-store").await.unwrap();
    assert_eq!(kept.metadata.uid, made.metadata.uid);

    let sandboxes = fixture.cluster.api::<Sandbox>();
    sandboxes
        .delete("store", &DeleteParams::default())
        .await
        .unwrap();
    fixture
        .cluster
        .until_gone::<PersistentVolumeClaim>("work-store")
        .await;
    fixture.cluster.until_gone::<Pod>("store").await;
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unowned_claim_is_adopted_and_anothers_is_refused() {
    let fixture = Fixture::start().await;
    let claims = fixture.cluster.api::<PersistentVolumeClaim>();
    let params = PostParams::default();
    claims
        .create(&params, &claim("data-mine", &json!([])))
        .await
        .unwrap();
    // Its owner must exist, or garbage collection takes it.
    let owner = fixture
        .cluster
        .create_sandbox("owner", SandboxSpec::default())
        .await;
    let owners = json!([{
        "apiVersion": "agents.x-k8s.io/v1beta1",
        "kind": "Sandbox",
        "name": "owner",
        "uid": owner.metadata.uid,
        "controller": true,
    }]);
    claims
        .create(&params, &claim("data-theirs", &owners))
        .await
        .unwrap();

    fixture
        .cluster
        .create_sandbox("mine", spec(&["data"]))
        .await;
    let sandbox = fixture.until_ready("mine").await;
    let adopted = claims.get("data-mine").await.unwrap();
    assert_eq!(
        Some(&controller_of(&adopted.metadata).unwrap().uid),
        sandbox.metadata.uid.as_ref()
    );

    fixture
        .cluster
        .create_sandbox("theirs", spec(&["data"]))
        .await;
    let message = "Error seen: refusing to use persistent volume claim \"data-theirs\": it is controlled by Sandbox \"owner\"";
    fixture
        .until_reported("theirs", "ReconcilerError", message)
        .await;
    assert!(
        fixture
            .cluster
            .api::<Pod>()
            .get_opt("theirs")
            .await
            .unwrap()
            .is_none()
    );
    fixture.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_name_that_is_too_long_is_reported_without_retries() {
    let fixture = Fixture::start().await;
    let name = "n".repeat(200);
    let long = "v".repeat(60);
    fixture.cluster.create_sandbox(&name, spec(&[&long])).await;
    let message = format!(
        "volume claim name \"{long}-{name}\" has 261 characters and may have at most 253; shorten the sandbox's or the template's name"
    );
    fixture
        .until_reported(&name, "InvalidConfiguration", &message)
        .await;
    let writes = fixture.tap.writes(&name);
    assert_eq!(writes.len(), 1, "only the status is written: {writes:?}");
    fixture.stop().await;
}
