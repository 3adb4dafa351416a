//! Accepts connections and serves HTTP until it is asked to drain. It is independent of the API; it only refuses requests from
//! pages of other sites.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cross_site::is_cross_site;
use crate::response::{Body, message};

/// Timeout for a request's head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// Handles requests; shared by all connections of one listener.
pub trait Handler: Send + Sync + 'static {
    fn handle(
        self: Arc<Self>,
        request: Request<Incoming>,
    ) -> impl Future<Output = Response<Body>> + Send;
}

/// Listens on `address`. The unspecified IPv4 address means every address, IPv4 and IPv6 if the machine
/// has both.
pub async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    if address.is_ipv4() && address.ip().is_unspecified() {
        let both = SocketAddr::from((Ipv6Addr::UNSPECIFIED, address.port()));
        if let Ok(listener) = TcpListener::bind(both).await {
            return Ok(listener);
        }
    }
    TcpListener::bind(address).await
}

/// The protocol of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Http1,
    /// With prior knowledge, as gRPC clients use it.
    Http2,
}

/// Serves until `stop`, then finishes the requests that have begun. Connections are counted in `connections`.
pub async fn serve<H: Handler>(
    listener: TcpListener,
    protocol: Protocol,
    handler: Arc<H>,
    connections: TaskTracker,
    stop: CancellationToken,
) {
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    // Most likely too many open files: the only remedy is to wait.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            },
        };
        let _ = stream.set_nodelay(true);
        let (handler, stop) = (Arc::clone(&handler), stop.clone());
        connections.spawn(async move {
            match protocol {
                Protocol::Http1 => serve_http1(stream, handler, stop).await,
                Protocol::Http2 => serve_http2(stream, handler, stop).await,
            }
        });
    }
}

async fn answer<H: Handler>(handler: Arc<H>, request: Request<Incoming>) -> Response<Body> {
    if is_cross_site(request.method(), request.headers()) {
        return message(
            StatusCode::FORBIDDEN,
            "cross-site requests of browser pages are refused (Origin, Sec-Fetch-Site)",
        );
    }
    handler.handle(request).await
}

// Errors of a client's connection are ignored: they do not concern the sandbox.

async fn serve_http1<H: Handler>(stream: TcpStream, handler: Arc<H>, stop: CancellationToken) {
    let service = service_fn(move |request| {
        let handler = Arc::clone(&handler);
        async move { Ok::<_, Infallible>(answer(handler, request).await) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

async fn serve_http2<H: Handler>(stream: TcpStream, handler: Arc<H>, stop: CancellationToken) {
    let service = service_fn(move |request| {
        let handler = Arc::clone(&handler);
        async move { Ok::<_, Infallible>(answer(handler, request).await) }
    });
    let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(Some(HEAD_TIMEOUT))
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}
