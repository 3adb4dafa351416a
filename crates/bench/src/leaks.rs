//! `bench leaks`: creates and deletes many claims, and checks that the controllers hold nothing of them afterwards.
//!
//! The check compares, before and after: the number of entries of every data structure of the controllers, as their metrics report it;
//! the series of these metrics; and the memory of the process. Bounded structures fill up once (the history for watches, remembered
//! deletions, pages of the allocator), so a warm-up creates and deletes claims until memory is level. Memory that never becomes level is
//! a leak, too.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::bail;
use api::conditions::{self, ConditionType};
use api::{Sandbox, SandboxClaim};
use apiserver::store::Window;
use controllers::metrics::Metrics;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::events::v1::Event;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use serde_json::json;

use crate::fake_cluster::{self, FakeCluster};
use crate::kinds;

const NAMESPACE: &str = "default";
/// Claims that exist at a time: a tenth of all claims, within these bounds.
const SMALLEST_WAVE: usize = 50;
const LARGEST_WAVE: usize = 500;
/// Concurrent requests.
const CONCURRENCY: usize = 64;
const POOL: usize = 50;
/// The timeout for a wave of claims to become Ready, and to be gone.
const DEADLINE: Duration = Duration::from_secs(300);
/// The variation of memory between two equal waves.
const MEMORY_SLACK: f64 = 16.0 * MEBIBYTE;
/// Memory counts as level after this number of consecutive waves without a new maximum.
const LEVEL_WAVES: usize = 4;
/// A new maximum exceeds the old one by more than this.
const STEP: f64 = 2.0 * MEBIBYTE;
/// Memory must be level after this number of waves.
const WARM_UP_WAVES: usize = 40;
const MEBIBYTE: f64 = 1024.0 * 1024.0;
/// The history that watches resume from. It is small, so that it is full before the comparison begins.
const HISTORY: Window = Window {
    events_per_kind: 2_048,
    bytes: 8 << 20,
    age: Duration::from_secs(60),
};
/// Metrics by the result of requests: few series, of which some appear at the first failed request.
const BY_OUTCOME: [&str; 2] = [
    "agent_sandbox_api_requests_total{",
    "rest_client_requests_total{",
];
/// Metrics by the way in which claims got their sandbox, some of which occur only on a busy machine; and the most series of one template and
/// one pool.
const BY_LAUNCH: [(&str, usize); 2] = [
    ("agent_sandbox_claim_creation_total{", 8),
    ("agent_sandbox_claim_warm_misses_total{", 1),
];
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// One of this number of waves reuses the names of earlier claims.
const WAVES_TO_A_REPEATED_ONE: usize = 4;

/// The most entries of an idle queue: the periodic reconcile of the pool.
const MOST_QUEUED: usize = 1;

/// The values to compare.
#[derive(Debug)]
struct Census {
    entries: BTreeMap<String, f64>,
    series: BTreeSet<String>,
    resident_bytes: f64,
}

impl Census {
    fn take(metrics: &Metrics) -> Self {
        let text = metrics.exposition();
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let samples = samples.filter_map(|line| line.rsplit_once(' '));
        let samples: Vec<(&str, f64)> = samples
            .filter_map(|(series, value)| Some((series, value.parse().ok()?)))
            .collect();
        let process = telemetry::process::render();
        let resident_bytes = process
            .lines()
            .find_map(|line| line.strip_prefix("process_resident_memory_bytes "))
            .and_then(|value| value.parse().ok())
            .unwrap_or(f64::NAN);
        Self {
            entries: samples
                .iter()
                .filter(|(series, _)| series.starts_with("agent_sandbox_controller_entries{"))
                .map(|(series, value)| ((*series).to_owned(), *value))
                .collect(),
            series: samples
                .iter()
                .filter(|(series, _)| !BY_OUTCOME.iter().any(|family| series.starts_with(family)))
                .map(|(series, _)| (*series).to_owned())
                .collect(),
            resident_bytes,
        }
    }

