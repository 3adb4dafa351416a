//! The HTTP front end: maps requests to operations and results to responses. Transport, TLS and authentication are done before a
//! request gets here. Authorization happens here, before any object is read.

mod discovery;
mod metrics;
mod objects;
mod openapi;
mod options;
mod patch;
mod render;

use std::sync::Arc;

use apimachinery::status::Status;
use bytes::Bytes;
use futures::StreamExt;
use http::{Method, Request, StatusCode, request::Parts};
use http_body_util::{BodyExt, Either};
use serde_json::json;
use store::Store;

pub use self::{metrics::Requests, openapi::Documents};
use crate::{
    audit::{self, Record},
    auth::{User, access::Access, reviews},
    body::{self, HttpResponse},
    fair_queue::{FairQueue, Upload},
    kubelet::{self, Dialer},
    operations::Api,
    path::{Path, ResourcePath},
    registry::Rules,
    request_info::{RequestInfo, Stream},
    target::Target,
};

/// The dependencies of request handling.
#[derive(Debug)]
pub struct Frontend {
    /// The operations.
    pub api: Arc<Api>,
    /// Authorization: who may do what.
    pub access: Arc<Access>,
    /// Connects to the nodes.
    pub dialer: Dialer,
    /// The OpenAPI documents.
    pub documents: Documents,
    /// The audit log, if enabled.
    pub audit: Option<audit::Log>,
    /// Counts of answered requests, for the metrics.
    pub requests: Requests,
}

impl Frontend {
    /// Answers one request of an authenticated user and writes it to the audit log. Requests of clients wait in `queue` for a
    /// seat. Requests of this process have no queue.
    pub async fn handle<B>(
        &self,
        user: &User,
        info: RequestInfo,
        request: Request<B>,
        queue: Option<&Arc<FairQueue>>,
    ) -> HttpResponse
    where
        B: http_body::Body + Send,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let (mut parts, body) = request.into_parts();
        let mut audited = self.audit.as_ref().map(|log| {
            let record = Record::new(&parts, &info, Some(user), self.api.now());
            (log, record)
        });
        let request = metrics::Request::new(&self.api.registry(), &parts, &info);
        let is_watch = info.is_watch();
        let answered = match self.authorize(user, &info) {
            Ok(()) => {
                let answering = self.answer(user, &mut parts, info.path, body, queue);
                match &mut audited {
                    None => answering.await,
                    Some((_, record)) => {
                        let (answered, annotations) = audit::annotated(answering).await;
                        record.annotate(annotations);
                        answered
                    }
                }
            }
            Err(status) => Err(status),
        };
        let response = answered.unwrap_or_else(|status| body::failure(&status));
        self.requests.answered(request, response.status());
        match audited {
            None => response,
            Some((log, record)) if is_watch => {
                let line = record.line("ResponseStarted", response.status(), self.api.now());
                log.write(line).await;
                self.record_end(log.clone(), record, response)
            }
            Some((log, record)) => {
                let line = record.line("ResponseComplete", response.status(), self.api.now());
                log.write(line).await;
                response
            }
        }
    }

    /// Rejects a request that failed authentication or impersonation, and writes it to the audit log.
    pub async fn refuse<B>(
        &self,
        info: &RequestInfo,
        request: Request<B>,
        status: &Status,
    ) -> HttpResponse {
        let response = body::failure(status);
        if let Some(log) = &self.audit {
            let (parts, _) = request.into_parts();
            let record = Record::new(&parts, info, None, self.api.now());
            let line = record.line("ResponseComplete", response.status(), self.api.now());
            log.write(line).await;
        }
        response
    }

    fn authorize(&self, user: &User, info: &RequestInfo) -> Result<(), Status> {
        self.access.authorize(user, &info.attributes)?;
        match info.upgrade_attributes() {
            Some(create) => self.access.authorize(user, &create),
            None => Ok(()),
        }
    }

    /// Wraps a response so that its end is audited: when it is complete, or when the client disconnects.
    fn record_end(&self, log: audit::Log, record: Record, response: HttpResponse) -> HttpResponse {
        let end = End {
            log,
            record,
            code: response.status(),
            api: self.api.clone(),
        };
        response.map(|content| match content {
            Either::Left(full) => Either::Left(full),
            Either::Right(stream) => {
                body::stream(stream.into_data_stream().filter_map(move |piece| {
                    let _end = &end;
                    futures::future::ready(piece.ok())
                }))
            }
        })
    }

    async fn answer<B>(
        &self,
        user: &User,
        parts: &mut Parts,
        path: Path,
        body: B,
        queue: Option<&Arc<FairQueue>>,
    ) -> Result<HttpResponse, Status>
    where
        B: http_body::Body + Send,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        // A node may take long to respond, and that is not work of this server: such a request needs no seat.
        if let Path::Resource(found) = &path
            && let Some((target, stream)) = self.node_stream(found)
        {
            return kubelet::proxy(&self.api, &self.dialer, &target, stream, parts).await;
        }
        let has_body = matches!(path, Path::Resource(_))
            && !matches!(parts.method, Method::GET | Method::HEAD);
        let (bytes, _upload) = if has_body {
            read_body(user, body, queue).await?
        } else {
            (Bytes::new(), None)
        };
        let _seat = match queue {
            Some(queue) => Some(queue.seat(&user.name).await?),
            None => None,
        };
        let found = match path {
            Path::Discovery(segments) => {
                return Ok(discovery::answer(
                    &self.api.registry(),
                    &segments,
                    &parts.headers,
                ));
            }
            Path::Other(other) if other.trim_end_matches('/') == "/metrics" => {
                return Ok(self.requests.answer());
            }
            Path::Other(other) => {
                let document = self.documents.answer(&self.api.registry(), parts);
                return document
                    .or_else(|| public(&other, &self.api.store))
                    .ok_or_else(Status::unknown_path);
            }
            Path::Resource(found) => found,
        };
        if reviews::is_review(&found.group, &found.version, &found.resource) {
            return self.review(user, parts, &found, &bytes).await;
        }
        if let Some(target) = self.token_target(&found) {
            if parts.method != Method::POST {
                return Err(Status::method_not_allowed());
            }
            let format = body::format(&parts.headers)?;
            let request = body::decode(&bytes, format).await?.value;
            let response = reviews::request_token(&self.access, &target.key(), request)?;
            return Ok(body::json(StatusCode::CREATED, &response));
        }
        objects::answer(&self.api, user, parts, &found, bytes).await
    }

    fn target(&self, found: &ResourcePath, rules: Rules) -> Option<Target> {
        let resource = self
            .api
            .registry()
            .find(&found.group, &found.version, &found.resource)?;
        let target = Target {
            resource,
            namespace: found.namespace.clone(),
            name: found.name.clone(),
        };
        (target.resource.rules == rules && !target.name.is_empty()).then_some(target)
    }

    fn node_stream(&self, found: &ResourcePath) -> Option<(Target, Stream)> {
        let stream = Stream::of(&found.subresource)?;
        self.target(found, Rules::Pod)
            .map(|target| (target, stream))
    }

    fn token_target(&self, found: &ResourcePath) -> Option<Target> {
        if found.subresource == "token" {
            self.target(found, Rules::ServiceAccount)
        } else {
            None
        }
    }

    async fn review(
        &self,
        user: &User,
        parts: &Parts,
        found: &ResourcePath,
        bytes: &Bytes,
    ) -> Result<HttpResponse, Status> {
        if parts.method != Method::POST || !found.name.is_empty() {
            return Err(Status::method_not_allowed());
        }
        let review = body::decode(bytes, body::format(&parts.headers)?).await?;
        let review = review.value;
        let response = reviews::answer(&self.access, user, &found.resource, review)?;
        Ok(body::json(StatusCode::CREATED, &response))
    }
}

