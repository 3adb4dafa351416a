//! `agent-sandbox suspend` and `resume`. Both return when the sandbox has come to rest, or is ready again.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::{connect, explain};
use crate::connection::{self, Connected};
use crate::output::parse_duration;
use crate::terminal::Progress;

/// Stop sandboxes and keep their volumes; files outside of volumes are lost
#[derive(Debug, Args)]
pub struct SuspendArguments {
    #[command(flatten)]
    which: Which,
}

/// Start suspended sandboxes again, and wait until they are ready
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
    let connected = connect_with(&arguments.which).await?;
    for name in &arguments.which.names {
        let progress = Progress::begin();
        progress.say(&format!("suspending {name}"));
        let sandbox = explain::attach(&connected, name).await?;
        let suspended = sandbox.suspend().await;
        progress.finish();
        suspended?;
        println!("{name} is suspended");
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn resume(arguments: ResumeArguments) -> anyhow::Result<ExitCode> {
    let connected = connect_with(&arguments.which).await?;
    for name in &arguments.which.names {
        let progress = Progress::begin();
        progress.say(&format!("resuming {name}"));
        let sandbox = explain::attach(&connected, name).await?;
        let resumed = sandbox.resume().await;
        progress.finish();
        resumed?;
        println!("{name} is running");
    }
    Ok(ExitCode::SUCCESS)
}

async fn connect_with(which: &Which) -> anyhow::Result<Connected> {
    let mut connected = connect(&which.connection).await?;
    connected.ready_timeout = Some(which.timeout);
    Ok(connected)
}
