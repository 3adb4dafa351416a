//! The controller process against a real API server: leader election and shutdown.

use std::sync::Arc;
use std::time::Duration;

use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxSpec};
use clap::Parser;
use controllers::clock::Clock;
use controllers::manager::lease::{Candidate, LEASE_NAME, Timing};
use controllers::manager::{self, Args};
use controllers::metrics::{BuildInfo, Metrics};
use k8s_openapi::api::coordination::v1::Lease;
use kube::Client;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;
use testkit::{Cluster, FakeNode, Tap, eventually};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

#[derive(Debug, Parser)]
struct Program {
    #[command(flatten)]
    args: Args,
}

fn args() -> Args {
    let line = [
        "controller",
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
        "--leader-election-namespace=default",
    ];
    Program::parse_from(line).args
}

/// Renews and polls often, so that the test is quick; expires late, so that no result is due to expiry.
fn timing() -> Timing {
    Timing {
        lease_duration: Duration::from_secs(600),
        renew_deadline: Duration::from_secs(300),
        renew_interval: Duration::from_millis(20),
        retry_interval: Duration::from_millis(20),
    }
}

type Replica = JoinHandle<Result<(), manager::Error>>;

fn start(client: Client, shutdown: &CancellationToken) -> Replica {
    start_counted(
        client,
        &Arc::new(Metrics::new("", BuildInfo::UNKNOWN)),
        shutdown,
    )
}

fn start_counted(client: Client, metrics: &Arc<Metrics>, shutdown: &CancellationToken) -> Replica {
    let (metrics, shutdown) = (Arc::clone(metrics), shutdown.clone());
    tokio::spawn(async move {
        manager::serve_and_run(client, metrics, &args(), shutdown, timing()).await
    })
}

/// The value of the leader election metric.
fn says_it_leads(metrics: &Metrics) -> Option<bool> {
    let text = metrics.exposition();
    let line = text
        .lines()
        .find(|line| line.starts_with("leader_election_master_status{"))?;
    Some(line.ends_with(" 1"))
}

async fn holder(cluster: &Cluster) -> Option<String> {
    let lease = cluster.api::<Lease>().get_opt(LEASE_NAME).await;
    let lease = lease.expect("the lease is read")?;
    let holder = lease.spec?.holder_identity?;
    (!holder.is_empty()).then_some(holder)
}

async fn until_ready(cluster: &Cluster, name: &str) {
    cluster
        .until(name, "to be ready", |sandbox: &Sandbox| {
            let status = sandbox.status.clone().unwrap_or_default();
            conditions::is_true(&status.conditions, ConditionType::Ready)
        })
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_takes_over_as_soon_as_the_leader_stops() {
    let cluster = Cluster::start().await;
    let _node = FakeNode::start(cluster.client());
    let stop_first = CancellationToken::new();
    let metrics = Arc::new(Metrics::new("", BuildInfo::UNKNOWN));
    let first = start_counted(cluster.client(), &metrics, &stop_first);
    let first_holder = eventually("a leader", async || holder(&cluster).await).await;
    let (tap, client) = Tap::on(cluster.client());
    let stop_second = CancellationToken::new();
    let standby = Arc::new(Metrics::new("", BuildInfo::UNKNOWN));
    let second = start_counted(client, &standby, &stop_second);
    cluster
        .create_sandbox("early", SandboxSpec::default())
        .await;
    until_ready(&cluster, "early").await;
    let stands_by = eventually("the standby to say whether it leads", async || {
        says_it_leads(&standby)
    });
    assert!(!stands_by.await);
    assert_eq!(tap.writes("/").len(), 0, "a standby writes nothing");
    assert_eq!(says_it_leads(&metrics), Some(true));

    stop_first.cancel();
    first.await.unwrap().unwrap();
    assert_eq!(says_it_leads(&metrics), Some(false));
    eventually("another leader", async || {
        holder(&cluster)
            .await
            .filter(|holder| *holder != first_holder)
    })
    .await;
    cluster.create_sandbox("late", SandboxSpec::default()).await;
    until_ready(&cluster, "late").await;

    stop_second.cancel();
    second.await.unwrap().unwrap();
    assert_eq!(holder(&cluster).await, None, "the lease is released");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_loses_its_lease_writes_nothing_more() {
    let cluster = Cluster::start().await;
    let (tap, client) = Tap::on(cluster.client());
    let replica = start(client, &CancellationToken::new());
    eventually("a leader", async || holder(&cluster).await).await;
    // In the middle of much work, another replica takes the lease.
    for number in 0..200 {
        let name = format!("work-{number}");
        cluster.create_sandbox(&name, SandboxSpec::default()).await;
    }
    let stolen = Patch::Merge(json!({"spec": {"holderIdentity": "someone-else"}}));
    let leases = cluster.api::<Lease>();
    leases
        .patch(LEASE_NAME, &PatchParams::default(), &stolen)
        .await
        .unwrap();
    let ended = replica.await.unwrap();
    assert!(matches!(ended, Err(manager::Error::LeaseLost)), "{ended:?}");

    let written = tap.writes("/").len();
    cluster
        .create_sandbox("afterwards", SandboxSpec::default())
        .await;
    for _ in 0..50 {
        cluster
            .api::<Sandbox>()
            .list(&ListParams::default())
            .await
            .unwrap();
    }
    assert_eq!(tap.writes("/").len(), written);
    assert_eq!(holder(&cluster).await.as_deref(), Some("someone-else"));
    cluster.stop().await;
}

#[tokio::test]
async fn a_start_that_waits_for_an_api_that_never_answers_is_ended_by_a_stop() {
    let silent = tower::service_fn(|_: http::Request<kube::client::Body>| {
        std::future::pending::<Result<http::Response<kube::client::Body>, kube::Error>>()
    });
    let shutdown = CancellationToken::new();
    let replica = start(Client::new(silent, "default"), &shutdown);
    shutdown.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(60), replica).await;
    ended
        .expect("a stop is honoured")
        .expect("the process does not panic")
        .expect("a stop is no failure");
}

/// A renewal that is cancelled by a stop may still be written, after the version that the leader knows.
#[tokio::test]
async fn a_lease_is_released_although_its_last_renewal_was_cancelled() {
    let cluster = Cluster::start().await;
    let candidate = |identity: &str| {
        let client = cluster.client();
        Candidate::new(
            client,
            "default",
            identity.into(),
            Clock::default(),
            timing(),
        )
    };
    let leader = candidate("leader");
    let leadership = leader.acquire().await;
    let renewed = Patch::Merge(json!({"spec": {"leaseDurationSeconds": 599}}));
    let leases = cluster.api::<Lease>();
    let params = PatchParams::default();
    leases.patch(LEASE_NAME, &params, &renewed).await.unwrap();
    leader.release(leadership).await;
    assert_eq!(holder(&cluster).await, None);

    let leadership = leader.acquire().await;
    let taken = Patch::Merge(json!({"spec": {"holderIdentity": "another"}}));
    leases.patch(LEASE_NAME, &params, &taken).await.unwrap();
    leader.release(leadership).await;
    assert_eq!(holder(&cluster).await.as_deref(), Some("another"));
}