    /// Whether the queues are idle, and the caches hold only the sandboxes of the pool, all Ready. Sandboxes that are not Ready have a
    /// series of their own.
    fn is_settled(&self) -> bool {
        let is_of_unready = |series: &String| {
            series.starts_with("agent_sandboxes{") && series.contains("ready_condition=\"false\"")
        };
        if self.series.iter().any(is_of_unready) {
            return false;
        }
        self.entries.iter().all(|(series, entries)| {
            if series.contains("structure=\"queue\"") {
                *entries <= bound_of(series)
            } else if series.contains("structure=\"expectation\"") {
                *entries < 1.0
            } else if series.contains("of=\"Sandbox\"") || series.contains("of=\"Pod\"") {
                entries.to_string() == POOL.to_string()
            } else {
                true
            }
        })
    }

    /// What grew.
    fn growth_since(&self, before: &Self) -> Vec<String> {
        let mut growth = Vec::new();
        for (what, count) in &self.entries {
            let earlier = before.entries.get(what).copied().unwrap_or_default();
            if *count > earlier.max(bound_of(what)) {
                growth.push(format!("{what} was {earlier} and is {count}"));
            }
        }
        let new = self.series.difference(&before.series);
        for series in new.filter(|series| !self.is_of_a_launch(series)) {
            growth.push(format!("a new series: {series}"));
        }
        if self.resident_bytes > before.resident_bytes + MEMORY_SLACK {
            growth.push(format!(
                "memory was {} MiB and is {} MiB",
                mebibytes(before.resident_bytes),
                mebibytes(self.resident_bytes)
            ));
        }
        growth
    }

    /// Whether a series belongs to [`BY_LAUNCH`], and its family has no more series than it may have.
    fn is_of_a_launch(&self, series: &str) -> bool {
        BY_LAUNCH.iter().any(|(family, most)| {
            let of_family = self.series.iter().filter(|one| one.starts_with(family));
            series.starts_with(family) && of_family.count() <= *most
        })
    }
}

/// The bound of a structure that keeps entries after claims are deleted.
fn bound_of(series: &str) -> f64 {
    let bound = if series.contains("structure=\"event_series\"") {
        controllers::events::REMEMBERED
    } else if series.contains("structure=\"warm_queue\"") {
        POOL
    } else if series.contains("structure=\"queue\"") {
        MOST_QUEUED
    } else {
        0
    };
    f64::from(u32::try_from(bound).unwrap_or(u32::MAX))
}

fn mebibytes(bytes: f64) -> String {
    format!("{:.0}", bytes / MEBIBYTE)
}

/// The maximum of memory, and the number of waves since it was reached.
#[derive(Debug, Default)]
struct Level {
    highest: f64,
    waves_below: usize,
}

impl Level {
    fn record(&mut self, resident_bytes: f64) {
        if resident_bytes > self.highest + STEP {
            self.highest = resident_bytes;
            self.waves_below = 0;
        } else {
            self.waves_below += 1;
        }
    }

    fn is_reached(&self) -> bool {
        self.waves_below >= LEVEL_WAVES
    }
}

/// Creates and deletes claims until memory is level, then `claims` more, and fails if anything grew.
pub async fn check(directory: &Path, claims: usize) -> anyhow::Result<()> {
    let server = apiserver::Server::open(apiserver::Config {
        window: HISTORY,
        ..apiserver::Config::new(directory)
    })
    .await?;
    let client = server.client();
    kinds::install(&client).await?;
    let metrics = fake_cluster::metrics();
    let cluster = FakeCluster::start(controllers::Parts {
        instrumentation: metrics.clone(),
        ..controllers::Parts::new(client.clone(), fake_cluster::with_extensions())
    });
    let compared = compare(&client, &metrics, claims).await;
    cluster.stop().await?;
    drop(client);
    server.shutdown().await;
    compared
}

