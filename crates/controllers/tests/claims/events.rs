//! The events of claims, pools and templates, as `kubectl describe` shows them.

use std::time::Duration;

use api::claim::ClaimShutdownPolicy;
use api::{Sandbox, SandboxTemplate, SandboxWarmPool};
use controllers::clock::Clock;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::core::Status;
use serde_json::json;
use testkit::{FakeClock, Tap, eventually};

use crate::support::{Cluster, claim, expiring, pool, template};

/// A policy of the name that a template's own would have.
fn namesake(template: &str, owner: Option<serde_json::Value>) -> NetworkPolicy {
    serde_json::from_value(json!({
        "metadata": { "name": format!("{template}-network-policy"), "ownerReferences": owner.map(|owner| [owner]) },
        "spec": { "podSelector": {} },
    }))
    .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_report_changes_of_claims_and_templates() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    let ends = expiring(claim("mine", "py"), ClaimShutdownPolicy::Retain);
    cluster.create(&ends).await;
    cluster.claim_ready("mine").await;
    let reported = cluster.event("mine", "SandboxProvisioned").await;
    assert_eq!(reported.note.as_deref(), Some("Created sandbox \"mine\""));
    assert_eq!(reported.type_.as_deref(), Some("Normal"));
    cluster.finish_pod("mine", "Succeeded").await;
    cluster.event("mine", "ClaimExpired").await;

    cluster.create(&namesake("unowned", None)).await;
    cluster.create(&template("unowned")).await;
    let reported = cluster.event("unowned", "NetworkPolicyAdopted").await;
    assert_eq!(reported.type_.as_deref(), Some("Normal"));

    let owner = cluster.create(&template("owner")).await;
    let owner = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "name": "owner", "uid": owner.uid(), "controller": true,
    });
    let foreign = cluster.create(&namesake("foreign", Some(owner))).await;
    cluster.create(&template("foreign")).await;
    let reported = cluster.event("foreign", "NetworkPolicyConflict").await;
    assert_eq!(reported.type_.as_deref(), Some("Warning"));
    assert!(reported.note.unwrap().contains("SandboxTemplate \"owner\""));
    let left = cluster.get::<NetworkPolicy>(&foreign.name_any()).await;
    assert_eq!(left.unwrap().spec, foreign.spec);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_report_what_keeps_a_pool_from_its_size() {
    let cluster = Cluster::start().await;
    cluster.lose_node();
    let (tap, client) = Tap::on(cluster.client.clone());
    let clock = FakeClock::at(Timestamp::now());
    let read = clock.clone();
    let controllers = cluster.controllers_by(client, Clock::new(move || read.now()));
    let quota: Status = serde_json::from_value(json!({
        "status": "Failure", "reason": "Forbidden", "code": 403, "message": "exceeded quota: sandboxes",
    }))
    .unwrap();
    tap.answer(move |seen| {
        (seen.is_write() && seen.path.ends_with("/sandboxes")).then(|| quota.clone())
    });
    cluster.create(&template("py")).await;
    cluster.create(&pool("warm", "py", 1)).await;
    let reported = cluster.event("warm", "FailedCreate").await;
    assert!(reported.note.unwrap().contains("exceeded quota: sandboxes"));
    assert_eq!(reported.type_.as_deref(), Some("Warning"));

    tap.refuse_nothing();
    // The grace period begins with the status, which must be written before the clock is advanced.
    let member = eventually("a member that is not Ready", async || {
        let member = cluster.members("warm").await.pop()?;
        let text = !member.status.as_ref()?.conditions.is_empty();
        text.then_some(member)
    })
    .await;
    clock.advance(planner::pool_view::READINESS_GRACE + Duration::from_secs(60));
    let look = json!({ "metadata": { "annotations": { "look": "again" } } });
    cluster.patch::<SandboxWarmPool>("warm", look).await;
    let reported = cluster.event("warm", "SandboxStuck").await;
    let note = reported.note.unwrap();
    // By the fake clock the replacement is old as well, and is replaced again: the event may already name it.
    assert!(note.starts_with("Sandbox \"warm-"), "{note}");
    assert!(note.contains("did not become Ready in time"), "{note}");
    eventually("the member to be replaced", async || {
        let left = cluster.get::<Sandbox>(&member.name_any()).await;
        left.is_none().then_some(())
    })
    .await;
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_without_its_template_says_so_until_there_is_one() {
    let cluster = Cluster::start().await;
    let (tap, controllers) = cluster.tapped_controllers();
    cluster.create(&pool("warm", "py", 2)).await;
    let reported = cluster.event("warm", "TemplateNotFound").await;
    let missing = "SandboxTemplate \"py\" not found";
    assert_eq!(reported.note.as_deref(), Some(missing));
    let asked = tap.seen();
    let asked_for_it =
        |seen: &testkit::tap::Seen| !seen.is_write() && seen.path.ends_with("/sandboxtemplates/py");
    assert!(asked.iter().any(asked_for_it), "the server itself is asked");
    let updated = |pool: &SandboxWarmPool| {
        let updated = pool.status.as_ref()?.conditions.first()?.clone();
        Some((updated.status, updated.reason))
    };
    // The event and the status are separate writes.
    let (status, reason) = eventually("the pool's status", async || {
        updated(&cluster.get::<SandboxWarmPool>("warm").await?)
    })
    .await;
    assert_eq!(
        (status.as_str(), reason.as_str()),
        ("False", "TemplateNotFound")
    );
    cluster.create(&template("py")).await;
    let filled = cluster.pool_ready("warm", 2).await;
    assert_eq!(
        updated(&filled),
        Some(("True".to_owned(), "RolloutComplete".to_owned()))
    );
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repetition_is_reported_even_if_its_event_was_deleted() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.create(&pool("warm", "py", 1)).await;
    let first = cluster.event("warm", "TemplateNotFound").await;
    cluster.delete::<Event>(&first.name_any()).await;
    cluster.create(&template("py")).await;
    cluster.pool_ready("warm", 1).await;
    cluster.delete::<SandboxTemplate>("py").await;
    let again = cluster.event("warm", "TemplateNotFound").await;
    assert_ne!(again.name_any(), first.name_any());
    assert_eq!(again.note, first.note);
    controllers.stop().await;
    cluster.stop().await;
}
