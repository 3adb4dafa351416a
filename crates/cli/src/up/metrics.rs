//! The metrics of every part that runs on one address, in Prometheus' text format: those of the controllers, the router, the node, and
//! the process they share.

use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::routing::get;
use controllers::metrics::{CONTENT_TYPE, Metrics};

/// Serves what the controllers, the router and the node count.
pub fn routes(controllers: Option<Arc<Metrics>>, router: Option<router::Router>) -> Router {
    let metrics = move || {
        let text = [
            controllers
                .as_ref()
                .map(|controllers| controllers.exposition())
                .unwrap_or_default(),
            router
                .as_ref()
                .map(router::Router::render_metrics)
                .unwrap_or_default(),
            pod_network::enforcer::render_metrics(),
            telemetry::process::render(),
        ]
        .concat();
        std::future::ready(([(header::CONTENT_TYPE, CONTENT_TYPE)], text))
    };
    Router::new().route("/metrics", get(metrics))
}
