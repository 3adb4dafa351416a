//! The SDK's errors. Every error about a sandbox names it, so that the logs of a program with many sandboxes can be
//! searched by claim.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

/// How many bytes of a server's error text are shown.
const SHOWN_BODY_BYTES: usize = 256;

/// Identifies a sandbox: the namespace and name of its claim. The claim's name is the sandbox's id.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub namespace: String,
    pub claim: String,
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.namespace, self.claim)
    }
}

/// An error, and the sandbox it is about. Match on [`Error::kind`].
#[derive(Debug)]
pub struct Error {
    sandbox: Option<Box<Key>>,
    kind: Box<ErrorKind>,
}

impl Error {
    pub(crate) fn of(sandbox: &Key, kind: ErrorKind) -> Self {
        Self {
            sandbox: Some(Box::new(sandbox.clone())),
            kind: Box::new(kind),
        }
    }

    pub fn kind(&self) -> &ErrorKind {
        &self.kind
    }

    /// The sandbox that the error is about, if any.
    pub fn sandbox(&self) -> Option<&Key> {
        self.sandbox.as_deref()
    }

    /// The reason of the Ready condition that ended the wait, for example `TemplateNotFound`.
    pub fn reason(&self) -> Option<&str> {
        let mut kind = self.kind();
        loop {
            match kind {
                ErrorKind::Refused { reason, .. } => return Some(reason),
                ErrorKind::OrphanedClaim { cause, .. } => kind = cause,
                _ => return None,
            }
        }
    }

    /// Whether the claim does not exist (any more).
    pub fn is_not_found(&self) -> bool {
        matches!(
            self.kind(),
            ErrorKind::ClaimNotFound | ErrorKind::SandboxDeleted
        )
    }

    /// The status code, if the error is an HTTP response.
    pub fn http_status(&self) -> Option<StatusCode> {
        let mut kind = self.kind();
        loop {
            match kind {
                ErrorKind::Http { status, .. } => return Some(*status),
                ErrorKind::RetriesExhausted { last, .. } => kind = last,
                _ => return None,
            }
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(sandbox) = &self.sandbox {
            write!(formatter, "sandbox[{sandbox}]: ")?;
        }
        self.kind.fmt(formatter)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        std::error::Error::source(&self.kind)
    }
}

impl From<ErrorKind> for Error {
    fn from(kind: ErrorKind) -> Self {
        Self {
            sandbox: None,
            kind: Box::new(kind),
        }
    }
}

/// The kinds of errors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    #[error("invalid option {option}: {reason}")]
    InvalidOption {
        option: &'static str,
        reason: String,
    },

