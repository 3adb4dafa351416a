//! `agent-sandbox run`: claim a sandbox, run a command in it, release it. The exit code is the command's.

use std::process::ExitCode;

use clap::Args;
use node::privileges::{Privileges, ROOTLESS_LIMITS};
use tempfile::TempDir;

use crate::connection::{self, Connected};
use crate::terminal::{self, Progress};
use crate::up::{Options, Quickstart, Up};
use crate::{data_directory, rootless, sandboxes};

/// Run a command in a fresh sandbox, and release the sandbox
///
/// Without a cluster or a running `agent-sandbox up`, the whole system is started for the call.
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(flatten)]
    source: sandboxes::Source,

    /// Keep the sandbox, and print the name of its claim on stderr
    #[arg(long)]
    keep: bool,

    /// Run the command on a terminal
    #[arg(short, long)]
    tty: bool,

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

pub async fn execute(arguments: Arguments) -> anyhow::Result<ExitCode> {
    let progress = Progress::begin();
    if let Some(connected) = arguments.connection.connect_if_any().await? {
        connected.require_kinds().await?;
        return run_in(&connected, &arguments, &progress).await;
    }
    if arguments.keep {
        anyhow::bail!("--keep needs a system that stays: start `agent-sandbox up` first");
    }
    progress.say("starting agent-sandbox");
    let embedded = Embedded::start().await?;
    let connected = arguments
        .connection
        .connect_within(embedded.up.client(), embedded.up.running());
    let result = run_in(&connected, &arguments, &progress).await;
    embedded.stop().await?;
    result
}

async fn run_in(
    connected: &Connected,
    arguments: &Arguments,
    progress: &Progress,
) -> anyhow::Result<ExitCode> {
    progress.say("claiming a sandbox");
    let created = sandboxes::create(connected, arguments.source.wanted()).await;
    progress.finish();
    let sandbox = created?;
    let result = terminal::run(
        &sandbox,
        arguments.command.clone(),
        terminal::Mode::from_flag(arguments.tty),
    )
    .await;
    if arguments.keep {
        eprintln!("kept as claim {}", sandbox.id());
    } else {
        sandbox.terminate().await?;
    }
    result
}

/// A whole system for one call, which leaves nothing behind.
struct Embedded {
    up: Up,
    _data_directory: TempDir,
}

impl Embedded {
    async fn start() -> anyhow::Result<Self> {
        let parent = data_directory::default_path()?;
        data_directory::create(&parent)?;
        rootless::enter(&parent.join("bin"), &[])?;
        if Privileges::current() == Privileges::Rootless {
            eprintln!("{ROOTLESS_LIMITS}");
        }
        let data_directory = tempfile::Builder::new().prefix("run-").tempdir_in(parent)?;
        let any_port = ([127, 0, 0, 1], 0).into();
        let up = Up::start(Options {
            data_directory: data_directory.path().to_owned(),
            api_listen: any_port,
            router_listen: any_port,
            metrics_listen: any_port,
            audit: None,
            quickstart: Quickstart::Template,
            node: crate::node_flags::NodeFlags::default(),
        })
        .await?;
        Ok(Self {
            up,
            _data_directory: data_directory,
        })
    }

    async fn stop(self) -> anyhow::Result<()> {
        self.up.stop_with_sandboxes().await
    }
}
