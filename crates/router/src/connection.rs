//! The HTTP connection of one client: detects the protocol version, serves requests, and ends the connection.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::activity::Activity;
use crate::body::ProxyBody;
use crate::shutdown::ShutdownSignal;
use crate::strict_http1::Strict;

/// Request heads larger than this are refused.
const MAX_HEAD_BYTES: usize = 128 * 1024;
/// The first bytes of an HTTP/2 connection (RFC 9113, 3.4).
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0";

/// How long a connection may stay open without a request after it was asked to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The limits that end a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// The idle timeout: before the first request's head is complete, and between two requests.
    pub header_timeout: Duration,
    /// When triggered, requests in flight finish and no more are accepted.
    pub stop: &'a ShutdownSignal,
    /// When triggered, requests in flight are aborted too.
    pub abort: &'a ShutdownSignal,
}

/// Serves a TCP connection without TLS. Nearly all clients use HTTP/1.1, for which only the check of request heads
/// sits between the codec and the socket.
pub async fn plain<S>(stream: TcpStream, service: S, limits: Limits<'_>)
where
    S: Service<Request<Incoming>, Response = Response<ProxyBody>, Error = Infallible>
        + Send
        + 'static,
    S::Future: Send + 'static,
{
    let mut first = [0; HTTP2_PREFACE.len()];
    let peeking = tokio::time::timeout(limits.header_timeout, stream.peek(&mut first));
    let peeked = tokio::select! {
        peeked = peeking => peeked,
        () = limits.stop.triggered() => return,
    };
    match peeked {
        Ok(Ok(length @ 1..)) if HTTP2_PREFACE.starts_with(&first[..length]) => {
            either(stream, service, limits).await;
        }
        Ok(Ok(1..)) => {
            let activity = Arc::default();
            let mut builder = http1::Builder::new();
            builder
                .header_read_timeout(None)
                .max_buf_size(MAX_HEAD_BYTES)
                .writev(false);
            let connection = builder
                .serve_connection(
                    TokioIo::new(Strict::new(stream)),
                    counted(service, &activity),
                )
                .with_upgrades();
            let finish = http1::UpgradeableConnection::graceful_shutdown;
            run(connection, finish, &activity, limits).await;
        }
        // The client disconnected or sent nothing.
        _ => {}
    }
}

/// Serves HTTP/1.1 or HTTP/2, as the first bytes decide.
pub async fn either<S, I>(stream: I, service: S, limits: Limits<'_>)
where
    S: Service<Request<Incoming>, Response = Response<ProxyBody>, Error = Infallible>
        + Send
        + 'static,
    S::Future: Send + 'static,
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let activity = Arc::default();
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .header_read_timeout(None)
        .max_buf_size(MAX_HEAD_BYTES);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Some(Duration::from_secs(30)))
        .max_concurrent_streams(256)
        .initial_stream_window_size(1024 * 1024);
    let service = counted(service, &activity);
    let connection =
        builder.serve_connection_with_upgrades(TokioIo::new(Strict::new(stream)), service);
    let finish = auto::UpgradeableConnection::graceful_shutdown;
    run(connection, finish, &activity, limits).await;
}

/// Wraps a service to count its requests. The codec has a head timeout only for HTTP/1.1, and sets a timer for each
/// request; this covers every version, with one timer that is rarely reset.
fn counted<S>(
    service: S,
    activity: &Arc<Activity>,
) -> impl Service<
    Request<Incoming>,
    Response = Response<ProxyBody>,
    Error = Infallible,
    Future: Send + 'static,
> + Send
+ 'static
where
    S: Service<Request<Incoming>, Response = Response<ProxyBody>, Error = Infallible>
        + Send
        + 'static,
    S::Future: Send + 'static,
{
    let activity = Arc::clone(activity);
    service_fn(move |request| {
        let in_flight = activity.begin();
        let answering = service.call(request);
        async move {
            let mut response = answering.await?;
            response.body_mut().hold(in_flight);
            Ok::<_, Infallible>(response)
        }
    })
}

/// Runs a connection to its end. `finish` asks it to close after the requests in flight, when the router stops or when
/// the connection is idle. A connection that stays open after that is dropped.
async fn run<Connection: Future>(
    connection: Connection,
    finish: impl FnOnce(Pin<&mut Connection>),
    activity: &Activity,
    limits: Limits<'_>,
) {
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        // Errors of a client's connection need no handling here.
        _ = connection.as_mut() => return,
        () = limits.abort.triggered() => return,
        () = limits.stop.triggered() => finish(connection.as_mut()),
        () = activity.idle_for(limits.header_timeout) => finish(connection.as_mut()),
    }
    tokio::select! {
        _ = connection => {}
        () = limits.abort.triggered() => {}
        () = activity.idle_for(limits.header_timeout.min(CLOSE_TIMEOUT)) => {}
    }
}
