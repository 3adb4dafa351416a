//! The node's side of a container agent's socket.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use serde::Serialize;
use shim_protocol::{
    ExecRequest, ExitReport, FailureReport, Frame, FrameError, FrameKind, SignalRequest,
    StartedReport, WindowSize,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error("reaching the container's agent")]
    Connect(#[source] io::Error),
    #[error("talking to the container's agent")]
    Stream(#[source] io::Error),
    #[error("the container's agent sent an invalid response")]
    Frame(#[from] FrameError),
    #[error("the container ended")]
    Gone,
    #[error("{message}")]
    Refused { message: String, code: i32 },
}

/// One event of a running exec or attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Output {
    Stdout(Vec<u8>),
    Stderr(Vec<u8>),
    Exit(ExitReport),
}

/// A running exec or attachment.
#[derive(Debug)]
pub struct Session {
    pub input: Input,
    pub output: OutputStream,
    /// In the container's PID namespace.
    pub pid: i32,
}

#[derive(Debug)]
pub struct Input(OwnedWriteHalf);

#[derive(Debug)]
pub struct OutputStream {
    stream: OwnedReadHalf,
    buffer: Vec<u8>,
}

/// Connects to the agent whose socket is in `directory`. The path may be longer than a socket address allows, so it is opened through
/// the directory's descriptor.
async fn connect(directory: &Path) -> Result<UnixStream, AgentError> {
    let opened = rustix::fs::open(directory, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
        .map_err(|source| AgentError::Connect(source.into()))?;
    UnixStream::connect(format!("/proc/self/fd/{}/agent.sock", opened.as_raw_fd()))
        .await
        .map_err(AgentError::Connect)
}

fn encoded(kind: FrameKind, message: &impl Serialize) -> Vec<u8> {
    let mut buffer = Vec::new();
    shim_protocol::encode(
        kind,
        &serde_json::to_vec(message).unwrap_or_default(),
        &mut buffer,
    );
    buffer
}

impl OutputStream {
    async fn frame(&mut self) -> Result<Frame, AgentError> {
        loop {
            if let Some(frame) = shim_protocol::decode(&mut self.buffer)? {
                return Ok(frame);
            }
            if self
                .stream
                .read_buf(&mut self.buffer)
                .await
                .map_err(AgentError::Stream)?
                == 0
            {
                return Err(AgentError::Gone);
            }
        }
    }

    /// The next piece of output; after [`Output::Exit`] there is no more.
    pub async fn next(&mut self) -> Result<Output, AgentError> {
        loop {
            let frame = self.frame().await?;
            return Ok(match frame.kind {
                FrameKind::Stdout => Output::Stdout(frame.payload),
                FrameKind::Stderr => Output::Stderr(frame.payload),
                FrameKind::Exit => Output::Exit(frame.parse()?),
                FrameKind::Failure => return Err(refusal(&frame)?),
                _ => continue,
            });
        }
    }
}

fn refusal(frame: &Frame) -> Result<AgentError, FrameError> {
    let FailureReport { message, code } = frame.parse()?;
    Ok(AgentError::Refused { message, code })
}

impl Input {
    pub async fn write(&mut self, data: &[u8]) -> Result<(), AgentError> {
        for piece in data.chunks(shim_protocol::MAXIMUM_PAYLOAD_BYTES / 2) {
            let mut buffer = Vec::with_capacity(piece.len() + shim_protocol::HEADER_BYTES);
            shim_protocol::encode(FrameKind::Stdin, piece, &mut buffer);
            self.0
                .write_all(&buffer)
                .await
                .map_err(AgentError::Stream)?;
        }
        Ok(())
    }

    pub async fn close(&mut self) -> Result<(), AgentError> {
        self.send(FrameKind::StdinClosed, &()).await
    }

    pub async fn resize(&mut self, window: WindowSize) -> Result<(), AgentError> {
        self.send(FrameKind::Resize, &window).await
    }

    /// Signals the exec's process group.
    pub async fn signal(&mut self, signal: i32) -> Result<(), AgentError> {
        self.send(FrameKind::SignalExec, &SignalRequest { signal })
            .await
    }

    async fn send(
        &mut self,
        kind: FrameKind,
        message: &(impl Serialize + Sync),
    ) -> Result<(), AgentError> {
        self.0
            .write_all(&encoded(kind, message))
            .await
            .map_err(AgentError::Stream)
    }
}

async fn open(
    directory: &Path,
    kind: FrameKind,
    request: &(impl Serialize + Sync),
) -> Result<Session, AgentError> {
    let (read, write) = connect(directory).await?.into_split();
    let mut input = Input(write);
    let mut output = OutputStream {
        stream: read,
        buffer: Vec::new(),
    };
    input.send(kind, request).await?;
    let frame = output.frame().await?;
    match frame.kind {
        FrameKind::Failure => Err(refusal(&frame)?),
        _ => Ok(Session {
            input,
            output,
            pid: frame.parse::<StartedReport>()?.pid,
        }),
    }
}

/// Runs a command in the container whose agent's socket is in `directory`.
pub async fn exec(directory: &Path, request: &ExecRequest) -> Result<Session, AgentError> {
    open(directory, FrameKind::Exec, request).await
}

/// Attaches to the container's own command.
pub async fn attach(directory: &Path, stdin: bool) -> Result<Session, AgentError> {
    open(
        directory,
        FrameKind::Attach,
        &shim_protocol::AttachRequest { stdin },
    )
    .await
}

/// Signals the container's own command.
pub async fn signal_command(directory: &Path, signal: i32) -> Result<(), AgentError> {
    let (read, mut write) = connect(directory).await?.into_split();
    let request = encoded(FrameKind::SignalCommand, &SignalRequest { signal });
    write
        .write_all(&request)
        .await
        .map_err(AgentError::Stream)?;
    expect_done(read).await
}

async fn expect_done(stream: OwnedReadHalf) -> Result<(), AgentError> {
    let frame = OutputStream {
        stream,
        buffer: Vec::new(),
    }
    .frame()
    .await?;
    if frame.kind == FrameKind::Failure {
        Err(refusal(&frame)?)
    } else {
        Ok(())
    }
}

/// Makes the agent write its log to `file` from now on.
pub async fn replace_log(directory: &Path, file: std::fs::File) -> Result<(), AgentError> {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::os::fd::AsFd;

    let stream = connect(directory).await?;
    let request = encoded(FrameKind::ReplaceLog, &());
    stream
        .async_io(tokio::io::Interest::WRITABLE, || {
            let descriptors = [file.as_fd()];
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
            // A message this short is never sent partially on a new connection.
            sendmsg(
                &stream,
                &[io::IoSlice::new(&request)],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            )
            .map_err(io::Error::from)
        })
        .await
        .map_err(AgentError::Stream)?;
    expect_done(stream.into_split().0).await
}
