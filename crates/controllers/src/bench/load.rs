//! The ways in which claims are made: one after the other, all at once, by clients who each wait before they ask again, and at a
//! steady rate whether or not earlier ones were met.

use std::time::{Duration, Instant};

use api::claim::WarmPoolRef;
use api::{SandboxClaim, SandboxClaimSpec};
use futures::{StreamExt, TryStreamExt, stream};
use kube::api::PostParams;
use kube::{Api, Client};

use super::arrivals::Arrivals;
use super::report::Latencies;
use super::{Error, POOL, request};

/// How long a claim may take before the measurement is given up.
const DEADLINE: Duration = Duration::from_secs(120);

/// Somebody who makes claims and sees them met.
#[derive(Clone)]
pub(super) struct Claimant {
    pub client: Client,
    pub namespace: String,
    pub arrivals: Arrivals,
}

/// What a load measured.
#[derive(Debug, Default)]
pub(super) struct Met {
    pub latencies: Latencies,
    /// From the first request until the last claim was Ready.
    pub took: Duration,
}

impl Claimant {
    /// Each claim is made when the one before it is Ready.
    pub async fn one_by_one(&self, count: usize) -> Result<Met, Error> {
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

    /// Every claim is made as soon as the API server takes it.
    pub async fn at_once(&self, count: usize) -> Result<Met, Error> {
        self.closed_loop("burst", count, count).await
    }

    /// So many clients, each of whom makes its next claim when its last is Ready.
    pub async fn sustained(&self, count: usize, clients: usize) -> Result<Met, Error> {
        self.closed_loop("sustained", count, clients).await
    }

    async fn closed_loop(&self, name: &str, count: usize, clients: usize) -> Result<Met, Error> {
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

    /// Claims come at a rate, whatever becomes of those before. Each one's time counts from when it was due, so that a system
    /// that falls behind does not look better for it.
    pub async fn at_rate(&self, count: usize, per_second: u32) -> Result<Met, Error> {
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

    /// Makes a claim and answers when it was seen Ready.
    async fn claim(&self, name: String) -> Result<Instant, Error> {
        let arrival = self.arrivals.expect(&name);
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
            .map_err(|source| request("create a claim", source))?;
        let late = || Error::ClaimNotReady {
            name: name.clone(),
            after: DEADLINE,
        };
        tokio::time::timeout(DEADLINE, arrival)
            .await
            .map_err(|_| late())?
            .map_err(|_| late())
    }
}

/// Starts a client: each is a task of its own, as clients are.
fn spawned<T: Send + 'static>(
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> impl Future<Output = Result<T, Error>> {
    let task = tokio::spawn(work);
    async move {
        task.await
            .unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }
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
