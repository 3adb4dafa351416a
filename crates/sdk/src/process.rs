//! The `process` engine: interactive processes over a WebSocket, in the wire format of `sandboxd::protocol`.
//!
//! The holder of a [`Process`] reads its events, so a slow reader slows the process down and no output is buffered without bound.
//! Writing goes through [`Control`], which can be cloned and given to other tasks. Dropping the process kills it in the sandbox.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use futures::stream::{SplitSink, SplitStream};
use futures::{SinkExt, StreamExt};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use sandboxd::protocol::{self, ClientMessage, ServerMessage, channel};
pub use sandboxd::protocol::{Exit, SignalName};
use tokio::sync::mpsc;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::Span;

use crate::connector::Connector;
use crate::error::{Error, ErrorKind, Key};
use crate::sandbox::Sandbox;

const ENDPOINT: &str = "v1/exec";
/// Input is split into chunks of this size, so that a resize or a signal does not wait behind a large write.
const INPUT_PIECE: usize = 64 * 1024;
/// Timeout for closing the WebSocket.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How many frames may be queued for sending.
const OUTGOING_FRAMES: usize = 16;

/// Options for starting a process.
///
/// ```
/// use sdk::process::Start;
///
/// let shell = Start { tty: true, rows: 40, cols: 120, ..Start::argv(["bash", "-l"]) };
/// let pipeline = Start::command("ls | wc -l");
/// # let _ = (shell, pipeline);
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Start {
    /// Program and arguments, run without a shell. Exactly one of this and `command` is given.
    pub argv: Vec<String>,
    /// A command line for the shell.
    pub command: Option<String>,
    /// Working directory, relative to the base directory unless absolute.
    pub cwd: Option<String>,
    /// Environment variables on top of the sandbox's own.
    pub env: BTreeMap<String, String>,
    /// Run on a terminal.
    pub tty: bool,
    /// The terminal's height; 0 leaves it to the sandbox.
    pub rows: u16,
    /// The terminal's width; 0 leaves it to the sandbox.
    pub cols: u16,
    /// How long the process may run before the sandbox kills it; the default is no limit.
    pub time_limit: Option<Duration>,
}

impl Start {
    /// A program and its arguments.
    pub fn argv<I>(words: I) -> Self
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        Self {
            argv: words.into_iter().map(Into::into).collect(),
            ..Self::default()
        }
    }

    /// A command line for the shell.
    pub fn command(line: impl Into<String>) -> Self {
        Self {
            command: Some(line.into()),
            ..Self::default()
        }
    }

    fn into_message(self) -> Result<ClientMessage, ErrorKind> {
        if self.argv.is_empty() == self.command.is_none() {
            return Err(ErrorKind::InvalidOption {
                option: "argv",
                reason: "exactly one of argv and command must be given".into(),
            });
        }
        let given = |number: u16| (number > 0).then_some(number);
        Ok(ClientMessage::Start(protocol::Start {
            command: self.command,
            argv: (!self.argv.is_empty()).then_some(self.argv),
            cwd: self.cwd,
            env: self.env,
            tty: self.tty,
            rows: given(self.rows),
            cols: given(self.cols),
            timeout_seconds: self.time_limit.map(|limit| limit.as_secs_f64()),
            stdin: None,
        }))
    }
}

/// An event of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Bytes of standard output, or of the terminal.
    Stdout(Bytes),
    /// Bytes of standard error.
    Stderr(Bytes),
    /// The process ended. Nothing follows.
    Exit(Exit),
}

/// The output and exit of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub exit: Exit,
}

/// Starts processes in a sandbox. See [`Sandbox::process`].
#[derive(Clone, Debug)]
pub struct Processes {
    sandbox: Sandbox,
}

impl Processes {
    pub(crate) fn new(sandbox: Sandbox) -> Self {
        Self { sandbox }
    }

    /// Starts a process. A process that cannot be started is not an error: it has no [`Process::pid`], and its only event is an exit
    /// with 126 or 127 and the reason.
    pub async fn start(&self, start: Start) -> Result<Process, Error> {
        let message = start
            .into_message()
            .map_err(|kind| Error::of(self.sandbox.key(), kind))?;
        self.sandbox
            .operate("process", |connector| async move {
                if let ClientMessage::Start(start) = &message {
                    let shown = match (&start.argv, &start.command) {
                        (Some(argv), _) => argv.join(" "),
                        (None, command) => command.clone().unwrap_or_default(),
                    };
                    Span::current().record("sandbox.command", shown);
                }
                Process::open(&connector, self.sandbox.key().clone(), &message).await
            })
            .await
    }

