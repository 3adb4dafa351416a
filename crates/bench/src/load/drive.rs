//! Puts a load on an API: creates claims or sandboxes when they are due, waits until they are Ready, deletes them.
//!
//! The load is open-loop: objects are due at fixed times, whether or not earlier ones are Ready, and latency counts from the due time. So
//! a system that delays its clients does not look fast (coordinated omission). This module uses only the Kubernetes API.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use api::{Sandbox, SandboxClaim};
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use tokio::task::JoinSet;

use super::objects::{self, Loaded, NAME, Place};
use super::outcome::{Sample, Summary, all_met, checks, milliseconds};
use super::progress::Progress;
use super::recipe::{Makes, Recipe};
use crate::ready_times::ReadyTimes;

/// The timeout for filling a pool and for a round to become Ready.
pub const DEADLINE: Duration = Duration::from_secs(300);

/// The measurements of a load.
#[derive(Debug, Default)]
pub struct Driven {
    pub filled_pool_in: Duration,
    pub samples: Vec<Sample>,
    pub rounds: Vec<Summary>,
    /// The desired sandboxes of all autoscaled pools at the end.
    pub pool_at_end: Option<usize>,
}

/// Runs a recipe. Deletes everything that it created, also after an error.
pub async fn drive(place: &Place, recipe: &Recipe, progress: &Progress) -> anyhow::Result<Driven> {
    let driven = match recipe.makes {
        Makes::Claims => load::<SandboxClaim>(place, recipe, progress).await,
        Makes::Sandboxes => load::<Sandbox>(place, recipe, progress).await,
    };
    let removed = objects::remove_namespaces(place).await;
    let driven = driven?;
    removed?;
    Ok(driven)
}

async fn load<K: Loaded>(
    place: &Place,
    recipe: &Recipe,
    progress: &Progress,
) -> anyhow::Result<Driven> {
    let began = Instant::now();
    objects::prepare(place, recipe).await?;
    progress.say("filling the pool");
    objects::await_pools(place, recipe).await?;
    let filled_pool_in = began.elapsed();
    let driven = Driver::<K>::new(place, recipe, progress).run().await?;
    Ok(Driven {
        filled_pool_in,
        pool_at_end: objects::desired_replicas(place, recipe).await?,
        ..driven
    })
}

struct Driver<'a, K> {
    place: &'a Place,
    recipe: &'a Recipe,
    progress: &'a Progress,
    /// One for each namespace. Objects are distributed round-robin.
    apis: Vec<Api<K>>,
    ready_times: Arc<ReadyTimes>,
    began: Instant,
    made: usize,
    _following: JoinSet<()>,
}

/// A claim or sandbox that was due.
struct Due {
    index: usize,
    at: Instant,
    was_made: bool,
}

impl Due {
    fn name(&self) -> String {
        name(self.index)
    }
}

/// The name of an object. It is unique over all namespaces.
fn name(index: usize) -> String {
    format!("{NAME}-{index}")
}

impl<'a, K: Loaded> Driver<'a, K> {
    fn new(place: &'a Place, recipe: &'a Recipe, progress: &'a Progress) -> Self {
        let namespaces = place.namespaces.iter();
        let apis: Vec<Api<K>> = namespaces
            .map(|namespace| Api::namespaced(place.client.clone(), namespace))
            .collect();
        let ready_times = Arc::new(ReadyTimes::default());
        let mut following = JoinSet::new();
        for api in &apis {
            following.spawn(Arc::clone(&ready_times).follow(api.clone()));
        }
        Self {
            place,
            recipe,
            progress,
            apis,
            ready_times,
            began: Instant::now(),
            made: 0,
            _following: following,
        }
    }

