//! Puts a load on an API: makes claims when they are due, sees them become Ready, deletes them.
//!
//! Claims are due by the clock, whether or not those before them have been met, and latency counts from when a claim was due: a
//! system that slows its clients down does not look fast for it. It knows only the Kubernetes API.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use api::{SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::wait::await_condition;
use kube::{Api, Client};
use serde_json::json;
use tokio::task::JoinSet;

use super::outcome::{Sample, Summary, all_met, checks, milliseconds};
use super::progress::Progress;
use super::recipe::Recipe;
use crate::arrivals::Arrivals;

/// What the template and the pool are called.
const NAME: &str = "load";
/// How long a pool may take to fill, and a round to be met, before claims count as unmet.
const DEADLINE: Duration = Duration::from_secs(300);

/// Where the load goes.
#[derive(Clone)]
pub struct Place {
    pub client: Client,
    pub namespace: String,
    /// The image and command of the sandboxes.
    pub image: String,
    pub command: Vec<String>,
}

/// What came of it.
#[derive(Debug)]
pub struct Driven {
    pub filled_pool_in: Duration,
    pub samples: Vec<Sample>,
    pub rounds: Vec<Summary>,
}

/// Carries a recipe out. What it made is deleted afterwards, whatever came of it.
pub async fn drive(place: &Place, recipe: &Recipe, progress: &Progress) -> anyhow::Result<Driven> {
    let driven = match Driver::prepare(place, recipe, progress).await {
        Ok(mut prepared) => prepared.run().await,
        Err(error) => Err(error),
    };
    let removed = remove_namespace(place).await;
    let driven = driven?;
    removed?;
    Ok(driven)
}

struct Driver<'a> {
    recipe: &'a Recipe,
    progress: &'a Progress,
    claims: Api<SandboxClaim>,
    arrivals: Arc<Arrivals>,
    filled_pool_in: Duration,
    began: Instant,
    made: usize,
    _following: JoinSet<()>,
}

/// A claim that was due.
struct Due {
    name: String,
    at: Instant,
    was_made: bool,
}

impl<'a> Driver<'a> {
    async fn prepare(
        place: &Place,
        recipe: &'a Recipe,
        progress: &'a Progress,
    ) -> anyhow::Result<Self> {
        create_namespace(place).await?;
        let began = Instant::now();
        create_template_and_pool(place, recipe).await?;
        progress.say("filling the pool");
        await_pool(place, recipe).await?;
        let filled_pool_in = began.elapsed();
        let claims = Api::namespaced(place.client.clone(), &place.namespace);
        let arrivals = Arc::new(Arrivals::default());
        let mut following = JoinSet::new();
        following.spawn(Arc::clone(&arrivals).follow(claims.clone()));
        Ok(Self {
            recipe,
            progress,
            claims,
            arrivals,
            filled_pool_in,
            began: Instant::now(),
            made: 0,
            _following: following,
        })
    }

    async fn run(&mut self) -> anyhow::Result<Driven> {
        let mut driven = Driven {
            filled_pool_in: self.filled_pool_in,
            samples: Vec::new(),
            rounds: Vec::new(),
        };
        for round in 0..self.recipe.rounds {
            if round > 0 {
                tokio::time::sleep(Duration::from_secs_f64(self.recipe.pause_s)).await;
            }
            let due = self.make_claims(self.recipe.claims_in(round)).await?;
            self.await_all(&due).await;
            let samples: Vec<Sample> = due.iter().map(|claim| self.sample(round, claim)).collect();
            let summary = Summary::of(&samples);
            self.progress.round(round + 1, &summary);
            let within_bounds = all_met(&checks(&summary, &self.recipe.bounds));
            driven.rounds.push(summary);
            driven.samples.extend(samples);
            // A load that grows has found its end, and its claims make room for the next.
            if self.recipe.doubles {
                let names = due.into_iter().map(|claim| claim.name).collect();
                self.delete(names).await?;
                if !within_bounds {
                    break;
                }
            }
        }
        if !self.recipe.doubles {
            self.progress.say("deleting the claims");
            self.delete(self.arrivals.names()).await?;
        }
        Ok(driven)
    }

    /// Makes claims at the recipe's rate.
    async fn make_claims(&mut self, count: usize) -> anyhow::Result<Vec<Due>> {
        let mut requests = JoinSet::new();
        let start = Instant::now();
        let interval = Duration::from_secs_f64(self.recipe.claims_per_second.recip());
        for index in 0..count {
            let index_in_time = u32::try_from(index).context("more claims than can be counted")?;
            let at = start + interval * index_in_time;
            tokio::time::sleep_until(at.into()).await;
            let name = format!("{NAME}-{}", self.made);
            self.made += 1;
            let claim = self.claim(&name)?;
            let (claims, arrivals) = (self.claims.clone(), Arc::clone(&self.arrivals));
            let kept_for = self.recipe.kept_for_s.map(Duration::from_secs_f64);
            requests.spawn(async move {
                let made = claims.create(&PostParams::default(), &claim).await;
                let was_made = match made {
                    Ok(_) => true,
                    Err(error) => {
                        tracing::warn!(%error, name, "cannot make a claim");
                        false
                    }
                };
                if let (true, Some(kept_for)) = (was_made, kept_for) {
                    delete_later(claims, arrivals, name.clone(), kept_for);
                }
                Due { name, at, was_made }
            });
            self.progress.made(1);
        }
        let mut due = Vec::with_capacity(count);
        while let Some(made) = requests.join_next().await {
            due.push(made.context("a client ended unexpectedly")?);
        }
        due.sort_by_key(|claim| claim.at);
        Ok(due)
    }