async fn compare(client: &Client, metrics: &Metrics, claims: usize) -> anyhow::Result<()> {
    create_pool(client).await?;
    let largest = (claims / 10).clamp(SMALLEST_WAVE, LARGEST_WAVE);
    let before = warm_up(client, metrics, largest).await?;
    let started = Instant::now();
    let mut made = 0;
    for number in 0.. {
        if made >= claims {
            break;
        }
        let wave = largest.min(claims - made);
        pass_through(client, wave, Names::of_wave(number)).await?;
        settle(client, metrics).await?;
        made += wave;
    }
    let after = census_compared_with(metrics, &before).await;
    println!(
        "{claims} claims came and went in {:.0} s; series {} before and {} after; memory {} MiB before and {} MiB after",
        started.elapsed().as_secs_f64(),
        before.series.len(),
        after.series.len(),
        mebibytes(before.resident_bytes),
        mebibytes(after.resident_bytes),
    );
    let growth = after.growth_since(&before);
    if !growth.is_empty() {
        bail!(
            "something is left of claims that are gone:\n  {}",
            growth.join("\n  ")
        );
    }
    Ok(())
}

/// Takes a census as soon as nothing has grown, or after the deadline: a controller may not have seen the last deletions yet.
async fn census_compared_with(metrics: &Metrics, before: &Census) -> Census {
    let ends = Instant::now() + DEADLINE;
    loop {
        let census = Census::take(metrics);
        if census.growth_since(before).is_empty() || Instant::now() > ends {
            return census;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Runs waves of claims until memory is level. Returns the census at that time, with the maximum of memory.
async fn warm_up(client: &Client, metrics: &Metrics, wave: usize) -> anyhow::Result<Census> {
    let mut level = Level::default();
    for waves in 1..=WARM_UP_WAVES {
        pass_through(client, wave, Names::of_wave(waves)).await?;
        settle(client, metrics).await?;
        let census = Census::take(metrics);
        level.record(census.resident_bytes);
        if level.is_reached() {
            println!(
                "memory is level at {} MiB after {} claims",
                mebibytes(level.highest),
                waves * wave
            );
            return Ok(Census {
                resident_bytes: level.highest,
                ..census
            });
        }
    }
    bail!(
        "memory still grows after {} claims came and went: {} MiB",
        WARM_UP_WAVES * wave,
        mebibytes(level.highest)
    )
}

async fn create_pool(client: &Client) -> anyhow::Result<()> {
    let container = json!({ "name": "main", "image": "pretended" });
    let template = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate",
        "metadata": { "name": "leaks" },
        "spec": { "podTemplate": { "spec": { "containers": [container] } } },
    });
    let pool = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxWarmPool",
        "metadata": { "name": "leaks" },
        "spec": { "replicas": POOL, "sandboxTemplateRef": { "name": "leaks" } },
    });
    let params = PostParams::default();
    Api::<api::SandboxTemplate>::namespaced(client.clone(), NAMESPACE)
        .create(&params, &serde_json::from_value(template)?)
        .await?;
    Api::<api::SandboxWarmPool>::namespaced(client.clone(), NAMESPACE)
        .create(&params, &serde_json::from_value(pool)?)
        .await?;
    Ok(())
}

/// The names of the claims of a wave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Names {
    /// New names.
    Fresh,
    /// The names of an earlier wave, whose claims are deleted.
    Again,
}

impl Names {
    fn of_wave(number: usize) -> Self {
        if number.is_multiple_of(WAVES_TO_A_REPEATED_ONE) {
            Self::Again
        } else {
            Self::Fresh
        }
    }
}

/// Creates a wave of claims, waits until they are Ready, and deletes them. Half of them start without a warm pool.
async fn pass_through(client: &Client, wave: usize, names: Names) -> anyhow::Result<()> {
    let api = Api::<SandboxClaim>::namespaced(client.clone(), NAMESPACE);
    stream::iter(0..wave)
        .map(|number| {
            let api = api.clone();
            async move { create(&api, number, names).await }
        })
        .buffer_unordered(CONCURRENCY)
        .try_collect::<()>()
        .await?;
    let poll = Poll::until("all claims of a wave to be Ready");
    while ready(&api).await? < wave {
        poll.step().await?;
    }
    api.delete_collection(&DeleteParams::default(), &ListParams::default())
        .await?;
    let poll = Poll::until("a wave to be gone");
    while count(&api).await? > 0 {
        poll.step().await?;
    }
    // Events would expire only after an hour.
    Api::<Event>::namespaced(client.clone(), NAMESPACE)
        .delete_collection(&DeleteParams::default(), &ListParams::default())
        .await?;
    Ok(())
}

