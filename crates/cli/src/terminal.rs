//! A process in a sandbox, connected to this process's own standard streams, signals and terminal.

use std::io::{self, IsTerminal, Read, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use rustix::termios::{self, OptionalActions, Termios};
use sdk::process::{Control, Event, Process, Start};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::signals::{Received, Signals};
use crate::visible;

/// How much of standard input is sent at a time.
const INPUT_PIECE: usize = 32 * 1024;
/// The timeout of handing a signal to the connection.
const PASSING: Duration = Duration::from_secs(1);

/// The exit code of a command that is not there.
const NOT_FOUND: i32 = 127;
const NOT_FOUND_HINT: &str = "the program has to be in the image of the sandbox; the image `host`, which `run` and the quickstart use, shows this machine's /usr: \
     install the program on this machine, or use a template whose image has it";

/// What is to be run, and how.
#[derive(Debug, Args)]
pub struct CommandLine {
    /// Run the command on a terminal
    #[arg(short, long)]
    tty: bool,

    /// Command and arguments
    // Our options come before the command; an unknown option there is an error.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl CommandLine {
    /// Runs the command in a sandbox to its end, and returns its exit code. A signal before the start of the command ends it with the
    /// signal's exit code.
    pub async fn run(
        &self,
        sandbox: &sdk::Sandbox,
        mut signals: Signals,
    ) -> anyhow::Result<ExitCode> {
        if self.tty && !io::stdin().is_terminal() {
            anyhow::bail!("-t needs a terminal as standard input");
        }
        let (rows, cols) = window_size().filter(|_| self.tty).unwrap_or_default();
        let start = Start {
            tty: self.tty,
            rows,
            cols,
            ..Start::argv(self.command.clone())
        };
        let processes = sandbox.process();
        let process = tokio::select! {
            started = processes.start(start) => started?,
            received = signals.next() => return Ok(received.exit_code()),
        };
        let (mode, raw) = if self.tty {
            (Mode::Terminal, Some(RawTerminal::enter()?))
        } else {
            (Mode::Plain, None)
        };
        let input = tokio::spawn(send_input(process.control().clone()));
        // A task of its own: printing output may block if stdout is a pipe that is not read.
        let forwarding = forward_signals(process.control().clone(), mode, signals)?;
        let mut forwarding = tokio::spawn(forwarding);
        let result = tokio::select! {
            result = print_output(process) => result,
            Ok(stuck) = &mut forwarding => Ok(stuck.exit_code()),
        };
        input.abort();
        forwarding.abort();
        drop(raw);
        result
    }
}

/// Whether the process has a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Plain,
    Terminal,
}

async fn print_output(mut process: Process) -> anyhow::Result<ExitCode> {
    while let Some(event) = process.next().await? {
        match event {
            Event::Stdout(bytes) => write_all(io::stdout(), &bytes)?,
            Event::Stderr(bytes) => write_all(io::stderr(), &bytes)?,
            Event::Exit(exit) => {
                if let Some(error) = &exit.error {
                    eprintln!("error: {}", visible::text(error));
                    if exit.exit_code == NOT_FOUND {
                        eprintln!("{NOT_FOUND_HINT}");
                    }
                }
                return Ok(ExitCode::from(
                    u8::try_from(exit.exit_code).unwrap_or(u8::MAX),
                ));
            }
        }
    }
    anyhow::bail!("the connection to the sandbox ended before the command did")
}

fn write_all(mut stream: impl Write, bytes: &[u8]) -> anyhow::Result<()> {
    stream
        .write_all(bytes)
        .and_then(|()| stream.flush())
        .context("cannot write the command's output")
}

async fn send_input(control: Control) -> anyhow::Result<()> {
    let mut pieces = read_input();
    while let Some(piece) = pieces.recv().await {
        control.write(piece).await?;
    }
    Ok(control.close_stdin().await?)
}

/// Reads standard input on a separate thread: a read may block for ever, and would keep the runtime from shutting down.
fn read_input() -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        let mut buffer = vec![0; INPUT_PIECE];
        while let Ok(length @ 1..) = io::stdin().read(&mut buffer) {
            if sender.blocking_send(buffer[..length].to_vec()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Forwards signals to the command. On a terminal, keys such as Ctrl-C reach the command as input instead. Returns a signal that cannot
/// be forwarded in time because it queues behind input that the command does not read: it then ends this process.
fn forward_signals(
    control: Control,
    mode: Mode,
    mut signals: Signals,
) -> io::Result<impl Future<Output = Received> + Send + 'static> {
    let mut window_change = signal(SignalKind::window_change())?;
    Ok(async move {
        loop {
            tokio::select! {
                received = signals.next() => {
                    let passing = control.signal(received.name);
                    match tokio::time::timeout(PASSING, passing).await {
                        // The command has ended; `print_output` reports it.
                        Ok(Err(_)) => std::future::pending().await,
                        Ok(Ok(())) => {}
                        Err(_) => return received,
                    }
                }
                Some(()) = window_change.recv(), if mode == Mode::Terminal => {
                    if let Some((rows, cols)) = window_size() {
                        let _ = tokio::time::timeout(PASSING, control.resize(rows, cols)).await;
                    }
                }
            }
        }
    })
}

fn window_size() -> Option<(u16, u16)> {
    let size = termios::tcgetwinsize(io::stdout()).ok()?;
    Some((size.ws_row, size.ws_col))
}

/// The terminal in raw mode: every key goes to the command. Left again when this is dropped.
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    fn enter() -> anyhow::Result<Self> {
        let before =
            termios::tcgetattr(io::stdin()).context("cannot read the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw)
            .context("cannot change the terminal's settings")?;
        Ok(Self { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// A progress line on standard error, if that is a terminal.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    shown: bool,
}

impl Progress {
    pub fn begin() -> Self {
        Self {
            shown: io::stderr().is_terminal(),
        }
    }

    pub fn say(self, step: &str) {
        if self.shown {
            eprint!("\r\x1b[K{} …", visible::line(step));
        }
    }

    /// Prints a permanent line, on a terminal or not.
    pub fn note(self, line: &str) {
        self.finish();
        eprintln!("{}", visible::line(line));
    }

    /// Clears the line.
    pub fn finish(self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}
