//! `agent-sandbox bench`: measures the parts and the whole, against peers in the same run where there are any.

mod claims;
mod idle;
mod node;
mod process;
mod sandboxd;
mod start;
mod versus;
mod wrk;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, Subcommand};
use sdk::process::{Event, Start};
use serde::Serialize;

use crate::output::{Table, bytes};
use crate::up::{Options, QUICKSTART_TEMPLATE, Quickstart, Up};

/// How often the in-sandbox runtime is started to measure its start.
const STARTS: usize = 30;

/// Measure the parts and the whole
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Debug, Subcommand)]
enum What {
    /// The embedded API server: durable writes, gets, lists, watches, memory
    Api {
        /// Over HTTPS instead of in process, under the load of wrk: creates and gets
        #[arg(long)]
        wrk: bool,
        /// With --wrk, measure in the same run the server that this kubeconfig of an administrator names
        #[arg(long, value_name = "KUBECONFIG", requires = "wrk")]
        against: Option<PathBuf>,
        /// With --against, where kube-apiserver.pid and etcd.pid say whose memory that server takes; `cargo xtask kube-up` sets it
        #[arg(long, env = "CONTROL_PLANE", value_name = "DIRECTORY")]
        processes: Option<PathBuf>,
        /// With --wrk, how long each sample lasts
        #[arg(long, default_value_t = 10, requires = "wrk")]
        seconds: u64,
    },
    /// Warm claims: latency one at a time, throughput at once, writes per claim
    Claims(claims::Arguments),
    /// Reconciles of claims, with few and with many sandboxes in the caches
    Reconcile {
        /// Sandboxes in the caches when there are many
        #[arg(long, default_value_t = 100_000)]
        cached: usize,
        /// Claims made one at a time
        #[arg(long, default_value_t = 300)]
        claims: usize,
    },
    /// Batch claims of the OpenKruise kind: many at once, of many sandboxes each
    Kruise {
        /// Sandboxes that can be claimed before the first claim
        #[arg(long, default_value_t = 5_000)]
        set: usize,
        /// Claims made at once
        #[arg(long, default_value_t = 100)]
        claims: usize,
        /// Sandboxes that each asks for
        #[arg(long, default_value_t = 50)]
        replicas: usize,
    },
    /// The node: cold pods, exec, memory, beside runc and bubblewrap where they are installed
    Node(node::Arguments),
    /// The router, beside nginx where it is installed
    Router {
        /// Another router that runs on this machine, to be measured in the same run
        #[arg(long, value_name = "ADDRESS")]
        other: Option<std::net::SocketAddr>,
    },
    /// The in-sandbox runtime: commands a second; size, start and memory of its binary
    Sandboxd,
    /// What `up` costs while nobody uses it: memory, processor time
    Idle {
        /// How long to measure
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
    /// How soon `up` serves and its pool is full, from nothing; what it costs then; the size of the program. Fails beyond a budget
    Start {
        /// How long to measure it idle
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
    /// From the claim to the first output of a command, through every part
    FirstInstruction {
        #[arg(long, default_value_t = 50)]
        rounds: usize,
    },
    VersusUpstream(versus::Arguments),
    /// What being observed costs: scrapes, changes, traces that nobody asked for
    Scrape {
        #[arg(long, default_value_t = 10_000)]
        sandboxes: usize,
    },
    /// Whether anything is left of claims that came and went: entries, series, memory
    Leaks {
        #[arg(long, default_value_t = 20_000)]
        claims: usize,
    },
    /// A load-test recipe: claims at a rate, judged by their latencies
    Load(Box<crate::load::Arguments>),
    /// From the claim to Ready, without a warm pool
    Cold {
        #[arg(long, default_value_t = 50)]
        rounds: usize,
        /// Milliseconds between the end of one sandbox and the next claim: it takes about as long to remove one as to start it
        #[arg(long, default_value_t = 200)]
        rest: u64,
    },
}

impl Arguments {
    /// Measures and prints. Some measurements bring a runtime of their own, so this is called outside of any.
    pub fn execute(self) -> anyhow::Result<ExitCode> {
        match self.what {
            What::Router { other } => {
                let options = router::bench::Options {
                    other,
                    ..router::bench::Options::default()
                };
                print_router(&router::bench::run(&options)?);
            }
            What::Sandboxd => {
                let directory = tempfile::tempdir()?;
                let figures = sandboxd::measure(directory.path(), STARTS)?;
                print_sandboxd(&figures.commands);
                let size = bytes(figures.size);
                let resident = bytes(figures.resident);
                println!(
                    "binary {size}; resident, idle, {resident}; start to first answer {}",
                    figures.start
                );
                return Ok(verdict(&figures.missed()));
            }
            What::Scrape { sandboxes } => {
                return Ok(verdict(&crate::scrape::measure(sandboxes)));
            }
            What::Load(arguments) => {
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .enable_all()
                    .build()?;
                let load = crate::load::execute(*arguments);
                return runtime.block_on(async { tokio::spawn(load).await? });
            }
            within => {
                let directory = tempfile::tempdir()?;
                let path = directory.path().to_owned();
                let runtime = tokio::runtime::Builder::new_multi_thread()
                    .enable_all()
                    .build()?;
                runtime.block_on(async {
                    tokio::spawn(async move { Box::pin(measure(within, &path)).await }).await?
                })?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Tells where a budget is missed. The exit code says whether one is.
fn verdict(missed: &[String]) -> ExitCode {
    for missed in missed {
        eprintln!("missed: {missed}");
    }
    if missed.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

async fn measure(what: What, directory: &Path) -> anyhow::Result<()> {
    match what {
        What::Api {
            wrk: true,
            against,
            processes,
            seconds,
        } => {
            let duration = Duration::from_secs(seconds);
            wrk::run(
                directory,
                against.as_deref(),
                processes.as_deref(),
                duration,
            )
            .await?;
        }
        What::Api { .. } => {
            print_api(apiserver::bench::run(&apiserver::bench::Options::new(directory)).await?);
        }
        What::Claims(arguments) => arguments.measure(directory).await?,
        What::Reconcile { cached, claims } => claims::reconcile(cached, claims).await?,
        What::Kruise {
            set,
            claims,
            replicas,
        } => {
            let server = apiserver::Server::open(apiserver::Config::new(directory)).await?;
            crate::up::install_kinds(&server.client()).await?;
            let options = controllers::kruise::bench::Options {
                set,
                claims,
                replicas,
            };
            println!(
                "{}",
                controllers::kruise::bench::run(server.client(), options).await?
            );
            server.shutdown().await;
        }
        What::Node(arguments) => arguments.measure(directory).await?,
        What::Idle { seconds } => {
            let up = start(directory, Quickstart::TemplateAndPool).await?;
            let figures = idle::measure(&up, Duration::from_secs(seconds)).await;
            up.stop_with_sandboxes().await?;
            println!("{}", figures?);
        }
        What::Start { seconds } => start::run(directory, Duration::from_secs(seconds)).await?,
        What::FirstInstruction { rounds } => {
            let up = start(directory, Quickstart::TemplateAndPool).await?;
            let figures = first_instruction(&up, rounds).await;
            up.stop_with_sandboxes().await?;
            println!("claim to first output of a command: {}", figures?);
        }
        What::Cold { rounds, rest } => {
            let up = start(directory, Quickstart::Template).await?;
            let figures = cold(&up, rounds, Duration::from_millis(rest)).await;
            up.stop_with_sandboxes().await?;
            println!("claim to Ready without a pool: {}", figures?);
        }
        What::VersusUpstream(arguments) => versus::run(arguments).await?,
        What::Leaks { claims } => crate::leaks::check(directory, claims).await?,
        What::Router { .. } | What::Sandboxd | What::Scrape { .. } | What::Load(_) => {
            unreachable!("measured outside of a runtime")
        }
    }
    Ok(())
}

fn print_api(report: apiserver::bench::Report) {
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
}

async fn start(directory: &Path, quickstart: Quickstart) -> anyhow::Result<Up> {
    Up::start(Options {
        quickstart,
        ..Options::new(directory)
    })
    .await
}

fn client_of(up: &Up) -> anyhow::Result<sdk::Client> {
    let options = sdk::Options {
        connection: sdk::Connection::Direct {
            url: up.running().router.clone().context("the router runs")?,
        },
        ..sdk::Options::default()
    };
    Ok(sdk::Client::new(up.client(), options)?)
}

async fn first_instruction(up: &Up, rounds: usize) -> anyhow::Result<Sample> {
    let client = client_of(up)?;
    let mut sample = Sample::default();
    for _ in 0..rounds {
        await_warm_pool(&up.client()).await?;
        let begin = Instant::now();
        let sandbox = client
            .create(sdk::CreateOptions::from_template(QUICKSTART_TEMPLATE))
            .await?;
        let mut process = sandbox
            .process()
            .start(Start::argv(["echo", "first"]))
            .await?;
        loop {
            match process
                .next()
                .await?
                .context("the command ended without output")?
            {
                Event::Stdout(_) => break,
                Event::Stderr(_) => {}
                Event::Exit(exit) => anyhow::bail!("the command ended without output: {exit:?}"),
            }
        }
        sample.add(begin.elapsed());
        sandbox.terminate().await?;
    }
    Ok(sample)
}

async fn cold(up: &Up, rounds: usize, rest: Duration) -> anyhow::Result<Sample> {
    let client = client_of(up)?;
    let mut sample = Sample::default();
    for _ in 0..rounds {
        let begin = Instant::now();
        let wanted =
            sdk::CreateOptions::from_template(QUICKSTART_TEMPLATE).warm_pool(sdk::WarmPool::None);
        let sandbox = client.create(wanted).await?;
        sample.add(begin.elapsed());
        sandbox.terminate().await?;
        tokio::time::sleep(rest).await;
    }
    Ok(sample)
}

async fn await_warm_pool(client: &kube::Client) -> anyhow::Result<()> {
    let pools: kube::Api<api::SandboxWarmPool> = kube::Api::default_namespaced(client.clone());
    let is_full = |pool: Option<&api::SandboxWarmPool>| {
        pool.is_some_and(|pool| {
            let ready = pool
                .status
                .as_ref()
                .map_or(0, |status| status.ready_replicas);
            ready >= pool.spec.desired_replicas()
        })
    };
    kube::runtime::wait::await_condition(pools, crate::up::QUICKSTART_POOL, is_full).await?;
    Ok(())
}

/// Durations, described by their percentiles.
#[derive(Debug, Default, Serialize)]
struct Sample(Vec<Duration>);

impl Sample {
    fn add(&mut self, duration: Duration) {
        self.0.push(duration);
    }

    fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort();
        let index = sorted.len().saturating_sub(1) * percent / 100;
        sorted.get(index).copied().unwrap_or_default()
    }
}

impl std::fmt::Display for Sample {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [p50, p90, p99] = [50, 90, 99].map(|percent| milliseconds(self.percentile(percent)));
        write!(
            formatter,
            "p50 {p50}, p90 {p90}, p99 {p99} over {} rounds",
            self.0.len()
        )
    }
}

fn milliseconds(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1_000.0)
}

fn print_router(measured: &[router::bench::Measurement]) {
    let mut table = Table::new(&[
        "TARGET",
        "CONNECTIONS",
        "REQUESTS/S",
        "P50",
        "P99",
        "FAILURES",
        "TO NGINX",
    ]);
    for figure in measured {
        let peer = measured
            .iter()
            .find(|other| other.target == "nginx" && other.connections == figure.connections);
        let ratio = peer.map_or_else(String::new, |peer| {
            let [lowest, median, highest] = figure.against(peer);
            format!("{median:.2}× ({lowest:.2} – {highest:.2})")
        });
        table.row(vec![
            figure.target.to_owned(),
            figure.connections.to_string(),
            format!("{:.0}", figure.requests_per_second()),
            milliseconds(figure.percentile(50)),
            milliseconds(figure.percentile(99)),
            figure.failures.to_string(),
            ratio,
        ]);
    }
    print!("{}", table.render());
}

fn print_sandboxd(measured: &[::sandboxd::bench::Measurement]) {
    let mut table = Table::new(&["CLIENTS", "COMMANDS/S", "P50", "P99"]);
    for figure in measured {
        table.row(vec![
            figure.clients.to_string(),
            format!("{:.0}", figure.commands_per_second),
            milliseconds(figure.p50),
            milliseconds(figure.p99),
        ]);
    }
    print!("{}", table.render());
}