    /// Starts a process, closes its input and collects its output, at most `limit` bytes of each stream.
    pub async fn output(&self, start: Start, limit: usize) -> Result<Output, Error> {
        let process = self.start(start).await?;
        process.control().close_stdin().await?;
        process.output(limit).await
    }
}

type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// A running process.
#[derive(Debug)]
pub struct Process {
    key: Key,
    pid: Option<u32>,
    control: Control,
    frames: SplitStream<Socket>,
    /// An event that was received during the start.
    pending: Option<Event>,
    ended: bool,
    _hang_up: DropGuard,
}

/// Writes to a process and controls it.
#[derive(Clone, Debug)]
pub struct Control {
    key: Key,
    frames: mpsc::Sender<Message>,
}

impl Control {
    /// Writes to standard input, or to the terminal. Waits while the process does not read.
    pub async fn write(&self, bytes: impl AsRef<[u8]>) -> Result<(), Error> {
        for piece in bytes.as_ref().chunks(INPUT_PIECE) {
            let mut frame = BytesMut::with_capacity(piece.len() + 1);
            frame.put_u8(channel::STDIN);
            frame.put(piece);
            self.send(Message::Binary(frame.freeze())).await?;
        }
        Ok(())
    }

    /// Ends standard input.
    pub async fn close_stdin(&self) -> Result<(), Error> {
        self.send_message(&ClientMessage::StdinClose).await
    }

    /// Changes the terminal's size.
    pub async fn resize(&self, rows: u16, cols: u16) -> Result<(), Error> {
        self.send_message(&ClientMessage::Resize { rows, cols })
            .await
    }

    /// Sends a signal, for example `SIGINT`, to the process and its children.
    pub async fn signal(&self, name: &str) -> Result<(), Error> {
        let signal = SignalName::Name(name.to_owned());
        self.send_message(&ClientMessage::Signal { signal }).await
    }

    /// Sends a signal by its number.
    pub async fn signal_number(&self, number: i32) -> Result<(), Error> {
        let signal = SignalName::Number(number);
        self.send_message(&ClientMessage::Signal { signal }).await
    }

    /// Kills the process and its children.
    pub async fn kill(&self) -> Result<(), Error> {
        self.signal("SIGKILL").await
    }

    async fn send_message(&self, message: &ClientMessage) -> Result<(), Error> {
        self.send(text(message)).await
    }

    async fn send(&self, frame: Message) -> Result<(), Error> {
        let sent = self.frames.send(frame).await;
        sent.map_err(|_| Error::of(&self.key, ErrorKind::ProcessEnded))
    }
}

impl Process {
    async fn open(
        connector: &Connector,
        key: Key,
        start: &ClientMessage,
    ) -> Result<Self, ErrorKind> {
        let stream = connector.upgrade("process", ENDPOINT).await?;
        let mut socket = WebSocketStream::from_raw_socket(stream, Role::Client, None).await;
        socket
            .send(text(start))
            .await
            .map_err(|error| lost(error.to_string()))?;
        let (sink, frames) = socket.split();
        let (sender, receiver) = mpsc::channel(OUTGOING_FRAMES);
        let hang_up = CancellationToken::new();
        tokio::spawn(write_frames(sink, receiver, hang_up.clone()));
        let mut process = Self {
            control: Control {
                key: key.clone(),
                frames: sender,
            },
            key,
            pid: None,
            frames,
            pending: None,
            ended: false,
            _hang_up: hang_up.drop_guard(),
        };
        while process.pid.is_none() && process.pending.is_none() {
            process.pending = process.receive().await?;
        }
        Ok(process)
    }

