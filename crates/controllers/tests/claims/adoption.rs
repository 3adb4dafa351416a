//! What a user sees of claims, against the embedded API server.

#![expect(
    clippy::unwrap_used,
    reason = "what a test's helpers cannot do fails the test"
)]

mod support;

use std::collections::{BTreeMap, BTreeSet};

use api::claim::{ClaimShutdownPolicy, EnvVar};
use api::sandbox::{PersistentVolumeClaimTemplate, PodMetadata};
use api::template::{EnvVarsInjectionPolicy, VolumeClaimTemplatesPolicy};
use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool, labels};
use controllers::instrumentation::Verb;
use futures::future::join_all;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{DeleteParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt};
use planner::owner::controller_of;
use serde_json::json;
use support::{
    Cluster, NAMESPACE, claim, claim_from, expiring, message_of, pool, ready_of, template,
};
use testkit::eventually;

/// Which claim holds which sandbox. Panics if a claim holds two, or a sandbox is held by two.
async fn holders(cluster: &Cluster) -> BTreeMap<String, String> {
    let mut holders = BTreeMap::new();
    for sandbox in cluster.list::<Sandbox>().await {
        if let Some(owner) =
            controller_of(&sandbox.metadata).filter(|owner| owner.kind == "SandboxClaim")
        {
            let before = holders.insert(owner.name.clone(), sandbox.name_any());
            assert_eq!(before, None, "claim {} holds two sandboxes", owner.name);
        }
    }
    let distinct: BTreeSet<_> = holders.values().collect();
    assert_eq!(distinct.len(), holders.len());
    holders
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_claim_takes_a_sandbox_over_in_three_writes() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 2)).await;
    cluster.pool_ready("warm", 2).await;
    let counts = |kind, verb| controllers.observations.count(kind, verb);
    let before = (
        counts("SandboxClaim", Verb::Patch),
        counts("SandboxClaim", Verb::PatchStatus),
    );

    cluster.create(&claim("mine", "py")).await;
    let ready = cluster.claim_ready("mine").await;
    let sandbox = cluster.sandbox_of(&ready).await;
    assert!(sandbox.name_any().starts_with("warm-"));
    assert_eq!(
        ready.labels()[labels::ASSIGNED_SANDBOX_NAME],
        sandbox.name_any()
    );
    assert_eq!(
        ready.annotations()[labels::ASSIGNED_SANDBOX_NAME],
        sandbox.name_any()
    );
    assert!(
        ready
            .annotations()
            .contains_key(labels::CONTROLLER_FIRST_OBSERVED_AT)
    );
    assert_eq!(sandbox.annotations()[labels::POD_NAME], sandbox.name_any());
    assert_eq!(sandbox.labels()[labels::CLAIM_UID], ready.uid().unwrap());
    assert!(!sandbox.labels().contains_key(labels::WARM_POOL_SANDBOX));
    assert!(
        !ready
            .status
            .as_ref()
            .unwrap()
            .sandbox
            .as_ref()
            .unwrap()
            .pod_ips
            .is_empty()
    );

    // The pod learns whose it is, and never loses the label of its network policy.
    let uid = ready.uid().unwrap();
    let pod = eventually("the pod to carry the claim's UID", async || {
        let pod = cluster.get::<Pod>(&sandbox.name_any()).await?;
        (pod.labels().get(labels::CLAIM_UID) == Some(&uid)).then_some(pod)
    })
    .await;
    assert!(pod.labels().contains_key(labels::SANDBOX_TEMPLATE_REF_HASH));

    cluster.pool_ready("warm", 2).await;
    assert_eq!(
        counts("SandboxClaim", Verb::Patch) - before.0,
        1,
        "one binding"
    );
    assert_eq!(
        counts("SandboxClaim", Verb::PatchStatus) - before.1,
        1,
        "one status"
    );
    let provisioned = controllers.observations.provisioned();
    assert_eq!(provisioned, [("warm", Some("warm".to_owned()), true)]);
    assert_eq!(controllers.observations.ready(), [("warm", true)]);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_sees_the_claim_ready_finds_the_pod_name_on_its_sandbox() {
    use futures::TryStreamExt;
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 1)).await;
    cluster.pool_ready("warm", 1).await;
    let claims = cluster.api::<SandboxClaim>();
    let mut events = std::pin::pin!(claims.watch(&WatchParams::default(), "0").await.unwrap());
    cluster.create(&claim("mine", "py")).await;
    while let Some(event) = events.try_next().await.unwrap() {
        let (WatchEvent::Added(claim) | WatchEvent::Modified(claim)) = event else {
            continue;
        };
        if ready_of(&claim).is_some_and(|(status, _)| status == "True") {
            let sandbox = cluster.sandbox_of(&claim).await;
            assert!(sandbox.annotations().contains_key(labels::POD_NAME));
            break;
        }
    }
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_claims_on_two_warm_sandboxes_get_one_each_and_one_cold() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 2)).await;
    cluster.pool_ready("warm", 2).await;
    let warm: BTreeSet<String> = cluster
        .members("warm")
        .await
        .iter()
        .map(ResourceExt::name_any)
        .collect();
    let names = ["a", "b", "c"];
    let claims = names.map(|name| claim(name, "py"));
    join_all(claims.iter().map(|claim| cluster.create(claim))).await;
    for name in names {
        cluster.claim_ready(name).await;
    }
    let holders = holders(&cluster).await;
    assert_eq!(holders.len(), 3);
    let taken = holders
        .values()
        .filter(|sandbox| warm.contains(*sandbox))
        .count();
    assert_eq!(taken, 2, "{holders:?}");
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_claims_at_once_are_met_whether_the_pool_suffices_or_not() {
    for stock in [25, 5] {
        let cluster = Cluster::start().await;
        let controllers = cluster.controllers();
        cluster.create(&template("py")).await;
        cluster.create(&pool("warm", "py", stock)).await;
        cluster.pool_ready("warm", stock).await;
        let names: Vec<String> = (0..20).map(|index| format!("claim-{index}")).collect();
        let claims: Vec<_> = names.iter().map(|name| claim_from(name, "warm")).collect();
        join_all(claims.iter().map(|claim| cluster.create(claim))).await;
        for name in &names {
            cluster.claim_ready(name).await;
        }
        assert_eq!(holders(&cluster).await.len(), 20);
        cluster.pool_ready("warm", stock).await;
        controllers.stop().await;
        cluster.stop().await;
    }
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
async fn a_claim_waits_for_its_template_and_its_pool() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&claim("by-template", "py")).await;
    cluster.create(&claim_from("by-pool", "warm")).await;
    let waiting = cluster
        .claim_with("by-template", "False", "TemplateNotFound")
        .await;
    assert_eq!(message_of(&waiting), "SandboxTemplate \"py\" not found");
    cluster
        .claim_with("by-pool", "False", "WarmPoolNotFound")
        .await;
    cluster.create(&template("py")).await;
    cluster.claim_ready("by-template").await;
    cluster.create(&pool("warm", "py", 0)).await;
    cluster.claim_ready("by-pool").await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_name_the_field_and_fixing_it_heals_the_claim() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    let mut restricted = claim("restricted", "py");
    restricted.spec.additional_pod_metadata = Some(PodMetadata {
        labels: Some([("kubernetes.io/x".to_owned(), "y".to_owned())].into()),
        annotations: None,
    });
    let variable = |name: &str, container: Option<&str>| EnvVar {
        name: name.into(),
        value: "claim".into(),
        container_name: container.map(Into::into),
    };
    let mut warm_env = claim("warm-env", "py");
    warm_env.spec.env = Some(vec![variable("A", None)]);
    let mut cold_env = claim("cold-env", "py");
    cold_env.spec.warmpool = Some("none".into());
    cold_env.spec.env = Some(vec![variable("MODE", Some("main"))]);
    for (claim, reason, part) in [
        (&restricted, "InvalidMetadata", "kubernetes.io/x"),
        (&warm_env, "EnvVarsInjectionRejected", "warm"),
        (
            &cold_env,
            "EnvVarsInjectionRejected",
            "not allowed by the template policy",
        ),
    ] {
        cluster.create(claim).await;
        let refused = cluster.claim_with(&claim.name_any(), "False", reason).await;
        assert!(
            message_of(&refused).contains(part),
            "{}",
            message_of(&refused)
        );
    }
    let heal = json!({ "spec": { "additionalPodMetadata": { "labels": { "kubernetes.io/x": null, "team": "ml" } } } });
    cluster.patch::<SandboxClaim>("restricted", heal).await;
    cluster.claim_ready("restricted").await;
    let heal = json!({ "spec": { "envVarsInjectionPolicy": EnvVarsInjectionPolicy::Overrides } });
    cluster.patch::<SandboxTemplate>("py", heal).await;
    let ready = cluster.claim_ready("cold-env").await;
    let sandbox = cluster.sandbox_of(&ready).await;
    let env = sandbox.spec.pod_template.spec.containers[0]
        .env
        .clone()
        .unwrap();
    assert_eq!(env[0].value.as_deref(), Some("claim"));
    cluster
        .patch::<SandboxClaim>("warm-env", json!({ "spec": { "warmpool": "none" } }))
        .await;
    cluster.claim_ready("warm-env").await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_claim_templates_follow_the_templates_policy() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    let mut volume = PersistentVolumeClaimTemplate::default();
    volume.metadata.name = Some("data".into());
    volume.spec.access_modes = Some(vec!["ReadWriteOnce".into()]);
    let mut wanting = claim("wanting", "py");
    wanting.spec.volume_claim_templates = Some(vec![volume]);
    cluster.create(&template("py")).await;
    cluster.create(&wanting).await;
    cluster
        .claim_with("wanting", "False", "VolumeClaimTemplatesError")
        .await;
    let allow =
        json!({ "spec": { "volumeClaimTemplatesPolicy": VolumeClaimTemplatesPolicy::Allowed } });
    cluster.patch::<SandboxTemplate>("py", allow).await;
    let sandbox = eventually("the sandbox", async || {
        cluster.get::<Sandbox>("wanting").await
    })
    .await;
    assert_eq!(sandbox.spec.volume_claim_templates.unwrap().len(), 1);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn later_metadata_reaches_the_pod() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&claim("mine", "py")).await;
    cluster.claim_ready("mine").await;
    let add = json!({ "spec": { "additionalPodMetadata": { "labels": { "team": "ml" } } } });
    cluster.patch::<SandboxClaim>("mine", add).await;
    eventually("the pod to carry the label", async || {
        let pod = cluster.get::<Pod>("mine").await?;
        (pod.labels().get("team").map(String::as_str) == Some("ml")).then_some(())
    })
    .await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_the_two_writes_of_an_adoption_is_made_good() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 1)).await;
    cluster.pool_ready("warm", 1).await;
    controllers.kill().await;
    let promised = cluster.members("warm").await.remove(0).name_any();
    // What the first write leaves behind.
    let mut bound = claim("bound", "py");
    bound
        .labels_mut()
        .insert(labels::ASSIGNED_SANDBOX_NAME.into(), promised.clone());
    bound
        .annotations_mut()
        .insert(labels::ASSIGNED_SANDBOX_NAME.into(), promised.clone());
    cluster.create(&bound).await;
    cluster.create(&claim("rival", "py")).await;

    let controllers = cluster.controllers();
    cluster.claim_ready("bound").await;
    cluster.claim_ready("rival").await;
    let holders = holders(&cluster).await;
    assert_eq!(holders.len(), 2, "{holders:?}");
    assert!(holders.values().any(|sandbox| *sandbox == promised));
    cluster.pool_ready("warm", 1).await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_in_the_middle_of_a_burst_lose_and_double_nothing() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 10)).await;
    cluster.pool_ready("warm", 10).await;
    let names: Vec<String> = (0..30).map(|index| format!("claim-{index}")).collect();
    let claims: Vec<_> = names.iter().map(|name| claim(name, "py")).collect();
    let mut running = Some(controllers);
    for chunk in claims.chunks(10) {
        join_all(chunk.iter().map(|claim| cluster.create(claim))).await;
        if let Some(controllers) = running.take() {
            controllers.kill().await;
        }
        running = Some(cluster.controllers());
    }
    for name in &names {
        cluster.claim_ready(name).await;
    }
    assert_eq!(holders(&cluster).await.len(), 30);
    cluster.pool_ready("warm", 10).await;
    assert_eq!(cluster.members("warm").await.len(), 10);
    if let Some(controllers) = running {
        controllers.stop().await;
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_deleted_under_its_claims_takes_none_of_theirs() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 10)).await;
    cluster.pool_ready("warm", 10).await;
    let names: Vec<String> = (0..10).map(|index| format!("claim-{index}")).collect();
    let claims: Vec<_> = names.iter().map(|name| claim(name, "py")).collect();
    let (_, ()) = tokio::join!(
        join_all(claims.iter().map(|claim| cluster.create(claim))),
        cluster.delete::<SandboxWarmPool>("warm"),
    );
    for name in &names {
        cluster.claim_ready(name).await;
    }
    eventually("only claimed sandboxes to be left", async || {
        (cluster.list::<Sandbox>().await.len() == 10).then_some(())
    })
    .await;
    assert_eq!(holders(&cluster).await.len(), 10);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_deleted_under_load_goes() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 5)).await;
    cluster.pool_ready("warm", 5).await;
    let claims: Vec<_> = (0..10)
        .map(|index| claim(&format!("claim-{index}"), "py"))
        .collect();
    join_all(claims.iter().map(|claim| cluster.create(claim))).await;
    let namespaces = Api::<Namespace>::all(cluster.client.clone());
    namespaces
        .delete(NAMESPACE, &DeleteParams::default())
        .await
        .unwrap();
    eventually("the namespace to be gone", async || {
        namespaces
            .get_opt(NAMESPACE)
            .await
            .unwrap()
            .is_none()
            .then_some(())
    })
    .await;
    assert!(cluster.list::<Sandbox>().await.is_empty());
    controllers.stop().await;
    cluster.stop().await;
}
