//! The interface between the endpoints and the container runtime that runs the pods.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::stream::BoxStream;
use http::StatusCode;

use crate::port_forward::Duplex;
use crate::remote_command::{Process, Streams};

/// A pod as a request names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetPod {
    pub namespace: String,
    pub name: String,
    /// If set, the request applies only to the pod with this UID.
    pub uid: Option<String>,
}

/// A container as a request names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub pod: TargetPod,
    pub container: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecRequest {
    pub target: Target,
    pub command: Vec<String>,
    pub streams: Streams,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachRequest {
    pub target: Target,
    pub streams: Streams,
}

/// The start of the requested part of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    Seconds(i64),
    Time(jiff::Timestamp),
}

/// Which of a container's output streams to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogStream {
    #[default]
    All,
    Stdout,
    Stderr,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRequest {
    pub target: Target,
    pub follow: bool,
    /// Reads the log of the container's previous run.
    pub previous: bool,
    /// Prefixes each line with its timestamp.
    pub timestamps: bool,
    pub since: Option<Since>,
    pub tail_lines: Option<u64>,
    /// The endpoint enforces this limit already; the backend may use it to read less.
    pub limit_bytes: Option<u64>,
    pub stream: LogStream,
}

/// Why a request cannot be served, as a message for the user.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// 404
    #[error("{0}")]
    NotFound(String),
    /// 400
    #[error("{0}")]
    Invalid(String),
    /// 429
    #[error("{0}")]
    TooMany(String),
    /// 500
    #[error("{0}")]
    Internal(String),
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status = match &self {
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Invalid(_) => StatusCode::BAD_REQUEST,
            Self::TooMany(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, self.to_string()).into_response()
    }
}

/// A container runtime, as the endpoints use it.
///
/// # Guarantees
/// The endpoints call `find` right before `exec` and `attach`, and `find_pod` right before `port_forward`. If a `find` fails, the
/// client gets an HTTP status; a failure after the upgrade is reported inside the streaming protocol.
pub trait Backend: Send + Sync + 'static {
    /// Succeeds if the container exists and is running.
    fn find(&self, target: &Target) -> impl Future<Output = Result<(), Error>> + Send;

    /// Succeeds if the pod exists and is running.
    fn find_pod(&self, pod: &TargetPod) -> impl Future<Output = Result<(), Error>> + Send;

    /// Starts a command. The process may lack the streams that `request.streams` does not ask for.
    fn exec(&self, request: ExecRequest) -> impl Future<Output = Result<Process, Error>> + Send;

    /// Attaches to the container's main process; `exit` resolves when the container ends.
    fn attach(&self, request: AttachRequest)
    -> impl Future<Output = Result<Process, Error>> + Send;

    /// Connects to a port inside the pod.
    fn port_forward(
        &self,
        pod: TargetPod,
        port: u16,
    ) -> impl Future<Output = Result<Box<dyn Duplex>, Error>> + Send;

    /// The requested log, ready to send to the client. The endpoint drops the stream when the client disconnects.
    fn logs(
        &self,
        request: LogRequest,
    ) -> impl Future<Output = Result<BoxStream<'static, std::io::Result<Bytes>>, Error>> + Send;

    /// The pods of this node, as JSON objects of the core API.
    fn pods(&self) -> impl Future<Output = Result<Vec<serde_json::Value>, Error>> + Send;
}
