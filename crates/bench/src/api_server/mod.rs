//! `bench api`: the embedded API server through its in-process client, as controllers use it. Every operation must succeed; durations are
//! not judged.

pub mod wrk;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use apiserver::{Config, Server};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ListParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, Client};
use serde_json::json;

use crate::process;
use crate::table::Table;

/// The options of a benchmark run.
#[derive(Clone, Debug)]
struct Options {
    /// A directory on the disk to measure. The benchmark fills it; the caller must remove it.
    directory: PathBuf,
    /// The duration of each sample of a rate.
    duration: Duration,
    /// The number of samples of each measurement.
    samples: usize,
    /// Number of objects in the list and memory measurements.
    objects: usize,
    /// Number of objects in the cold-open measurement.
    cold_objects: usize,
}

impl Options {
    /// The sizes that the project's performance budgets use.
    fn new(directory: impl Into<PathBuf>) -> Self {
        Self {
            directory: directory.into(),
            duration: Duration::from_secs(5),
            samples: 3,
            objects: 10_000,
            cold_objects: 100_000,
        }
    }
}

/// One measurement.
#[derive(Clone, Debug)]
struct Measurement {
    /// The name of the measurement.
    name: String,
    /// The unit of the values.
    unit: &'static str,
    /// The median of the samples.
    median: f64,
    /// The lowest sample.
    lowest: f64,
    /// The highest sample.
    highest: f64,
}

/// All measurements.
#[derive(Clone, Debug, Default)]
struct Report {
    /// The measurements in the order in which they were taken.
    measurements: Vec<Measurement>,
}

impl Report {
    fn add(&mut self, name: impl Into<String>, unit: &'static str, mut samples: Vec<f64>) {
        samples.sort_by(f64::total_cmp);
        let at = |index: usize| samples.get(index).copied().unwrap_or_default();
        let measurement = Measurement {
            name: name.into(),
            unit,
            median: at(samples.len() / 2),
            lowest: at(0),
            highest: at(samples.len().saturating_sub(1)),
        };
        tracing::info!(?measurement, "measured");
        self.measurements.push(measurement);
    }
}

/// Measures in `directory`, and prints.
pub async fn execute(directory: &Path) -> anyhow::Result<()> {
    let report = run(&Options::new(directory)).await?;
    let mut table = Table::new(&["WHAT", "MEDIAN", "LOWEST", "HIGHEST", "UNIT"]);
    for figure in report.measurements {
        let number = |value: f64| format!("{value:.1}");
        let (median, lowest, highest) = (figure.median, figure.lowest, figure.highest);
        table.row(vec![
            figure.name,
            number(median),
            number(lowest),
            number(highest),
            figure.unit.to_owned(),
        ]);
    }
    print!("{}", table.render());
    Ok(())
}

/// Runs all measurements.
async fn run(options: &Options) -> anyhow::Result<Report> {
    let mut report = Report::default();
    for writers in [1, 16, 64] {
        measure_writes(options, writers, &mut report).await?;
    }
    measure_gets(options, &mut report).await?;
    measure_list_and_memory(options, &mut report).await?;
    measure_watchers(options, &mut report).await?;
    measure_cold_open(options, &mut report).await?;
    Ok(report)
}

fn new_directory(options: &Options, name: &str) -> PathBuf {
    options
        .directory
        .join(format!("{name}-{}", rand::random::<u32>()))
}

/// A config map of about two kilobytes.
fn config_map(name: &str) -> ConfigMap {
    let object = json!({"metadata": {"name": name, "labels": {"app": "bench"}}, "data": {"text": "x".repeat(1700)}});
    serde_json::from_value(object).expect("the object is well formed")
}

#[expect(
    clippy::cast_precision_loss,
    reason = "the counts are small enough to be exact as floats"
)]
fn per_second(count: usize, elapsed: Duration) -> f64 {
    count as f64 / elapsed.as_secs_f64()
}

fn milliseconds(elapsed: Duration) -> f64 {
    elapsed.as_secs_f64() * 1000.0
}

