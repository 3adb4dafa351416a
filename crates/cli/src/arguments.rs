//! The command line. Each command's flags and behaviour are in its own module.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};

use crate::build_info::VERSION;
use crate::logging::{self, Audience};
use crate::{bench, generate, image, open_files, parts, reset, run, sandboxes, token, up};

/// Names under which the binary is also installed, and the command each stands for.
const OTHER_NAMES: [(&str, &str); 3] = [
    ("agent-sandbox-controller", "controller"),
    ("sandbox-router", "router"),
    ("sandboxd", "sandboxd"),
];

/// Isolated, stateful sandboxes for AI agents
#[derive(Debug, Parser)]
#[command(name = "agent-sandbox", version = VERSION, max_term_width = 110)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Up(Box<up::Arguments>),
    Run(run::Arguments),
    Claim(sandboxes::ClaimArguments),
    #[command(visible_alias = "ls")]
    List(sandboxes::ListArguments),
    Get(sandboxes::GetArguments),
    Exec(sandboxes::ExecArguments),
    Cp(sandboxes::CopyArguments),
    Logs(sandboxes::LogsArguments),
    Suspend(sandboxes::SuspendArguments),
    Resume(sandboxes::ResumeArguments),
    Scale(sandboxes::ScaleArguments),
    #[command(visible_alias = "rm")]
    Delete(sandboxes::DeleteArguments),
    /// Pull, load, list and remove the images of this machine's node
    #[command(subcommand)]
    Image(image::Command),
    Status(sandboxes::StatusArguments),
    Reset(reset::Arguments),
    Token(token::Arguments),
    Generate(generate::Arguments),
    Bench(bench::Arguments),
    /// Run the controllers, as on a Kubernetes cluster; also installed as agent-sandbox-controller
    // As in Go, the last of several of the same flag holds.
    #[command(disable_version_flag = true, args_override_self = true)]
    Controller(Box<controllers::manager::Args>),
    /// Run the router, as on a Kubernetes cluster; also installed as sandbox-router
    #[command(args_override_self = true)]
    Router(Box<parts::RouterArguments>),
    Node(parts::NodeArguments),
    Sandboxd(parts::SandboxdArguments),
    /// Print a completion script for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages of all commands into a directory
    #[command(hide = true)]
    ManPages {
        /// Where to write them; it must exist
        directory: PathBuf,
    },
}

/// Parses the command line, under any of the binary's names.
pub fn parse() -> anyhow::Result<Arguments> {
    let mut arguments = with_command(std::env::args_os());
    if is_command(&arguments, "router") {
        arguments = router::with_config_file(arguments, |name| std::env::var(name).ok())?;
    }
    Ok(Arguments::parse_from(arguments))
}

fn is_command(arguments: &[OsString], name: &str) -> bool {
    arguments.get(1).is_some_and(|command| command == name)
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
    // Flags of programs written in Go may have one dash. These commands have no short flags that this could be confused with.
    if is_command(&arguments, "controller") || is_command(&arguments, "router") {
        return controllers::manager::normalize(arguments);
    }
    arguments
}

