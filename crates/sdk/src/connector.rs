//! Requests to one sandbox: routing headers, retries, timeouts, size limits. Independent of engines and claims.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{
    CONNECTION, CONTENT_TYPE, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION,
    UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use saturating_time::SaturatingTime;
use tokio::time::Instant;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tracing::Span;

use crate::cluster::Cluster;
use crate::error::{ErrorKind, Key};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::readiness::{self, Bound};
use crate::retry::{self, is_retryable};
use crate::route::{self, Route, RouterAddress};
use crate::trace;
use crate::transport::{Body, HttpClient, body};

/// How much of an error response's body is included in the error.
const ERROR_BODY_BYTES: usize = 512;
/// How much of an unused response body is read, so that its connection can be reused.
const DRAIN_BYTES: usize = 4096;

const SANDBOX_ID: HeaderName = HeaderName::from_static("x-sandbox-id");
const SANDBOX_NAMESPACE: HeaderName = HeaderName::from_static("x-sandbox-namespace");
const SANDBOX_PORT: HeaderName = HeaderName::from_static("x-sandbox-port");
const SANDBOX_TIMEOUT: HeaderName = HeaderName::from_static("x-sandbox-timeout");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Options of one call that override the client's options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallOptions {
    /// The timeout of the call, including all attempts and the response's body.
    pub timeout: Option<Duration>,
    /// The total number of attempts. A command is run once by default: running it twice may do harm.
    pub max_attempts: Option<u32>,
}

impl CallOptions {
    pub fn timeout(limit: Duration) -> Self {
        Self {
            timeout: Some(limit),
            ..Self::default()
        }
    }

    #[must_use]
    pub fn with_max_attempts(mut self, attempts: u32) -> Self {
        self.max_attempts = Some(attempts);
        self
    }
}

/// The state that all sandboxes of one client share.
#[derive(Debug)]
pub(crate) struct Access {
    pub options: Options,
    pub cluster: Cluster,
    pub route: Route,
    pub http: HttpClient,
    pub metrics: Metrics,
}

/// A request that can be sent more than once.
#[derive(Debug)]
pub(crate) struct Call {
    pub operation: &'static str,
    pub method: Method,
    pub endpoint: String,
    pub content_type: Option<String>,
    pub body: Bytes,
    pub max_attempts: u32,
    pub timeout: Option<Duration>,
}

/// The address of the sandbox.
#[derive(Clone, Debug)]
struct Link {
    /// `None` while the sandbox has no address.
    base_url: Option<String>,
    sandbox: String,
}

/// The connection to one sandbox, open or not.
#[derive(Debug)]
pub(crate) struct Connector {
    access: Arc<Access>,
    key: Key,
    link: Mutex<Option<Link>>,
}

/// A response whose body is still to be read, within the call's timeout.
pub(crate) struct Answer {
    operation: &'static str,
    response: Response<Incoming>,
    deadline: Instant,
    limit: Duration,
}

impl Connector {
    pub(crate) fn new(access: Arc<Access>, key: Key) -> Self {
        Self {
            access,
            key,
            link: Mutex::default(),
        }
    }

    pub(crate) fn open(&self, router: &RouterAddress, bound: &Bound) {
        let route = &self.access.route;
        let port = self.access.options.server_port;
        let base_url = route.base_url(router, bound, &self.key.namespace, port);
        tracing::debug!(sandbox = %self.key, url = base_url.as_deref(), mode = route.label(), "connected");
        *self.lock() = Some(Link {
            base_url,
            sandbox: bound.sandbox.clone(),
        });
    }

    pub(crate) fn close(&self) {
        *self.lock() = None;
    }

