//! Bodies on their way through: what clients send, what sandboxes answer, and what the router says itself. Nothing is
//! collected; a reader that is slow slows the writer.

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

/// What is known about a request's body while it passes.
#[derive(Debug)]
pub struct Passage {
    began: Instant,
    /// When the last piece passed, in microseconds after the beginning.
    moved_micros: AtomicU64,
    outcome: AtomicU8,
    awaits_client: AtomicBool,
}

const TOO_LARGE: u8 = 1;
const UNREADABLE: u8 = 2;

impl Passage {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            moved_micros: AtomicU64::new(0),
            outcome: AtomicU8::new(0),
            awaits_client: AtomicBool::new(false),
        }
    }

    /// The deadline that replaces one that has passed: a client that still sends is not a sandbox that does not answer. `None` when nothing has passed
    /// since that deadline was set.
    pub fn later_deadline(&self, deadline: Instant, timeout: Duration) -> Option<Instant> {
        let moved = Duration::from_micros(self.moved_micros.load(Ordering::Relaxed));
        let later = self.began.later_by(moved).later_by(timeout);
        (later > deadline).then_some(later)
    }

    pub fn note_progress(&self) {
        let micros = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.moved_micros.store(micros, Ordering::Relaxed);
    }

    pub fn was_too_large(&self) -> bool {
        self.outcome.load(Ordering::Acquire) == TOO_LARGE
    }

    pub fn was_unreadable(&self) -> bool {
        self.outcome.load(Ordering::Acquire) == UNREADABLE
    }

    /// Whether the sandbox would take more, and the client does not send it.
    pub fn awaits_client(&self) -> bool {
        self.awaits_client.load(Ordering::Acquire)
    }
}

/// A request's body, passed on piece by piece.
#[derive(Debug)]
pub struct RequestBody {
    incoming: Incoming,
    passage: Option<Arc<Passage>>,
    remaining: u64,
}

impl RequestBody {
    /// `limit` 0 means none.
    pub fn new(incoming: Incoming, limit: u64) -> Self {
        let passage = if incoming.is_end_stream() {
            None
        } else {
            Some(Arc::new(Passage::new()))
        };
        Self {
            incoming,
            passage,
            remaining: if limit == 0 { u64::MAX } else { limit },
        }
    }

    /// Nothing, if there is no body.
    pub fn passage(&self) -> Option<Arc<Passage>> {
        self.passage.clone()
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
        let Some(passage) = &self.passage else {
            return polled.map_err(BoxError::from);
        };
        passage
            .awaits_client
            .store(polled.is_pending(), Ordering::Release);
        let frame = std::task::ready!(polled);
        match frame {
            None => Poll::Ready(None),
            Some(Err(error)) => {
                passage.outcome.store(UNREADABLE, Ordering::Release);
                Poll::Ready(Some(Err(error.into())))
            }
            Some(Ok(frame)) => {
                passage.note_progress();
                let length = frame.data_ref().map_or(0, |data| data.len() as u64);
                if length > self.remaining {
                    passage.outcome.store(TOO_LARGE, Ordering::Release);
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
    Answer(Box<AnswerBody>),
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

    /// The rest of an answer that came over a connection with a task of its own. A sandbox that is silent for longer than `patience`
    /// breaks it off.
    pub fn spawned(incoming: Incoming, patience: Duration) -> Self {
        Self::answer(incoming, None, patience)
    }

    /// The rest of an answer that came over `link`, which goes back to `upstream` afterwards. The same holds for a sandbox that is
    /// silent.
    pub fn driven(
        incoming: Incoming,
        link: Link,
        upstream: Arc<Upstream>,
        port: u16,
        patience: Duration,
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
        Self::answer(incoming, Some(driven), patience)
    }

    fn answer(incoming: Incoming, driven: Option<Driven>, patience: Duration) -> Self {
        let body = AnswerBody {
            incoming,
            driven,
            patience,
            silence: None,
            is_silent: false,
            failure: None,
        };
        Self {
            content: Content::Answer(Box::new(body)),
            tracked: None,
            in_flight: None,
        }
    }

    /// Reports to `tracked` when the body has passed, or was given up.
    pub fn track(&mut self, tracked: Tracked) {
        self.tracked = Some(tracked);
    }

    /// Keeps the request in flight until the body has passed, or was given up.
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
            Content::Answer(body) => body.poll_frame(context),
        };
        if let (Poll::Ready(Some(Ok(frame))), Some(tracked)) = (&frame, &mut self.tracked) {
            tracked.bytes += frame.data_ref().map_or(0, |data| data.len() as u64);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Own(bytes) => bytes.is_none(),
            Content::Answer(body) => body.incoming.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Own(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Content::Answer(body) => body.incoming.size_hint(),
        }
    }
}

/// A connection that a body drives, and where it goes afterwards.
struct Driven {
    link: Link,
    upstream: Arc<Upstream>,
    port: u16,
}

struct AnswerBody {
    incoming: Incoming,
    /// Nothing, if the connection has a task of its own, or is of no use any more.
    driven: Option<Driven>,
    patience: Duration,
    /// Runs while the sandbox is silent; made when it is silent for the first time.
    silence: Option<Pin<Box<Sleep>>>,
    is_silent: bool,
    failure: Option<BoxError>,
}

impl AnswerBody {
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
            Poll::Pending => self.poll_silence(context),
            Poll::Ready(None) => {
                self.finish();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Err(failure))) => self.fail(failure.into(), context),
            Poll::Ready(Some(Ok(frame))) => {
                self.is_silent = false;
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn poll_silence(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let patience = self.patience;
        let silence = self
            .silence
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        if !self.is_silent {
            // Silence begins when something is waited for: a client that does not read is not a sandbox that is silent.
            silence.as_mut().reset(Instant::now().later_by(patience));
            self.is_silent = true;
        }
        std::task::ready!(silence.as_mut().poll(context));
        self.fail(
            "the sandbox fell silent in the middle of its answer".into(),
            context,
        )
    }

    /// Breaks the answer off, one turn later: the server drops what it has not written yet when a body fails, and the
    /// client should get what did come.
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

impl Drop for AnswerBody {
    fn drop(&mut self) {
        // A body of known length is not read past its end.
        if self.incoming.is_end_stream() {
            self.finish();
        }
    }
}
