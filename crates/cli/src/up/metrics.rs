//! The metrics of every part on one address, in Prometheus' text format: those of the controllers, the router, the node, and the process
//! they share.

use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::routing::get;
use controllers::metrics::{CONTENT_TYPE, Metrics};

/// Serves what the controllers, the router and the node count.
pub fn routes(controllers: Arc<Metrics>, router: router::Router) -> Router {
    let metrics = move || {
        let text = [
            controllers.exposition(),
            router.render_metrics(),
            node::network::enforcer::render_metrics(),
            telemetry::process::render(),
        ]
        .concat();
        std::future::ready(([(header::CONTENT_TYPE, CONTENT_TYPE)], text))
    };
    Router::new().route("/metrics", get(metrics))
}
