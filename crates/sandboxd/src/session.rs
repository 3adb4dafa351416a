//! One command from its start to its exit: process group, input, output, time limit. Every API that runs commands
//! consumes a [`Session`]'s events.
//!
//! ```text
//! start ──► Output* ──► Exit          the events, in this order; Exit comes once
//!    └─ drop before Exit kills the process group
//! ```
//!
//! Everything that a command has written is sent before its exit, however slowly the client reads. A background process that it
//! leaves running, and that keeps the output open, delays the exit by at most [`LINGER`] without output and
//! [`LARGEST_PIPE`] of output; that process keeps running, and its further output is read and discarded.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rustix::process::{Signal, WaitStatus};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{ChildStderr, ChildStdin, ChildStdout};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use crate::protocol::{Exit, SignalName, Start, exit_code};
use crate::reaper::{ProcessGroup, Reaper};
use crate::terminal::{self, END_OF_FILE, Terminal, TerminalEnds};

/// How long output may stay open and idle after the command has ended.
const LINGER: Duration = Duration::from_secs(2);
/// The largest amount of unread output of an ended command: the capacity of a pipe that an unprivileged user has enlarged.
const LARGEST_PIPE: usize = 1024 * 1024;
const READ_SIZE: usize = 32 * 1024;
/// The number of chunks of output, or of input, that are queued for a slow reader.
const QUEUED_PIECES: usize = 8;

/// Environment variables for commands, set while the sandbox runs.
pub type SharedEnvironment = Arc<Mutex<BTreeMap<String, String>>>;

/// The server's state that new commands need.
#[derive(Clone, Debug)]
pub struct Launcher {
    pub reaper: Arc<Reaper>,
    pub environment: SharedEnvironment,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("exactly one of `command` and `argv` is needed")]
    Ambiguous,
    #[error("the command is empty")]
    Empty,
    #[error("the time limit must be a positive number of seconds")]
    TimeLimit,
    #[error("{reason}: '{program}'")]
    Spawn {
        program: String,
        reason: String,
        #[source]
        source: io::Error,
    },
}

impl StartError {
    /// The exit code that a shell would return.
    pub fn exit(&self) -> Exit {
        let exit_code = match self {
            StartError::Spawn { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                exit_code::NOT_FOUND
            }
            _ => exit_code::CANNOT_RUN,
        };
        Exit {
            exit_code,
            error: Some(self.to_string()),
            ..Exit::default()
        }
    }

    /// Whether the request is invalid, as opposed to the command.
    pub fn is_invalid_request(&self) -> bool {
        !matches!(self, StartError::Spawn { .. })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    Stdout,
    Stderr,
}

#[derive(Debug)]
pub enum Event {
    Output(Stream, Bytes),
    Exit(Exit),
}

#[derive(Debug)]
enum Input {
    Bytes(Bytes),
    End,
}

/// A running command.
#[derive(Debug)]
pub struct Session {
    events: mpsc::Receiver<Event>,
    control: Control,
}

/// Controls a running command.
#[derive(Clone, Debug)]
pub struct Control {
    group: ProcessGroup,
    ended: watch::Receiver<bool>,
    input: mpsc::Sender<Input>,
    terminal: Option<Arc<Terminal>>,
}

impl Launcher {
    /// Starts a command. `default_limit` applies if the request has no time limit.
    pub fn start(
        &self,
        base: &Path,
        request: &Start,
        default_limit: Option<Duration>,
    ) -> Result<Session, StartError> {
        let words = match (&request.argv, &request.command) {
            (Some(argv), None) => argv.clone(),
            (None, Some(line)) => vec!["/bin/sh".into(), "-c".into(), line.clone()],
            _ => return Err(StartError::Ambiguous),
        };
        let limit = match request.timeout_seconds {
            Some(seconds) => Some(time_limit(seconds).ok_or(StartError::TimeLimit)?),
            None => default_limit,
        };
        let (program, arguments) = words.split_first().ok_or(StartError::Empty)?;
        if program.is_empty() {
            return Err(StartError::Empty);
        }
        self.spawn(base, request, program, arguments, limit)
            .map_err(|source| StartError::Spawn {
                program: program.clone(),
                reason: reason(&source),
                source,
            })
    }

