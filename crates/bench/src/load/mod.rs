//! `bench load`: load-test recipes, judged by their bounds.
//!
//! | module | owns |
//! |---|---|
//! | [`arguments`] | the flags |
//! | [`recipe`] | how much, how fast, against which limits |
//! | [`objects`] | the objects that a load creates, and their namespaces |
//! | [`drive`] | creating the load and measuring it |
//! | [`histograms`] | the latencies that the controller measured |
//! | [`outcome`] | percentiles and checks |
//! | [`plot`], [`html`], [`junit`] | the reports |

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

use anyhow::{Context, bail};
use k8s_openapi::jiff::Timestamp;

use crate::agent_sandbox::{Quickstart, Up};
use crate::fake_cluster::{self, FakeCluster};
use crate::kinds;
use crate::table::{Table, counted};
pub use arguments::Arguments;
use arguments::Target;
use drive::Driven;
use histograms::{Histograms, Latencies, Source};
use objects::Place;
use outcome::{Judged, Machine, Outcome, Summary, checks, sustained_rounds};
use progress::Progress;
use recipe::Recipe;

/// Runs the load and prints its results. The exit code reports whether the limits were met.
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

/// Compares the measurements with the limits. A growing load misses its bounds in the last round, so only the rounds before it are judged.
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
    // The controller's histograms include the last round of a growing load, which cannot be subtracted.
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

/// The target of a load, and its measurements.
struct Ran {
    target: String,
    driven: Driven,
    /// The latencies that the controller measured.
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
            let connected = arguments.connection.connect().await?;
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

/// Runs a load between two readings of the controller's metrics.
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

/// Loads the controllers and an embedded API server, with a fake node that marks pods Ready.
async fn load_controllers(
    directory: &Path,
    namespaces: Vec<String>,
    recipe: &Recipe,
    progress: &Progress,
) -> anyhow::Result<Ran> {
    let server = apiserver::Server::open(apiserver::Config::new(directory)).await?;
    let client = server.client();
    kinds::install(&client).await?;
    let metrics = fake_cluster::metrics();
    let cluster = FakeCluster::start(controllers::Parts {
        instrumentation: metrics.clone(),
        ..controllers::Parts::new(client.clone(), fake_cluster::with_extensions())
    });
    let place = Place {
        client,
        namespaces,
        image: "pretended".to_owned(),
        command: Vec::new(),
    };
    let target = "embedded API server and controllers, pods only pretended".to_owned();
    let ran = load(target, &place, &Source::Process(metrics), recipe, progress).await;
    cluster.stop().await?;
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
    let up = Up::start(directory, Quickstart::Nothing).await?;
    let place = Place {
        client: up.client.clone(),
        namespaces,
        image,
        command: vec!["sleep".to_owned(), "infinity".to_owned()],
    };
    let source = Source::Address(up.ready.metrics.clone());
    let target = "the whole system, pods that run".to_owned();
    let ran = load(target, &place, &source, recipe, progress).await;
    drop(place);
    up.stop_after(ran).await
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
