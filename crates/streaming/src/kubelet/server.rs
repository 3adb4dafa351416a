//! Serves a router as the kubelet's port is served: HTTP/1.1 with upgrades, over TLS if so configured, with the client's
//! certificates in each request. Which certificates are good is for the TLS configuration to decide.

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

/// How long a client may take for the TLS handshake, and then for the head of a request.
const HANDSHAKE: Duration = Duration::from_secs(10);
const REQUEST_HEAD: Duration = Duration::from_secs(30);

/// How long to wait when the system gives no more connections (too many open files, for one).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves `router` on `listener` until `stop` is cancelled and the requests under way are answered. Connections that have been
/// upgraded are their sessions' by then and go on.
///
/// HTTP/2 is not offered: an upgrade is an affair of HTTP/1.1.
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
                let session = connection(stream, acceptor.clone(), router.clone(), stop.clone());
                connections.spawn(session);
            }
            Err(error) => {
                debug!(
                    error = &error as &dyn std::error::Error,
                    "no connection was accepted"
                );
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    connections.close();
    connections.wait().await;
}

async fn connection(
    stream: TcpStream,
    acceptor: Option<TlsAcceptor>,
    router: Router,
    stop: CancellationToken,
) {
    // Keystrokes and their echoes must not wait for each other.
    let _ = stream.set_nodelay(true);
    let Some(acceptor) = acceptor else {
        return requests(stream, PeerCertificates::default(), router, stop).await;
    };
    match timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => {
            let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
            let certificates = certificates
                .iter()
                .map(|certificate| certificate.to_vec())
                .collect();
            requests(stream, PeerCertificates(certificates), router, stop).await;
        }
        Ok(Err(error)) => {
            debug!(
                error = &error as &dyn std::error::Error,
                "a TLS handshake failed"
            );
        }
        Err(_elapsed) => debug!("a TLS handshake took too long"),
    }
}

async fn requests<T>(
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
        .header_read_timeout(REQUEST_HEAD)
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
            "a connection was broken"
        );
    }
}
