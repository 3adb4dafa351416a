//! The SDK API on port 8888: dispatches requests.

use std::sync::Arc;

use http::{HeaderMap, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use serde::Serialize;
use tokio_util::task::TaskTracker;

use crate::directory_tree::Tree;
use crate::exec_http::{self, Limits};
use crate::exec_websocket;
use crate::files;
use crate::http_server::Handler;
use crate::response::{Body, Refusal, json};
use crate::rest_files::{self, RestApi};
use crate::session::Launcher;

#[derive(Debug)]
pub struct SdkApi {
    pub tree: Arc<Tree>,
    pub launcher: Launcher,
    pub limits: Limits,
    /// Files under the newer API's paths, for clients that know only this port.
    pub newer_files: Arc<RestApi>,
    /// Tracks WebSockets, which outlive the connection they were upgraded from.
    pub tasks: TaskTracker,
}

#[derive(Serialize)]
struct Health {
    status: &'static str,
    message: &'static str,
}

impl SdkApi {
    async fn route(&self, request: Request<Incoming>) -> Result<Response<Body>, Refusal> {
        let path = request.uri().path().to_owned();
        if path.starts_with(rest_files::PREFIX) {
            return Ok(Arc::clone(&self.newer_files).handle(request).await);
        }
        let endpoint =
            Endpoint::of(&path).ok_or_else(|| Refusal::new(StatusCode::NOT_FOUND, "Not Found"))?;
        let base = self.tree.base();
        match (endpoint, request.method()) {
            (Endpoint::Health, &Method::GET | &Method::HEAD) => {
                let health = Health {
                    status: "ok",
                    message: "Sandbox Runtime is active.",
                };
                Ok(json(StatusCode::OK, &health))
            }
            (Endpoint::Execute, &Method::POST) => {
                exec_http::execute(&self.launcher, base, self.limits, request).await
            }
            (Endpoint::Exec, &Method::POST) => {
                exec_http::exec(&self.launcher, base, self.limits, request).await
            }
            (Endpoint::Exec, &Method::GET) => {
                exec_websocket::upgrade(&self.launcher, base.to_owned(), &self.tasks, request)
            }
            (Endpoint::Upload, &Method::POST) => files::upload(&self.tree, request).await,
            (Endpoint::Download(encoded), &Method::GET) => {
                files::download(&self.tree, encoded, request.headers()).await
            }
            (Endpoint::Download(encoded), &Method::HEAD) => {
                // A range applies only to GET.
                let whole = files::download(&self.tree, encoded, &HeaderMap::new()).await?;
                Ok(files::head_of(&whole))
            }
            (Endpoint::List(encoded), &Method::GET) => files::list(&self.tree, encoded).await,
            (Endpoint::MakeDirectory(encoded), &Method::POST) => {
                files::make_directory(&self.tree, encoded).await
            }
            (Endpoint::Exists(encoded), &Method::GET) => files::exists(&self.tree, encoded).await,
            _ => Err(Refusal::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "Method Not Allowed",
            )),
        }
    }
}

/// The endpoint of a URL path, independent of the method. File paths are still percent-encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint<'a> {
    Health,
    Execute,
    Exec,
    Upload,
    Download(&'a str),
    List(&'a str),
    Exists(&'a str),
    MakeDirectory(&'a str),
}

impl<'a> Endpoint<'a> {
    fn of(path: &'a str) -> Option<Self> {
        match path {
            "/" => Some(Endpoint::Health),
            "/execute" => Some(Endpoint::Execute),
            "/upload" => Some(Endpoint::Upload),
            "/v1/exec" => Some(Endpoint::Exec),
            // Some clients normalise `/list/.` to this before they send it.
            "/list" => Some(Endpoint::List(".")),
            _ => {
                let (name, rest) = path.strip_prefix('/')?.split_once('/')?;
                match name {
                    "download" => Some(Endpoint::Download(rest)),
                    "list" => Some(Endpoint::List(rest)),
                    "exists" => Some(Endpoint::Exists(rest)),
                    "mkdir" => Some(Endpoint::MakeDirectory(rest)),
                    _ => None,
                }
            }
        }
    }
}

impl Handler for SdkApi {
    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        self.route(request)
            .await
            .unwrap_or_else(Refusal::into_response)
    }
}
