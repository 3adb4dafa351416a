//! The kubelet's HTTP endpoints, generic over the [`Backend`] that runs the pods.
//!
//! | request | does |
//! |---|---|
//! | `GET, POST /exec/{namespace}/{pod}[/{uid}]/{container}` | runs a command |
//! | `GET, POST /attach/{namespace}/{pod}[/{uid}]/{container}` | joins a running container |
//! | `GET, POST /portForward/{namespace}/{pod}[/{uid}]` | forwards ports |
//! | `GET /containerLogs/{namespace}/{pod}/{container}` | logs |
//! | `GET /pods`, `GET /healthz` | the pods of this node, and a health check |
//!
//! Every request passes the [`Authenticator`] first. Errors are plain text with the kubelet's status codes; clients show them.

mod access;
mod backend;
mod logs;
mod query;
mod server;
mod streams;

pub use access::{Access, Authenticator, PeerCertificates, bearer_token};
pub use backend::{
    AttachRequest, Backend, Error, ExecRequest, LogRequest, LogStream, Since, Target, TargetPod,
};

pub use server::serve;

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::header::CONTENT_TYPE;
use serde_json::json;

use crate::Settings;

/// The state that every handler shares.
struct Kubelet<B> {
    backend: B,
    settings: Settings,
}

type Shared<B> = Arc<Kubelet<B>>;

/// The router of the kubelet endpoints. [`serve`] serves it; another server must support HTTP/1.1 upgrades.
pub fn router<B: Backend, A: Authenticator>(
    backend: B,
    authenticator: A,
    settings: Settings,
) -> Router {
    let kubelet = Arc::new(Kubelet { backend, settings });
    let with_optional_uid =
        |path: &str, with_uid: &str, method: axum::routing::MethodRouter<Shared<B>>| {
            Router::new()
                .route(path, method.clone())
                .route(with_uid, method)
        };
    Router::new()
        .merge(with_optional_uid(
            "/exec/{namespace}/{pod}/{container}",
            "/exec/{namespace}/{pod}/{uid}/{container}",
            get(streams::exec::<B>).post(streams::exec::<B>),
        ))
        .merge(with_optional_uid(
            "/attach/{namespace}/{pod}/{container}",
            "/attach/{namespace}/{pod}/{uid}/{container}",
            get(streams::attach::<B>).post(streams::attach::<B>),
        ))
        .merge(with_optional_uid(
            "/portForward/{namespace}/{pod}",
            "/portForward/{namespace}/{pod}/{uid}",
            get(streams::port_forward::<B>).post(streams::port_forward::<B>),
        ))
        .route(
            "/containerLogs/{namespace}/{pod}/{container}",
            get(logs::container_logs::<B>),
        )
        .route("/pods", get(pods::<B>))
        .route("/healthz", get(|| async { "ok" }))
        .with_state(kubelet)
        .layer(middleware::from_fn_with_state(
            Arc::new(authenticator),
            access::check::<A>,
        ))
}

async fn pods<B: Backend>(State(kubelet): State<Shared<B>>) -> Response {
    match kubelet.backend.pods().await {
        Ok(items) => {
            let list =
                json!({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items});
            let json = [(CONTENT_TYPE, "application/json")];
            (json, Body::from(list.to_string())).into_response()
        }
        Err(error) => error.into_response(),
    }
}
