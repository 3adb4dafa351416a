//! `agent-sandbox exec`: a command in a sandbox that is claimed already.

use std::process::ExitCode;

use clap::Args;

use super::{connect, explain};
use crate::connection;
use crate::signals::Signals;
use crate::terminal;

/// Run a command in a claimed sandbox
#[derive(Debug, Args)]
pub struct ExecArguments {
    /// Run the command on a terminal
    #[arg(short, long)]
    tty: bool,

    /// Pass standard input on; always done, accepted for those used to it
    #[arg(short = 'i', long = "stdin", alias = "interactive")]
    stdin: bool,

    /// Name of the claim
    name: String,

    /// Command and arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "COMMAND"
    )]
    command: Vec<String>,

    #[command(flatten)]
    connection: connection::Arguments,
}

pub async fn exec(arguments: ExecArguments) -> anyhow::Result<ExitCode> {
    let connected = connect(&arguments.connection).await?;
    let sandbox = explain::attach(&connected, &arguments.name).await?;
    let signals = Signals::listen()?;
    let mode = terminal::Mode::from_flag(arguments.tty);
    terminal::run(&sandbox, arguments.command, mode, signals).await
}
