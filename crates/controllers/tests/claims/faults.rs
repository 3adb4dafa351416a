//! Claims during faults: crashes, and deletions of the objects that they depend on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use api::{Sandbox, SandboxWarmPool, labels};
use futures::future::join_all;
use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{DeleteParams, PostParams};
use kube::core::Status;
use kube::{Api, ResourceExt};
use planner::owner::{controller_of, controller_reference};
use serde_json::json;
use testkit::eventually;
use testkit::tap::Seen;
use tokio_util::sync::CancellationToken;

use crate::holders;
use crate::support::{Cluster, NAMESPACE, claim, claim_from, message_of, pool, template};

/// Whether a request is the write of an adoption that a crash is to prevent.
type Write = fn(&Seen) -> bool;

fn transfers(request: &Seen) -> bool {
    request.method == http::Method::PATCH
        && request.path.contains("/sandboxes/warm-")
        && !request.path.ends_with("/status")
}

fn publishes(request: &Seen) -> bool {
    request.method == http::Method::PATCH && request.path.ends_with("/sandboxclaims/mine/status")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_before_any_write_of_an_adoption_is_made_good() {
    let crashes: [(Write, &str); 2] = [(transfers, "SandboxWarmPool"), (publishes, "SandboxClaim")];
    for (prevented, owner_at_crash) in crashes {
        let cluster = Cluster::start().await;
        let (tap, controllers) = cluster.tapped_controllers();
        cluster.full_pool(1).await;
        let warm = cluster.members("warm").await.remove(0).name_any();

        // The process dies as it is about to write, and writes nothing more.
        let (crash, dead) = (controllers.crash(), Arc::new(AtomicBool::new(false)));
        let died = dead.clone();
        tap.refuse(move |request| {
            if prevented(request) {
                died.store(true, Ordering::SeqCst);
                crash.cancel();
            }
            if request.is_write() && died.load(Ordering::SeqCst) {
                return Err("the process is dead".to_owned());
            }
            Ok(())
        });
        cluster.create(&claim("mine", "py")).await;
        controllers.ended().await;
        assert!(dead.load(Ordering::SeqCst));
        let bound = cluster.get::<api::SandboxClaim>("mine").await.unwrap();
        assert_eq!(bound.labels()[labels::ASSIGNED_SANDBOX_NAME], warm);
        assert!(bound.status.is_none());
        let sandbox = cluster.get::<Sandbox>(&warm).await.unwrap();
        assert_eq!(
            controller_of(&sandbox.metadata).unwrap().kind,
            owner_at_crash
        );

        cluster.create(&claim("rival", "py")).await;
        let controllers = cluster.controllers();
        let ready = cluster.claim_ready("mine").await;
        assert_eq!(cluster.sandbox_of(&ready).await.name_any(), warm);
        cluster.claim_ready("rival").await;
        assert_eq!(holders(&cluster).await.len(), 2);
        cluster.pool_ready("warm", 1).await;
        controllers.stop().await;
        cluster.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restarts_in_the_middle_of_a_burst_lose_and_double_nothing() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(10).await;
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
    eventually("the pool to have its size again", async || {
        (cluster.members("warm").await.len() == 10).then_some(())
    })
    .await;
    cluster.pool_ready("warm", 10).await;
    if let Some(controllers) = running {
        controllers.stop().await;
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_deleted_under_its_claims_takes_none_of_theirs() {
    let cluster = Cluster::start().await;
    let controllers = cluster.controllers();
    cluster.full_pool(10).await;
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
    cluster.full_pool(5).await;
    let begun = CancellationToken::new();
    // Clients create claims until the namespace refuses them.
    let clients = (0..4).map(|client| {
        let (claims, begun) = (cluster.api(), begun.clone());
        tokio::spawn(async move {
            for number in 0.. {
                let claim = claim(&format!("claim-{client}-{number}"), "py");
                if let Err(error) = claims.create(&PostParams::default(), &claim).await {
                    return error.to_string();
                }
                if number == 10 {
                    begun.cancel();
                }
            }
            unreachable!("the loop has no end")
        })
    });
    let clients: Vec<_> = clients.collect();
    begun.cancelled().await;
    let namespaces = Api::<Namespace>::all(cluster.client.clone());
    namespaces
        .delete(NAMESPACE, &DeleteParams::default())
        .await
        .unwrap();
    for client in join_all(clients).await {
        let refusal = client.unwrap();
        assert!(refusal.contains(NAMESPACE), "{refusal}");
    }
    eventually("the namespace to be gone", async || {
        let namespace = namespaces.get_opt(NAMESPACE).await.unwrap();
        namespace.is_none().then_some(())
    })
    .await;
    assert!(cluster.list::<Sandbox>().await.is_empty());
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cache_that_lags_is_no_proof_that_a_template_or_pool_is_missing() {
    let cluster = Cluster::start().await;
    let (tap, controllers) = cluster.tapped_controllers();
    cluster.create(&template("early")).await;
    cluster.create(&claim("first", "early")).await;
    cluster.claim_ready("first").await;
    // From here on the controllers see templates and pools only by GET requests.
    let kinds = ["/sandboxtemplates", "/sandboxwarmpools"];
    tap.refuse(move |seen| {
        if !seen.is_write() && kinds.iter().any(|kind| seen.path.ends_with(kind)) {
            return Err("the watch is broken".to_owned());
        }
        Ok(())
    });
    for kind in kinds {
        tap.break_watches(kind);
    }
    cluster.create(&template("late")).await;
    cluster.create(&pool("late", "late", 0)).await;
    cluster.create(&claim("by-template", "late")).await;
    cluster.create(&claim_from("by-pool", "late")).await;
    for name in ["by-template", "by-pool"] {
        cluster.claim_ready(name).await;
    }
    tap.forget();
    cluster.create(&claim("nowhere", "none")).await;
    cluster
        .claim_with("nowhere", "False", "TemplateNotFound")
        .await;
    let asks = |seen: &Seen| !seen.is_write() && seen.path.ends_with("/sandboxtemplates/none");
    assert!(tap.seen().iter().any(asks), "the server has confirmed it");
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_that_others_keep_changing_says_so_and_gets_its_sandbox_later() {
    let cluster = Cluster::start().await;
    let (tap, controllers) = cluster.tapped_controllers();
    cluster.full_pool(1).await;
    let conflict: Status = serde_json::from_value(json!({
        "status": "Failure", "reason": "Conflict", "code": 409, "message": "the object has been modified",
    }))
    .unwrap();
    let binds = |seen: &Seen| seen.is_write() && seen.path.ends_with("/sandboxclaims/mine");
    tap.answer(move |seen| binds(seen).then(|| conflict.clone()));
    cluster.create(&claim("mine", "py")).await;
    let waiting = cluster
        .claim_with("mine", "False", "AdoptionConflict")
        .await;
    assert!(message_of(&waiting).contains("keep changing"));
    let seen = tap.seen();
    let published = seen.iter().position(publishes).unwrap();
    let attempts = seen[..published].iter().filter(|seen| binds(seen)).count();
    assert_eq!(attempts, 3);
    tap.refuse_nothing();
    cluster.claim_ready("mine").await;
    assert_eq!(holders(&cluster).await.len(), 1);
    controllers.stop().await;
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_policy_that_older_controllers_made_for_a_claim_goes_and_a_users_stays() {
    let cluster = Cluster::start().await;
    let policy = |claim: &str| -> NetworkPolicy {
        serde_json::from_value(json!({
            "metadata": { "name": format!("{claim}-network-policy") },
            "spec": { "podSelector": {} },
        }))
        .unwrap()
    };
    let old = cluster.create(&claim("old", "py")).await;
    let mut made = policy("old");
    made.metadata.owner_references = Some(vec![controller_reference(&old)]);
    cluster.create(&made).await;
    cluster.create(&policy("users")).await;
    cluster.create(&claim("users", "py")).await;
    let controllers = cluster.controllers();
    cluster.create(&template("py")).await;
    for name in ["old", "users"] {
        cluster.claim_ready(name).await;
    }
    cluster.gone::<NetworkPolicy>("old-network-policy").await;
    let users = cluster.get::<NetworkPolicy>("users-network-policy").await;
    assert!(users.is_some());
    controllers.stop().await;
    cluster.stop().await;
}
