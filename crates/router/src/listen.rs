//! Listens on every port of a router that runs as its own process.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, ListenAddress};
use crate::serve::{Router, RouterError};

/// Opens every port of the configuration and serves until the shutdown that follows `stop_requested` is complete.
pub async fn run(
    config: Config,
    client: Option<kube::Client>,
    stop_requested: CancellationToken,
) -> Result<(), RouterError> {
    let http = listen(config.http_listen).await?;
    let https = if config.tls.is_some() {
        listen(config.https_listen).await?
    } else {
        None
    };
    let metrics = listen(config.metrics_listen).await?;
    let health = listen(config.health_listen).await?;
    let shutdown_delay = config.shutdown_delay;
    let router = Router::new(config, client)?;
    let shutdown = CancellationToken::new();
    let (leaving, stop) = (router.clone(), shutdown.clone());
    tokio::spawn(async move {
        stop_requested.cancelled().await;
        leaving.leave();
        tokio::time::sleep(shutdown_delay).await;
        stop.cancel();
    });
    for admin in [metrics, health].into_iter().flatten() {
        let (router, shutdown) = (router.clone(), shutdown.clone());
        tokio::spawn(async move { router.serve_admin(admin, shutdown).await });
    }
    let plain = async {
        if let Some(listener) = http {
            tracing::info!(address = ?listener.local_addr().ok(), "serving HTTP");
            router.serve_on_threads(listener, shutdown.clone()).await;
        }
    };
    let secure = async {
        match https {
            Some(listener) => {
                tracing::info!(address = ?listener.local_addr().ok(), "serving HTTPS");
                router.serve_tls(listener, shutdown.clone()).await
            }
            None => Ok(()),
        }
    };
    tokio::join!(plain, secure).1
}

async fn listen(address: ListenAddress) -> Result<Option<TcpListener>, RouterError> {
    let address = match address {
        ListenAddress::Off => return Ok(None),
        ListenAddress::At(address) => address,
        ListenAddress::Any(port) => {
            let both = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
            if let Ok(listener) = TcpListener::bind(both).await {
                return Ok(Some(listener));
            }
            SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port)
        }
    };
    TcpListener::bind(address)
        .await
        .map(Some)
        .map_err(|source| RouterError::Listen { address, source })
}
