//! Byte streams to the router, and the HTTP client over them. One client with its connection pool serves all sandboxes
//! of a [`crate::Client`]; a [`Dialer`] opens the connections.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::Uri;
use http::uri::Scheme;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use rustls_platform_verifier::BuilderVerifierExt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

const IDLE_CONNECTIONS_PER_HOST: usize = 10;
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
const TLS_HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A two-way byte stream.
pub trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// Opens byte streams to the host of a URI. TLS, if the scheme requires it, is added on top.
///
/// The default dials TCP. A program that runs the router in its own process, or needs a proxy, supplies its own.
pub trait Dialer: Send + Sync + fmt::Debug {
    fn dial<'a>(&'a self, uri: &'a Uri) -> BoxFuture<'a, io::Result<Box<dyn Io>>>;
}

/// Dials TCP.
#[derive(Clone, Copy, Debug, Default)]
pub struct TcpDialer;

impl Dialer for TcpDialer {
    fn dial<'a>(&'a self, uri: &'a Uri) -> BoxFuture<'a, io::Result<Box<dyn Io>>> {
        Box::pin(async move {
            let host = host(uri)?;
            let default_port = if is_https(uri) { 443 } else { 80 };
            let port = uri.port_u16().unwrap_or(default_port);
            let stream = TcpStream::connect((host, port)).await?;
            // Requests are small and each waits for its response: Nagle's algorithm would only delay them.
            stream.set_nodelay(true)?;
            Ok(Box::new(stream) as Box<dyn Io>)
        })
    }
}

/// A request's body. A body made of bytes can be sent again.
pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;
pub(crate) type HttpClient = hyper_util::client::legacy::Client<Dial, Body>;

pub(crate) fn body(bytes: Bytes) -> Body {
    Full::new(bytes)
        .map_err(|never| match never {})
        .boxed_unsync()
}

/// The HTTP client that reaches hosts through this dialer.
pub(crate) fn client(
    dialer: Arc<dyn Dialer>,
    tls: Option<Arc<rustls::ClientConfig>>,
) -> HttpClient {
    let dial = Dial {
        dialer,
        tls: Arc::new(tls.map(OnceLock::from).unwrap_or_default()),
    };
    hyper_util::client::legacy::Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(IDLE_CONNECTIONS_PER_HOST)
        .pool_idle_timeout(IDLE_TIMEOUT)
        .pool_timer(TokioTimer::new())
        .build(dial)
}

/// Adapts a dialer to the HTTP client, with TLS on top if the scheme requires it.
#[derive(Clone, Debug)]
pub(crate) struct Dial {
    dialer: Arc<dyn Dialer>,
    /// Created on first use: reading the machine's certificates takes longer than a claim does.
    tls: Arc<OnceLock<Arc<rustls::ClientConfig>>>,
}

impl Dial {
    fn tls(&self) -> io::Result<Arc<rustls::ClientConfig>> {
        if let Some(config) = self.tls.get() {
            return Ok(Arc::clone(config));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(BuilderVerifierExt::with_platform_verifier)
            .map_err(io::Error::other)?
            .with_no_client_auth();
        Ok(Arc::clone(self.tls.get_or_init(|| Arc::new(config))))
    }

    async fn connect(self, uri: Uri) -> io::Result<TokioIo<Stream>> {
        let stream = self.dialer.dial(&uri).await?;
        if !is_https(&uri) {
            return Ok(TokioIo::new(Stream(stream)));
        }
        let name = ServerName::try_from(host(&uri)?.to_owned()).map_err(io::Error::other)?;
        let handshake = TlsConnector::from(self.tls()?).connect(name, stream);
        let secured = tokio::time::timeout(TLS_HANDSHAKE_TIMEOUT, handshake)
            .await
            .map_err(|_| {
                io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake took too long")
            })??;
        Ok(TokioIo::new(Stream(Box::new(secured))))
    }
}

impl tower::Service<Uri> for Dial {
    type Response = TokioIo<Stream>;
    type Error = io::Error;
    type Future = BoxFuture<'static, io::Result<TokioIo<Stream>>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        Box::pin(self.clone().connect(uri))
    }
}

fn is_https(uri: &Uri) -> bool {
    uri.scheme() == Some(&Scheme::HTTPS)
}

/// The host without the brackets of an IPv6 address.
fn host(uri: &Uri) -> io::Result<&str> {
    let host = uri
        .host()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the URL has no host"))?;
    Ok(host.trim_start_matches('[').trim_end_matches(']'))
}

/// A stream that the HTTP client can pool.
pub(crate) struct Stream(Box<dyn Io>);

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}
