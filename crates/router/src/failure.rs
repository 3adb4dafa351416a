//! Every response that the router itself produces for a refusal or failure, always as `{"detail": …}`. Messages that upstream
//! defines are the same here. One function turns each failure into a response.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use serde::Serialize;

use crate::body::ProxyBody;
use crate::registry::Suspended;

/// Why a request does not reach its sandbox, or its response does not come back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    NoSandbox,
    InvalidSandbox,
    InvalidNamespace,
    InvalidPort,
    InvalidAddress,
    /// The Host header or the request target is not a valid host, or the two differ.
    InvalidHost,
    /// A header that must be unique was repeated.
    Repeated(&'static str),
    /// The Host header is not a name of this router.
    Misdirected,
    /// CONNECT, which would make this an open proxy.
    MethodNotAllowed,
    Unauthenticated(&'static str),
    /// The request has no token, and the connection is not of a user whom the router serves.
    NotALocalUser,
    Forbidden(&'static str),
    /// The Kubernetes API that reviews tokens cannot be reached.
    AuthorizationUnavailable,
    NotFound {
        namespace: String,
        name: String,
    },
    Suspended {
        namespace: String,
        name: String,
        how: Suspended,
    },
    /// The sandbox exists, but has no address; the message of its Ready condition says why.
    NotReady {
        namespace: String,
        name: String,
        reason: String,
    },
    /// The sandbox finished and will not run again.
    Finished {
        namespace: String,
        name: String,
        reason: String,
    },
    CannotConnect {
        name: String,
    },
    /// The connection broke, or the sandbox sent something that is not HTTP.
    BadAnswer {
        name: String,
    },
    TimedOut {
        name: String,
    },
    /// The sandbox waits for a request body that the client does not send.
    ClientTimedOut,
    BodyTooLarge,
    /// The request body could not be read from the client.
    BadRequestBody,
}

#[derive(Serialize)]
struct Detail<'a> {
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<&'a str>,
}

impl Failure {
    pub fn status(&self) -> StatusCode {
        match self {
            Failure::NoSandbox
            | Failure::InvalidSandbox
            | Failure::InvalidNamespace
            | Failure::InvalidPort
            | Failure::InvalidAddress
            | Failure::InvalidHost
            | Failure::Repeated(_)
            | Failure::BadRequestBody => StatusCode::BAD_REQUEST,
            Failure::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Failure::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Failure::Unauthenticated(_) | Failure::NotALocalUser => StatusCode::UNAUTHORIZED,
            Failure::Forbidden(_) => StatusCode::FORBIDDEN,
            Failure::NotFound { .. } => StatusCode::NOT_FOUND,
            Failure::AuthorizationUnavailable
            | Failure::Suspended { .. }
            | Failure::NotReady { .. }
            | Failure::Finished { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Failure::CannotConnect { .. } | Failure::BadAnswer { .. } => StatusCode::BAD_GATEWAY,
            Failure::TimedOut { .. } => StatusCode::GATEWAY_TIMEOUT,
            Failure::ClientTimedOut => StatusCode::REQUEST_TIMEOUT,
            Failure::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        }
    }

    /// The text of `detail`: what happened.
    pub fn detail(&self) -> String {
        match self {
            Failure::NoSandbox => "X-Sandbox-ID header is required.".into(),
            Failure::InvalidSandbox => "Invalid sandbox ID format.".into(),
            Failure::InvalidNamespace => "Invalid namespace format.".into(),
            Failure::InvalidPort => "Invalid port format.".into(),
            Failure::InvalidAddress => "Invalid target IP address.".into(),
            Failure::InvalidHost => {
                "The Host header and the request's target must name one host, without user information.".into()
            }
            Failure::Repeated(header) => format!("{header} header must not be repeated."),
            Failure::Misdirected => "The Host header is not a name of this router.".into(),
            Failure::MethodNotAllowed => "The CONNECT method is not supported.".into(),
            Failure::Unauthenticated(why) | Failure::Forbidden(why) => (*why).into(),
            Failure::NotALocalUser => {
                "This router serves root and the user who started it; others need a token.".into()
            }
            Failure::AuthorizationUnavailable => "The token cannot be checked right now.".into(),
            Failure::NotFound { namespace, name } => {
                format!("Sandbox not found: {namespace}/{name}")
            }
            Failure::Suspended {
                namespace,
                name,
                how,
            } => {
                let frozen = match how {
                    Suspended::Stopped => "",
                    Suspended::Frozen => " (frozen)",
                };
                format!("Sandbox is suspended: {namespace}/{name}{frozen}")
            }
            Failure::NotReady {
                namespace,
                name,
                reason,
            } => {
                format!("Sandbox is not ready: {namespace}/{name}: {reason}")
            }
            Failure::Finished {
                namespace,
                name,
                reason,
            } => {
                format!("Sandbox has finished: {namespace}/{name}: {reason}")
            }
            Failure::CannotConnect { name } => {
                format!("Could not connect to the backend sandbox: {name}")
            }
            Failure::BadAnswer { name } => {
                format!("The backend sandbox closed the connection or did not speak HTTP: {name}")
            }
            Failure::TimedOut { name } => {
                format!("The backend sandbox did not answer in time: {name}")
            }
            Failure::ClientTimedOut => "The request body did not arrive in time.".into(),
            Failure::BodyTooLarge => "The request body is too large.".into(),
            Failure::BadRequestBody => "The request body could not be read.".into(),
        }
    }

    /// The text of `hint`: what the user can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Failure::Misdirected => {
                Some("Call it localhost, or by its address; --host-domain gives it further names.")
            }
            Failure::NotALocalUser => Some(
                "Send `Authorization: Bearer` with a token of `agent-sandbox token <sandbox>`, which the user who started `up` can make, or that of a kubeconfig whose account may create pods/portforward. `up --router-authz=none` admits every local user.",
            ),
            Failure::NotFound { .. } => Some(
                "Check the name and namespace; a claim's sandbox is named in its status.sandbox.name.",
            ),
            Failure::Suspended { .. } => {
                Some("Resume it (spec.replicas: 1, or spec.operatingMode: Running) and try again.")
            }
            Failure::NotReady { .. } => {
                Some("Wait for its Ready condition, which says what is missing.")
            }
            Failure::Finished { .. } => Some("Claim or create a new sandbox."),
            Failure::CannotConnect { .. } => Some(
                "Nothing accepts connections on that port of the sandbox; check X-Sandbox-Port and that the server listens on 0.0.0.0.",
            ),
            Failure::TimedOut { .. } => {
                Some("Raise X-Sandbox-Timeout, or --proxy-timeout of the router, which bounds it.")
            }
            _ => None,
        }
    }

    pub fn into_response(self) -> Response<ProxyBody> {
        let body = Detail {
            detail: &self.detail(),
            hint: self.hint(),
        };
        let mut response = json(self.status(), serde_json::to_vec(&body).unwrap_or_default());
        if self.status() == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if matches!(
            self,
            Failure::NotReady { .. } | Failure::AuthorizationUnavailable
        ) {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A response with a JSON body.
pub fn json(status: StatusCode, bytes: impl Into<Bytes>) -> Response<ProxyBody> {
    let mut response = Response::new(ProxyBody::full(bytes));
    *response.status_mut() = status;
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}
