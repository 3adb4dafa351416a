//! The binding on a claim is a hint: users can remove and forge it.

use api::claim::EnvVar;
use api::template::EnvVarsInjectionPolicy;
use api::{Sandbox, SandboxClaim, labels};
use kube::ResourceExt;
use planner::owner::controller_of;
use serde_json::{Value, json};
use testkit::eventually;

use crate::holders;
use crate::support::{Cluster, claim, pool, template};

/// The patch that sets or removes the binding of a claim.
fn binding(sandbox: Option<&str>) -> Value {
    let binding = json!({ labels::ASSIGNED_SANDBOX_NAME: sandbox });
    json!({ "metadata": { "labels": binding, "annotations": binding } })
}

fn forged(mut claim: SandboxClaim, sandbox: &str) -> SandboxClaim {
    let pair = || (labels::ASSIGNED_SANDBOX_NAME.to_owned(), sandbox.to_owned());
    claim.labels_mut().extend([pair()]);
    claim.annotations_mut().extend([pair()]);
    claim
}

/// Waits until the label and the annotation of a claim bind it to a sandbox.
async fn bound_to(cluster: &Cluster, claim: &str, sandbox: &str) {
    eventually(&format!("{claim} to be bound to {sandbox}"), async || {
        let claim = cluster.get::<SandboxClaim>(claim).await?;
        let is_bound = |entries: &std::collections::BTreeMap<String, String>| {
            entries
                .get(labels::ASSIGNED_SANDBOX_NAME)
                .map(String::as_str)
                == Some(sandbox)
        };
        (is_bound(claim.labels()) && is_bound(claim.annotations())).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_loses_its_binding_before_its_first_status_gets_no_second_sandbox() {
    let cluster = Cluster::start().await;
    // Sandboxes stay unready, so that no status is written while the claim's binding is removed.
    cluster.lose_node();
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 3)).await;
    eventually("the pool to have its sandboxes", async || {
        (cluster.members("warm").await.len() == 3).then_some(())
    })
    .await;
    cluster.create(&claim("mine", "py")).await;
    let held = eventually("the claim to have a sandbox", async || {
        let sandboxes = cluster.list::<Sandbox>().await;
        let is_held = |sandbox: &&Sandbox| {
            controller_of(&sandbox.metadata).is_some_and(|owner| owner.name == "mine")
        };
        sandboxes.iter().find(is_held).map(ResourceExt::name_any)
    })
    .await;
    cluster.patch::<SandboxClaim>("mine", binding(None)).await;
    bound_to(&cluster, "mine", &held).await;
    let reported = eventually("the claim's status", async || {
        let claim = cluster.get::<SandboxClaim>("mine").await?;
        Some(claim.status?.sandbox?.name)
    })
    .await;
    assert_eq!(reported, held);
    assert_eq!(holders(&cluster).await.len(), 1);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_binding_that_is_taken_off_or_changed_later_is_written_again() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(2).await;
    cluster.create(&claim("mine", "py")).await;
    let ready = cluster.claim_ready("mine").await;
    let held = cluster.sandbox_of(&ready).await.name_any();
    let other = cluster.members("warm").await[0].name_any();
    for edited in [None, Some(other.as_str())] {
        cluster.patch::<SandboxClaim>("mine", binding(edited)).await;
        bound_to(&cluster, "mine", &held).await;
    }
    assert_eq!(holders(&cluster).await["mine"], held);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_binding_gets_a_new_claim_around_nothing_that_its_spec_says() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(2).await;
    let mut js = template("js");
    js.spec.env_vars_injection_policy = Some(EnvVarsInjectionPolicy::Allowed);
    cluster.create(&js).await;
    let warm = cluster.members("warm").await[0].name_any();

    let mut other_template = forged(claim("other-template", "js"), &warm);
    other_template.spec.warmpool = Some("none".into());
    let mut cold = forged(claim("cold", "py"), &warm);
    cold.spec.warmpool = Some("none".into());
    let mut with_env = forged(claim("with-env", "js"), &warm);
    with_env.spec.warmpool = Some("none".into());
    with_env.spec.env = Some(vec![EnvVar {
        name: "A".into(),
        value: "1".into(),
        container_name: None,
    }]);
    for claim in [other_template, cold, with_env] {
        let name = claim.name_any();
        cluster.create(&claim).await;
        let ready = cluster.claim_ready(&name).await;
        let sandbox = cluster.sandbox_of(&ready).await;
        assert_eq!(sandbox.name_any(), name, "it is made for the claim");
        bound_to(&cluster, &name, &name).await;
    }
    let sandbox = cluster.get::<Sandbox>("with-env").await.unwrap();
    let env = sandbox.spec.pod_template.spec.containers[0].env.clone();
    assert!(env.unwrap().iter().any(|variable| variable.name == "A"));
    assert_eq!(cluster.members("warm").await.len(), 2);
    controllers.stop().await;
    cluster.stop().await;
}
