//! Connections to one sandbox. Idle connections belong to the sandbox they were opened for and close with it, so that an address
//! that passes to another sandbox never receives a request over an old connection.
//!
//! An HTTP/1.1 connection ([`Link`]) has no task of its own: the task of the client's connection polls it.
//! That saves two wake-ups between threads per request.

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

/// The largest number of idle connections to one sandbox.
const MAX_IDLE: usize = 512;
/// Shorter than the usual keep-alive timeout of servers, so that the router closes first.
const IDLE_TIMEOUT: Duration = Duration::from_secs(50);
/// Response heads larger than this are refused.
const MAX_HEAD_BYTES: usize = 128 * 1024;

/// One sandbox at its addresses.
#[derive(Debug)]
pub struct Upstream {
    addresses: Vec<IpAddr>,
    idle: Mutex<Vec<Idle>>,
    multiplexed: Mutex<Vec<(u16, http2::SendRequest<RequestBody>)>>,
    gone: CancellationToken,
    /// The `Host` header for the port that was requested first, which is nearly always the only one.
    first_host: OnceLock<(u16, HeaderValue)>,
}

#[derive(Debug)]
struct Idle {
    port: u16,
    /// The worker thread that opened it, which receives its I/O events.
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

    /// The `Host` header of requests to a port.
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

    /// Marks that the sandbox is no longer at these addresses: idle connections are closed, and tunnels end.
    pub fn retire(&self) {
        self.gone.cancel();
        lock(&self.idle).clear();
        lock(&self.multiplexed).clear();
    }

    pub fn is_retired(&self) -> bool {
        self.gone.is_cancelled()
    }

    /// Cancelled when the sandbox is no longer at these addresses.
    pub fn gone(&self) -> CancellationToken {
        self.gone.clone()
    }

    /// An idle connection that still works.
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

    /// Returns a connection to the pool, if it can be reused.
    pub fn give_back(&self, port: u16, mut link: Link) {
        if self.is_retired() || !link.is_ready() {
            return;
        }
        let mut idle = lock(&self.idle);
        if idle.len() >= MAX_IDLE {
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
            now.duration_since(idle.since) < IDLE_TIMEOUT && idle.link.is_ready()
        });
    }

    /// Opens a connection to the first address that accepts.
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
                    // A connection without these options still works.
                    let _ = sockets::tune(&stream);
                    return Ok(stream);
                }
                Ok(Err(error)) => failure = error,
                Err(_elapsed) => failure = io::ErrorKind::TimedOut.into(),
            }
        }
        Err(failure)
    }

    /// The open HTTP/2 connection, if there is one.
    pub fn multiplexed(&self, port: u16) -> Option<http2::SendRequest<RequestBody>> {
        let mut open = lock(&self.multiplexed);
        open.retain(|(_, sender)| !sender.is_closed());
        open.iter()
            .find(|(at, _)| *at == port)
            .map(|(_, sender)| sender.clone())
    }

    /// Starts HTTP/2 on a new connection, which concurrent requests then share.
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

/// Why a request got no response.
#[derive(Debug)]
pub enum SendFailure {
    /// No byte was sent: the request may be sent over another connection.
    Unsent(Box<Request<RequestBody>>),
    /// The sandbox may have received it, so it is not repeated.
    Broken,
}

/// An HTTP/1.1 connection to a sandbox, and the state machine that drives it.
#[derive(Debug)]
pub struct Link {
    sender: http1::SendRequest<RequestBody>,
    connection: Pin<Box<http1::Connection<TokioIo<TcpStream>, RequestBody>>>,
    ended: bool,
    /// The response timeout. One timer for all requests of the connection: moving a timer that is already set further
    /// into the future takes no lock.
    timer: Pin<Box<Sleep>>,
}

impl Link {
    pub async fn over(stream: TcpStream) -> hyper::Result<Self> {
        let (sender, connection) = http1::Builder::new()
            .max_buf_size(MAX_HEAD_BYTES)
            // Heads and small bodies are written from one buffer, which costs the kernel less than a vectored write of two.
            .writev(false)
            .handshake(TokioIo::new(stream))
            .await?;
        Ok(Self {
            sender,
            connection: Box::pin(connection),
            ended: false,
            timer: Box::pin(tokio::time::sleep(IDLE_TIMEOUT)),
        })
    }

    /// Polls the connection's I/O. Every task that waits for a result of this connection must call it.
    pub fn drive(&mut self, context: &mut Context<'_>) {
        if !self.ended && self.connection.as_mut().poll(context).is_ready() {
            self.ended = true;
        }
    }

    /// Whether another request can be sent. Detects a server that has closed the connection.
    pub fn is_ready(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        !self.ended && self.sender.is_ready()
    }

    /// Sends a request and its body until the response's head has arrived. `None` after `timeout`, which restarts
    /// with each chunk of the request's body.
    pub async fn send(
        &mut self,
        request: Request<RequestBody>,
        timeout: Duration,
    ) -> Option<Result<Response<Incoming>, SendFailure>> {
        let progress = request.body().progress();
        let mut answer = std::pin::pin!(self.sender.try_send_request(request));
        let (connection, ended, timer) = (&mut self.connection, &mut self.ended, &mut self.timer);
        timer.as_mut().reset(Instant::now().later_by(timeout));
        let answered = poll_fn(|context| {
            if !*ended && connection.as_mut().poll(context).is_ready() {
                *ended = true;
            }
            match answer.as_mut().poll(context) {
                Poll::Pending if *ended => return Poll::Ready(Some(None)),
                Poll::Pending => {}
                Poll::Ready(answer) => return Poll::Ready(Some(Some(answer))),
            }
            while timer.as_mut().poll(context).is_ready() {
                let later = progress
                    .as_deref()
                    .and_then(|progress| progress.later_deadline(timer.deadline(), timeout));
                let Some(deadline) = later else {
                    return Poll::Ready(None);
                };
                timer.as_mut().reset(deadline);
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
