//! The metrics of every part on one address, in Prometheus' text format: those of the controllers, the router, and the process
//! they share.

use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::routing::get;
use controllers::metrics::{CONTENT_TYPE, Metrics};

/// Serves what the controllers and the router count.
pub fn routes(controllers: Arc<Metrics>, router: router::Router) -> Router {
    let metrics = move || {
        let text =
            controllers.exposition() + &router.render_metrics() + &telemetry::process::render();
        std::future::ready(([(header::CONTENT_TYPE, CONTENT_TYPE)], text))
    };
    Router::new().route("/metrics", get(metrics))
}