impl Arguments {
    /// Runs the command, and returns the exit code of the process.
    pub fn execute(self) -> anyhow::Result<ExitCode> {
        logging::choose(self.command.log_format());
        match self.command {
            // The controllers configure logging from their own flags; the others do so within their runtime, where spans are exported.
            Command::Controller(_)
            | Command::Up(_)
            | Command::Router(_)
            | Command::Sandboxd(_)
            | Command::Run(_)
            | Command::Claim(_)
            | Command::Exec(_)
            | Command::Cp(_)
            | Command::Suspend(_)
            | Command::Resume(_) => {}
            Command::Node(_) => logging::start(Audience::Operator),
            _ => logging::start(Audience::User),
        }
        // What runs in a sandbox has the sandbox's limits.
        if !matches!(self.command, Command::Sandboxd(_)) {
            open_files::allow();
        }
        match self.command {
            Command::Up(arguments) => {
                let traces = arguments.enable_tracing;
                let up = up::execute(*arguments);
                block_on(logging::observed("agent-sandbox", traces, up))
            }
            Command::Run(arguments) => block_on(logging::traced(
                "agent-sandbox run",
                run::execute(arguments),
            )),
            Command::Claim(arguments) => block_on(logging::traced(
                "agent-sandbox claim",
                sandboxes::claim(arguments),
            )),
            Command::List(arguments) => block_on(sandboxes::list(arguments)),
            Command::Get(arguments) => block_on(sandboxes::get(arguments)),
            Command::Exec(arguments) => block_on(logging::traced(
                "agent-sandbox exec",
                sandboxes::exec(arguments),
            )),
            Command::Cp(arguments) => block_on(logging::traced(
                "agent-sandbox cp",
                sandboxes::copy(arguments),
            )),
            Command::Logs(arguments) => block_on(sandboxes::logs(arguments)),
            Command::Suspend(arguments) => block_on(logging::traced(
                "agent-sandbox suspend",
                sandboxes::suspend(arguments),
            )),
            Command::Resume(arguments) => block_on(logging::traced(
                "agent-sandbox resume",
                sandboxes::resume(arguments),
            )),
            Command::Scale(arguments) => block_on(sandboxes::scale(arguments)),
            Command::Delete(arguments) => block_on(sandboxes::delete(arguments)),
            Command::Image(command) => block_on(image::execute(command)),
            Command::Status(arguments) => block_on(sandboxes::status(arguments)),
            Command::Reset(arguments) => block_on(reset::execute(arguments)),
            Command::Token(arguments) => token::print(&arguments),
            Command::Generate(arguments) => generate::print(&arguments).map(|()| ExitCode::SUCCESS),
            Command::Bench(arguments) => Err(bench::execute(&arguments)),
            Command::Controller(arguments) => block_on(parts::controller(*arguments)),
            Command::Router(arguments) => {
                if arguments.router.version {
                    println!("sandbox-router {VERSION}");
                    return Ok(ExitCode::SUCCESS);
                }
                let traces = arguments.router.enable_tracing;
                let router = parts::router(arguments.router);
                block_on(logging::observed("sandbox-router", traces, router))
            }
            Command::Node(arguments) => block_on(parts::node(arguments)),
            Command::Sandboxd(arguments) => block_on(parts::sandboxd(arguments)),
            Command::Completions { shell } => {
                clap_complete::generate(
                    shell,
                    &mut Self::command(),
                    "agent-sandbox",
                    &mut io::stdout(),
                );
                Ok(ExitCode::SUCCESS)
            }
            Command::ManPages { directory } => {
                clap_mangen::generate_to(Self::command(), &directory).with_context(|| {
                    format!("cannot write manual pages into {}", directory.display())
                })?;
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

impl Command {
    /// The format of the lines that the command writes to standard error.
    fn log_format(&self) -> logging::Format {
        match self {
            Command::Up(arguments) => arguments.logging.log_format,
            Command::Router(arguments) => arguments.logging.log_format,
            Command::Node(arguments) => arguments.logging.log_format,
            Command::Controller(arguments) => arguments.logging.format().into(),
            // The runtime reads its flags itself.
            _ => logging::Format::Text,
        }
    }
}

/// Runs a command on a runtime of its own, in a spawned task: the in-process client is slow on the thread that blocks.
fn block_on(
    command: impl Future<Output = anyhow::Result<ExitCode>> + Send + 'static,
) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(async { tokio::spawn(command).await? });
    // Tasks that wait for input, such as a read of the terminal, must not hold up the exit.
    runtime.shutdown_background();
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_last_of_several_flags_holds_as_in_go() {
        let line = [
            "agent-sandbox",
            "controller",
            "--extensions",
            "--extensions=false",
        ];
        let Command::Controller(arguments) = Arguments::try_parse_from(line).unwrap().command
        else {
            panic!("it is the controller");
        };
        assert!(!arguments.extensions);
    }

    #[test]
    fn an_unknown_option_before_the_command_is_an_error_and_not_the_command() {
        let parsed = |words: &[&str]| Arguments::try_parse_from(words).map(drop);
        for words in [
            &["agent-sandbox", "run", "--unknown", "true"][..],
            &["agent-sandbox", "run", "--tenplate", "x", "--", "true"],
            &["agent-sandbox", "exec", "a-claim", "--unknown", "true"],
        ] {
            let error = parsed(words).unwrap_err();
            assert_eq!(
                error.kind(),
                clap::error::ErrorKind::UnknownArgument,
                "{words:?}"
            );
        }
        for words in [
            &["agent-sandbox", "run", "python3", "-c", "1", "--unknown"][..],
            &["agent-sandbox", "run", "--", "--odd-program", "-x"],
            &["agent-sandbox", "exec", "a-claim", "--", "ls", "-l"],
            &["agent-sandbox", "exec", "a-claim", "ls", "-l"],
        ] {
            parsed(words).unwrap();
        }
    }

    #[test]
    fn other_names_of_the_binary_stand_for_a_command() {
        let called = |words: &[&str]| with_command(words.iter().map(OsString::from));
        assert_eq!(
            called(&["/usr/bin/sandbox-router", "--x"]),
            ["/usr/bin/sandbox-router", "router", "--x"]
        );
        assert_eq!(called(&["agent-sandbox", "up"]), ["agent-sandbox", "up"]);
    }
}
