//! `agent-sandbox suspend` and `resume`. Both return when the sandbox is suspended, or ready again.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use super::{connect, explain};
use crate::connection::{self, Connected};
use crate::output::{chain, parse_duration};
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
    change(&arguments.which, Mode::Suspended).await
}

pub async fn resume(arguments: ResumeArguments) -> anyhow::Result<ExitCode> {
    change(&arguments.which, Mode::Running).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Running,
    Suspended,
}

async fn change(which: &Which, mode: Mode) -> anyhow::Result<ExitCode> {
    let connected = connect_with(which).await?;
    let mut code = ExitCode::SUCCESS;
    for name in &which.names {
        match change_one(&connected, name, mode).await {
            Ok(()) if mode == Mode::Running => println!("{name} is running"),
            Ok(()) => println!("{name} is suspended"),
            // Goes on with the remaining claims.
            Err(error) => {
                eprintln!("error: {}", chain(&error));
                code = ExitCode::FAILURE;
            }
        }
    }
    Ok(code)
}

async fn change_one(connected: &Connected, name: &str, mode: Mode) -> anyhow::Result<()> {
    let progress = Progress::begin();
    let changing = async {
        let sandbox = explain::attach(connected, name).await?;
        match mode {
            Mode::Running => {
                progress.say(&format!("resuming {name}"));
                sandbox.resume().await?;
            }
            Mode::Suspended => {
                progress.say(&format!("suspending {name}"));
                sandbox.suspend().await?;
            }
        }
        Ok(())
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