    fn spawn(
        &self,
        base: &Path,
        request: &Start,
        program: &str,
        arguments: &[String],
        limit: Option<Duration>,
    ) -> io::Result<Session> {
        let directory = request
            .cwd
            .as_ref()
            .map_or_else(|| base.to_owned(), |cwd| base.join(cwd));
        if !directory.is_dir() {
            // Checked here, because a failed start does not distinguish a missing directory from a missing program.
            return Err(io::Error::new(
                io::ErrorKind::NotADirectory,
                format!("no directory {}", directory.display()),
            ));
        }
        let (mut command, ends) = if request.tty {
            let TerminalEnds {
                terminal,
                reader,
                writer,
                slave,
            } = Terminal::open(request.rows.unwrap_or(24), request.cols.unwrap_or(80))?;
            let mut command = terminal::command_on(slave, program, arguments)?;
            command.env("TERM", "xterm-256color");
            (command, Some((terminal, reader, writer)))
        } else {
            let mut command = Command::new(program);
            command
                .args(arguments)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            // The terminal helper becomes a session leader instead, which includes a process group.
            command.process_group(0);
            (command, None)
        };
        command.current_dir(directory);
        command.envs(
            &*self
                .environment
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        command.envs(&request.env);
        let (mut child, group, status) = self.reaper.spawn(&mut command)?;
        // The command holds the parent's copies of the terminal's slave side.
        drop(command);

        let (event_sender, events) = mpsc::channel(QUEUED_PIECES);
        let (input, input_receiver) = mpsc::channel(QUEUED_PIECES);
        let (has_ended, ended) = watch::channel(false);
        let pump = |stream| Pump {
            stream,
            events: event_sender.clone(),
            ended: ended.clone(),
        };
        let mut pumps = JoinSet::new();
        let mut terminal = None;
        if let Some((ends, reader, writer)) = ends {
            pumps.spawn(pump(Stream::Stdout).run(reader));
            tokio::spawn(feed(writer, input_receiver, InputEnd::Typed));
            terminal = Some(Arc::new(ends));
        } else if let (Some(stdin), Some(stdout), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        {
            pumps.spawn(pump(Stream::Stdout).run(ChildStdout::from_std(stdout)?));
            pumps.spawn(pump(Stream::Stderr).run(ChildStderr::from_std(stderr)?));
            tokio::spawn(feed(
                ChildStdin::from_std(stdin)?,
                input_receiver,
                InputEnd::Closed,
            ));
        }
        tokio::spawn(supervise(
            group,
            status,
            limit,
            pumps,
            event_sender,
            has_ended,
        ));
        Ok(Session {
            events,
            control: Control {
                group,
                ended,
                input,
                terminal,
            },
        })
    }
}

impl Session {
    /// The next event; `None` after the exit.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    pub fn control(&self) -> &Control {
        &self.control
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if !*self.control.ended.borrow() {
            let _ = self.control.group.signal(Signal::KILL);
        }
    }
}

impl Control {
    pub fn process(&self) -> u32 {
        self.group.number()
    }

    /// Queues bytes for standard input; waits while the command does not read. Input for a command that has closed its
    /// standard input is discarded, as a shell's pipe would do.
    pub async fn write(&self, bytes: Bytes) {
        let _ = self.input.send(Input::Bytes(bytes)).await;
    }

    /// Closes standard input after the queued bytes.
    pub async fn end_input(&self) {
        let _ = self.input.send(Input::End).await;
    }

    pub fn has_terminal(&self) -> bool {
        self.terminal.is_some()
    }

    /// Does nothing without a terminal.
    pub fn resize(&self, rows: u16, cols: u16) -> io::Result<()> {
        self.terminal
            .as_ref()
            .map_or(Ok(()), |terminal| terminal.resize(rows, cols))
    }

    /// Signals the command's process group, unless it has ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        if *self.ended.borrow() {
            Ok(())
        } else {
            self.group.signal(signal)
        }
    }
}

/// Waits for the command, kills its process group at the time limit, and drains the output before it reports the exit.
async fn supervise(
    group: ProcessGroup,
    status: oneshot::Receiver<WaitStatus>,
    limit: Option<Duration>,
    mut pumps: JoinSet<()>,
    events: mpsc::Sender<Event>,
    has_ended: watch::Sender<bool>,
) {
    let mut status = status;
    let mut timed_out = false;
    let status = if let Some(limit) = limit {
        match tokio::time::timeout(limit, &mut status).await {
            Ok(status) => status,
            Err(_elapsed) => {
                timed_out = true;
                let _ = group.signal(Signal::KILL);
                status.await
            }
        }
    } else {
        status.await
    };
    has_ended.send_replace(true);
    while pumps.join_next().await.is_some() {}
    let mut exit = status.map_or_else(
        |_| Exit {
            exit_code: exit_code::CANNOT_RUN,
            error: Some("the command was lost".into()),
            ..Exit::default()
        },
        exit_of,
    );
    if timed_out {
        exit = Exit {
            exit_code: exit_code::TIMED_OUT,
            timed_out,
            ..Exit::default()
        };
    }
    let _ = events.send(Event::Exit(exit)).await;
}

/// Forwards a command's output.
struct Pump {
    stream: Stream,
    events: mpsc::Sender<Event>,
    ended: watch::Receiver<bool>,
}

impl Pump {
    /// Runs until the output is closed, or is only kept open by background processes of the command. The time that a slow client
    /// takes does not count: what is still in the pipe belongs to the command.
    async fn run(mut self, mut source: impl AsyncRead + Unpin + Send + 'static) {
        let mut buffer = vec![0; READ_SIZE];
        let mut after_the_end = 0;
        while after_the_end <= LARGEST_PIPE {
            let read = tokio::select! {
                biased;
                read = source.read(&mut buffer) => read,
                () = lingered(&mut self.ended) => break,
            };
            let Ok(length @ 1..) = read else {
                return;
            };
            if *self.ended.borrow() {
                after_the_end += length;
            }
            let piece = Bytes::copy_from_slice(&buffer[..length]);
            // Without a receiver, reading continues: a process that still writes must not block.
            let _ = self.events.send(Event::Output(self.stream, piece)).await;
        }
        tokio::spawn(async move { while let Ok(1..) = source.read(&mut buffer).await {} });
    }
}