    pub(crate) fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    /// Records the address of a new pod of the same sandbox.
    pub(crate) fn moved(&self, pod_ips: &[String]) {
        if !self.access.route.follows_the_pod() {
            return;
        }
        if let Some(url) = route::pod_url(pod_ips, self.access.options.server_port)
            && let Some(link) = self.lock().as_mut()
        {
            link.base_url = Some(url);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<Link>> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn link(&self) -> Result<Link, ErrorKind> {
        self.lock().clone().ok_or_else(|| ErrorKind::NotReady {
            cause: self.access.route.failure().map(Arc::new),
        })
    }

    /// Sends a request, with retries if permitted, and returns the first successful response.
    pub(crate) async fn send(&self, call: Call) -> Result<Answer, ErrorKind> {
        let limit = call.timeout.unwrap_or(self.access.options.request_timeout);
        let deadline = Instant::now().later_by(limit);
        let mut headers = self.headers();
        if let Some(content_type) = &call.content_type
            && let Ok(value) = HeaderValue::from_str(content_type)
        {
            headers.insert(CONTENT_TYPE, value);
        }
        if let Some(timeout) = call.timeout {
            // So that the router's timeout is the caller's, and not shorter.
            headers.insert(SANDBOX_TIMEOUT, whole_seconds(timeout));
        }
        let attempts = self.attempts(
            call.operation,
            call.max_attempts,
            self.attempt_timeout(&call),
            || {
                let mut request = Request::new(body(call.body.clone()));
                *request.method_mut() = call.method.clone();
                *request.headers_mut() = headers.clone();
                (request, call.endpoint.as_str())
            },
        );
        let response = tokio::time::timeout_at(deadline, attempts)
            .await
            .unwrap_or(Err(ErrorKind::Timeout {
                what: call.operation,
                limit,
            }))?;
        Ok(Answer {
            operation: call.operation,
            response,
            deadline,
            limit,
        })
    }

    /// Sends a request with a streamed body, which cannot be sent twice, once.
    pub(crate) async fn send_stream(&self, call: Call, content: Body) -> Result<Answer, ErrorKind> {
        let mut content = Some(content);
        let limit = call.timeout.unwrap_or(self.access.options.request_timeout);
        let mut headers = self.headers();
        if let Some(content_type) = &call.content_type
            && let Ok(value) = HeaderValue::from_str(content_type)
        {
            headers.insert(CONTENT_TYPE, value);
        }
        headers.insert(SANDBOX_TIMEOUT, whole_seconds(limit));
        let sending = self.attempts(call.operation, 1, limit, || {
            let mut request = Request::new(content.take().unwrap_or_default());
            *request.method_mut() = call.method.clone();
            *request.headers_mut() = headers.clone();
            (request, call.endpoint.as_str())
        });
        let response = sending.await?;
        Ok(Answer {
            operation: call.operation,
            response,
            deadline: Instant::now().later_by(limit),
            limit,
        })
    }

    /// Opens a WebSocket. The sandbox does nothing until the first message, so this may be retried.
    pub(crate) async fn upgrade(
        &self,
        operation: &'static str,
        endpoint: &str,
    ) -> Result<TokioIo<Upgraded>, ErrorKind> {
        let options = &self.access.options;
        let limit = options.request_timeout;
        let key = generate_key();
        let mut headers = self.headers();
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
        if let Ok(value) = HeaderValue::from_str(&key) {
            headers.insert(SEC_WEBSOCKET_KEY, value);
        }
        let attempts = self.attempts(
            operation,
            options.retry.max_attempts,
            options.per_attempt_timeout,
            || {
                let mut request = Request::new(body(Bytes::new()));
                *request.headers_mut() = headers.clone();
                (request, endpoint)
            },
        );
        let lost = |reason: &str| ErrorKind::ProcessLost {
            reason: reason.to_owned(),
        };
        let response =
            tokio::time::timeout(limit, attempts)
                .await
                .unwrap_or(Err(ErrorKind::Timeout {
                    what: operation,
                    limit,
                }))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(lost("the response is not a WebSocket upgrade"));
        }
        let accept = response.headers().get(SEC_WEBSOCKET_ACCEPT);
        if accept
            .is_none_or(|accept| accept.as_bytes() != derive_accept_key(key.as_bytes()).as_bytes())
        {
            return Err(lost(
                "the response has the accept key of another WebSocket request",
            ));
        }
        let upgraded = hyper::upgrade::on(response).await;
        upgraded
            .map(TokioIo::new)
            .map_err(|cause| ErrorKind::Transport {
                operation,
                cause: cause.into(),
            })
    }

    /// The timeout of one attempt until the response begins. A call with a single attempt and its own timeout needs no
    /// other: it may be a command that runs for long before it responds.
    fn attempt_timeout(&self, call: &Call) -> Duration {
        match call.timeout {
            Some(limit) if call.max_attempts == 1 => limit,
            _ => self.access.options.per_attempt_timeout,
        }
    }

    fn headers(&self) -> HeaderMap {
        let options = &self.access.options;
        let mut headers = options.headers.clone();
        let request_id = uuid::Uuid::new_v4().to_string();
        Span::current().record("sandbox.request_id", &request_id);
        if let Ok(value) = HeaderValue::from_str(&request_id) {
            headers.insert(REQUEST_ID, value);
        }
        headers.insert(SANDBOX_PORT, options.server_port.into());
        if let Ok(value) = HeaderValue::from_str(&self.key.namespace) {
            headers.insert(SANDBOX_NAMESPACE, value);
        }
        for (name, value) in trace::carrier(options.propagator.as_deref()) {
            if let (Ok(name), Ok(value)) =
                (HeaderName::try_from(name), HeaderValue::try_from(value))
            {
                headers.insert(name, value);
            }
        }
        headers
    }

    async fn attempts<'a>(
        &self,
        operation: &'static str,
        max_attempts: u32,
        attempt_timeout: Duration,
        mut request: impl FnMut() -> (Request<Body>, &'a str),
    ) -> Result<Response<Incoming>, ErrorKind> {
        let policy = &self.access.options.retry;
        let mut attempt = 1;
        loop {
            let (request, endpoint) = request();
            let failure = match self
                .attempt(operation, attempt_timeout, request, endpoint)
                .await?
            {
                Ok(response) => return Ok(response),
                Err(failure) => failure,
            };
            if attempt >= max_attempts {
                return Err(if attempt == 1 {
                    failure
                } else {
                    ErrorKind::RetriesExhausted {
                        operation,
                        attempts: attempt,
                        last: Box::new(failure),
                    }
                });
            }
            let wait = policy.backoff(attempt, retry::random());
            tracing::debug!(sandbox = %self.key, operation, attempt, ?wait, error = %failure, "trying again");
            tokio::time::sleep(wait).await;
            self.refresh_pod_address().await;
            attempt += 1;
        }
    }

    /// Makes one attempt. The outer error is permanent; the inner one may be retried.
    async fn attempt(
        &self,
        operation: &'static str,
        attempt_timeout: Duration,
        mut request: Request<Body>,
        endpoint: &str,
    ) -> Result<Result<Response<Incoming>, ErrorKind>, ErrorKind> {
        if self.link()?.base_url.is_none() {
            self.refresh_pod_address().await;
        }
        let link = self.link()?;
        let Some(base_url) = link.base_url else {
            return Ok(Err(ErrorKind::NoAddress));
        };
        let url = format!("{base_url}/{}", endpoint.trim_start_matches('/'));
        *request.uri_mut() = url.parse::<Uri>().map_err(|cause| ErrorKind::Transport {
            operation,
            cause: cause.into(),
        })?;
        if let Ok(value) = HeaderValue::from_str(&link.sandbox) {
            request.headers_mut().insert(SANDBOX_ID, value);
        }
        let response =
            match tokio::time::timeout(attempt_timeout, self.access.http.request(request)).await {
                Err(_) => {
                    return Ok(Err(ErrorKind::Timeout {
                        what: operation,
                        limit: attempt_timeout,
                    }));
                }
                Ok(Err(cause)) => {
                    let known = self.access.route.failure();
                    return Ok(Err(known.unwrap_or_else(|| ErrorKind::Transport {
                        operation,
                        cause: cause.into(),
                    })));
                }
                Ok(Ok(response)) => response,
            };
        let status = response.status();
        if status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS {
            return Ok(Ok(response));
        }
        let error = ErrorKind::Http {
            operation,
            status,
            body: error_body(response).await,
        };
        if is_retryable(status) {
            Ok(Err(error))
        } else {
            Err(error)
        }
    }

    /// Looks up the pod's address again: a pod that does not respond may have been replaced.
    async fn refresh_pod_address(&self) {
        if !self.access.route.follows_the_pod() {
            return;
        }
        let Ok(link) = self.link() else { return };
        let found = self
            .access
            .cluster
            .sandbox(&self.key.namespace, &link.sandbox)
            .await;
        if let Ok(Some(sandbox)) = found {
            self.moved(&readiness::pod_ips(&sandbox));
        }
    }
}

/// Rounds up: the router's timeout is in seconds.
fn whole_seconds(limit: Duration) -> HeaderValue {
    let started = u64::from(limit.subsec_nanos() > 0);
    limit.as_secs().saturating_add(started).into()
}

/// The beginning of an error's body. The rest of a small body is read as well, so that the connection can be reused.
async fn error_body(response: Response<Incoming>) -> String {
    let mut body = response.into_body();
    let mut read = BytesMut::new();
    while read.len() < DRAIN_BYTES {
        match body.frame().await {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    read.extend_from_slice(data);
                }
            }
            Some(Err(_)) | None => break,
        }
    }
    String::from_utf8_lossy(&read[..read.len().min(ERROR_BODY_BYTES)]).into_owned()
}

