//! `agent-sandbox bench load`: the load-test recipes that operators know, judged by their bounds.
//!
//! | module | owns |
//! |---|---|
//! | [`arguments`] | the flags |
//! | [`recipe`] | how much, how fast, against which limits |
//! | [`objects`] | what is made, and in which namespaces |
//! | [`drive`] | putting the load on an API, and measuring |
//! | [`histograms`] | what the controller measured meanwhile |
//! | [`outcome`] | percentiles and checks |
//! | [`plot`], [`html`], [`junit`] | how the outcome is told |

mod arguments;
mod drive;
mod histograms;
mod html;
mod junit;
mod objects;
mod outcome;
mod plot;
mod progress;
mod recipe;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, bail};
use controllers::metrics::Metrics;
use k8s_openapi::jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::build_info::BUILD;
use crate::output::{Table, counted};
use crate::up::{Options, Up};
pub use arguments::Arguments;
use arguments::Target;
use drive::Driven;
use histograms::{Histograms, Latencies, Source};
use objects::Place;
use outcome::{Judged, Machine, Outcome, Summary, checks, sustained_rounds};
use progress::Progress;
use recipe::Recipe;

/// Runs the load and tells of it. The exit code says whether the limits were met.
pub async fn execute(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let recipe = arguments.recipe();
    arguments.check(&recipe)?;
    let began = Timestamp::now();
    let progress = Progress::of(&recipe);
    let ran = Box::pin(run(&arguments, &recipe, &progress)).await?;
    progress.finish();
    let outcome = judge(recipe, began, ran);
    let judged = arguments.judged();
    print_summary(&outcome);
    if let Some(directory) = &arguments.output {
        write_all(directory, &outcome, judged)?;
        println!("written to {}", directory.display());
    }
    for missed in outcome.missed(judged) {
        eprintln!(
            "missed: {} is {:.1} {unit}, at most {} {unit} was asked",
            missed.what,
            missed.measured,
            missed.limit,
            unit = missed.unit
        );
    }
    Ok(if outcome.passed(judged) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Compares what was measured with what was asked. A load that grows is meant to miss its bounds in the end: it is judged by the rounds
/// before.
fn judge(recipe: Recipe, began: Timestamp, ran: Ran) -> Outcome {
    let driven = ran.driven;
    let sustained = sustained_rounds(&driven.rounds, recipe.makes, &recipe.bounds);
    let (capacity, judged_rounds) = if recipe.doubles {
        let last = driven.rounds[..sustained].last();
        (Some(last.map_or(0, |round| round.claims)), sustained.max(1))
    } else {
        (None, driven.rounds.len())
    };
    let judged = driven.samples.iter();
    let total = Summary::of(judged.filter(|sample| sample.round < judged_rounds));
    // The controller does not know rounds: what it measured of the one that missed the bounds cannot be taken out.
    let controller_bounds = if recipe.doubles {
        Vec::new()
    } else {
        let measured = ran.controller.iter();
        measured
            .flat_map(|latencies| latencies.checks(&recipe.bounds))
            .collect()
    };
    Outcome {
        target: ran.target,
        machine: machine(),
        began: began.to_string(),
        filled_pool_in_s: driven.filled_pool_in.as_secs_f64(),
        pool_at_end: driven.pool_at_end,
        bounds: checks(&total, recipe.makes, &recipe.bounds),
        budget: checks(&total, recipe.makes, &recipe.budget),
        controller: ran.controller,
        controller_bounds,
        capacity,
        total,
        rounds: driven.rounds,
        samples: driven.samples,
        recipe,
    }
}

/// What was loaded, and what came of it.
struct Ran {
    target: String,
    driven: Driven,
    /// What the controller measured.
    controller: Vec<Latencies>,
}

async fn run(arguments: &Arguments, recipe: &Recipe, progress: &Progress) -> anyhow::Result<Ran> {
    let namespaces = arguments.namespaces(recipe);
    let directory = tempfile::tempdir()?;
    match arguments.target {
        Target::Controllers => {
            load_controllers(directory.path(), namespaces, recipe, progress).await
        }
        Target::Up => {
            let image = arguments.image.clone().unwrap_or_else(|| "host".to_owned());
            load_up(directory.path(), namespaces, image, recipe, progress).await
        }
        Target::Cluster => {
            let Some(image) = arguments.image.clone() else {
                bail!("--target=cluster needs --image, one that the cluster can pull");
            };
            let connected = arguments.connection.connect_or_explain().await?;
            let source = match &arguments.controller_metrics {
                Some(url) => Source::Address(url.clone()),
                None => Source::Service(connected.client.clone()),
            };
            let place = Place {
                client: connected.client,
                namespaces,
                image,
                command: arguments.command.clone(),
            };
            load(connected.described, &place, &source, recipe, progress).await
        }
    }
}

/// Drives a load between two readings of the controller's metrics.
async fn load(
    target: String,
    place: &Place,
    source: &Source,
    recipe: &Recipe,
    progress: &Progress,
) -> anyhow::Result<Ran> {
    let before = source.read().await;
    let driven = drive::drive(place, recipe, progress).await?;
    let controller = match (before, source.read().await) {
        (Ok(before), Ok(after)) => Histograms::parse(&after).since(&Histograms::parse(&before)),
        (Err(error), _) | (_, Err(error)) => {
            eprintln!(
                "the controller's histograms are left out: {error:#}; --controller-metrics=URL says where they are"
            );
            Vec::new()
        }
    };
    Ok(Ran {
        target,
        driven,
        controller,
    })
}

/// The controllers against the embedded server, with a node that marks pods Ready without running them.
async fn load_controllers(
    directory: &Path,
    namespaces: Vec<String>,
    recipe: &Recipe,
    progress: &Progress,
) -> anyhow::Result<Ran> {
    let server = apiserver::Server::open(apiserver::Config::new(directory)).await?;
    let client = server.client();
    crate::up::install_kinds(&client).await?;
    let shutdown = CancellationToken::new();
    let config = controllers::Config {
        extensions: true,
        ..controllers::Config::default()
    };
    let metrics = Arc::new(Metrics::new("embedded", BUILD));
    let runtime = controllers::assemble(controllers::Parts {
        instrumentation: metrics.clone(),
        ..controllers::Parts::new(client.clone(), config)
    });
    let (stop, never) = (shutdown.clone(), CancellationToken::new());
    let controllers = tokio::spawn(async {
        runtime
            .run(stop, never, || {}, std::future::ready(()))
            .await;
    });
    let node = tokio::spawn(controllers::bench::mark_pods_ready(client.clone()));
    let place = Place {
        client,
        namespaces,
        image: "pretended".to_owned(),
        command: Vec::new(),
    };
    let target = "embedded API server and controllers, pods only pretended".to_owned();
    let ran = load(target, &place, &Source::Process(metrics), recipe, progress).await;
    shutdown.cancel();
    controllers.await?;
    node.abort();
    drop(place);
    server.shutdown().await;
    ran
}

async fn load_up(
    directory: &Path,
    namespaces: Vec<String>,
    image: String,
    recipe: &Recipe,
    progress: &Progress,
) -> anyhow::Result<Ran> {
    let up = Up::start(Options::new(directory)).await?;
    let place = Place {
        client: up.client(),
        namespaces,
        image,
        command: vec!["sleep".to_owned(), "infinity".to_owned()],
    };
    let source = Source::Address(up.running().metrics.clone());
    let target = "the whole system, pods that run".to_owned();
    let ran = load(target, &place, &source, recipe, progress).await;
    drop(place);
    let stopped = up.stop_with_sandboxes().await;
    // Why the load failed says more than what its end then stumbled over.
    let ran = ran?;
    stopped?;
    Ok(ran)
}

fn machine() -> Machine {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Machine {
        processors: std::thread::available_parallelism().map_or(0, usize::from),
        kernel: format!("Linux {}", kernel.trim()),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

fn write_all(directory: &Path, outcome: &Outcome, judged: Judged) -> anyhow::Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let files = [
        ("report.html", html::render(outcome, judged)),
        ("junit.xml", junit::render(outcome, judged)),
        ("results.json", serde_json::to_string_pretty(outcome)?),
        ("latencies.svg", plot::latencies_over_time(outcome)),
        ("distribution.svg", plot::distribution(outcome)),
        ("throughput.svg", plot::throughput(outcome)),
    ];
    for (name, text) in files {
        let path = directory.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn print_summary(outcome: &Outcome) {
    let total = &outcome.total;
    let pool = if outcome.recipe.pool > 0 {
        format!("; pool full after {:.1} s", outcome.filled_pool_in_s)
    } else {
        String::new()
    };
    let makes = outcome.recipe.makes;
    let namespaces = match outcome.recipe.namespaces {
        1 => String::new(),
        several => format!(" over {}", counted(several, "namespace")),
    };
    println!(
        "{}: {} in {}{namespaces}, {:.1} {}/s{pool}",
        outcome.recipe.name.as_str(),
        counted(total.claims, makes.noun()),
        counted(outcome.rounds.len(), "round"),
        total.claims_per_second,
        makes.plural(),
    );
    if let Some(capacity) = outcome.capacity {
        println!("capacity: {}", counted(capacity, makes.noun()));
    }
    if let Some(desired) = outcome.pool_at_end {
        println!("autoscaled to {} in the end", counted(desired, "sandbox"));
    }
    let mut table = Table::new(&["WHAT", "MEASURED", "BOUND", "", "BUDGET", ""]);
    for (bound, budget) in outcome.bounds.iter().zip(&outcome.budget) {
        let word = |met: bool| if met { "met" } else { "missed" }.to_owned();
        table.row(vec![
            bound.what.clone(),
            format!("{:.1} {}", bound.measured, bound.unit),
            format!("{}", bound.limit),
            word(bound.met),
            format!("{}", budget.limit),
            word(budget.met),
        ]);
    }
    print!("{}", table.render());
    if outcome.controller.is_empty() {
        return;
    }
    let mut table = Table::new(&["CONTROLLER'S HISTOGRAM", "COUNT", "P50", "P90", "P99"]);
    for latencies in &outcome.controller {
        let shown = |milliseconds: f64| format!("{milliseconds:.1} ms");
        table.row(vec![
            latencies.histogram.to_owned(),
            format!("{:.0}", latencies.count),
            shown(latencies.p50_ms),
            shown(latencies.p90_ms),
            shown(latencies.p99_ms),
        ]);
    }
    print!("{}", table.render());
}

#[cfg(test)]
mod tests;