/// Completes when the command has ended and its output was idle for long enough.
async fn lingered(ended: &mut watch::Receiver<bool>) {
    drop(ended.wait_for(|ended| *ended).await);
    tokio::time::sleep(LINGER).await;
}

/// What to do at the end of the input.
#[derive(Clone, Copy)]
enum InputEnd {
    Closed,
    Typed,
}

async fn feed(
    mut sink: impl tokio::io::AsyncWrite + Unpin,
    mut input: mpsc::Receiver<Input>,
    end: InputEnd,
) {
    while let Some(piece) = input.recv().await {
        let written = match (piece, end) {
            (Input::Bytes(bytes), _) => sink.write_all(&bytes).await,
            (Input::End, InputEnd::Typed) => sink.write_all(&[END_OF_FILE]).await,
            (Input::End, InputEnd::Closed) => return,
        };
        if written.is_err() {
            return;
        }
    }
}

fn exit_of(status: WaitStatus) -> Exit {
    if let Some(number) = status.terminating_signal() {
        return Exit {
            exit_code: exit_code::SIGNAL_BASE + number,
            signal: Some(signal_name(number)),
            ..Exit::default()
        };
    }
    Exit {
        exit_code: status.exit_status().unwrap_or(exit_code::CANNOT_RUN),
        ..Exit::default()
    }
}

/// Converts a time limit: positive, and at most a year.
pub fn time_limit(seconds: f64) -> Option<Duration> {
    const LONGEST_SECONDS: f64 = 366.0 * 24.0 * 3600.0;
    (seconds.is_finite() && seconds > 0.0)
        .then(|| Duration::from_secs_f64(seconds.min(LONGEST_SECONDS)))
}

fn reason(error: &io::Error) -> String {
    // "No such file or directory (os error 2)" without the number.
    let text = error.to_string();
    text.split(" (os error")
        .next()
        .unwrap_or_default()
        .to_owned()
}

const SIGNALS: [(&str, Signal); 29] = [
    ("HUP", Signal::HUP),
    ("INT", Signal::INT),
    ("QUIT", Signal::QUIT),
    ("ILL", Signal::ILL),
    ("TRAP", Signal::TRAP),
    ("ABRT", Signal::ABORT),
    ("BUS", Signal::BUS),
    ("FPE", Signal::FPE),
    ("KILL", Signal::KILL),
    ("USR1", Signal::USR1),
    ("SEGV", Signal::SEGV),
    ("USR2", Signal::USR2),
    ("PIPE", Signal::PIPE),
    ("ALRM", Signal::ALARM),
    ("TERM", Signal::TERM),
    ("CHLD", Signal::CHILD),
    ("CONT", Signal::CONT),
    ("STOP", Signal::STOP),
    ("TSTP", Signal::TSTP),
    ("TTIN", Signal::TTIN),
    ("TTOU", Signal::TTOU),
    ("URG", Signal::URG),
    ("XCPU", Signal::XCPU),
    ("XFSZ", Signal::XFSZ),
    ("VTALRM", Signal::VTALARM),
    ("PROF", Signal::PROF),
    ("WINCH", Signal::WINCH),
    ("IO", Signal::IO),
    ("SYS", Signal::SYS),
];

/// Parses a client's signal.
pub fn parse_signal(name: &SignalName) -> Option<Signal> {
    match name {
        SignalName::Number(number) => Signal::from_named_raw(*number),
        SignalName::Name(name) => {
            let upper = name.to_ascii_uppercase();
            let short = upper.strip_prefix("SIG").unwrap_or(&upper);
            SIGNALS
                .iter()
                .find(|(known, _)| *known == short)
                .map(|(_, signal)| *signal)
        }
    }
}

fn signal_name(number: i32) -> String {
    let known = SIGNALS.iter().find(|(_, signal)| signal.as_raw() == number);
    known.map_or_else(|| format!("SIG{number}"), |(name, _)| format!("SIG{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_parsed_by_name_and_number() {
        for spelled in ["INT", "SIGINT", "sigint"] {
            assert_eq!(
                parse_signal(&SignalName::Name(spelled.into())),
                Some(Signal::INT)
            );
        }
        assert_eq!(parse_signal(&SignalName::Number(9)), Some(Signal::KILL));
        assert_eq!(parse_signal(&SignalName::Number(0)), None);
        assert_eq!(parse_signal(&SignalName::Name("NONSENSE".into())), None);
        assert_eq!(signal_name(15), "SIGTERM");
        assert_eq!(signal_name(64), "SIG64");
    }

    #[test]
    fn time_limits_are_positive_and_finite() {
        assert_eq!(time_limit(1.5), Some(Duration::from_millis(1500)));
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(time_limit(wrong), None);
        }
        assert!(time_limit(1e300).is_some());
    }
}
