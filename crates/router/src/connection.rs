//! HTTP with one client, from its first byte to its last: which version it speaks, and how the conversation ends.

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
use crate::stopping::Moment;
use crate::strict_http1::Strict;

/// Heads larger than this are refused.
const LARGEST_HEAD: usize = 128 * 1024;
/// How a conversation in HTTP/2 begins.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0";

/// How long a connection that is told to end may go on without a request.
const LAST_CHANCE: Duration = Duration::from_secs(1);

/// When a conversation ends that does not end by itself.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// How long a connection may be without a request: before the first one's head has come, and between two.
    pub header_timeout: Duration,
    /// From here on, requests in flight are finished and no more are taken.
    pub stop: &'a Moment,
    /// From here on, nothing is.
    pub cut: &'a Moment,
}

/// Converses over TCP. Nearly all clients speak HTTP/1.1, and for them nothing but the check of heads stands between the codec
/// and the socket.
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
            let activity = Arc::default();
            let mut builder = http1::Builder::new();
            builder
                .header_read_timeout(None)
                .max_buf_size(LARGEST_HEAD)
                .writev(false);
            let connection = builder
                .serve_connection(
                    TokioIo::new(Strict::new(stream)),
                    counted(service, &activity),
                )
                .with_upgrades();
            let finish = http1::UpgradeableConnection::graceful_shutdown;
            converse(connection, finish, &activity, limits).await;
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
    let activity = Arc::default();
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .header_read_timeout(None)
        .max_buf_size(LARGEST_HEAD);
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
    converse(connection, finish, &activity, limits).await;
}

/// The same service, with its requests counted. The codec has time limits of its own for heads in HTTP/1.1 alone, and sets a timer for
/// each request; this covers every version, and sets one now and then.
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

/// Lets a connection run to its end. `finish` tells it to end after what is in flight, which happens when the router stops, or when
/// the connection is not used. One that goes on all the same is dropped.
async fn converse<Connection: Future>(
    connection: Connection,
    finish: impl FnOnce(Pin<&mut Connection>),
    activity: &Activity,
    limits: Limits<'_>,
) {
    let mut connection = pin!(connection);
    tokio::select! {
        biased;
        // How a connection ends is the client's affair.
        _ = connection.as_mut() => return,
        () = limits.cut.come() => return,
        () = limits.stop.come() => finish(connection.as_mut()),
        () = activity.ceased_for(limits.header_timeout) => finish(connection.as_mut()),
    }
    tokio::select! {
        _ = connection => {}
        () = limits.cut.come() => {}
        () = activity.ceased_for(limits.header_timeout.min(LAST_CHANCE)) => {}
    }
}
