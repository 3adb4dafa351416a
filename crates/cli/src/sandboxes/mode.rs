//! `agent-sandbox suspend` and `resume`. Both return when the sandbox is suspended, or ready again.

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use sdk::{Phase, SuspensionType};

use super::{connect, explain};
use crate::connection::{self, Connected};
use crate::output::{chain, parse_duration};
use crate::terminal::Progress;

/// Suspend sandboxes: stop them and keep their volumes, or freeze them as they are
#[derive(Debug, Args)]
pub struct SuspendArguments {
    /// How to suspend them, now and later [default: as their template says, else Stop]
    #[arg(long, value_enum, value_name = "STRATEGY", ignore_case = true)]
    strategy: Option<Strategy>,

    #[command(flatten)]
    which: Which,
}

/// The ways to suspend a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Strategy {
    /// Delete the pod; volumes stay, memory and files outside of volumes are lost
    #[value(name = "Stop")]
    Stop,
    /// Keep the pod and stop all of its processes where they are; memory and files stay
    #[value(name = "Freeze")]
    Freeze,
    /// Write the memory to disk; no node can do that yet
    #[value(name = "Hibernate")]
    Hibernate,
}

impl From<Strategy> for SuspensionType {
    fn from(strategy: Strategy) -> Self {
        match strategy {
            Strategy::Stop => Self::Stop,
            Strategy::Freeze => Self::Freeze,
            Strategy::Hibernate => Self::Hibernate,
        }
    }
}

/// Let suspended sandboxes run again, and wait until they are ready
#[derive(Debug, Args)]
pub struct ResumeArguments {
    #[command(flatten)]
    which: Which,
}

#[derive(Debug, Args)]
struct Which {
    /// How long to wait for each
    #[arg(long, value_name = "DURATION", default_value = "3m", value_parser = parse_duration)]
    timeout: Duration,

    /// Names of the claims
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn suspend(arguments: SuspendArguments) -> anyhow::Result<ExitCode> {
    let strategy = arguments.strategy.map(SuspensionType::from);
    change(&arguments.which, Mode::Suspended(strategy)).await
}

pub async fn resume(arguments: ResumeArguments) -> anyhow::Result<ExitCode> {
    change(&arguments.which, Mode::Running).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Running,
    Suspended(Option<SuspensionType>),
}

async fn change(which: &Which, mode: Mode) -> anyhow::Result<ExitCode> {
    let connected = connect_with(which).await?;
    let mut code = ExitCode::SUCCESS;
    for name in &which.names {
        match change_one(&connected, name, mode).await {
            Ok(done) => println!("{name} is {done}"),
            // Goes on with the remaining claims.
            Err(error) => {
                eprintln!("error: {}", chain(&error));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

async fn change_one(connected: &Connected, name: &str, mode: Mode) -> anyhow::Result<&'static str> {
    let progress = Progress::begin();
    let changing = async {
        let sandbox = explain::attach(connected, name).await?;
        match mode {
            Mode::Running => {
                progress.say(&format!("resuming {name}"));
                sandbox.resume().await?;
                Ok("running")
            }
            Mode::Suspended(strategy) => {
                progress.say(&format!("suspending {name}"));
                match strategy {
                    Some(strategy) => sandbox.suspend_with(strategy).await?,
                    None => sandbox.suspend().await?,
                }
                Ok(match sandbox.status().await?.phase {
                    Phase::Frozen => "frozen",
                    _ => "suspended",
                })
            }
        }
    };
    let changed = changing.await;
    progress.finish();
    changed
}

async fn connect_with(which: &Which) -> anyhow::Result<Connected> {
    let mut connected = connect(&which.connection).await?;
    connected.ready_timeout = Some(which.timeout);
    Ok(connected)
}
