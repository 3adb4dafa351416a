//! HTTP with one client, from its first byte to its last: which version it speaks, and how the conversation ends.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use crate::body::ProxyBody;
use crate::stopping::Moment;

/// Heads larger than this are refused.
const LARGEST_HEAD: usize = 128 * 1024;
/// How a conversation in HTTP/2 begins.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0";

/// When a conversation ends that does not end by itself.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// How long a request's head may take.
    pub header_timeout: Duration,
    /// From here on, requests in flight are finished and no more are taken.
    pub stop: &'a Moment,
    /// From here on, nothing is.
    pub cut: &'a Moment,
}

/// Converses over TCP. Nearly all clients speak HTTP/1.1, and for them nothing stands between the codec and the socket.
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
        () = limits.stop.come() => return,
    };
    match peeked {
        Ok(Ok(length @ 1..)) if HTTP2_PREFACE.starts_with(&first[..length]) => {
            either(stream, service, limits).await;
        }
        Ok(Ok(1..)) => {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(limits.header_timeout)
                .max_buf_size(LARGEST_HEAD)
                .writev(false);
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            let connection = connection.with_upgrades();
            converse(
                connection,
                http1::UpgradeableConnection::graceful_shutdown,
                limits,
            )
            .await;
        }
        // It left, or has nothing to say.
        _ => {}
    }
}

/// Converses in whichever version the client begins with.
pub async fn either<S, I>(stream: I, service: S, limits: Limits<'_>)
where
    S: Service<Request<Incoming>, Response = Response<ProxyBody>, Error = Infallible>
        + Send
        + 'static,
    S::Future: Send + 'static,
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_buf_size(LARGEST_HEAD);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(Some(Duration::from_secs(30)))
        .max_concurrent_streams(256)
        .initial_stream_window_size(1024 * 1024);
    let connection = builder.serve_connection_with_upgrades(TokioIo::new(stream), service);
    converse(
        connection,
        auto::UpgradeableConnection::graceful_shutdown,
        limits,
    )
    .await;
}

/// Lets a connection run to its end. `finish` tells it to end after what is in flight.
async fn converse<Connection: Future>(
    connection: Connection,
    finish: impl FnOnce(Pin<&mut Connection>),
    limits: Limits<'_>,
) {
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        // How a connection ends is the client's affair.
        _ = connection.as_mut() => return,
        () = limits.cut.come() => return,
        () = limits.stop.come() => finish(connection.as_mut()),
    }
    tokio::select! {
        _ = connection => {}
        () = limits.cut.come() => {}
    }
}