async fn measure_writes(
    options: &Options,
    writers: usize,
    report: &mut Report,
) -> anyhow::Result<()> {
    let server = Server::open(Config::new(new_directory(options, "writes"))).await?;
    let (mut rates, mut medians, mut tails) = (Vec::new(), Vec::new(), Vec::new());
    for sample in 0..options.samples {
        let end = Instant::now() + options.duration;
        let start = Instant::now();
        let tasks: Vec<_> = (0..writers)
            .map(|writer| {
                let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
                tokio::spawn(async move {
                    let mut latencies = Vec::new();
                    while Instant::now() < end {
                        let name = format!("s{sample}-w{writer}-{}", latencies.len());
                        let before = Instant::now();
                        maps.create(&PostParams::default(), &config_map(&name))
                            .await?;
                        latencies.push(before.elapsed());
                    }
                    Ok::<_, kube::Error>(latencies)
                })
            })
            .collect();
        let mut latencies = Vec::new();
        for task in tasks {
            latencies.extend(task.await??);
        }
        rates.push(per_second(latencies.len(), start.elapsed()));
        latencies.sort();
        medians.push(milliseconds(latencies[latencies.len() / 2]));
        tails.push(milliseconds(latencies[latencies.len() * 99 / 100]));
    }
    report.add(format!("durable creates, {writers} writers"), "1/s", rates);
    report.add(
        format!("durable create latency p50, {writers} writers"),
        "ms",
        medians,
    );
    report.add(
        format!("durable create latency p99, {writers} writers"),
        "ms",
        tails,
    );
    server.shutdown().await;
    Ok(())
}

/// Creates `count` config maps, many at a time.
async fn fill(client: &Client, count: usize) -> anyhow::Result<()> {
    let maps: Api<ConfigMap> = Api::default_namespaced(client.clone());
    futures::stream::iter(0..count)
        .map(|index| {
            let maps = maps.clone();
            async move {
                maps.create(
                    &PostParams::default(),
                    &config_map(&format!("object-{index:06}")),
                )
                .await
                .map(drop)
            }
        })
        .buffer_unordered(256)
        .try_collect::<()>()
        .await?;
    Ok(())
}

async fn measure_gets(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    const READERS: usize = 32;
    let server = Server::open(Config::in_memory()).await?;
    fill(&server.client(), 1000).await?;
    let mut rates = Vec::new();
    for _ in 0..options.samples {
        let (start, end) = (Instant::now(), Instant::now() + options.duration);
        let tasks: Vec<_> = (0..READERS)
            .map(|reader| {
                let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
                tokio::spawn(async move {
                    let mut count = 0;
                    while Instant::now() < end {
                        maps.get(&format!("object-{:06}", (count + reader * 31) % 1000))
                            .await?;
                        count += 1;
                    }
                    Ok::<_, kube::Error>(count)
                })
            })
            .collect();
        let mut total = 0;
        for task in tasks {
            total += task.await??;
        }
        rates.push(per_second(total, start.elapsed()));
    }
    report.add(
        format!("gets, {READERS} readers, decoded by the client"),
        "1/s",
        rates,
    );
    server.shutdown().await;
    Ok(())
}

/// Resident memory of this process, in MiB.
fn resident_mebibytes() -> anyhow::Result<f64> {
    let kibibytes = process::resident(std::process::id())? >> 10;
    Ok(f64::from(u32::try_from(kibibytes)?) / 1024.0)
}

async fn measure_list_and_memory(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let server = Server::open(Config::new(new_directory(options, "list"))).await?;
    let before = resident_mebibytes()?;
    fill(&server.client(), options.objects).await?;
    let mebibytes = resident_mebibytes()? - before;
    report.add(
        format!(
            "memory of {} objects of 2 KiB, with history",
            options.objects
        ),
        "MiB",
        vec![mebibytes],
    );
    let (mut raw, mut decoded) = (Vec::new(), Vec::new());
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    for _ in 0..options.samples {
        let start = Instant::now();
        let request = http::Request::get("/api/v1/namespaces/default/configmaps")
            .body(Vec::new())
            .expect("the request is well formed");
        let text = server.client().request_text(request).await?;
        assert!(text.len() > options.objects * 1700, "the list is complete");
        raw.push(milliseconds(start.elapsed()));
        let start = Instant::now();
        assert!(maps.list(&ListParams::default()).await?.items.len() >= options.objects);
        decoded.push(milliseconds(start.elapsed()));
    }
    report.add(
        format!("list of {} objects, bytes", options.objects),
        "ms",
        raw,
    );
    report.add(
        format!("list of {} objects, decoded by the client", options.objects),
        "ms",
        decoded,
    );
    server.shutdown().await;
    Ok(())
}