    fn claim(&self, name: &str) -> anyhow::Result<SandboxClaim> {
        let spec = if self.recipe.pool > 0 {
            json!({ "warmPoolRef": { "name": NAME } })
        } else {
            json!({ "sandboxTemplateRef": { "name": NAME }, "warmpool": "none" })
        };
        let claim = json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "kind": "SandboxClaim",
            "metadata": { "name": name },
            "spec": spec,
        });
        Ok(serde_json::from_value(claim)?)
    }

    async fn await_all(&self, due: &[Due]) {
        let names = due
            .iter()
            .filter(|claim| claim.was_made)
            .map(|claim| claim.name.as_str());
        let names: Vec<&str> = names.collect();
        self.arrivals.wait_for(&names, DEADLINE).await;
    }

    fn sample(&self, round: usize, claim: &Due) -> Sample {
        let ready = self.arrivals.of(&claim.name);
        Sample {
            round,
            due_s: claim.at.duration_since(self.began).as_secs_f64(),
            latency_ms: ready.map(|ready| milliseconds(ready.duration_since(claim.at))),
        }
    }

    /// Deletes claims at the recipe's rate. One that is gone already is deleted.
    async fn delete(&self, names: Vec<String>) -> anyhow::Result<()> {
        let interval = Duration::from_secs_f64(self.recipe.deletions_per_second.recip());
        let mut due = Instant::now();
        let mut requests = JoinSet::new();
        for name in names {
            tokio::time::sleep_until(due.into()).await;
            due += interval;
            let claims = self.claims.clone();
            requests.spawn(async move { delete(&claims, &name).await });
        }
        while let Some(deleted) = requests.join_next().await {
            deleted.context("a client ended unexpectedly")??;
        }
        Ok(())
    }
}

/// Deletes a claim some time after it is Ready.
fn delete_later(
    claims: Api<SandboxClaim>,
    arrivals: Arc<Arrivals>,
    name: String,
    kept_for: Duration,
) {
    tokio::spawn(async move {
        arrivals.wait_for(&[&name], DEADLINE).await;
        tokio::time::sleep(kept_for).await;
        if let Err(error) = delete(&claims, &name).await {
            tracing::warn!(%error, name, "cannot delete a claim");
        }
    });
}

async fn delete(claims: &Api<SandboxClaim>, name: &str) -> anyhow::Result<()> {
    match claims.delete(name, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot delete claim {name}")),
    }
}

async fn create_namespace(place: &Place) -> anyhow::Result<()> {
    let mut namespace = Namespace::default();
    namespace.metadata.name = Some(place.namespace.clone());
    Api::<Namespace>::all(place.client.clone())
        .create(&PostParams::default(), &namespace)
        .await
        .with_context(|| {
            format!(
                "cannot create namespace {}; the load makes one of its own, so that all of it can be removed",
                place.namespace
            )
        })?;
    Ok(())
}

async fn remove_namespace(place: &Place) -> anyhow::Result<()> {
    let namespaces = Api::<Namespace>::all(place.client.clone());
    match namespaces
        .delete(&place.namespace, &DeleteParams::default())
        .await
    {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
        Err(error) => {
            return Err(error)
                .with_context(|| format!("cannot remove namespace {}", place.namespace));
        }
    }
    let gone = await_condition(
        namespaces,
        &place.namespace,
        |namespace: Option<&Namespace>| namespace.is_none(),
    );
    tokio::time::timeout(DEADLINE, gone)
        .await
        .with_context(|| format!("namespace {} does not go", place.namespace))??;
    Ok(())
}

async fn create_template_and_pool(place: &Place, recipe: &Recipe) -> anyhow::Result<()> {
    let params = PostParams::default();
    let container = json!({ "name": "main", "image": place.image, "command": place.command });
    let template: SandboxTemplate = serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": { "name": NAME },
        "spec": { "podTemplate": { "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
        } } },
    }))?;
    Api::namespaced(place.client.clone(), &place.namespace)
        .create(&params, &template)
        .await
        .context("cannot create the template")?;
    if recipe.pool > 0 {
        let pool: SandboxWarmPool = serde_json::from_value(json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
            "kind": "SandboxWarmPool",
            "metadata": { "name": NAME },
            "spec": { "replicas": recipe.pool, "sandboxTemplateRef": { "name": NAME } },
        }))?;
        Api::namespaced(place.client.clone(), &place.namespace)
            .create(&params, &pool)
            .await
            .context("cannot create the pool")?;
    }
    Ok(())
}

async fn await_pool(place: &Place, recipe: &Recipe) -> anyhow::Result<()> {
    if recipe.pool == 0 {
        return Ok(());
    }
    let pools: Api<SandboxWarmPool> = Api::namespaced(place.client.clone(), &place.namespace);
    let is_full = |pool: Option<&SandboxWarmPool>| {
        pool.and_then(|pool| pool.status.as_ref())
            .and_then(|status| usize::try_from(status.ready_replicas).ok())
            .is_some_and(|ready| ready >= recipe.pool)
    };
    tokio::time::timeout(DEADLINE, await_condition(pools, NAME, is_full))
        .await
        .with_context(|| {
            format!(
                "the pool of {} did not fill within {DEADLINE:?}",
                recipe.pool
            )
        })??;
    Ok(())
}
