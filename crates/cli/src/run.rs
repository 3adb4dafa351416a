//! `agent-sandbox run`: claim a sandbox, run a command in it, release it. The exit code is the command's.

use std::pin::pin;
use std::process::ExitCode;

use clap::Args;

use crate::connection::{self, Connected};
use crate::private_system::PrivateSystem;
use crate::sandboxes::{self, Created};
use crate::signals::Signals;
use crate::terminal::{CommandLine, Progress};

/// Run a command in a fresh sandbox, and release the sandbox
///
/// Without a cluster or a running `agent-sandbox up`, the whole system is started for the call.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    source: sandboxes::Source,

    #[command(flatten)]
    wait: sandboxes::Wait,

    /// Keep the sandbox, and print the name of its claim on stderr
    #[arg(long)]
    keep: bool,

    #[command(flatten)]
    command_line: CommandLine,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn execute(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let progress = Progress::begin();
    if let Some(connected) = arguments.connection.connect_if_any().await? {
        connected.require_kinds().await?;
        return run_in(&connected, &arguments, &progress, Signals::listen()?).await;
    }
    for (flag, is_set) in [
        ("--keep", arguments.keep),
        ("--keep-on-failure", arguments.wait.keep_on_failure),
    ] {
        if is_set {
            anyhow::bail!("{flag} needs a system that stays: start `agent-sandbox up` first");
        }
    }
    progress.say("starting agent-sandbox");
    let mut signals = Signals::listen()?;
    let mut starting = pin!(PrivateSystem::start());
    let system = tokio::select! {
        started = &mut starting => started?,
        received = signals.next() => {
            // A private system can be removed only once it has started, which is soon.
            starting.await?.stop().await?;
            return Ok(received.exit_code());
        }
    };
    let connected = arguments
        .connection
        .connect_within(system.up.client(), system.up.running());
    let result = run_in(&connected, &arguments, &progress, signals).await;
    system.stop().await?;
    result
}

/// Signals during the release of the sandbox, after the command, are ignored: the release is quick and must be completed.
async fn run_in(
    connected: &Connected,
    arguments: &Arguments,
    progress: &Progress,
    mut signals: Signals,
) -> anyhow::Result<ExitCode> {
    progress.say("claiming a sandbox");
    let wanted = arguments.source.wanted();
    let wait = &arguments.wait;
    let created = sandboxes::create(connected, wanted, wait, *progress, &mut signals).await;
    progress.finish();
    let sandbox = match created? {
        Created::Ready(sandbox) => sandbox,
        Created::Interrupted(received) => return Ok(received.exit_code()),
    };
    let result = arguments.command_line.run(&sandbox, signals).await;
    if arguments.keep {
        eprintln!("kept as claim {}", sandbox.id());
    } else {
        sandbox.terminate().await?;
    }
    result
}
