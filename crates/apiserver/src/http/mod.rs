//! From HTTP requests to operations and back. Transport, encryption and authentication are settled before a request gets here.

pub mod body;
mod discovery;
mod objects;
mod options;
pub mod path;
mod render;

use std::sync::Arc;

use apimachinery::status::Status;
use bytes::Bytes;
use http::{Request, StatusCode};
use serde_json::json;

use self::body::Answer;
use crate::{auth::User, operations::Api};

/// Answers one request of an authenticated user.
pub async fn handle<B>(api: &Arc<Api>, user: &User, request: Request<B>) -> Answer
where
    B: http_body::Body + Send,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (parts, body) = request.into_parts();
    match path::parse(parts.uri.path()) {
        path::Path::Discovery(segments) => {
            discovery::answer(&api.registry(), &segments, &parts.headers)
        }
        path::Path::Other(other) => {
            public(&other).unwrap_or_else(|| body::failure(&Status::unknown_path()))
        }
        path::Path::Resource(found) => {
            let reads = matches!(parts.method, http::Method::GET | http::Method::HEAD);
            let bytes = if reads {
                Ok(Bytes::new())
            } else {
                body::read(body).await
            };
            let answered = match bytes {
                Ok(bytes) => objects::answer(api, user, &parts, &found, bytes).await,
                Err(status) => Err(status),
            };
            answered.unwrap_or_else(|status| body::failure(&status))
        }
    }
}

/// The paths that need no identity.
pub fn public(path: &str) -> Option<Answer> {
    match path.trim_end_matches('/') {
        "/healthz" | "/livez" | "/readyz" | "/healthz/ping" | "/livez/ping" | "/readyz/ping" => {
            Some(body::text(StatusCode::OK, "ok"))
        }
        "/version" => Some(body::json(
            StatusCode::OK,
            &json!({
                "major": "1", "minor": "35", "gitVersion": concat!("v1.35.0+agent-sandbox.", env!("CARGO_PKG_VERSION")),
                "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "rust",
                "compiler": "rustc", "platform": concat!("linux/", "amd64"),
            }),
        )),
        _ => None,
    }
}
