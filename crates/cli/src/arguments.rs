//! The command line. Each command's flags and behaviour are in its own module.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::logging::{self, Audience};
use crate::{generate, run, sandboxes, up};

/// Names under which the binary is also installed, and the command each stands for.
const OTHER_NAMES: [(&str, &str); 3] = [
    ("agent-sandbox-controller", "controller"),
    ("sandbox-router", "router"),
    ("sandboxd", "sandboxd"),
];

/// Isolated, stateful sandboxes for AI agents
#[derive(Debug, Parser)]
#[command(name = "agent-sandbox", version, max_term_width = 110)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Up(up::Arguments),
    Run(run::Arguments),
    Claim(sandboxes::ClaimArguments),
    #[command(visible_alias = "ls")]
    List(sandboxes::ListArguments),
    Exec(sandboxes::ExecArguments),
    /// Stop a claim's sandbox and keep its volumes
    Suspend(sandboxes::OneArguments),
    /// Start a suspended sandbox again
    Resume(sandboxes::OneArguments),
    Delete(sandboxes::DeleteArguments),
    Generate(generate::Arguments),
}

/// Reads the command line, under whatever name the binary was called.
pub fn parse() -> Arguments {
    Arguments::parse_from(with_command(std::env::args_os()))
}

fn with_command(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    let command = arguments
        .first()
        .and_then(|program| Path::new(program).file_name()?.to_str())
        .and_then(|name| OTHER_NAMES.iter().find(|(other, _)| *other == name))
        .map(|(_, command)| OsString::from(command));
    if let Some(command) = command {
        arguments.insert(1, command);
    }
    arguments
}

impl Arguments {
    /// Runs the command, and answers with the exit code of the process.
    pub fn execute(self) -> anyhow::Result<ExitCode> {
        logging::start(match self.command {
            Command::Up(_) => Audience::Operator,
            _ => Audience::User,
        });
        match self.command {
            Command::Up(arguments) => block_on(up::execute(arguments)),
            Command::Run(arguments) => block_on(run::execute(arguments)),
            Command::Claim(arguments) => block_on(sandboxes::claim(arguments)),
            Command::List(arguments) => block_on(sandboxes::list(arguments)),
            Command::Exec(arguments) => block_on(sandboxes::exec(arguments)),
            Command::Suspend(arguments) => block_on(sandboxes::suspend(arguments)),
            Command::Resume(arguments) => block_on(sandboxes::resume(arguments)),
            Command::Delete(arguments) => block_on(sandboxes::delete(arguments)),
            Command::Generate(arguments) => generate::print(&arguments).map(|()| ExitCode::SUCCESS),
        }
    }
}

/// Runs a command on a runtime of its own, in a spawned task: the in-process client is slow on the thread that blocks.
fn block_on(command: impl Future<Output = anyhow::Result<ExitCode>> + Send + 'static) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(async { tokio::spawn(command).await? });
    // Tasks that wait for input, such as a read of the terminal, must not hold up the exit.
    runtime.shutdown_background();
    result
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn other_names_of_the_binary_stand_for_a_command() {
        let called = |words: &[&str]| with_command(words.iter().map(OsString::from));
        assert_eq!(called(&["/usr/bin/sandbox-router", "--x"]), ["/usr/bin/sandbox-router", "router", "--x"]);
        assert_eq!(called(&["agent-sandbox", "up"]), ["agent-sandbox", "up"]);
    }
}