async fn create(claims: &Api<SandboxClaim>, number: usize, names: Names) -> anyhow::Result<()> {
    let metadata = match names {
        Names::Fresh => json!({ "generateName": format!("claim-{number}-") }),
        Names::Again => json!({ "name": format!("again-{number}") }),
    };
    let spec = if number.is_multiple_of(2) {
        json!({ "warmPoolRef": { "name": "leaks" } })
    } else {
        json!({ "sandboxTemplateRef": { "name": "leaks" }, "warmpool": "none" })
    };
    let claim = serde_json::from_value(json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
        "metadata": metadata,
        "spec": spec,
    }))?;
    claims.create(&PostParams::default(), &claim).await?;
    Ok(())
}

/// The number of Ready claims.
async fn ready(claims: &Api<SandboxClaim>) -> anyhow::Result<usize> {
    let claims = claims.list(&ListParams::default()).await?;
    let statuses = claims
        .items
        .iter()
        .filter_map(|claim| claim.status.as_ref());
    let ready =
        statuses.filter(|status| conditions::is_true(&status.conditions, ConditionType::Ready));
    Ok(ready.count())
}

/// Waits until only the pool is left, and the controllers have seen it.
async fn settle(client: &Client, metrics: &Metrics) -> anyhow::Result<()> {
    let sandboxes = Api::<Sandbox>::namespaced(client.clone(), NAMESPACE);
    let poll = Poll::until("only the pool to be left");
    while !(Census::take(metrics).is_settled() && count(&sandboxes).await? == POOL) {
        poll.step().await?;
    }
    Ok(())
}

async fn count<K>(api: &Api<K>) -> anyhow::Result<usize>
where
    K: Clone + DeserializeOwned + std::fmt::Debug,
{
    let listed = api.list_metadata(&ListParams::default()).await?;
    Ok(listed.items.len())
}

/// Polls a condition until a deadline.
struct Poll {
    what: &'static str,
    ends: Instant,
}

impl Poll {
    fn until(what: &'static str) -> Self {
        Self {
            what,
            ends: Instant::now() + DEADLINE,
        }
    }

    async fn step(&self) -> anyhow::Result<()> {
        if Instant::now() > self.ends {
            bail!("timed out waiting for {}", self.what);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_level_once_no_wave_reaches_a_new_maximum() {
        let mut level = Level::default();
        for maximum in [100.0, 140.0, 150.0, 149.0, 151.0, 151.5] {
            level.record(maximum * MEBIBYTE);
            assert!(!level.is_reached(), "{level:?}");
        }
        level.record(120.0 * MEBIBYTE);
        assert!(level.is_reached());
        assert!((level.highest - 150.0 * MEBIBYTE).abs() < 1.0);
    }

    fn census(series: &[&str]) -> Census {
        Census {
            entries: BTreeMap::new(),
            series: series.iter().map(|series| (*series).to_owned()).collect(),
            resident_bytes: 0.0,
        }
    }

    #[test]
    fn a_new_launch_type_is_no_leak_and_a_series_for_each_claim_is() {
        let met = "agent_sandbox_claim_creation_total{launch_type=\"warm\"}";
        let missed = "agent_sandbox_claim_warm_misses_total{namespace=\"default\"}";
        let before = census(&[met]);
        assert!(census(&[met, missed]).growth_since(&before).is_empty());
        let other = "agent_sandbox_claim_warm_misses_total{namespace=\"another\"}";
        let growth = census(&[met, missed, other]).growth_since(&before);
        assert_eq!(growth.len(), 2, "{growth:?}");
        let growth = census(&[met, "process_threads"]).growth_since(&before);
        assert_eq!(growth, ["a new series: process_threads"]);
    }

    #[test]
    fn memory_that_grows_with_every_wave_is_never_level() {
        let mut level = Level::default();
        for wave in 0..WARM_UP_WAVES {
            level.record(f64::from(u32::try_from(wave).unwrap()) * 3.0 * MEBIBYTE);
            assert!(!level.is_reached());
        }
    }
}
