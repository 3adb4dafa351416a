//! Exec and attach: a client's streams joined to a process's, and the end of the process told to the client.
//!
//! `spdy` and `websocket` make [`ClientStreams`] out of a connection; [`serve`] does the rest, and cannot tell them apart. What a
//! process is, nobody here knows: it is handed in as [`Process`].

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

/// Which streams a client asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "these are the four independent parameters of the request"
)]
pub struct Streams {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
    pub tty: bool,
}

/// A process as the client is to meet it.
///
/// # Guarantees
/// All parts are dropped when the client is gone, or when the process has ended and its output is delivered. Whether the process
/// survives a client that leaves is for its owner to decide, who sees `exit` dropped.
pub struct Process {
    /// Closed when the client closes its end.
    pub stdin: Option<Output>,
    /// Must end when the process does; with a terminal, everything comes here.
    pub stdout: Option<Input>,
    pub stderr: Option<Input>,
    /// The size of the client's terminal, first and whenever it changes.
    pub resize: Option<mpsc::Sender<TerminalSize>>,
    /// The exit code: 128 + the signal for a process that was killed by one.
    pub exit: BoxFuture<'static, Result<i32, Failure>>,
}

impl std::fmt::Debug for Process {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Process").finish_non_exhaustive()
    }
}

/// A command that could not be run or followed, in words for the user.
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
    /// Done when the client is gone.
    gone: BoxFuture<'static, ()>,
    /// Keeps the connection open.
    _connection: Box<dyn Send>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the client did not open its streams in time")]
    Timeout,
    #[error("the client left before it had opened its streams")]
    Gone,
    #[error("the end of the command could not be told")]
    Report(#[source] std::io::Error),
}

/// Serves a client on an upgraded connection: waits for its streams, then starts the process and follows it to its end.
///
/// `start` is not polled before the streams are there.
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
    follow(client, start, settings).await
}

async fn follow(
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
        mut gone,
        _connection,
    } = client;
    let attended = attend(stdin.as_mut(), stdout, stderr, resize, start, settings);
    let outcome = match select(pin!(attended), &mut gone).await {
        Either::Left((outcome, _)) => outcome,
        Either::Right(((), _)) => {
            debug!("the client left before its command ended");
            return Ok(Outcome::ClientLeft);
        }
    };
    let report = outcome.report(version);
    error.write_all(&report).await.map_err(Error::Report)?;
    error.shutdown().await.map_err(Error::Report)?;
    Ok(outcome)
}

/// Runs the process with its streams joined to the client's until it has ended and its output is written.
async fn attend(
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
    let pace = Pace::default();
    let input = async {
        if let Some(from) = stdin {
            if let Some(to) = process.stdin {
                copy(from, to, &Pace::default()).await;
            }
            // A process that reads no more is no reason to bother a client that still sends.
            let _ = tokio::io::copy(from, &mut tokio::io::sink()).await;
        }
    };
    let sizes = async {
        if let (Some(from), Some(to)) = (resize, process.resize) {
            resize::forward(from, to).await;
        }
    };
    let output = join(
        copy_output(process.stdout, stdout, &pace),
        copy_output(process.stderr, stderr, &pace),
    );
    let end = async {
        let mut output = pin!(output);
        match select(&mut output, process.exit).await {
            Either::Left((_, exit)) => exit.await,
            Either::Right((exit, _)) => {
                drain(output, &pace, settings).await;
                exit
            }
        }
    };
    // The input never ends a session: a client may close it and go on reading.
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

/// Waits for the rest of the output of a process that has ended: as long as it keeps coming or the client has yet to take it.
async fn drain(mut output: impl Future + Unpin, pace: &Pace, settings: Settings) {
    loop {
        let before = pace.moved.load(Ordering::Relaxed);
        if timeout(settings.drain, &mut output).await.is_ok() {
            return;
        }
        let stalled = pace.moved.load(Ordering::Relaxed) == before;
        if stalled && pace.writing.load(Ordering::Relaxed) == 0 {
            debug!("a process that outlives its command holds the output; not waiting for it");
            return;
        }
    }
}

/// How copying goes, for whoever decides whether to wait for it.
#[derive(Debug, Default)]
struct Pace {
    moved: AtomicU64,
    writing: AtomicUsize,
}

async fn copy_output(from: Option<Input>, to: Option<Output>, pace: &Pace) {
    match (from, to) {
        (Some(mut from), Some(to)) => copy(&mut from, to, pace).await,
        // Output that the client does not want must still be taken, or the process would stop.
        (Some(mut from), None) => {
            let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
        }
        (None, Some(mut to)) => {
            let _ = to.shutdown().await;
        }
        (None, None) => {}
    }
}

/// Copies to the end and closes the target. A reader or writer that fails ends the copy: the other side is then gone, which
/// the process or the connection tells in its own way.
async fn copy(from: &mut Input, mut to: Output, pace: &Pace) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        pace.writing.fetch_add(1, Ordering::Relaxed);
        let written = async {
            to.write_all(&buffer[..length]).await?;
            to.flush().await
        };
        let written = written.await;
        pace.writing.fetch_sub(1, Ordering::Relaxed);
        if written.is_err() {
            return;
        }
        pace.moved.fetch_add(1, Ordering::Relaxed);
    }
    let _ = to.shutdown().await;
}
