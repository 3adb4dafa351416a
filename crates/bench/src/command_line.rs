//! The flags of `agent-sandbox-bench`, and which measurement each subcommand runs.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::agent_sandbox::{Quickstart, Up};
use crate::{
    api_server, claims, cold, first_instruction, idle, kruise, leaks, load, node, router, sandboxd,
    scrape, start, state, versus,
};

/// Measure the parts and the whole
#[derive(Debug, Parser)]
#[command(max_term_width = 110)]
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
        /// With --wrk, also measure the server that this administrator's kubeconfig names
        #[arg(long, value_name = "KUBECONFIG", requires = "wrk")]
        against: Option<PathBuf>,
        /// With --against, the directory with kube-apiserver.pid and etcd.pid, to measure their memory; `cargo xtask kube-up` sets it
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
        /// Sandboxes in each claim
        #[arg(long, default_value_t = 50)]
        replicas: usize,
    },
    /// The node: cold pods, exec, memory, beside runc and bubblewrap where they are installed
    Node(node::Arguments),
    /// The router, beside nginx where it is installed
    Router {
        /// Another router that runs on this machine, to be measured in the same run
        #[arg(long, value_name = "ADDRESS")]
        other: Option<SocketAddr>,
    },
    /// The in-sandbox runtime: commands a second; size, start and memory of its binary
    Sandboxd,
    /// What `up` costs while it is idle: memory, CPU time
    Idle {
        /// How long to measure
        #[arg(long, default_value_t = 10)]
        seconds: u64,
    },
    /// How soon `up` serves and fills its pool on an empty data directory; its idle cost; the size of the program. Fails beyond a budget
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
    /// What metrics and traces cost: scrapes, changes of metrics, spans that are not exported
    Scrape {
        #[arg(long, default_value_t = 10_000)]
        sandboxes: usize,
    },
    /// Whether deleted claims leave anything behind: entries, series, memory
    Leaks {
        #[arg(long, default_value_t = 20_000)]
        claims: usize,
    },
    /// A load-test recipe: claims at a rate, judged by their latencies
    Load(Box<load::Arguments>),
    /// Freezing and thawing: in the node, to the first answer, through the API. Fails beyond a budget
    State {
        #[arg(long, default_value_t = 200)]
        rounds: usize,
    },
    /// From the claim to Ready, without a warm pool
    Cold {
        #[arg(long, default_value_t = 50)]
        rounds: usize,
        /// Milliseconds between the deletion of a sandbox and the next claim: removing a sandbox takes about as long as starting it
        #[arg(long, default_value_t = 200)]
        rest: u64,
    },
}

impl Arguments {
    /// Measures and prints. Some measurements start a runtime of their own, so this is called outside of a runtime.
    pub fn execute(self) -> anyhow::Result<ExitCode> {
        match self.what {
            What::Router { other } => router::execute(other).map(|()| ExitCode::SUCCESS),
            What::Sandboxd => sandboxd::execute().map(|missed| verdict(&missed)),
            What::Scrape { sandboxes } => Ok(verdict(&scrape::measure(sandboxes))),
            What::Load(arguments) => block_on(load::execute(*arguments)),
            within => {
                let directory = tempfile::tempdir()?;
                let path = directory.path().to_owned();
                block_on(async move { Box::pin(measure(within, &path)).await })?;
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

/// Runs a measurement in a task on a new runtime: the in-process client is slow on the thread that blocks.
fn block_on<T: Send + 'static>(
    measurement: impl Future<Output = anyhow::Result<T>> + Send + 'static,
) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async { tokio::spawn(measurement).await? })
}

/// Prints the missed budgets. The exit code reports whether there is one.
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
            let (against, processes) = (against.as_deref(), processes.as_deref());
            api_server::wrk::run(directory, against, processes, duration).await
        }
        What::Api { .. } => api_server::execute(directory).await,
        What::Claims(arguments) => arguments.measure(directory).await,
        What::Reconcile { cached, claims } => claims::reconcile(cached, claims).await,
        What::Kruise {
            set,
            claims,
            replicas,
        } => {
            let options = kruise::Options {
                set,
                claims,
                replicas,
            };
            kruise::execute(directory, options).await
        }
        What::Node(arguments) => arguments.measure(directory).await,
        What::Idle { seconds } => {
            let up = Up::start(directory, Quickstart::TemplateAndPool).await?;
            let figures = idle::measure(&up, Duration::from_secs(seconds)).await;
            println!("{}", up.stop_after(figures).await?);
            Ok(())
        }
        What::Start { seconds } => start::run(directory, Duration::from_secs(seconds)).await,
        What::FirstInstruction { rounds } => {
            let up = Up::start(directory, Quickstart::TemplateAndPool).await?;
            let sample = first_instruction::measure(&up, rounds).await;
            let sample = up.stop_after(sample).await?;
            println!("claim to first output of a command: {sample}");
            Ok(())
        }
        What::Cold { rounds, rest } => {
            let up = Up::start(directory, Quickstart::TemplateAndPool).await?;
            let sample = cold::measure(&up, rounds, Duration::from_millis(rest)).await;
            let sample = up.stop_after(sample).await?;
            println!("claim to Ready without a pool: {sample}");
            Ok(())
        }
        What::State { rounds } => state::run(directory, rounds).await,
        What::VersusUpstream(arguments) => versus::run(arguments).await,
        What::Leaks { claims } => leaks::check(directory, claims).await,
        What::Router { .. } | What::Sandboxd | What::Scrape { .. } | What::Load(_) => {
            unreachable!("measured outside of this runtime")
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }
}
