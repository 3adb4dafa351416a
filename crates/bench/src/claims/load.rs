//! The ways to create claims: one after the other, all at once, by clients that each wait for their last claim (closed loop), and at a
//! steady rate (open loop).

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use api::claim::WarmPoolRef;
use api::{SandboxClaim, SandboxClaimSpec};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::PostParams;
use kube::{Api, Client};

use super::measurement::POOL;
use super::ready_watch::ReadyWatch;
use super::report::Latencies;

/// The timeout for a claim to become Ready.
const DEADLINE: Duration = Duration::from_secs(120);

/// A client that creates claims in a namespace and waits for them. Clones share one watch.
#[derive(Clone)]
pub(super) struct Claimant {
    pub client: Client,
    namespace: String,
    watch: Arc<ReadyWatch>,
}

/// The measurements of a load.
#[derive(Debug, Default)]
pub(super) struct Met {
    pub latencies: Latencies,
    /// From the first request until the last claim was Ready.
    pub took: Duration,
}

impl Claimant {
    pub fn start(client: Client, namespace: &str) -> Self {
        Self {
            watch: Arc::new(ReadyWatch::start(client.clone(), namespace)),
            client,
            namespace: namespace.to_owned(),
        }
    }

    /// Creates each claim when the one before it is Ready.
    pub async fn one_by_one(&self, count: usize) -> anyhow::Result<Met> {
        let started = Instant::now();
        let mut met = Met::default();
        for index in 0..count {
            let asked = Instant::now();
            let ready = self.claim(format!("one-{index}")).await?;
            met.latencies.extend([ready - asked]);
        }
        met.took = started.elapsed();
        Ok(met)
    }

    /// Creates all claims at once.
    pub async fn at_once(&self, count: usize) -> anyhow::Result<Met> {
        self.closed_loop("burst", count, count).await
    }

    /// Runs this number of clients, each of which creates its next claim when its last is Ready.
    pub async fn sustained(&self, count: usize, clients: usize) -> anyhow::Result<Met> {
        self.closed_loop("sustained", count, clients).await
    }

    async fn closed_loop(&self, name: &str, count: usize, clients: usize) -> anyhow::Result<Met> {
        let started = Instant::now();
        let outcomes: Vec<(Instant, Instant)> = stream::iter(0..count)
            .map(|index| {
                let (claimant, name) = (self.clone(), format!("{name}-{index}"));
                spawned(async move {
                    let asked = Instant::now();
                    let ready = claimant.claim(name).await?;
                    Ok((asked, ready))
                })
            })
            .buffer_unordered(clients.max(1))
            .try_collect()
            .await?;
        Ok(met(started, &outcomes))
    }

    /// Creates claims at a rate, whether or not earlier ones are Ready. The time of each counts from when it was due, so that a
    /// system that falls behind does not look fast.
    pub async fn at_rate(&self, count: usize, per_second: u32) -> anyhow::Result<Met> {
        let started = Instant::now();
        let interval = Duration::from_secs(1) / per_second.max(1);
        let mut tasks = Vec::with_capacity(count);
        for index in 0..count {
            let due = started + interval * u32::try_from(index).unwrap_or(u32::MAX);
            tokio::time::sleep_until(due.into()).await;
            let (claimant, name) = (self.clone(), format!("rate-{index}"));
            tasks.push(spawned(async move {
                let ready = claimant.claim(name).await?;
                Ok((due, ready))
            }));
        }
        let outcomes = futures::future::try_join_all(tasks).await?;
        Ok(met(started, &outcomes))
    }

    /// Creates a claim and returns when it was seen Ready.
    async fn claim(&self, name: String) -> anyhow::Result<Instant> {
        let ready = self.watch.expect(&name);
        let claim = SandboxClaim::new(
            &name,
            SandboxClaimSpec {
                warm_pool_ref: Some(WarmPoolRef {
                    name: POOL.to_owned(),
                }),
                ..SandboxClaimSpec::default()
            },
        );
        Api::namespaced(self.client.clone(), &self.namespace)
            .create(&PostParams::default(), &claim)
            .await
            .context("cannot create a claim")?;
        let ready = tokio::time::timeout(DEADLINE, ready).await;
        let ready = ready.ok().and_then(Result::ok);
        ready.ok_or_else(|| anyhow!("claim {name:?} did not become Ready within {DEADLINE:?}"))
    }
}

/// Runs a client as a task.
fn spawned<T: Send + 'static>(
    work: impl Future<Output = anyhow::Result<T>> + Send + 'static,
) -> impl Future<Output = anyhow::Result<T>> {
    let task = tokio::spawn(work);
    async move { task.await? }
}

fn met(started: Instant, outcomes: &[(Instant, Instant)]) -> Met {
    let mut latencies = Latencies::default();
    latencies.extend(outcomes.iter().map(|(asked, ready)| *ready - *asked));
    let last = outcomes.iter().map(|(_, ready)| *ready).max();
    Met {
        latencies,
        took: last.map_or(Duration::ZERO, |last| last - started),
    }
}
