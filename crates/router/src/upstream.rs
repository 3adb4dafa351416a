//! Connections to one sandbox. Idle ones belong to the sandbox they were made for and end with it, so that an address
//! which passes to another sandbox never gets a request over an old connection.
//!
//! An HTTP/1.1 connection ([`Link`]) has no task of its own: whoever uses it drives it, in the task of the client's
//! connection. That saves two wake-ups between threads per request.

use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use saturating_time::SaturatingTime;
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tokio_util::sync::CancellationToken;

use crate::body::RequestBody;
use crate::{sockets, workers};

/// Idle connections kept for one sandbox.
const MOST_IDLE: usize = 512;
/// How long one is kept. Shorter than servers' usual keep-alive, so that it is us who hang up.
const LONGEST_IDLE: Duration = Duration::from_secs(50);
/// Heads larger than this are garbage.
const LARGEST_HEAD: usize = 128 * 1024;

/// One sandbox at its addresses.
#[derive(Debug)]
pub struct Upstream {
    addresses: Vec<IpAddr>,
    idle: Mutex<Vec<Idle>>,
    multiplexed: Mutex<Vec<(u16, http2::SendRequest<RequestBody>)>>,
    gone: CancellationToken,
    /// The `Host` of the port that was asked for first, which is nearly always the only one.
    first_host: OnceLock<(u16, HeaderValue)>,
}

#[derive(Debug)]
struct Idle {
    port: u16,
    /// The thread it was made on, where its events arrive.
    worker: usize,
    since: Instant,
    link: Link,
}

impl Upstream {
    pub fn new(addresses: Vec<IpAddr>) -> Self {
        Self {
            addresses,
            idle: Mutex::default(),
            multiplexed: Mutex::default(),
            gone: CancellationToken::new(),
            first_host: OnceLock::new(),
        }
    }

    pub fn addresses(&self) -> &[IpAddr] {
        &self.addresses
    }

    /// What requests to a port have as their `Host`.
    pub fn host(&self, port: u16) -> HeaderValue {
        let spelled = || {
            let address = self
                .addresses
                .first()
                .map(|&address| SocketAddr::new(address, port).to_string());
            HeaderValue::try_from(address.unwrap_or_default())
                .unwrap_or(HeaderValue::from_static(""))
        };
        let (first_port, host) = self.first_host.get_or_init(|| (port, spelled()));
        if *first_port == port {
            host.clone()
        } else {
            spelled()
        }
    }

    /// The sandbox is not here any more: idle connections go, and tunnels end.
    pub fn retire(&self) {
        self.gone.cancel();
        lock(&self.idle).clear();
        lock(&self.multiplexed).clear();
    }

    pub fn is_retired(&self) -> bool {
        self.gone.is_cancelled()
    }

    /// Completes when the sandbox is not here any more.
    pub fn gone(&self) -> CancellationToken {
        self.gone.clone()
    }

    /// A connection that was used before and still works.
    pub fn reuse(&self, port: u16) -> Option<Link> {
        let worker = workers::current();
        loop {
            let mut link = {
                let mut idle = lock(&self.idle);
                let mine = |idle: &Idle| idle.port == port && idle.worker == worker;
                let found = idle.iter().rposition(mine)?;
                idle.swap_remove(found).link
            };
            if link.is_ready() {
                return Some(link);
            }
        }
    }

    /// Keeps a connection for later, if it can be used again.
    pub fn give_back(&self, port: u16, mut link: Link) {
        if self.is_retired() || !link.is_ready() {
            return;
        }
        let mut idle = lock(&self.idle);
        if idle.len() >= MOST_IDLE {
            idle.remove(0);
        }
        idle.push(Idle {
            port,
            worker: workers::current(),
            since: Instant::now(),
            link,
        });
    }

    pub fn close_idle(&self, now: Instant) {
        lock(&self.idle).retain_mut(|idle| {
            now.duration_since(idle.since) < LONGEST_IDLE && idle.link.is_ready()
        });
    }

