//! `GET /containerLogs`: streams a log until the client disconnects or the byte limit is reached.

use axum::body::Body;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use http::header::CONTENT_TYPE;

use super::Shared;
use super::backend::{Backend, Target, TargetPod};
use super::query::Query;

pub async fn container_logs<B: Backend>(
    State(kubelet): State<Shared<B>>,
    Path((namespace, name, container)): Path<(String, String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    let target = Target {
        pod: TargetPod {
            namespace,
            name,
            uid: None,
        },
        container,
    };
    let request = match Query::parse(query.as_deref()).logs(target) {
        Ok(request) => request,
        Err(error) => return error.into_response(),
    };
    let limit = request.limit_bytes;
    match kubelet.backend.logs(request).await {
        Ok(lines) => {
            let text = [(CONTENT_TYPE, "text/plain")];
            (text, Body::from_stream(truncate(lines, limit))).into_response()
        }
        Err(error) => error.into_response(),
    }
}

/// Ends the stream after `limit` bytes, in the middle of a line if necessary, as the kubelet does.
fn truncate(
    lines: BoxStream<'static, std::io::Result<Bytes>>,
    limit: Option<u64>,
) -> BoxStream<'static, std::io::Result<Bytes>> {
    let Some(limit) = limit else {
        return lines;
    };
    let cut = futures::stream::unfold((lines, limit), |(mut lines, left)| async move {
        if left == 0 {
            return None;
        }
        let mut piece = match lines.next().await? {
            Ok(piece) => piece,
            Err(error) => return Some((Err(error), (lines, 0))),
        };
        piece.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        let left = left - piece.len() as u64;
        Some((Ok(piece), (lines, left)))
    });
    cut.boxed()
}
