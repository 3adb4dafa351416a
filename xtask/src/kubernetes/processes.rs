//! Processes of a control plane and of what is run on it: they end when they are told to, when this process is interrupted, and with
//! it when it is killed.
//!
//! A terminal tells the whole process group of Ctrl-C; anything else may interrupt this process alone, and then its children are its
//! own to end.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, ensure};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use tokio::signal::unix::{SignalKind, signal};

pub const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How long a command may clear up after itself when this process is interrupted: scripts end nodes and their pods.
const COMMAND_GRACE: Duration = Duration::from_secs(60);

/// Whether this process has been told to end. Once there is one, SIGINT and SIGTERM no longer end the process by themselves.
#[derive(Clone)]
pub struct Interruption(Arc<OnceLock<Signal>>);

impl Interruption {
    pub fn watch() -> anyhow::Result<Self> {
        let received = Arc::new(OnceLock::new());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()?;
        let context = runtime.enter();
        let (mut interrupt, mut terminate) = (
            signal(SignalKind::interrupt())?,
            signal(SignalKind::terminate())?,
        );
        drop(context);
        let interruption = Self(Arc::clone(&received));
        std::thread::spawn(move || {
            runtime.block_on(async move {
                let first = tokio::select! {
                    _ = interrupt.recv() => Signal::INT,
                    _ = terminate.recv() => Signal::TERM,
                };
                let _ = received.set(first);
            });
        });
        Ok(interruption)
    }

    pub fn received(&self) -> Option<Signal> {
        self.0.get().copied()
    }

    /// Runs a command to its end, which an interruption hastens.
    pub fn run(&self, command: &mut Command) -> anyhow::Result<ExitStatus> {
        let mut child = command
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let told = || {
            // At a terminal the command has had its Ctrl-C, and a second one would disturb it while it clears up.
            let has_heard = |signal| signal == Signal::INT && std::io::stdin().is_terminal();
            self.received().map(|signal| {
                if has_heard(signal) {
                    Tell::Nothing
                } else {
                    Tell::Signal(signal)
                }
            })
        };
        wait(&mut child, COMMAND_GRACE, told)
    }
}

/// What a process is told, once, before it is left to end in its own time.
pub enum Tell {
    Nothing,
    Signal(Signal),
}

/// Waits for the end of a process. One that is told to end is killed if it has not after some time.
pub fn wait(
    child: &mut Child,
    grace: Duration,
    told: impl Fn() -> Option<Tell>,
) -> anyhow::Result<ExitStatus> {
    let mut told_at: Option<Instant> = None;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        match (told_at, told()) {
            (None, Some(tell)) => {
                if let Tell::Signal(signal) = tell {
                    // One that a test has paused would not hear of it.
                    send(child, Signal::CONT);
                    send(child, signal);
                }
                told_at = Some(Instant::now());
            }
            (Some(told_at), _) if told_at.elapsed() > grace => send(child, Signal::KILL),
            _ => {}
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn send(child: &Child, signal: Signal) {
    let _ = kill_process(Pid::from_child(child), signal);
}

/// Becomes a program that the kernel kills when the process that asked for it dies. A process can ask that only for itself, so that
/// it is this program, started anew, that becomes the other.
#[derive(Debug, clap::Args)]
pub struct BoundArguments {
    /// The process whose death is meant
    #[arg(long)]
    parent: i32,

    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    command: Vec<OsString>,
}

/// The subcommand that takes [`BoundArguments`].
pub const BOUND: &str = "bound";

/// A program that is killed when the thread that spawns it ends, however it ends.
pub fn bound(program: &Path) -> Command {
    // By this name it is found even when it was built anew meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(BOUND)
        .arg(format!("--parent={}", std::process::id()))
        .arg("--")
        .arg(program);
    command
}

pub fn become_bound(arguments: &BoundArguments) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    ensure!(
        getppid() == Pid::from_raw(arguments.parent),
        "the process that asked for this one is dead already"
    );
    let (program, rest) = arguments
        .command
        .split_first()
        .context("there is no program to become")?;
    let error = Command::new(program).args(rest).exec();
    Err(anyhow!(error).context(format!("cannot start {}", program.display())))
}
