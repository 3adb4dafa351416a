//! Drives a [`Session`] over a byte stream with tokio: one task per connection reads, writes and wakes the streams.
//!
//! The connection ends when the peer closes it, violates the protocol or exceeds the idle timeout, or when its [`Connection`] is
//! dropped. In the last case, the driver sends everything that was written, then GOAWAY, and reads the socket until the peer
//! closes too: closing a socket with unread input sends a TCP reset, and the peer could lose the last output.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use saturating_time::SaturatingTime;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tracing::debug;

use super::frame::{GoAwayStatus, ResetStatus};
use super::headers::Headers;
use super::session::{Limits, Session};
use super::stream::Stream;

const READ_BUFFER: usize = 32 * 1024;

/// The timeouts of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// How long a connection may stay open without a byte in either direction.
    pub idle: Duration,
    /// How long the peer may take to close the connection after we have closed our side.
    pub linger: Duration,
}

/// A server-side connection: the peer opens streams, and [`Connection::accept`] returns them.
#[derive(Debug)]
pub struct Connection {
    shared: Arc<Shared>,
}

#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
}

#[derive(Debug)]
pub(super) struct State {
    pub session: Session,
    pub wakers: HashMap<u32, StreamWakers>,
    pub writers_blocked: bool,
    /// The transport is closed: nothing more can be received or sent.
    pub over: bool,
    closing: bool,
    driver: Option<Waker>,
    acceptor: Option<Waker>,
    watchers: Vec<Waker>,
}

#[derive(Debug, Default)]
pub(super) struct StreamWakers {
    pub read: Option<Waker>,
    pub write: Option<Waker>,
}

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        // No code under this lock leaves the state inconsistent if it panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Wakes the driver task because there is new output, or room for input.
    pub fn wake_driver(&mut self) {
        if let Some(waker) = self.driver.take() {
            waker.wake();
        }
    }

    fn wake_touched(&mut self) {
        for stream in self.session.take_touched() {
            if let Some(wakers) = self.wakers.get_mut(&stream) {
                wakers.wake();
            }
        }
        if self.session.has_waiting()
            && let Some(waker) = self.acceptor.take()
        {
            waker.wake();
        }
    }

    fn wake_blocked_writers(&mut self) {
        if std::mem::take(&mut self.writers_blocked) {
            for wakers in self.wakers.values_mut() {
                if let Some(waker) = wakers.write.take() {
                    waker.wake();
                }
            }
        }
    }

    fn end(&mut self) {
        self.over = true;
        for wakers in self.wakers.values_mut() {
            wakers.wake();
        }
        for waker in self
            .acceptor
            .take()
            .into_iter()
            .chain(self.watchers.drain(..))
        {
            waker.wake();
        }
    }
}

impl StreamWakers {
    fn wake(&mut self) {
        for waker in [self.read.take(), self.write.take()].into_iter().flatten() {
            waker.wake();
        }
    }
}

