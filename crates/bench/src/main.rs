//! The `agent-sandbox-bench` binary: benchmarks, load tests and leak checks.
//!
//! | module | measures |
//! |---|---|
//! | [`command_line`] | nothing: it parses the flags and runs the measurement |
//! | [`api_server`] | the embedded API server, in process and over HTTPS |
//! | [`claims`], [`kruise`] | claims, with pods that do not run |
//! | [`cold`], [`first_instruction`] | claims through the whole system |
//! | [`idle`], [`start`] | the cost and the start of `agent-sandbox up` |
//! | [`leaks`] | what deleted claims leave behind in the controllers |
//! | [`load`] | load-test recipes |
//! | [`node`], [`router`], [`sandboxd`] | these parts, beside other programs that do the same |
//! | [`state`] | freezing and thawing of sandboxes |
//! | [`scrape`] | the cost of metrics and traces |
//! | [`versus`] | the controllers beside upstream's |
//!
//! The other modules are what several measurements share: [`agent_sandbox`] finds the program and runs it as `up`, [`kinds`] installs
//! the custom resource definitions, [`fake_cluster`] runs the controllers with a fake node, [`ready_times`] watches objects become Ready, [`process`] reads memory and CPU time,
//! [`connection`] connects to a cluster, [`sample`] and [`table`] print.

mod agent_sandbox;
mod api_server;
mod claims;
mod cold;
mod command_line;
mod connection;
mod fake_cluster;
mod first_instruction;
mod idle;
mod kinds;
mod kruise;
mod leaks;
mod load;
mod node;
mod process;
mod ready_times;
mod router;
mod sample;
mod sandboxd;
mod scrape;
mod start;
mod state;
mod table;
mod versus;

use std::process::ExitCode;

use clap::Parser;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing_subscriber::EnvFilter;

/// The allocator of the measured program (ADR 33): several measurements run its parts in this process.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let arguments = command_line::Arguments::parse();
    // Measurements print their results. `RUST_LOG` shows log lines on standard error.
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("off")),
        )
        .with_writer(std::io::stderr)
        .init();
    allow_open_files();
    match arguments.execute() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Raises the limit of open files to the hard limit: hundreds of connections, watches and pods are open at once.
fn allow_open_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    // With the old limit, small measurements still work.
    let _ = setrlimit(Resource::Nofile, limit);
}
