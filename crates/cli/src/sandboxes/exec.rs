//! `agent-sandbox exec`: a command in a sandbox that is claimed already.

use std::process::ExitCode;

use clap::Args;

use super::{connect, explain};
use crate::connection;
use crate::signals::Signals;
use crate::terminal::CommandLine;

/// Run a command in a claimed sandbox
#[derive(Debug, Args)]
pub struct ExecArguments {
    /// Pass standard input on; always done, accepted for those used to it
    #[arg(short = 'i', long = "stdin", alias = "interactive")]
    stdin: bool,

    /// Name of the claim
    name: String,

    #[command(flatten)]
    command_line: CommandLine,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn exec(arguments: ExecArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let sandbox = explain::attach(&connected, &arguments.name).await?;
    let signals = Signals::listen()?;
    arguments.command_line.run(&sandbox, signals).await
}
