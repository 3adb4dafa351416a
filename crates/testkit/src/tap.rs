//! A client whose requests a test can see and spoil.

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

/// What was asked of the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub method: Method,
    pub path: String,
    pub is_watch: bool,
}

impl Seen {
    /// Whether it could change anything.
    pub fn is_write(&self) -> bool {
        self.method != Method::GET
    }
}

/// What becomes of a request that is not sent on.
#[derive(Debug)]
enum Refusal {
    /// As if the connection were lost.
    Lost(String),
    /// As if the server had said this.
    Answered(Box<Status>),
}

/// Decides about a request before it is sent.
type Gate = Arc<dyn Fn(&Seen) -> Result<(), Refusal> + Send + Sync>;

/// Stands between a client and the server it was made for.
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
    /// A tap, and the client to be used through it.
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

    /// Everything that was asked for so far.
    pub fn seen(&self) -> Vec<Seen> {
        lock(&self.seen).clone()
    }

    /// The writes so far whose path holds `part`.
    pub fn writes(&self, part: &str) -> Vec<Seen> {
        let mut seen = self.seen();
        seen.retain(|request| request.is_write() && request.path.contains(part));
        seen
    }

    pub fn forget(&self) {
        lock(&self.seen).clear();
    }

    /// Loses requests from now on as `gate` says.
    pub fn refuse(&self, gate: impl Fn(&Seen) -> Result<(), String> + Send + Sync + 'static) {
        *lock(&self.gate) = Some(Arc::new(move |seen| gate(seen).map_err(Refusal::Lost)));
    }

    /// Answers requests from now on in the server's place where `gate` has an answer.
    pub fn answer(&self, gate: impl Fn(&Seen) -> Option<Status> + Send + Sync + 'static) {
        *lock(&self.gate) = Some(Arc::new(move |seen| match gate(seen) {
            Some(status) => Err(Refusal::Answered(Box::new(status))),
            None => Ok(()),
        }));
    }

    pub fn refuse_nothing(&self) {
        *lock(&self.gate) = None;
    }

    /// Ends the watches that are under way on paths that end so.
    pub fn break_watches(&self, path: &str) {
        lock(&self.watches).retain(|(watched, connection)| {
            let hit = watched.ends_with(path);
            if hit {
                connection.cancel();
            }
            !hit
        });
    }

    /// Notes a request, and answers with what breaks its connection if it is a watch.
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