impl Answer {
    /// The whole body, if it has at most `limit` bytes.
    pub(crate) async fn bytes(self, limit: u64) -> Result<Bytes, ErrorKind> {
        let Self {
            operation,
            response,
            deadline,
            limit: time,
        } = self;
        let too_large = ErrorKind::ResponseTooLarge { operation, limit };
        let mut body = response.into_body();
        let reading = async {
            let mut read = BytesMut::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|cause| ErrorKind::Transport {
                    operation,
                    cause: cause.into(),
                })?;
                if let Some(data) = frame.data_ref() {
                    if (read.len() + data.len()) as u64 > limit {
                        return Err(too_large);
                    }
                    read.extend_from_slice(data);
                }
            }
            Ok(read.freeze())
        };
        tokio::time::timeout_at(deadline, reading)
            .await
            .unwrap_or(Err(ErrorKind::Timeout {
                what: operation,
                limit: time,
            }))
    }

    /// The body as a JSON document of at most `limit` bytes.
    pub(crate) async fn json<T: serde::de::DeserializeOwned>(
        self,
        limit: u64,
    ) -> Result<T, ErrorKind> {
        let operation = self.operation;
        let bytes = self.bytes(limit).await?;
        serde_json::from_slice(&bytes)
            .map_err(|cause| ErrorKind::InvalidResponse { operation, cause })
    }

    pub(crate) fn into_body(self) -> Incoming {
        self.response.into_body()
    }

    /// The value of `Content-Length`.
    pub(crate) fn content_length(&self) -> Option<u64> {
        use hyper::body::Body as _;
        self.response.body().size_hint().exact()
    }
}
