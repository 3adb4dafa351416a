//! `agent-sandbox bench load`: the load-test recipes that operators know, judged by their bounds.
//!
//! | module | owns |
//! |---|---|
//! | [`recipe`] | how much, how fast, against which limits |
//! | [`drive`] | putting the load on an API, and measuring |
//! | [`outcome`] | percentiles and checks |
//! | [`plot`], [`html`], [`junit`] | how the outcome is told |

mod drive;
mod html;
mod junit;
mod outcome;
mod plot;
mod progress;
mod recipe;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use k8s_openapi::jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::connection;
use crate::output::{Table, counted};
use crate::up::{Options, Up};
use drive::{Driven, Place};
use outcome::{Judged, Machine, Outcome, Summary, checks, sustained_rounds};
use progress::Progress;
use recipe::{Name, Recipe};

/// What is loaded
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Target {
    /// The embedded API server and the controllers, with a node that calls every pod Ready at once
    #[default]
    Controllers,
    /// The whole system, with pods that run
    Up,
    /// The cluster that --kubeconfig or KUBECONFIG names, with the controllers that run there
    Cluster,
}

/// Put a load on the system and judge its latencies
#[derive(Clone, Debug, Args)]
pub struct Arguments {
    /// Which load
    #[arg(value_enum)]
    recipe: Name,

    /// What is loaded
    #[arg(long, value_enum, default_value_t)]
    target: Target,

    /// Claims of a round, of the first one where they double [default: the recipe's]
    #[arg(long, value_name = "N", value_parser = positive)]
    claims: Option<usize>,

    /// Rounds at most [default: the recipe's]
    #[arg(long, value_name = "N", value_parser = positive)]
    rounds: Option<usize>,

    /// Sandboxes kept warm [default: the recipe's]
    #[arg(long, value_name = "N")]
    pool: Option<usize>,

    /// Claims made each second [default: the recipe's]
    #[arg(long, value_name = "RATE", value_parser = positive_rate)]
    qps: Option<f64>,

    /// Seconds between rounds [default: the recipe's]
    #[arg(long, value_name = "SECONDS", value_parser = not_negative)]
    pause: Option<f64>,

    /// Seconds that a claim is kept once it is Ready, where claims come and go [default: the recipe's]
    #[arg(long, value_name = "SECONDS", value_parser = not_negative)]
    keep: Option<f64>,

    /// Fail when our own budget is missed too, not only the outer bounds
    #[arg(long)]
    strict: bool,

    /// Where to write report.html, results.json, junit.xml and the plots
    #[arg(long, value_name = "DIRECTORY")]
    output: Option<PathBuf>,

    /// Image of the sandboxes [default: host with --target=up; needed with --target=cluster]
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,

    #[command(flatten)]
    connection: connection::Arguments,
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        _ => Err("expected a whole number above 0".to_owned()),
    }
}

fn positive_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("expected a number above 0".to_owned()),
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds >= 0.0 => Ok(seconds),
        _ => Err("expected a number of seconds".to_owned()),
    }
}

impl Arguments {
    fn recipe(&self) -> Recipe {
        let recipe = Recipe::named(self.recipe);
        Recipe {
            claims: self.claims.unwrap_or(recipe.claims),
            rounds: self.rounds.unwrap_or(recipe.rounds),
            pool: self.pool.unwrap_or(recipe.pool),
            claims_per_second: self.qps.unwrap_or(recipe.claims_per_second),
            pause_s: self.pause.unwrap_or(recipe.pause_s),
            kept_for_s: recipe.kept_for_s.map(|kept| self.keep.unwrap_or(kept)),
            ..recipe
        }
    }

    fn judged(&self) -> Judged {
        if self.strict {
            Judged::ByBudgetToo
        } else {
            Judged::ByBounds
        }
    }
}

