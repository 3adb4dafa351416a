//! The metrics of every part on one address, in Prometheus' text format.

use std::sync::Arc;

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;

/// Serves what the controllers and the router count.
pub fn routes(controllers: Arc<controllers::metrics::Metrics>, router: router::Router) -> Router {
    let metrics = move || {
        let text = combine(&[controllers.exposition(), router.render_metrics()]);
        std::future::ready(([(CONTENT_TYPE, "text/plain; version=0.0.4")], text))
    };
    Router::new().route("/metrics", get(metrics))
}

/// Joins expositions. Only a single one may end in the mark of its end, which means nothing in the text format.
fn combine(expositions: &[String]) -> String {
    let lines = expositions.iter().flat_map(|exposition| exposition.lines());
    lines
        .filter(|line| *line != "# EOF")
        .flat_map(|line| [line, "\n"])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expositions_are_joined_without_their_ends() {
        let joined = combine(&["a 1\n# EOF\n".to_owned(), "b 2\n".to_owned()]);
        assert_eq!(joined, "a 1\nb 2\n");
    }
}