    /// Opens a connection to the first address that answers.
    pub async fn dial(&self, port: u16, timeout: Duration) -> io::Result<TcpStream> {
        let mut failure = io::Error::new(
            io::ErrorKind::AddrNotAvailable,
            "the sandbox has no address",
        );
        for &address in &self.addresses {
            match tokio::time::timeout(timeout, TcpStream::connect(SocketAddr::new(address, port)))
                .await
            {
                Ok(Ok(stream)) => {
                    // A connection that cannot be tuned still works.
                    let _ = sockets::tune(&stream);
                    return Ok(stream);
                }
                Ok(Err(error)) => failure = error,
                Err(_elapsed) => failure = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(failure)
    }

    /// An HTTP/2 connection that is open already.
    pub fn multiplexed(&self, port: u16) -> Option<http2::SendRequest<RequestBody>> {
        let mut open = lock(&self.multiplexed);
        open.retain(|(_, sender)| !sender.is_closed());
        open.iter()
            .find(|(at, _)| *at == port)
            .map(|(_, sender)| sender.clone())
    }

    /// Speaks HTTP/2 over a new connection, which others may share from now on.
    pub async fn multiplex(
        &self,
        port: u16,
        stream: TcpStream,
    ) -> hyper::Result<http2::SendRequest<RequestBody>> {
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .adaptive_window(true)
            .handshake(TokioIo::new(stream))
            .await?;
        let gone = self.gone();
        tokio::spawn(async move {
            tokio::select! {
                _ = connection => {}
                () = gone.cancelled() => {}
            }
        });
        lock(&self.multiplexed).push((port, sender.clone()));
        Ok(sender)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a request got no answer.
#[derive(Debug)]
pub enum SendFailure {
    /// No byte of it left: it may go over another connection.
    Unsent(Box<Request<RequestBody>>),
    /// It may have been seen, so it is not repeated.
    Broken,
}

/// An HTTP/1.1 connection to a sandbox, and the state machine that drives it.
#[derive(Debug)]
pub struct Link {
    sender: http1::SendRequest<RequestBody>,
    connection: Pin<Box<http1::Connection<TokioIo<TcpStream>, RequestBody>>>,
    ended: bool,
    /// Rings when an answer has been waited for long enough. One for all requests of the connection: moving a timer that is set
    /// already further away takes no lock.
    alarm: Pin<Box<Sleep>>,
}

impl Link {
    pub async fn over(stream: TcpStream) -> hyper::Result<Self> {
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(LARGEST_HEAD)
            // Heads and small bodies leave in one piece, which costs the kernel less than two in one call.
            .writev(false)
            .handshake(TokioIo::new(stream))
            .await?;
        Ok(Self {
            sender,
            connection: Box::pin(connection),
            ended: false,
            alarm: Box::pin(tokio::time::sleep(LONGEST_IDLE)),
        })
    }

    /// Lets the connection read and write what it can. It must be called by whoever waits for anything from it.
    pub fn drive(&mut self, context: &mut Context<'_>) {
        if !self.ended && self.connection.as_mut().poll(context).is_ready() {
            self.ended = true;
        }
    }

    /// Whether another request can be sent. Notices a server that hung up meanwhile.
    pub fn is_ready(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.ended && self.sender.is_ready()
    }

    /// Sends a request, and its body as it comes, until the answer's head is here. `None` if that takes longer than `timeout`, which begins anew
    /// whenever a piece of the request's body passes.
    pub async fn send(
        &mut self,
        request: Request<RequestBody>,
        timeout: Duration,
    ) -> Option<Result<Response<Incoming>, SendFailure>> {
        let passage = request.body().passage();
        let mut answer = std::pin::pin!(self.sender.try_send_request(request));
        let (connection, ended, alarm) = (&mut self.connection, &mut self.ended, &mut self.alarm);
        alarm.as_mut().reset(Instant::now().later_by(timeout));
        let answered = poll_fn(|context| {
            if !*ended && connection.as_mut().poll(context).is_ready() {
                *ended = true;
            }
            match answer.as_mut().poll(context) {
                Poll::Pending if *ended => return Poll::Ready(Some(None)),
                Poll::Pending => {}
                Poll::Ready(answer) => return Poll::Ready(Some(Some(answer))),
            }
            while alarm.as_mut().poll(context).is_ready() {
                let later = passage
                    .as_deref()
                    .and_then(|passage| passage.later_deadline(alarm.deadline(), timeout));
                let Some(deadline) = later else {
                    return Poll::Ready(None);
                };
                alarm.as_mut().reset(deadline);
            }
            Poll::Pending
        });
        Some(match answered.await? {
            Some(Ok(response)) => Ok(response),
            Some(Err(mut error)) => {
                Err(error.take_message().map_or(SendFailure::Broken, |request| {
                    SendFailure::Unsent(Box::new(request))
                }))
            }
            None => Err(SendFailure::Broken),
        })
    }
}
