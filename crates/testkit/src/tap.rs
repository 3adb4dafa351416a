//! A client whose requests a test can record and make fail.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures::StreamExt;
use http::header::CONTENT_TYPE;
use http::{Method, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, BodyStream, Full, StreamBody};
use kube::Client;
use kube::client::Body;
use kube::core::Status;
use tokio_util::sync::CancellationToken;
use tower::{BoxError, service_fn};

/// A recorded request to the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub method: Method,
    pub path: String,
    pub is_watch: bool,
}

impl Seen {
    /// Whether the request is a write.
    pub fn is_write(&self) -> bool {
        self.method != Method::GET
    }
}

/// Why a request is not forwarded to the server.
#[derive(Debug)]
enum Refusal {
    /// The connection fails.
    Lost(String),
    /// The server responds with this error.
    Answered(Box<Status>),
}

/// Decides about a request before it is forwarded.
type Gate = Arc<dyn Fn(&Seen) -> Result<(), Refusal> + Send + Sync>;

/// Intercepts the requests of a client.
#[derive(Clone)]
pub struct Tap {
    seen: Arc<Mutex<Vec<Seen>>>,
    gate: Arc<Mutex<Option<Gate>>>,
    watches: Arc<Mutex<Vec<(String, CancellationToken)>>>,
}

type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;

impl std::fmt::Debug for Tap {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Tap").finish_non_exhaustive()
    }
}

impl Tap {
    /// Wraps a client. Returns the tap and the intercepted client.
    pub fn on(client: Client) -> (Self, Client) {
        let tap = Self {
            seen: Arc::default(),
            gate: Arc::default(),
            watches: Arc::default(),
        };
        let namespace = client.default_namespace().to_owned();
        let inner = tap.clone();
        let service = service_fn(move |request: Request<Body>| {
            let client = client.clone();
            let passed = inner.pass(&request);
            async move {
                let broken = match passed {
                    Ok(broken) => broken,
                    Err(Refusal::Lost(reason)) => return Err(reason.into()),
                    Err(Refusal::Answered(status)) => return refusal(&status),
                };
                let answer = client.send(request).await?;
                Ok::<Answer, BoxError>(answer.map(|body| {
                    let frames = BodyStream::new(body)
                        .map(|frame| frame.map_err(Into::into))
                        .take_until(broken.cancelled_owned());
                    StreamBody::new(frames).boxed_unsync()
                }))
            }
        });
        (tap, Client::new(service, namespace))
    }

    /// All requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.seen).clone()
    }

    /// All writes so far whose path contains `part`.
    pub fn writes(&self, part: &str) -> Vec<Seen> {
        let mut seen = self.seen();
        seen.retain(|request| request.is_write() && request.path.contains(part));
        seen
    }

    pub fn forget(&self) {
        lock(&self.seen).clear();
    }

    /// From now on, fails the connection of requests for which `gate` returns an error.
    pub fn refuse(&self, gate: impl Fn(&Seen) -> Result<(), String> + Send + Sync + 'static) {
        *lock(&self.gate) = Some(Arc::new(move |seen| gate(seen).map_err(Refusal::Lost)));
    }

    /// From now on, responds to requests in place of the server if `gate` returns a response.
    pub fn answer(&self, gate: impl Fn(&Seen) -> Option<Status> + Send + Sync + 'static) {
        *lock(&self.gate) = Some(Arc::new(move |seen| match gate(seen) {
            Some(status) => Err(Refusal::Answered(Box::new(status))),
            None => Ok(()),
        }));
    }

    pub fn refuse_nothing(&self) {
        *lock(&self.gate) = None;
    }

    /// Closes the open watches whose path ends with `path`.
    pub fn break_watches(&self, path: &str) {
        lock(&self.watches).retain(|(watched, connection)| {
            let hit = watched.ends_with(path);
            if hit {
                connection.cancel();
            }
            !hit
        });
    }

    /// Records a request. If it is a watch, returns the token that breaks its connection.
    fn pass(&self, request: &Request<Body>) -> Result<CancellationToken, Refusal> {
        let query = request.uri().query().unwrap_or_default();
        let seen = Seen {
            method: request.method().clone(),
            path: request.uri().path().to_owned(),
            is_watch: query.split('&').any(|pair| pair.starts_with("watch=")),
        };
        let gate = lock(&self.gate).clone();
        let verdict = gate.map_or(Ok(()), |gate| gate(&seen));
        let connection = CancellationToken::new();
        if seen.is_watch {
            lock(&self.watches).push((seen.path.clone(), connection.clone()));
        }
        lock(&self.seen).push(seen);
        verdict.map(|()| connection)
    }
}

fn refusal(status: &Status) -> Result<Answer, BoxError> {
    let body = Full::from(serde_json::to_vec(status)?).map_err(|never| match never {});
    let answer = Response::builder()
        .status(status.code)
        .header(CONTENT_TYPE, "application/json");
    Ok(answer.body(body.boxed_unsync())?)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