    /// There is no connection: the handle is not open, or its connection was lost with the given cause.
    #[error("not connected")]
    NotReady {
        #[source]
        cause: Option<Arc<ErrorKind>>,
    },
    #[error("already open")]
    AlreadyOpen,
    #[error("closed during opening")]
    Cancelled,
    #[error("{what} took longer than {limit:?}")]
    Timeout { what: &'static str, limit: Duration },

    /// A sandbox was not ready, resumed or suspended in time.
    #[error("{what} took longer than {limit:?}{}", state.as_ref().map(|state| format!(": {state}")).unwrap_or_default())]
    ReadyTimeout {
        what: &'static str,
        limit: Duration,
        /// The last Ready condition.
        state: Option<String>,
    },

    #[error("cannot create the claim")]
    ClaimFailed {
        #[source]
        cause: kube::Error,
    },
    #[error("the claim does not exist")]
    ClaimNotFound,
    /// The claim's Ready condition has a reason that waiting does not resolve: its own, or that of a pod which cannot start
    /// ([`api::start_problem::Lasting`]).
    #[error("the claim cannot be fulfilled: {reason}: {message}")]
    Refused { reason: String, message: String },
    #[error("the claim was deleted")]
    SandboxDeleted,
    /// Opening failed and the claim still exists: it could not be deleted, or was to be kept
    /// ([`crate::CreateOptions::keep_on_failure`]). Opening again attaches to it; terminating deletes it.
    #[error("opening failed and the claim was not deleted{}", cleanup.as_ref().map(|error| format!(" (deleting it failed: {error})")).unwrap_or_default())]
    OrphanedClaim {
        #[source]
        cause: Box<ErrorKind>,
        /// Why the claim could not be deleted, if the SDK tried.
        cleanup: Option<String>,
    },
    #[error("cannot {operation}")]
    Kubernetes {
        operation: &'static str,
        #[source]
        cause: kube::Error,
    },

    #[error("gateway {gateway} was deleted")]
    GatewayDeleted { gateway: String },
    #[error(
        "gateway {gateway} has the address {address:?}, which is neither an IP address nor a host name"
    )]
    GatewayAddress { gateway: String, address: String },
    #[error("no ready endpoint of service {service} in {}", namespaces.join(" or "))]
    RouterNotFound {
        service: &'static str,
        namespaces: Vec<String>,
    },
    #[error("the port-forward to the router failed: {reason}")]
    PortForwardDied { reason: String },
    #[error("the sandbox has no address")]
    NoAddress,

    #[error("{operation}: all {attempts} attempts failed")]
    RetriesExhausted {
        operation: &'static str,
        attempts: u32,
        #[source]
        last: Box<ErrorKind>,
    },
    #[error("{operation}: {status}{}", shown(body))]
    Http {
        operation: &'static str,
        status: StatusCode,
        /// At most the first 512 bytes.
        body: String,
    },
    #[error("{operation}: the request failed")]
    Transport {
        operation: &'static str,
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("{operation}: the response is larger than {limit} bytes")]
    ResponseTooLarge { operation: &'static str, limit: u64 },
    #[error("{operation}: the response cannot be decoded")]
    InvalidResponse {
        operation: &'static str,
        #[source]
        cause: serde_json::Error,
    },
    #[error("the content has {size} bytes; the limit is {limit}")]
    UploadTooLarge { size: u64, limit: u64 },
    #[error("{name:?} is not a plain file name")]
    InvalidFileName { name: String },

    #[error("the process has ended")]
    ProcessEnded,
    #[error("the connection to the process broke: {reason}")]
    ProcessLost { reason: String },
}

fn shown(body: &str) -> String {
    let body = body.trim();
    if body.is_empty() {
        return String::new();
    }
    let mut end = body.len().min(SHOWN_BODY_BYTES);
    while !body.is_char_boundary(end) {
        end -= 1;
    }
    let ellipsis = if end < body.len() { "…" } else { "" };
    format!(": {}{ellipsis}", &body[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key {
            namespace: "team".into(),
            claim: "sandbox-claim-1".into(),
        }
    }

    #[test]
    fn a_failure_names_its_sandbox_and_chains_its_cause() {
        let error = Error::of(
            &key(),
            ErrorKind::OrphanedClaim {
                cause: Box::new(ErrorKind::Refused {
                    reason: "TemplateNotFound".into(),
                    message: "SandboxTemplate \"t\" not found".into(),
                }),
                cleanup: Some("503".into()),
            },
        );
        assert_eq!(
            error.to_string(),
            "sandbox[team/sandbox-claim-1]: opening failed and the claim was not deleted (deleting it failed: 503)"
        );
        assert_eq!(error.reason(), Some("TemplateNotFound"));
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(
            cause,
            "the claim cannot be fulfilled: TemplateNotFound: SandboxTemplate \"t\" not found"
        );
    }

    #[test]
    fn a_long_error_body_is_truncated_between_characters() {
        let error = ErrorKind::Http {
            operation: "run",
            status: StatusCode::BAD_REQUEST,
            body: format!("a{}", "ü".repeat(300)),
        };
        let text = error.to_string();
        assert!(text.starts_with("run: 400 Bad Request: aüü"), "{text}");
        assert!(text.ends_with("ü…"), "{text}");
        assert!(text.len() < 300, "{text}");
    }
}
