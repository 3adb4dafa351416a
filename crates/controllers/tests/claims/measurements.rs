//! The metrics of a claim, which are recorded once.

use api::labels;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use testkit::eventually;

use crate::support::{Cluster, claim, template};

#[tokio::test(flavor = "multi_thread")]
async fn a_time_that_cannot_be_read_or_lies_ahead_is_not_measured() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    let (past, future) = (
        Timestamp::now() - SignedDuration::from_secs(60),
        Timestamp::now() + SignedDuration::from_secs(3_600),
    );
    let table = [
        ("nonsense", "soon".to_owned(), false),
        ("ahead", future.to_string(), false),
        ("past", past.to_string(), true),
    ];
    for (index, (name, requested_at, is_measured)) in table.into_iter().enumerate() {
        let mut claim = claim(name, "py");
        claim
            .annotations_mut()
            .insert(labels::CLIENT_FIRST_REQUESTED_AT.to_owned(), requested_at);
        cluster.create(&claim).await;
        cluster.claim_ready(name).await;
        let measured = eventually("the claim to be measured", async || {
            let measured = cluster.observations.since_request();
            measured.get(index).copied()
        })
        .await;
        assert_eq!(measured.is_some(), is_measured, "{name}: {measured:?}");
        assert!(measured.is_none_or(|measured| measured.as_secs() >= 60));
    }
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_recovers_is_not_measured_again() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    cluster.create(&claim("mine", "py")).await;
    cluster.claim_ready("mine").await;
    let set_ready = async |ready: &str| {
        let status = json!({ "status": { "conditions": [{ "type": "Ready", "status": ready }] } });
        cluster
            .api::<Pod>()
            .patch_status("mine", &PatchParams::default(), &Patch::Merge(status))
            .await
            .unwrap();
    };
    set_ready("False").await;
    cluster
        .claim_with("mine", "False", "DependenciesNotReady")
        .await;
    set_ready("True").await;
    cluster.claim_ready("mine").await;
    // The measurement of a later claim comes after any further one of this claim.
    cluster.create(&claim("last", "py")).await;
    cluster.claim_ready("last").await;
    let measured = eventually("the last claim to be measured", async || {
        let measured = cluster.observations.ready();
        (measured.len() >= 2).then_some(measured)
    })
    .await;
    assert_eq!(measured, [("cold", true), ("cold", true)]);
    controllers.stop().await;
    cluster.stop().await;
}