    async fn run(&mut self) -> anyhow::Result<Driven> {
        let mut driven = Driven::default();
        for round in 0..self.recipe.rounds {
            if round > 0 {
                tokio::time::sleep(Duration::from_secs_f64(self.recipe.pause_s)).await;
            }
            let due = self.make(self.recipe.claims_in(round)).await?;
            self.await_all(&due).await;
            let samples: Vec<Sample> = due.iter().map(|one| self.sample(round, one)).collect();
            let summary = Summary::of(&samples);
            self.progress.round(round + 1, &summary);
            let checks = checks(&summary, self.recipe.makes, &self.recipe.bounds);
            driven.rounds.push(summary);
            driven.samples.extend(samples);
            // A growing load deletes the claims of each round, and ends at the first round that misses a bound.
            if self.recipe.doubles {
                self.delete(due.iter().map(|one| one.index)).await?;
                if !all_met(&checks) {
                    break;
                }
            }
        }
        if !self.recipe.doubles {
            self.progress.say("deleting");
            self.delete(0..self.made).await?;
        }
        Ok(driven)
    }

    fn api(&self, index: usize) -> Api<K> {
        self.apis[index % self.apis.len()].clone()
    }

    /// Creates objects at the recipe's rate.
    async fn make(&mut self, count: usize) -> anyhow::Result<Vec<Due>> {
        let mut requests = JoinSet::new();
        let start = Instant::now();
        let interval = Duration::from_secs_f64(self.recipe.claims_per_second.recip());
        for position in 0..count {
            let position = u32::try_from(position).context("too many claims")?;
            let at = start + interval * position;
            tokio::time::sleep_until(at.into()).await;
            let index = self.made;
            self.made += 1;
            let object = K::load(&name(index), self.recipe, self.place)?;
            let (api, ready_times) = (self.api(index), Arc::clone(&self.ready_times));
            let kept_for = self.recipe.kept_for_s.map(Duration::from_secs_f64);
            requests.spawn(async move {
                let made = api.create(&PostParams::default(), &object).await;
                let was_made = match made {
                    Ok(_) => true,
                    Err(error) => {
                        tracing::warn!(%error, name = name(index), "cannot create an object");
                        false
                    }
                };
                if let (true, Some(kept_for)) = (was_made, kept_for) {
                    delete_later(api, ready_times, name(index), kept_for);
                }
                Due {
                    index,
                    at,
                    was_made,
                }
            });
            self.progress.made(1);
        }
        let mut due = Vec::with_capacity(count);
        while let Some(made) = requests.join_next().await {
            due.push(made.context("a client ended unexpectedly")?);
        }
        due.sort_by_key(|one| one.at);
        Ok(due)
    }

    async fn await_all(&self, due: &[Due]) {
        let made = due.iter().filter(|one| one.was_made);
        let names: Vec<String> = made.map(Due::name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        self.ready_times.wait_for(&names, DEADLINE).await;
    }

    fn sample(&self, round: usize, due: &Due) -> Sample {
        let ready = self.ready_times.of(&due.name());
        Sample {
            round,
            due_s: due.at.duration_since(self.began).as_secs_f64(),
            latency_ms: ready.map(|ready| milliseconds(ready.duration_since(due.at))),
        }
    }

    /// Deletes objects at the recipe's rate. A missing object counts as deleted.
    async fn delete(&self, indices: impl Iterator<Item = usize>) -> anyhow::Result<()> {
        let interval = Duration::from_secs_f64(self.recipe.deletions_per_second.recip());
        let mut due = Instant::now();
        let mut requests = JoinSet::new();
        for index in indices {
            tokio::time::sleep_until(due.into()).await;
            due += interval;
            let api = self.api(index);
            requests.spawn(async move { delete(&api, &name(index)).await });
        }
        while let Some(deleted) = requests.join_next().await {
            deleted.context("a client ended unexpectedly")??;
        }
        Ok(())
    }
}

/// Deletes an object after it was Ready for `kept_for`.
fn delete_later<K: Loaded>(
    api: Api<K>,
    ready_times: Arc<ReadyTimes>,
    name: String,
    kept_for: Duration,
) {
    tokio::spawn(async move {
        ready_times.wait_for(&[&name], DEADLINE).await;
        tokio::time::sleep(kept_for).await;
        if let Err(error) = delete(&api, &name).await {
            tracing::warn!(%error, name, "cannot delete an object");
        }
    });
}

async fn delete<K: Loaded>(api: &Api<K>, name: &str) -> anyhow::Result<()> {
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot delete {name}")),
    }
}