async fn measure_watchers(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    const WATCHERS: usize = 100;
    const EVENTS_PER_SECOND: u32 = 1000;
    let server = Server::open(Config::new(new_directory(options, "watch"))).await?;
    let maps: Api<ConfigMap> = Api::default_namespaced(server.client());
    let version = maps
        .list(&ListParams::default())
        .await?
        .metadata
        .resource_version
        .unwrap_or_default();
    let events =
        usize::try_from(options.duration.as_secs()).unwrap_or(1) * EVENTS_PER_SECOND as usize;
    let origin = Instant::now();
    let watchers: Vec<_> = (0..WATCHERS)
        .map(|_| {
            tokio::spawn(watch_latencies(
                maps.clone(),
                version.clone(),
                events,
                origin,
            ))
        })
        .collect();
    let mut ticks = tokio::time::interval(Duration::from_secs(1) / EVENTS_PER_SECOND);
    let mut writes = tokio::task::JoinSet::new();
    for event in 0..events {
        ticks.tick().await;
        let maps = maps.clone();
        writes.spawn(async move {
            let sent = u64::try_from(origin.elapsed().as_nanos()).unwrap_or_default();
            let object = json!({"metadata": {"name": format!("event-{event}")}, "data": {"sent": sent.to_string()}});
            let object = serde_json::from_value(object).expect("the object is well formed");
            maps.create(&PostParams::default(), &object).await.map(drop)
        });
    }
    while let Some(outcome) = writes.join_next().await {
        outcome??;
    }
    let mut latencies = Vec::new();
    for watcher in watchers {
        latencies.extend(watcher.await??);
    }
    assert_eq!(
        latencies.len(),
        events * WATCHERS,
        "every watcher saw every event"
    );
    latencies.sort();
    let name =
        format!("{WATCHERS} watchers at {EVENTS_PER_SECOND} events/s: request to decoded event");
    let at = |percent: usize| vec![milliseconds(latencies[latencies.len() * percent / 100])];
    report.add(format!("{name}, p50"), "ms", at(50));
    report.add(format!("{name}, p99"), "ms", at(99));
    server.shutdown().await;
    Ok(())
}

/// Watches config maps until `events` events have arrived. Returns the latency of each event since its request.
async fn watch_latencies(
    maps: Api<ConfigMap>,
    version: String,
    events: usize,
    origin: Instant,
) -> Result<Vec<Duration>, kube::Error> {
    let mut stream = maps.watch(&WatchParams::default(), &version).await?.boxed();
    let mut latencies = Vec::with_capacity(events);
    while latencies.len() < events
        && let Some(event) = stream.try_next().await?
    {
        let WatchEvent::Added(object) = event else {
            continue;
        };
        let sent = object
            .data
            .as_ref()
            .and_then(|data| data.get("sent")?.parse().ok())
            .unwrap_or_default();
        latencies.push(origin.elapsed().saturating_sub(Duration::from_nanos(sent)));
    }
    Ok(latencies)
}

async fn measure_cold_open(options: &Options, report: &mut Report) -> anyhow::Result<()> {
    let directory = new_directory(options, "cold");
    let server = Server::open(Config::new(&directory)).await?;
    fill(&server.client(), options.cold_objects).await?;
    server.shutdown().await;
    let mut times = Vec::new();
    for _ in 0..options.samples {
        let start = Instant::now();
        let server = Server::open(Config::new(&directory)).await?;
        times.push(milliseconds(start.elapsed()));
        server.shutdown().await;
    }
    report.add(
        format!("cold open of {} objects", options.cold_objects),
        "ms",
        times,
    );
    let mut fresh = Vec::new();
    for _ in 0..options.samples.max(5) {
        let start = Instant::now();
        let server = Server::open(Config::new(new_directory(options, "fresh"))).await?;
        fresh.push(milliseconds(start.elapsed()));
        server.shutdown().await;
    }
    report.add("open of a new data directory", "ms", fresh);
    Ok(())
}
