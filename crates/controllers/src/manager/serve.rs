//! The HTTP endpoints of the controller process: probes, metrics, profiles.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::profile;
use crate::metrics::{CONTENT_TYPE, Metrics};

/// Which profiles are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Profiles {
    None,
    /// Only the CPU profile.
    Cpu,
    All,
}

/// Binds an address as Go writes it: without a host it means every interface. "0" means not at all.
pub(super) async fn bind(address: &str) -> io::Result<Option<TcpListener>> {
    if address.is_empty() || address == "0" {
        return Ok(None);
    }
    let Some(port) = address.strip_prefix(':') else {
        return TcpListener::bind(address).await.map(Some);
    };
    let port: u16 = port
        .parse()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
    let every_interface = SocketAddr::from((Ipv6Addr::UNSPECIFIED, port));
    match TcpListener::bind(every_interface).await {
        Ok(listener) => Ok(Some(listener)),
        // Machines without IPv6 have only the other kind.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(error),
        Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
            .await
            .map(Some),
    }
}

/// Serves until cancelled.
pub(super) async fn serve(
    listener: TcpListener,
    routes: Router,
    stop: CancellationToken,
) -> io::Result<()> {
    axum::serve(listener, routes)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

/// `/healthz` answers while the process lives, `/readyz` once its caches are complete.
pub(super) fn probes(ready: Arc<AtomicBool>) -> Router {
    async fn readiness(State(ready): State<Arc<AtomicBool>>) -> impl IntoResponse {
        if ready.load(Ordering::Acquire) {
            (StatusCode::OK, "ok")
        } else {
            (
                StatusCode::INTERNAL_SERVER_ERROR,
                "caches are not complete yet",
            )
        }
    }
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(readiness))
        .with_state(ready)
}

pub(super) fn metrics(metrics: Arc<Metrics>, profiles: Profiles) -> Router {
    let exposition = Router::new()
        .route(
            "/metrics",
            get(|State(metrics): State<Arc<Metrics>>| async move {
                let text = metrics.exposition() + &telemetry::process::render();
                ([(header::CONTENT_TYPE, CONTENT_TYPE)], text)
            }),
        )
        .with_state(metrics);
    match profiles {
        Profiles::None => exposition,
        Profiles::Cpu => exposition.merge(profile::cpu()),
        Profiles::All => exposition.merge(profile::cpu()).merge(profile::debug()),
    }
}

#[cfg(test)]
#[path = "serve_tests.rs"]
mod tests;