/// Runs the load and tells of it. The exit code says whether the limits were met.
pub async fn execute(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let recipe = arguments.recipe();
    let began = Timestamp::now();
    let progress = Progress::of(&recipe);
    let (target, driven) = run(&arguments, &recipe, &progress).await?;
    progress.finish();
    let outcome = judge(recipe, target, began, driven);
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
fn judge(recipe: Recipe, target: String, began: Timestamp, driven: Driven) -> Outcome {
    let sustained = sustained_rounds(&driven.rounds, &recipe.bounds);
    let (capacity, judged_rounds) = if recipe.doubles {
        let last = driven.rounds[..sustained].last();
        (Some(last.map_or(0, |round| round.claims)), sustained.max(1))
    } else {
        (None, driven.rounds.len())
    };
    let judged = driven.samples.iter();
    let total = Summary::of(judged.filter(|sample| sample.round < judged_rounds));
    Outcome {
        target,
        machine: machine(),
        began: began.to_string(),
        filled_pool_in_s: driven.filled_pool_in.as_secs_f64(),
        bounds: checks(&total, &recipe.bounds),
        budget: checks(&total, &recipe.budget),
        capacity,
        total,
        rounds: driven.rounds,
        samples: driven.samples,
        recipe,
    }
}

async fn run(
    arguments: &Arguments,
    recipe: &Recipe,
    progress: &Progress,
) -> anyhow::Result<(String, Driven)> {
    let namespace = format!("load-{}", std::process::id());
    let directory = tempfile::tempdir()?;
    match arguments.target {
        Target::Controllers => {
            let driven = load_controllers(directory.path(), namespace, recipe, progress).await?;
            let target = "embedded API server and controllers, pods only pretended".to_owned();
            Ok((target, driven))
        }
        Target::Up => {
            let image = arguments.image.clone().unwrap_or_else(|| "host".to_owned());
            let driven = load_up(directory.path(), namespace, image, recipe, progress).await?;
            Ok(("the whole system, pods that run".to_owned(), driven))
        }
        Target::Cluster => {
            let Some(image) = arguments.image.clone() else {
                bail!("--target=cluster needs --image, one that the cluster can pull");
            };
            let connected = arguments.connection.connect_or_explain().await?;
            let place = Place {
                client: connected.client,
                namespace,
                image,
                command: Vec::new(),
            };
            let driven = drive::drive(&place, recipe, progress).await?;
            Ok((connected.described, driven))
        }
    }
}

/// The controllers against the embedded server, with a node that marks pods Ready without running them.
async fn load_controllers(
    directory: &Path,
    namespace: String,
    recipe: &Recipe,
    progress: &Progress,
) -> anyhow::Result<Driven> {
    let server = apiserver::Server::open(apiserver::Config::new(directory)).await?;
    let client = server.client();
    crate::up::install_kinds(&client).await?;
    let shutdown = CancellationToken::new();
    let config = controllers::Config {
        extensions: true,
        ..controllers::Config::default()
    };
    let controllers = tokio::spawn(controllers::run(
        client.clone(),
        config,
        shutdown.clone(),
        || {},
    ));
    let node = tokio::spawn(controllers::bench::mark_pods_ready(client.clone()));
    let place = Place {
        client,
        namespace,
        image: "pretended".to_owned(),
        command: Vec::new(),
    };
    let driven = drive::drive(&place, recipe, progress).await;
    shutdown.cancel();
    controllers.await??;
    node.abort();
    drop(place);
    server.shutdown().await;
    driven
}

async fn load_up(
    directory: &Path,
    namespace: String,
    image: String,
    recipe: &Recipe,
    progress: &Progress,
) -> anyhow::Result<Driven> {
    let up = Up::start(Options::new(directory)).await?;
    let place = Place {
        client: up.client(),
        namespace,
        image,
        command: vec!["sleep".to_owned(), "infinity".to_owned()],
    };
    let driven = drive::drive(&place, recipe, progress).await;
    drop(place);
    let stopped = up.stop_with_sandboxes().await;
    // Why the load failed says more than what its end then stumbled over.
    let driven = driven?;
    stopped?;
    Ok(driven)
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
    println!(
        "{}: {} in {}, {:.1} claims/s{pool}",
        outcome.recipe.name.as_str(),
        counted(total.claims, "claim"),
        counted(outcome.rounds.len(), "round"),
        total.claims_per_second,
    );
    if let Some(capacity) = outcome.capacity {
        println!("capacity: {}", counted(capacity, "claim"));
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
}

#[cfg(test)]
mod tests;
