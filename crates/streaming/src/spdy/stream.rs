//! One SPDY stream as `AsyncRead + AsyncWrite`.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::connection::Shared;
use super::frame::ResetStatus;
use super::session::{ReadOutcome, WriteOutcome};

/// A stream of a [`Connection`](super::Connection).
///
/// # Guarantees
/// All data written before `shutdown` arrives before the end of the stream. Dropping a stream that is not finished on both sides
/// resets it.
///
/// # Caveats
/// A write only queues data, and a flush does not wait until it is sent.
#[derive(Debug)]
pub struct Stream {
    shared: Arc<Shared>,
    id: u32,
}

impl Stream {
    pub(super) fn new(shared: Arc<Shared>, id: u32) -> Self {
        Self { shared, id }
    }

    pub fn id(&self) -> u32 {
        self.id
    }

    /// Discards everything that the peer sends on this stream, so that it takes no buffer space from other streams.
    #[must_use]
    pub fn write_only(self) -> Self {
        let mut state = self.shared.lock();
        state.session.discard_input(self.id);
        state.wake_driver();
        drop(state);
        self
    }

    /// Resets the stream: ends both directions immediately.
    pub fn reset(self, status: ResetStatus) {
        let mut state = self.shared.lock();
        state.session.remove_with(self.id, status);
        state.wake_driver();
    }

    pub(super) fn reply(&self) {
        let mut state = self.shared.lock();
        state.session.reply(self.id);
        state.wake_driver();
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.wakers.remove(&self.id);
        state.session.remove(self.id);
        state.wake_driver();
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.shared.lock();
        match state.session.read(self.id, buffer.initialize_unfilled()) {
            ReadOutcome::Read(length) => {
                buffer.advance(length);
                state.wake_driver();
                Poll::Ready(Ok(()))
            }
            ReadOutcome::End => Poll::Ready(Ok(())),
            ReadOutcome::Reset => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            ReadOutcome::Pending if state.over => {
                Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
            }
            ReadOutcome::Pending => {
                state.wakers.entry(self.id).or_default().read = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.shared.lock();
        if state.over {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        match state.session.write(self.id, data) {
            WriteOutcome::Written(length) => {
                state.wake_driver();
                Poll::Ready(Ok(length))
            }
            WriteOutcome::Closed => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
            WriteOutcome::Blocked => {
                state.writers_blocked = true;
                state.wakers.entry(self.id).or_default().write = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.shared.lock();
        state.session.finish(self.id);
        state.wake_driver();
        Poll::Ready(Ok(()))
    }
}
