//! What can go wrong, as types. Every failure that concerns a sandbox says which one, so that logs of a program with many
//! of them can be searched by claim.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;

/// How much of a server's error text is shown.
const SHOWN_BODY_BYTES: usize = 256;

/// Which sandbox: the claim that holds it, in its namespace. The claim's name is the sandbox's id.
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

/// A failure, and the sandbox it concerns. Match on [`Error::kind`].
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

    /// The sandbox it happened to, when it happened to one.
    pub fn sandbox(&self) -> Option<&Key> {
        self.sandbox.as_deref()
    }

    /// The reason of the Ready condition that ended the waiting, as `TemplateNotFound`.
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

    /// Whether the claim does not exist, or exists no more.
    pub fn is_not_found(&self) -> bool {
        matches!(
            self.kind(),
            ErrorKind::ClaimNotFound | ErrorKind::SandboxDeleted
        )
    }

    /// The status of the answer that this failure is, when it is one.
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

/// The kinds of failure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErrorKind {
    #[error("invalid option {option}: {reason}")]
    InvalidOption {
        option: &'static str,
        reason: String,
    },

    /// There is no connection: the handle is not open, or its connection was lost for the given cause.
    #[error("not connected")]
    NotReady {
        #[source]
        cause: Option<Arc<ErrorKind>>,
    },
    #[error("already open")]
    AlreadyOpen,
    #[error("closed while it was opening")]
    Cancelled,
    #[error("{what} took longer than {limit:?}")]
    Timeout { what: &'static str, limit: Duration },

    /// A sandbox was not ready, resumed or suspended in time.
    #[error("{what} took longer than {limit:?}{}", state.as_ref().map(|state| format!(": {state}")).unwrap_or_default())]
    ReadyTimeout {
        what: &'static str,
        limit: Duration,
        /// What its Ready condition said last.
        state: Option<String>,
    },

    #[error("the claim could not be created")]
    ClaimFailed {
        #[source]
        cause: kube::Error,
    },
    #[error("there is no such claim")]
    ClaimNotFound,
    /// The claim's Ready condition gave a reason that waiting does not mend: its own, or that of a pod which cannot start
    /// ([`api::start_problem::Lasting`]).
    #[error("the claim cannot be met: {reason}: {message}")]
    Refused { reason: String, message: String },
    #[error("the claim was deleted")]
    SandboxDeleted,
    /// Opening failed and the claim is still there: it could not be deleted, or was to be kept
    /// ([`crate::CreateOptions::keep_on_failure`]). Opening again takes it up; terminating deletes it.
    #[error("opening failed and the claim is left behind{}", cleanup.as_ref().map(|error| format!(" (deleting it failed: {error})")).unwrap_or_default())]
    OrphanedClaim {
        #[source]
        cause: Box<ErrorKind>,
        /// Why the claim could not be deleted, if that was tried.
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
    #[error("the port-forward to the router died: {reason}")]
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
    #[error("{operation}: the answer is larger than {limit} bytes")]
    ResponseTooLarge { operation: &'static str, limit: u64 },
    #[error("{operation}: the answer is not understood")]
    InvalidResponse {
        operation: &'static str,
        #[source]
        cause: serde_json::Error,
    },
    #[error("the content has {size} bytes and may have at most {limit}")]
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
            "sandbox[team/sandbox-claim-1]: opening failed and the claim is left behind (deleting it failed: 503)"
        );
        assert_eq!(error.reason(), Some("TemplateNotFound"));
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(
            cause,
            "the claim cannot be met: TemplateNotFound: SandboxTemplate \"t\" not found"
        );
    }

    #[test]
    fn a_long_answer_is_cut_between_characters() {
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
