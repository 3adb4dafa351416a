//! What the endpoints ask of whoever runs the pods.

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
    /// When given, only the pod with this UID is meant.
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

/// From when on logs are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    Seconds(i64),
    Time(jiff::Timestamp),
}

/// Which of a container's outputs.
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
    /// Of the container's last run but one.
    pub previous: bool,
    /// Each line starts with its time.
    pub timestamps: bool,
    pub since: Option<Since>,
    pub tail_lines: Option<u64>,
    /// Already enforced by the endpoint; here so that no more need be read.
    pub limit_bytes: Option<u64>,
    pub stream: LogStream,
}

/// Why a request cannot be served, in words for the user.
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

/// Runs pods, for the endpoints.
///
/// # Guarantees
/// `find` has succeeded shortly before `exec` and `attach`, and `find_pod` before `port_forward`. A failure of the finders is an
/// HTTP status; a failure after the upgrade is told inside the protocol.
pub trait Backend: Send + Sync + 'static {
    /// Whether the container is there and runs.
    fn find(&self, target: &Target) -> impl Future<Output = Result<(), Error>> + Send;

    /// Whether the pod is there and runs.
    fn find_pod(&self, pod: &TargetPod) -> impl Future<Output = Result<(), Error>> + Send;

    /// Starts a command. The parts of the process that `request.streams` does not ask for may be absent.
    fn exec(&self, request: ExecRequest) -> impl Future<Output = Result<Process, Error>> + Send;

    /// Joins the container's main process; its `exit` is the end of the container.
    fn attach(&self, request: AttachRequest)
    -> impl Future<Output = Result<Process, Error>> + Send;

    /// Connects to a port inside the pod.
    fn port_forward(
        &self,
        pod: TargetPod,
        port: u16,
    ) -> impl Future<Output = Result<Box<dyn Duplex>, Error>> + Send;

    /// Logs, as they are to be shown. The stream is dropped when the client leaves.
    fn logs(
        &self,
        request: LogRequest,
    ) -> impl Future<Output = Result<BoxStream<'static, std::io::Result<Bytes>>, Error>> + Send;

    /// The pods of this node, as JSON objects of the core API.
    fn pods(&self) -> impl Future<Output = Result<Vec<serde_json::Value>, Error>> + Send;
}
