//! Streaming bodies: of requests, of responses, and of the router's own responses. No body is buffered whole; a slow
//! reader slows the writer (back-pressure).

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use saturating_time::SaturatingTime;
use tokio::time::{Instant, Sleep};

use crate::access::Tracked;
use crate::activity::InFlight;
use crate::upstream::{Link, Upstream};

pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The progress of a request's body while it is forwarded.
#[derive(Debug)]
pub struct UploadProgress {
    began: Instant,
    /// When the last chunk was forwarded, in microseconds after the start.
    last_chunk_micros: AtomicU64,
    outcome: AtomicU8,
    awaits_client: AtomicBool,
}

const TOO_LARGE: u8 = 1;
const UNREADABLE: u8 = 2;

impl UploadProgress {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            last_chunk_micros: AtomicU64::new(0),
            outcome: AtomicU8::new(0),
            awaits_client: AtomicBool::new(false),
        }
    }

    /// The deadline that replaces an expired one, if the client still sends: the wait for the sandbox starts after the last chunk of
    /// the body. `None` if no chunk was forwarded since that deadline was set.
    pub fn later_deadline(&self, deadline: Instant, timeout: Duration) -> Option<Instant> {
        let moved = Duration::from_micros(self.last_chunk_micros.load(Ordering::Relaxed));
        let later = self.began.later_by(moved).later_by(timeout);
        (later > deadline).then_some(later)
    }

    pub fn note_progress(&self) {
        let micros = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last_chunk_micros.store(micros, Ordering::Relaxed);
    }

    pub fn was_too_large(&self) -> bool {
        self.outcome.load(Ordering::Acquire) == TOO_LARGE
    }

    pub fn was_unreadable(&self) -> bool {
        self.outcome.load(Ordering::Acquire) == UNREADABLE
    }

    /// Whether the sandbox is ready to read more of the body, but the client does not send it.
    pub fn awaits_client(&self) -> bool {
        self.awaits_client.load(Ordering::Acquire)
    }
}

/// A request's body, forwarded chunk by chunk.
#[derive(Debug)]
pub struct RequestBody {
    incoming: Incoming,
    progress: Option<Arc<UploadProgress>>,
    remaining: u64,
}

impl RequestBody {
    /// A `limit` of 0 means no limit.
    pub fn new(incoming: Incoming, limit: u64) -> Self {
        let progress = if incoming.is_end_stream() {
            None
        } else {
            Some(Arc::new(UploadProgress::new()))
        };
        Self {
            incoming,
            progress,
            remaining: if limit == 0 { u64::MAX } else { limit },
        }
    }

