//! The server of the kubelet's port: HTTP/1.1 with upgrades, optionally over TLS, with the client's certificates in the
//! extensions of each request. The TLS configuration decides which certificates are valid.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::debug;

use super::PeerCertificates;

/// Timeouts for the TLS handshake and for the head of each request.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const REQUEST_HEAD_TIMEOUT: Duration = Duration::from_secs(30);

/// The delay before the next accept after one failed, for example because of too many open files.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Serves `router` on `listener` until `stop` is cancelled and all pending requests are answered. Connections that were upgraded
/// before that stay open.
///
/// HTTP/2 is not offered, because a connection upgrade exists only in HTTP/1.1.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<ServerConfig>>,
    router: Router,
    stop: CancellationToken,
) {
    let acceptor = tls.map(|config| {
        let mut config = ServerConfig::clone(&config);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        TlsAcceptor::from(Arc::new(config))
    });
    let connections = TaskTracker::new();
    while let Some(accepted) = stop.run_until_cancelled(listener.accept()).await {
        match accepted {
            Ok((stream, _)) => {
                let session = serve_client(stream, acceptor.clone(), router.clone(), stop.clone());
                connections.spawn(session);
            }
            Err(error) => {
                debug!(
                    error = &error as &dyn std::error::Error,
                    "accepting a connection failed"
                );
                sleep(ACCEPT_RETRY_DELAY).await;
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn serve_client(
    stream: TcpStream,
    acceptor: Option<TlsAcceptor>,
    router: Router,
    stop: CancellationToken,
) {
    // Disables Nagle's algorithm: single keystrokes and their echoes must not be delayed.
    let _ = stream.set_nodelay(true);
    let Some(acceptor) = acceptor else {
        return serve_requests(stream, PeerCertificates::default(), router, stop).await;
    };
    match timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => {
            let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let certificates = certificates
                .iter()
                .map(|certificate| certificate.to_vec())
                .collect();
            serve_requests(stream, PeerCertificates(certificates), router, stop).await;
        }
        Ok(Err(error)) => {
            debug!(
                error = &error as &dyn std::error::Error,
                "TLS handshake failed"
            );
        }
        Err(_elapsed) => debug!("TLS handshake timed out"),
    }
}

async fn serve_requests<T>(
    stream: T,
    certificates: PeerCertificates,
    router: Router,
    stop: CancellationToken,
) where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |mut request: hyper::Request<Incoming>| {
        request.extensions_mut().insert(certificates.clone());
        let router = TowerToHyperService::new(router.clone());
        async move { hyper::service::Service::call(&router, request.map(Body::new)).await }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = std::pin::pin!(connection);
    let served = tokio::select! {
        served = connection.as_mut() => served,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        debug!(
            error = &error as &dyn std::error::Error,
            "HTTP connection failed"
        );
    }
}