impl Connection {
    /// Serves SPDY on `io` in a new task.
    pub fn serve<T>(io: T, limits: Limits, timeouts: Timeouts) -> Self
    where
        T: AsyncRead + AsyncWrite + Send + 'static,
    {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                session: Session::new(limits),
                wakers: HashMap::new(),
                writers_blocked: false,
                over: false,
                closing: false,
                driver: None,
                acceptor: None,
                watchers: Vec::new(),
            }),
        });
        tokio::spawn(drive(io, Arc::clone(&shared), timeouts));
        Self { shared }
    }

    /// The next stream that the peer opens, or `None` when the connection has ended.
    pub async fn accept(&mut self) -> Option<IncomingStream> {
        poll_fn(|context| {
            let mut state = self.shared.lock();
            if let Some((id, headers)) = state.session.accept() {
                state.wakers.insert(id, StreamWakers::default());
                return Poll::Ready(Some(IncomingStream {
                    headers,
                    stream: Stream::new(Arc::clone(&self.shared), id),
                }));
            }
            if state.over {
                return Poll::Ready(None);
            }
            state.acceptor = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Waits until the peer has disconnected.
    pub fn closed(&self) -> impl Future<Output = ()> + Send + use<> {
        let shared = Arc::clone(&self.shared);
        poll_fn(move |context| {
            let mut state = shared.lock();
            if state.over {
                return Poll::Ready(());
            }
            if !state
                .watchers
                .iter()
                .any(|waker| waker.will_wake(context.waker()))
            {
                state.watchers.push(context.waker().clone());
            }
            Poll::Pending
        })
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        state.session.go_away(GoAwayStatus::Ok);
        state.wake_driver();
    }
}

/// A stream that the peer has opened and that is not answered yet. Dropping it refuses the stream.
#[derive(Debug)]
pub struct IncomingStream {
    headers: Headers,
    stream: Stream,
}

impl IncomingStream {
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    pub fn id(&self) -> u32 {
        self.stream.id()
    }

    pub fn accept(self) -> Stream {
        self.stream.reply();
        self.stream
    }

    pub fn refuse(self) {
        self.stream.reset(ResetStatus::RefusedStream);
    }
}

/// Why a connection ended.
#[derive(Debug)]
enum EndReason {
    /// We closed it: everything is sent, including GOAWAY.
    Ours,
    Peer,
    Idle,
    /// Reading or writing failed.
    Broken,
}

struct Driver<T> {
    io: Pin<Box<T>>,
    shared: Arc<Shared>,
    input: BytesMut,
    buffer: Box<[u8]>,
    sending: Bytes,
    unflushed: bool,
    /// Whether the last poll is waiting for input.
    reading: bool,
    /// The peer has violated the protocol: ignore its input and only send the remaining output.
    input_ignored: bool,
    idle: Pin<Box<Sleep>>,
    idle_timeout: Duration,
}

async fn drive<T>(io: T, shared: Arc<Shared>, timeouts: Timeouts)
where
    T: AsyncRead + AsyncWrite + Send + 'static,
{
    let mut driver = Driver {
        io: Box::pin(io),
        shared: Arc::clone(&shared),
        input: BytesMut::new(),
        buffer: vec![0; READ_BUFFER].into_boxed_slice(),
        sending: Bytes::new(),
        unflushed: false,
        reading: true,
        input_ignored: false,
        idle: Box::pin(sleep(timeouts.idle)),
        idle_timeout: timeouts.idle,
    };
    let reason = poll_fn(|context| driver.poll(context)).await;
    shared.lock().end();
    debug!(?reason, "SPDY connection ended");
    if matches!(reason, EndReason::Ours) {
        let Driver {
            mut io, mut buffer, ..
        } = driver;
        let goodbye = pin!(async {
            io.shutdown().await?;
            while io.read(&mut buffer).await? > 0 {}
            Ok::<_, std::io::Error>(())
        });
        // After the timeout the connection is dropped; all output has been handed to the socket by then.
        let _ = timeout(timeouts.linger, goodbye).await;
    }
}

impl<T: AsyncRead + AsyncWrite> Driver<T> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<EndReason> {
        self.shared.lock().driver = Some(context.waker().clone());
        loop {
            if let Poll::Ready(reason) = self.poll_receive(context) {
                return Poll::Ready(reason);
            }
            match self.poll_send(context) {
                Poll::Ready(Err(_)) => return Poll::Ready(EndReason::Broken),
                Poll::Ready(Ok(())) => {}
                Poll::Pending => break,
            }
            let state = self.shared.lock();
            if (state.closing || self.input_ignored) && !state.session.has_output() {
                return Poll::Ready(EndReason::Ours);
            }
            // If receiving had stopped for lack of room and sending has made room, poll again.
            if self.reading || !state.session.wants_input() {
                break;
            }
        }
        ready!(self.idle.as_mut().poll(context));
        Poll::Ready(EndReason::Idle)
    }

    /// Receives what has arrived, as long as there is room. Sending follows in the same poll. A stream that makes room because it
    /// is read wakes this task.
    fn poll_receive(&mut self, context: &mut Context<'_>) -> Poll<EndReason> {
        loop {
            self.reading = self.receive();
            if !self.reading {
                return Poll::Pending;
            }
            let mut buffer = ReadBuf::new(&mut self.buffer);
            match ready!(self.io.as_mut().poll_read(context, &mut buffer)) {
                Err(_) => return Poll::Ready(EndReason::Broken),
                Ok(()) if buffer.filled().is_empty() => return Poll::Ready(EndReason::Peer),
                Ok(()) => {
                    self.input.extend_from_slice(buffer.filled());
                    self.idle
                        .as_mut()
                        .reset(Instant::now().later_by(self.idle_timeout));
                }
            }
        }
    }

    /// Passes the received bytes to the session. Returns whether to read more.
    fn receive(&mut self) -> bool {
        let mut state = self.shared.lock();
        if !self.input_ignored && !self.input.is_empty() {
            let outcome = state.session.receive(&mut self.input);
            state.wake_touched();
            if let Err(error) = outcome {
                debug!(
                    error = &error as &dyn std::error::Error,
                    "the SPDY peer violated the protocol"
                );
                self.input_ignored = true;
                self.input.clear();
                // End the streams now instead of waiting until such a peer has received GOAWAY.
                state.end();
            }
        }
        !self.input_ignored && state.session.wants_input()
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        loop {
            if self.sending.is_empty() {
                let mut state = self.shared.lock();
                self.sending = state.session.take_output().freeze();
                state.wake_blocked_writers();
            }
            if self.sending.is_empty() {
                break;
            }
            let sent = ready!(self.io.as_mut().poll_write(context, &self.sending))?;
            if sent == 0 {
                return Poll::Ready(Err(std::io::ErrorKind::WriteZero.into()));
            }
            self.sending.advance(sent);
            self.unflushed = true;
            self.idle
                .as_mut()
                .reset(Instant::now().later_by(self.idle_timeout));
        }
        if self.unflushed {
            ready!(self.io.as_mut().poll_flush(context))?;
            self.unflushed = false;
        }
        Poll::Ready(Ok(()))
    }
}