    /// `None` if there is no body.
    pub fn progress(&self) -> Option<Arc<UploadProgress>> {
        self.progress.clone()
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = Pin::new(&mut self.incoming).poll_frame(context);
        let Some(progress) = &self.progress else {
            return polled.map_err(BoxError::from);
        };
        progress
            .awaits_client
            .store(polled.is_pending(), Ordering::Release);
        let frame = std::task::ready!(polled);
        match frame {
            None => Poll::Ready(None),
            Some(Err(error)) => {
                progress.outcome.store(UNREADABLE, Ordering::Release);
                Poll::Ready(Some(Err(error.into())))
            }
            Some(Ok(frame)) => {
                progress.note_progress();
                let length = frame.data_ref().map_or(0, |data| data.len() as u64);
                if length > self.remaining {
                    progress.outcome.store(TOO_LARGE, Ordering::Release);
                    return Poll::Ready(Some(Err("the request body is too large".into())));
                }
                self.remaining -= length;
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

/// A response's body.
pub struct ProxyBody {
    content: Content,
    tracked: Option<Tracked>,
    in_flight: Option<InFlight>,
}

enum Content {
    Own(Option<Bytes>),
    Response(Box<ResponseBody>),
}

impl ProxyBody {
    pub fn full(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        Self {
            content: Content::Own(Some(bytes).filter(|bytes| !bytes.is_empty())),
            tracked: None,
            in_flight: None,
        }
    }

    /// The rest of a response whose connection has a task of its own. The body fails if the sandbox sends nothing for longer than
    /// `idle_timeout`.
    pub fn spawned(incoming: Incoming, idle_timeout: Duration) -> Self {
        Self::answer(incoming, None, idle_timeout)
    }

    /// The rest of a response that came over `link`, which goes back to `upstream` afterwards. The body fails if the sandbox sends
    /// nothing for longer than `idle_timeout`.
    pub fn driven(
        incoming: Incoming,
        link: Link,
        upstream: Arc<Upstream>,
        port: u16,
        idle_timeout: Duration,
    ) -> Self {
        if incoming.is_end_stream() {
            upstream.give_back(port, link);
            return Self::full(Bytes::new());
        }
        let driven = Driven {
            link,
            upstream,
            port,
        };
        Self::answer(incoming, Some(driven), idle_timeout)
    }

    fn answer(incoming: Incoming, driven: Option<Driven>, idle_timeout: Duration) -> Self {
        let body = ResponseBody {
            incoming,
            driven,
            idle_timeout,
            idle_timer: None,
            is_idle: false,
            failure: None,
        };
        Self {
            content: Content::Response(Box::new(body)),
            tracked: None,
            in_flight: None,
        }
    }

    /// Reports to `tracked` when the body has ended or was dropped.
    pub fn track(&mut self, tracked: Tracked) {
        self.tracked = Some(tracked);
    }

    /// Keeps the request in flight until the body has ended or was dropped.
    pub fn hold(&mut self, in_flight: InFlight) {
        self.in_flight = Some(in_flight);
    }
}

impl fmt::Debug for ProxyBody {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("ProxyBody")
    }
}

impl Body for ProxyBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = match &mut self.content {
            Content::Own(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Content::Response(body) => body.poll_frame(context),
        };
        if let (Poll::Ready(Some(Ok(frame))), Some(tracked)) = (&frame, &mut self.tracked) {
            tracked.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Own(bytes) => bytes.is_none(),
            Content::Response(body) => body.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Own(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Content::Response(body) => body.incoming.size_hint(),
        }
    }
}

/// A connection that is polled by the body it carries, and the sandbox it returns to afterwards.
struct Driven {
    link: Link,
    upstream: Arc<Upstream>,
    port: u16,
}

struct ResponseBody {
    incoming: Incoming,
    /// `None` if the connection has a task of its own, or can no longer be used.
    driven: Option<Driven>,
    idle_timeout: Duration,
    /// Runs while the sandbox sends nothing; created when the body first waits for it.
    idle_timer: Option<Pin<Box<Sleep>>>,
    is_idle: bool,
    failure: Option<BoxError>,
}

impl ResponseBody {
    fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(failure) = self.failure.take() {
            return Poll::Ready(Some(Err(failure)));
        }
        let mut frame = Pin::new(&mut self.incoming).poll_frame(context);
        if frame.is_pending()
            && let Some(driven) = &mut self.driven
        {
            driven.link.drive(context);
            frame = Pin::new(&mut self.incoming).poll_frame(context);
        }
        match frame {
            Poll::Pending => self.poll_idle(context),
            Poll::Ready(None) => {
                self.finish();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(failure))) => self.fail(failure.into(), context),
            Poll::Ready(Some(Ok(frame))) => {
                self.is_idle = false;
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn poll_idle(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let idle_timeout = self.idle_timeout;
        let idle_timer = self
            .idle_timer
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(idle_timeout)));
        if !self.is_idle {
            // The timer starts when the router waits for the sandbox: time in which the client does not read does not count.
            idle_timer
                .as_mut()
                .reset(Instant::now().later_by(idle_timeout));
            self.is_idle = true;
        }
        std::task::ready!(idle_timer.as_mut().poll(context));
        self.fail(
            "the sandbox stopped sending in the middle of its response".into(),
            context,
        )
    }

    /// Fails the body, one poll later: when a body fails, the server drops what it has not written yet, and the client
    /// should receive what the sandbox did send.
    fn fail(
        &mut self,
        failure: BoxError,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.driven = None;
        self.failure = Some(failure);
        context.waker().wake_by_ref();
        Poll::Pending
    }

    fn finish(&mut self) {
        if let Some(driven) = self.driven.take() {
            driven.upstream.give_back(driven.port, driven.link);
        }
    }
}

impl Drop for ResponseBody {
    fn drop(&mut self) {
        // A body of known length is not read past its end.
        if self.incoming.is_end_stream() {
            self.finish();
        }
    }
}
