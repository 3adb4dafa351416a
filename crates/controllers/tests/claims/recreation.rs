//! A claim with the name of one that is being deleted waits until the objects of the earlier claim are gone. Waiting is not an error.

use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxClaim, SandboxSpec};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::ResourceExt;
use serde_json::{Value, json};
use testkit::cluster::Kind;
use testkit::eventually;

use crate::support::{Cluster, claim, message_of, template};

/// A finalizer that keeps an object until the test removes it.
const HELD: &str = "example.com/held";

/// The metadata of what an object that no longer exists has left behind. Garbage collection deletes it.
fn left_by(kind: &str, api_version: &str, name: &str) -> Value {
    json!({
        "name": name,
        "finalizers": [HELD],
        "ownerReferences": [{
            "apiVersion": api_version, "kind": kind, "name": "again",
            "uid": "00000000-0000-0000-0000-000000000001", "controller": true, "blockOwnerDeletion": true,
        }],
    })
}

async fn let_go<K: Kind>(cluster: &Cluster, name: &str) {
    cluster
        .patch::<K>(name, json!({ "metadata": { "finalizers": null } }))
        .await;
}

/// Waits until a sandbox reports that it waits for a deletion.
async fn waits_for_deletion(cluster: &Cluster, what: &str) {
    eventually(&format!("again to wait for {what}"), async || {
        let sandbox = cluster.get::<Sandbox>("again").await?;
        let conditions = sandbox.status?.conditions;
        let ready = conditions::find(&conditions, ConditionType::Ready)?;
        assert_ne!(ready.reason, "ReconcilerError", "{}", ready.message);
        let is_so = ready.message.contains(what) && ready.message.contains("is being deleted");
        is_so.then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_claim_made_again_waits_for_the_pod_of_its_predecessor() {
    let cluster = Cluster::start().await;
    let pod: Pod = serde_json::from_value(json!({
        "metadata": left_by("Sandbox", "agents.x-k8s.io/v1beta1", "again"),
        "spec": { "containers": [{ "name": "main", "image": "v1" }] },
    }))
    .unwrap();
    cluster.create(&pod).await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&claim("again", "py")).await;
    waits_for_deletion(&cluster, "pod \"again\"").await;
    let_go::<Pod>(&cluster, "again").await;
    cluster.claim_ready("again").await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_made_again_waits_for_the_volume_claim_of_its_predecessor() {
    let cluster = Cluster::start().await;
    let volume: PersistentVolumeClaim = serde_json::from_value(json!({
        "metadata": left_by("Sandbox", "agents.x-k8s.io/v1beta1", "data-again"),
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": { "requests": { "storage": "1Gi" } },
        },
    }))
    .unwrap();
    cluster.create(&volume).await;
    let controllers = cluster.controllers();
    let spec: SandboxSpec = serde_json::from_value(json!({
        "podTemplate": { "spec": { "containers": [{ "name": "main", "image": "v1" }] } },
        "volumeClaimTemplates": [{
            "metadata": { "name": "data" },
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": "1Gi" } },
            },
        }],
    }))
    .unwrap();
    cluster.create(&Sandbox::new("again", spec)).await;
    waits_for_deletion(&cluster, "\"data-again\"").await;
    assert!(cluster.get::<Pod>("again").await.is_none());
    let_go::<PersistentVolumeClaim>(&cluster, "data-again").await;
    eventually("the pod", async || cluster.get::<Pod>("again").await).await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cold_claim_made_again_waits_for_the_sandbox_of_its_predecessor() {
    let cluster = Cluster::start().await;
    let mut sandbox: Sandbox = Sandbox::new("again", SandboxSpec::default());
    sandbox.metadata = serde_json::from_value(left_by(
        "SandboxClaim",
        "extensions.agents.x-k8s.io/v1beta1",
        "again",
    ))
    .unwrap();
    sandbox.spec.pod_template = template("py").spec.pod_template;
    let left = cluster.create(&sandbox).await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&claim("again", "py")).await;
    let waiting = cluster
        .claim_with("again", "False", "SandboxNotReady")
        .await;
    assert!(
        message_of(&waiting).contains("is being deleted"),
        "{}",
        message_of(&waiting)
    );
    let_go::<Sandbox>(&cluster, "again").await;
    let ready: SandboxClaim = cluster.claim_ready("again").await;
    assert_ne!(cluster.sandbox_of(&ready).await.uid(), left.uid());
    controllers.stop().await;
    cluster.stop().await;
}
