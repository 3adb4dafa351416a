//! How claims get their sandboxes.

use std::collections::BTreeSet;

use api::{SandboxClaim, labels};
use controllers::instrumentation::Verb;
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{WatchEvent, WatchParams};
use serde_json::json;
use testkit::eventually;
use testkit::writes::Writes;

use crate::holders;
use crate::support::{Cluster, claim, claim_from, pool, ready_of, template};

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_claim_takes_a_sandbox_over_in_three_writes() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(2).await;
    let counts = |kind, verb| cluster.observations.count(kind, verb);
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

    // The pod gets the claim's labels, and never loses the label of its network policy.
    let uid = ready.uid().unwrap();
    let pod = eventually("the pod to carry the claim's UID", async || {
        let pod = cluster.get::<Pod>(&sandbox.name_any()).await?;
        (pod.labels().get(labels::CLAIM_UID) == Some(&uid)).then_some(pod)
    })
    .await;
    assert!(pod.labels().contains_key(labels::SANDBOX_TEMPLATE_REF_HASH));

    cluster.pool_ready("warm", 2).await;
    // The writes are visible before the controllers report them.
    eventually("the claim to be reported", async || {
        (!cluster.observations.ready().is_empty()).then_some(())
    })
    .await;
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
    let provisioned = cluster.observations.provisioned();
    assert_eq!(provisioned, [("warm", Some("warm".to_owned()), true)]);
    assert_eq!(cluster.observations.ready(), [("warm", true)]);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_a_claim_is_ready_its_sandbox_has_the_pod_name() {
    use futures::TryStreamExt;
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(1).await;
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
    cluster.full_pool(2).await;
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
async fn a_warm_claim_costs_the_api_server_no_more_than_six_writes() {
    const CLAIMS: u64 = 20;
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(30).await;
    let before = cluster.writes_when_quiet().await;
    // Only the writes that a claim waits for.
    let critical = [
        "PATCH sandboxclaims",
        "PATCH sandboxes",
        "PATCH sandboxclaims/status",
        "PATCH pods",
    ];
    let claims: Vec<_> = (0..CLAIMS)
        .map(|index| claim(&format!("claim-{index}"), "py"))
        .collect();
    join_all(claims.iter().map(|claim| cluster.create(claim))).await;
    for claim in &claims {
        cluster.claim_ready(&claim.name_any()).await;
    }
    cluster.pool_ready("warm", 30).await;
    eventually("all that is to be written", async || {
        let writes = Writes::so_far(&cluster.client).await.unwrap();
        let writes = writes.since(&before);
        let enough = |kind: &&str| writes.of(kind) >= CLAIMS;
        critical.iter().all(enough).then_some(())
    })
    .await;
    let writes = cluster.writes_when_quiet().await.since(&before);
    assert_eq!(writes.excess(CLAIMS), Vec::<String>::new());
    for critical in critical {
        assert_eq!(writes.of(critical), CLAIMS, "{critical}: {writes:?}");
    }
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_claims_at_once_are_met_whether_the_pool_suffices_or_not() {
    for size in [25, 5] {
        let cluster = Cluster::start().await;
        let controllers = cluster.controllers();
        cluster.create(&template("py")).await;
        cluster.create(&pool("warm", "py", size)).await;
        cluster.pool_ready("warm", size).await;
        let names: Vec<String> = (0..20).map(|index| format!("claim-{index}")).collect();
        let claims: Vec<_> = names.iter().map(|name| claim_from(name, "warm")).collect();
        join_all(claims.iter().map(|claim| cluster.create(claim))).await;
        for name in &names {
            cluster.claim_ready(name).await;
        }
        assert_eq!(holders(&cluster).await.len(), 20);
        cluster.pool_ready("warm", size).await;
        controllers.stop().await;
        cluster.stop().await;
    }
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
async fn a_claim_takes_nothing_of_another_template_pool_or_namespace() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    for name in ["mine", "other"] {
        cluster.create(&template(name)).await;
    }
    cluster.create(&pool("others", "other", 2)).await;
    cluster.create(&pool("mine-too", "mine", 2)).await;
    cluster.pool_ready("others", 2).await;
    cluster.pool_ready("mine-too", 2).await;
    let mut elsewhere = claim("elsewhere", "mine");
    elsewhere.spec.warmpool = Some("others".into());
    for (claim, expected) in [
        (claim("any", "mine"), "mine-too-"),
        // A pool of another template has nothing for this claim, so it starts cold, under its own name.
        (elsewhere, "elsewhere"),
        (claim_from("from-pool", "others"), "others-"),
    ] {
        cluster.create(&claim).await;
        let ready = cluster.claim_ready(&claim.name_any()).await;
        let sandbox = cluster.sandbox_of(&ready).await.name_any();
        assert!(
            sandbox.starts_with(expected),
            "{} got {sandbox}",
            claim.name_any()
        );
    }
    controllers.stop().await;
    cluster.stop().await;
}
