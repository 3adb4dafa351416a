//! Exec and attach: connects the streams of a client to those of a process and reports the exit code to the client.
//!
//! The modules `spdy` and `websocket` turn a connection into [`ClientStreams`]; [`serve`] works the same for both. This module
//! does not start processes: the caller provides a [`Process`].

mod protocol;
mod resize;
mod spdy;
mod websocket;

pub use protocol::{OFFER, Outcome, Version};
pub use resize::TerminalSize;

use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use futures::future::{BoxFuture, Either, join, select};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::debug;

use crate::upgrade::Upgrade;
use crate::{CHUNK, Input, Output, Settings};

/// The streams that a client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "the request has these four independent parameters"
)]
pub struct Streams {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub tty: bool,
}

/// A running process and its streams.
///
/// # Guarantees
/// All parts are dropped when the client disconnects, or when the process has exited and its output is delivered. The owner of
/// the process notices the disconnect because `exit` is dropped, and decides whether the process is killed.
pub struct Process {
    /// Closed when the client closes its stdin.
    pub stdin: Option<Output>,
    /// Must end when the process exits. With a terminal, it carries both stdout and stderr.
    pub stdout: Option<Input>,
    pub stderr: Option<Input>,
    /// Receives the initial size of the client's terminal and each change.
    pub resize: Option<mpsc::Sender<TerminalSize>>,
    /// The exit code, or 128 + the signal number if a signal killed the process.
    pub exit: BoxFuture<'static, Result<i32, Failure>>,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Process").finish_non_exhaustive()
    }
}

/// Why a command could not be started or awaited, as a message for the user.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct Failure(pub String);

/// The streams that a client has opened.
pub(crate) struct ClientStreams {
    stdin: Option<Input>,
    stdout: Option<Output>,
    stderr: Option<Output>,
    resize: Option<Input>,
    error: Output,
    version: Version,
    /// Resolves when the client disconnects.
    disconnected: BoxFuture<'static, ()>,
    /// Keeps the connection open while it is held.
    _connection: Box<dyn Send>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the client did not open its streams in time")]
    Timeout,
    #[error("the client disconnected before it opened its streams")]
    Disconnected,
    #[error("the exit status could not be sent to the client")]
    Report(#[source] std::io::Error),
}

/// Serves a client on an upgraded connection: waits for its streams, starts the process and waits until it exits.
///
/// `start` is first polled after the client has opened its streams.
pub async fn serve<T>(
    io: T,
    upgrade: &Upgrade,
    streams: Streams,
    start: impl Future<Output = Result<Process, Failure>> + Send,
    settings: Settings,
) -> Result<Outcome, Error>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let client = match upgrade {
        Upgrade::Spdy { protocol } => {
            spdy::open(io, Version::named(protocol), streams, settings).await?
        }
        Upgrade::WebSocket { protocol, .. } => {
            websocket::open(io, *protocol, streams, settings).await
        }
    };
    run_and_report(client, start, settings).await
}

async fn run_and_report(
    client: ClientStreams,
    start: impl Future<Output = Result<Process, Failure>> + Send,
    settings: Settings,
) -> Result<Outcome, Error> {
    let ClientStreams {
        mut stdin,
        stdout,
        stderr,
        resize,
        mut error,
        version,
        mut disconnected,
        _connection,
    } = client;
    let running = run_process(stdin.as_mut(), stdout, stderr, resize, start, settings);
    let outcome = match select(pin!(running), &mut disconnected).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right(((), _)) => {
            debug!("the client disconnected before the command exited");
            return Ok(Outcome::ClientDisconnected);
        }
    };
    let report = outcome.report(version);
    error.write_all(&report).await.map_err(Error::Report)?;
    error.shutdown().await.map_err(Error::Report)?;
    Ok(outcome)
}

/// Starts the process and copies its streams until it has exited and its output is written to the client.
async fn run_process(
    stdin: Option<&mut Input>,
    stdout: Option<Output>,
    stderr: Option<Output>,
    resize: Option<Input>,
    start: impl Future<Output = Result<Process, Failure>> + Send,
    settings: Settings,
) -> Outcome {
    let process = match start.await {
        Ok(process) => process,
        Err(failure) => return Outcome::Failed(failure),
    };
    let progress = CopyProgress::default();
    let input = async {
        if let Some(from) = stdin {
            if let Some(to) = process.stdin {
                copy(from, to, &CopyProgress::default()).await;
            }
            // If the process no longer reads stdin, discard the input: this is no error for a client that still sends.
            let _ = tokio::io::copy(from, &mut tokio::io::sink()).await;
        }
    };
    let sizes = async {
        if let (Some(from), Some(to)) = (resize, process.resize) {
            resize::forward(from, to).await;
        }
    };
    let output = join(
        copy_output(process.stdout, stdout, &progress),
        copy_output(process.stderr, stderr, &progress),
    );
    let end = async {
        let mut output = pin!(output);
        match select(&mut output, process.exit).await {
            Either::Left((_, exit)) => exit.await,
            Either::Right((exit, _)) => {
                drain(output, &progress, settings).await;
                exit
            }
        }
    };
    // The end of the input does not end the session: a client may close stdin and go on reading.
    let (input, end) = (pin!(join(input, sizes)), pin!(end));
    let exit = match select(end, input).await {
        Either::Left((exit, _)) => exit,
        Either::Right((_, end)) => end.await,
    };
    match exit {
        Ok(code) => Outcome::Exited(code),
        Err(failure) => Outcome::Failed(failure),
    }
}

/// Waits for the remaining output of a process that has exited, as long as output arrives or the client has not yet read all of
/// it.
async fn drain(mut output: impl Future + Unpin, progress: &CopyProgress, settings: Settings) {
    loop {
        let before = progress.moved.load(Ordering::Relaxed);
        if timeout(settings.drain, &mut output).await.is_ok() {
            return;
        }
        let stalled = progress.moved.load(Ordering::Relaxed) == before;
        if stalled && progress.writing.load(Ordering::Relaxed) == 0 {
            debug!(
                "a background process still holds the output of the exited command; not waiting for it"
            );
            return;
        }
    }
}

/// The progress of copying, by which [`drain`] decides whether to keep waiting.
#[derive(Debug, Default)]
struct CopyProgress {
    moved: AtomicU64,
    writing: AtomicUsize,
}

async fn copy_output(from: Option<Input>, to: Option<Output>, progress: &CopyProgress) {
    match (from, to) {
        (Some(mut from), Some(to)) => copy(&mut from, to, progress).await,
        // The process would block on a full pipe if its unwanted output were not read.
        (Some(mut from), None) => {
            let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
        }
        (None, Some(mut to)) => {
            let _ = to.shutdown().await;
        }
        (None, None) => {}
    }
}

/// Copies until the end of the input and closes the target. An error on either side ends the copy without a report: the exit of
/// the process or the end of the connection reports it.
async fn copy(from: &mut Input, mut to: Output, progress: &CopyProgress) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        progress.writing.fetch_add(1, Ordering::Relaxed);
        let written = async {
            to.write_all(&buffer[..length]).await?;
            to.flush().await
        };
        let written = written.await;
        progress.writing.fetch_sub(1, Ordering::Relaxed);
        if written.is_err() {
            return;
        }
        progress.moved.fetch_add(1, Ordering::Relaxed);
    }
    let _ = to.shutdown().await;
}