/// Writes the end of a response to the audit log when it is dropped.
struct End {
    log: audit::Log,
    record: Record,
    code: StatusCode,
    api: Arc<Api>,
}

impl Drop for End {
    fn drop(&mut self) {
        let line = self
            .record
            .line("ResponseComplete", self.code, self.api.now());
        self.log.write_now(line);
    }
}

/// Reads the body of a request. It takes no seat, so a client that sends slowly blocks no other client. The bytes count against
/// the user's limit until the returned `Upload` is dropped.
async fn read_body<B>(
    user: &User,
    body: B,
    queue: Option<&Arc<FairQueue>>,
) -> Result<(Bytes, Option<Upload>), Status>
where
    B: http_body::Body + Send,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let Some(queue) = queue else {
        return Ok((body::read(body, |_| Ok(())).await?, None));
    };
    let mut upload = queue.upload(&user.name)?;
    let bytes = body::read(body, |length| upload.charge(length)).await?;
    upload.arrived();
    Ok((bytes, Some(upload)))
}

/// The architecture of this machine, in Go's notation.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The health check, in kube-apiserver's format: fails when the store cannot write.
fn health(check: &str, store: &Store) -> HttpResponse {
    let Some(failure) = store.failure() else {
        return body::text(StatusCode::OK, "ok");
    };
    let cause = std::error::Error::source(&*failure)
        .map(|cause| format!(": {cause}"))
        .unwrap_or_default();
    body::text(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("[+]ping ok\n[-]storage failed: {failure}{cause}\n{check} check failed\n"),
    )
}

/// Answers the paths that need no authentication: health checks and the version.
pub fn public(path: &str, store: &Store) -> Option<HttpResponse> {
    match path.trim_end_matches('/') {
        "/healthz/ping" | "/livez/ping" | "/readyz/ping" => Some(body::text(StatusCode::OK, "ok")),
        check @ ("/healthz" | "/livez" | "/readyz") => Some(health(&check[1..], store)),
        "/version" => Some(body::json(
            StatusCode::OK,
            &json!({
                "major": "1", "minor": "35", "gitVersion": concat!("v1.35.0+agent-sandbox.", env!("CARGO_PKG_VERSION")),
                "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z", "goVersion": "",
                "compiler": "rustc", "platform": format!("linux/{}", architecture()),
            }),
        )),
        _ => None,
    }
}