    /// The process's id in the sandbox, if it could be started.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// The writing side. It may be used while waiting for events.
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// The next event, or `None` after the exit. An error means that the connection broke and the process is lost. Cancel
    /// safe: dropping the future loses no event.
    pub async fn next(&mut self) -> Result<Option<Event>, Error> {
        if let Some(event) = self.pending.take() {
            return Ok(Some(event));
        }
        if self.ended {
            return Ok(None);
        }
        let event = loop {
            match self.receive().await {
                Ok(Some(event)) => break event,
                Ok(None) => {}
                Err(kind) => return Err(Error::of(&self.key, kind)),
            }
        };
        Ok(Some(event))
    }

    /// Collects the output until the process ends. Each stream may have `limit` bytes.
    pub async fn output(mut self, limit: usize) -> Result<Output, Error> {
        let mut output = Output::default();
        while let Some(event) = self.next().await? {
            let (buffer, bytes) = match event {
                Event::Stdout(bytes) => (&mut output.stdout, bytes),
                Event::Stderr(bytes) => (&mut output.stderr, bytes),
                Event::Exit(exit) => {
                    output.exit = exit;
                    continue;
                }
            };
            if buffer.len() + bytes.len() > limit {
                let kind = ErrorKind::ResponseTooLarge {
                    operation: "process",
                    limit: limit as u64,
                };
                return Err(Error::of(&self.key, kind));
            }
            buffer.extend_from_slice(&bytes);
        }
        Ok(output)
    }

    /// Waits for the exit, and discards the output until then.
    pub async fn wait(mut self) -> Result<Exit, Error> {
        loop {
            match self.next().await? {
                Some(Event::Exit(exit)) => return Ok(exit),
                Some(_) => {}
                None => return Err(Error::of(&self.key, ErrorKind::ProcessEnded)),
            }
        }
    }

    /// The event in the next frame, if the frame contains one.
    async fn receive(&mut self) -> Result<Option<Event>, ErrorKind> {
        let frame = match self.frames.next().await {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Err(lost(error.to_string())),
            None => return Err(lost("the connection was closed before the process ended")),
        };
        match frame {
            Message::Binary(mut bytes) if !bytes.is_empty() => {
                let output = bytes.split_off(1);
                match bytes[0] {
                    _ if output.is_empty() => Ok(None),
                    channel::STDOUT => Ok(Some(Event::Stdout(output))),
                    channel::STDERR => Ok(Some(Event::Stderr(output))),
                    _ => Ok(None),
                }
            }
            Message::Text(text) => match serde_json::from_str(&text) {
                Ok(ServerMessage::Started { pid }) => {
                    self.pid = Some(pid);
                    Ok(None)
                }
                Ok(ServerMessage::Exit(exit)) => {
                    self.ended = true;
                    Ok(Some(Event::Exit(exit)))
                }
                // A newer sandbox may send messages that this version does not know.
                Ok(ServerMessage::Stdout(_) | ServerMessage::Stderr(_)) | Err(_) => Ok(None),
            },
            Message::Close(Some(close)) => Err(lost(close.reason.to_string())),
            Message::Close(None) => Err(lost("the connection was closed before the process ended")),
            _ => Ok(None),
        }
    }
}

fn text(message: &ClientMessage) -> Message {
    // The messages are plain structures with string keys, which always have a JSON form.
    Message::text(serde_json::to_string(message).unwrap_or_default())
}

fn lost(reason: impl Into<String>) -> ErrorKind {
    ErrorKind::ProcessLost {
        reason: reason.into(),
    }
}

/// Sends queued frames until the process is dropped.
async fn write_frames(
    mut sink: SplitSink<Socket, Message>,
    mut frames: mpsc::Receiver<Message>,
    hang_up: CancellationToken,
) {
    let writing = async {
        while let Some(frame) = frames.recv().await {
            if sink.send(frame).await.is_err() {
                return;
            }
        }
    };
    if hang_up.run_until_cancelled(writing).await.is_none() {
        // Optional: the sandbox also detects a connection that ends without a close frame.
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, sink.close()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_names_exactly_one_command() {
        assert!(Start::default().into_message().is_err());
        let both = Start {
            command: Some("a".into()),
            ..Start::argv(["b"])
        };
        assert!(both.into_message().is_err());
        let start = Start {
            tty: true,
            rows: 40,
            ..Start::argv(["bash"])
        };
        let message = serde_json::to_string(&start.into_message().unwrap()).unwrap();
        assert_eq!(
            message,
            r#"{"type":"start","argv":["bash"],"tty":true,"rows":40}"#
        );
    }
}
