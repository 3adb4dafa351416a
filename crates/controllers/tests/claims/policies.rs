//! Deleting a template does not weaken isolation: its network policy stays as long as a sandbox of the template exists.

use api::template::NetworkPolicyRules;
use api::{Sandbox, SandboxClaim, SandboxTemplate};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyEgressRule};
use kube::ResourceExt;
use planner::owner::controller_of;
use serde_json::json;
use testkit::eventually;

use crate::support::{Cluster, claim, template};

const POLICY: &str = "py-network-policy";

/// A template whose sandboxes reach nothing.
fn deny_all() -> SandboxTemplate {
    let mut template = template("py");
    template.spec.network_policy = Some(NetworkPolicyRules::default());
    template
}

async fn policy(cluster: &Cluster) -> NetworkPolicy {
    eventually("the network policy", async || {
        cluster.get::<NetworkPolicy>(POLICY).await
    })
    .await
}

/// Waits until garbage collection has dealt with the deletion of the policy's template.
async fn without_template(cluster: &Cluster) -> NetworkPolicy {
    eventually("garbage collection to come to the policy", async || {
        let policy = cluster.get::<NetworkPolicy>(POLICY).await;
        let policy = policy.expect("the policy stays");
        controller_of(&policy.metadata).is_none().then_some(policy)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_templates_policy_stays_until_its_last_sandbox_and_pod_are_gone() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&deny_all()).await;
    let made = policy(&cluster).await;
    cluster.create(&claim("mine", "py")).await;
    cluster.claim_ready("mine").await;
    // The pod takes its time to end.
    let held = json!({ "metadata": { "finalizers": ["example.com/held"] } });
    cluster.patch::<Pod>("mine", held).await;

    cluster.delete::<SandboxTemplate>("py").await;
    let reported = cluster.event(POLICY, "NetworkPolicyRetained").await;
    assert!(reported.note.unwrap().contains("\"py\" is gone"));
    let left = without_template(&cluster).await;
    assert_eq!((left.uid(), &left.spec), (made.uid(), &made.spec));

    cluster.delete::<SandboxClaim>("mine").await;
    cluster.gone::<Sandbox>("mine").await;
    let pod = cluster.get::<Pod>("mine").await;
    assert!(pod.is_some(), "the pod is still going");
    let left = cluster.get::<NetworkPolicy>(POLICY).await;
    assert_eq!(left.and_then(|left| left.uid()), made.uid());
    let released = json!({ "metadata": { "finalizers": null } });
    cluster.patch::<Pod>("mine", released).await;
    cluster.gone::<NetworkPolicy>(POLICY).await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_survives_its_template_while_no_controller_runs_and_goes_when_one_runs_again() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&deny_all()).await;
    policy(&cluster).await;
    cluster.create(&claim("mine", "py")).await;
    cluster.claim_ready("mine").await;
    controllers.stop().await;

    cluster.delete::<SandboxTemplate>("py").await;
    without_template(&cluster).await;
    cluster.delete::<SandboxClaim>("mine").await;
    cluster.gone::<Sandbox>("mine").await;
    cluster.gone::<Pod>("mine").await;
    policy(&cluster).await;
    let controllers = cluster.controllers();
    cluster.gone::<NetworkPolicy>(POLICY).await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_made_again_takes_the_policy_over_without_a_gap() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&deny_all()).await;
    let made = policy(&cluster).await;
    cluster.create(&claim("mine", "py")).await;
    cluster.claim_ready("mine").await;
    cluster.delete::<SandboxTemplate>("py").await;
    let mut next = deny_all();
    next.spec.network_policy = Some(NetworkPolicyRules {
        egress: Some(vec![NetworkPolicyEgressRule::default()]),
        ..NetworkPolicyRules::default()
    });
    let next = cluster.create(&next).await;
    let taken_over = eventually("the new template to have the policy", async || {
        let policy = cluster.get::<NetworkPolicy>(POLICY).await;
        let policy = policy.expect("the policy stays");
        let owner = controller_of(&policy.metadata).map(|owner| owner.uid.clone());
        (owner == next.uid()).then_some(policy)
    })
    .await;
    assert_eq!(taken_over.uid(), made.uid(), "it is the same object");
    assert!(taken_over.spec.unwrap().egress.is_some());
    controllers.stop().await;
    cluster.stop().await;
}
