//! Authentication and authorization of the endpoints: a middleware that checks every request before any handler runs.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::AUTHORIZATION;
use http::request::Parts;

/// The client certificate chain from the TLS handshake as DER, the client's own certificate first. The TLS server verifies the
/// chain and then adds it to the extensions of each request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerCertificates(pub Vec<Vec<u8>>);

/// The decision on a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    Allowed,
    /// The request carries no valid credentials: 401.
    Unauthenticated,
    /// The client is known but not permitted: 403, with the reason.
    Forbidden(String),
}

/// Decides about a request from its head: a bearer token ([`bearer_token`]), a certificate ([`PeerCertificates`]), path and
/// method.
pub trait Authenticator: Send + Sync + 'static {
    fn check(&self, request: &Parts) -> impl Future<Output = Access> + Send;
}

/// A closure can serve as an authenticator.
impl<F> Authenticator for F
where
    F: Fn(&Parts) -> Access + Send + Sync + 'static,
{
    async fn check(&self, request: &Parts) -> Access {
        self(request)
    }
}

/// The token of an `Authorization: Bearer` header.
pub fn bearer_token(request: &Parts) -> Option<&str> {
    let value = request.headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

pub async fn check<A: Authenticator>(
    State(authenticator): State<Arc<A>>,
    request: Request,
    next: Next,
) -> Response {
    let (parts, body) = request.into_parts();
    match authenticator.check(&parts).await {
        Access::Allowed => next.run(Request::from_parts(parts, body)).await,
        Access::Unauthenticated => (StatusCode::UNAUTHORIZED, "Unauthorized").into_response(),
        Access::Forbidden(reason) => {
            (StatusCode::FORBIDDEN, format!("Forbidden ({reason})")).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_bearer_scheme_gives_a_token() {
        for (header, token) in [
            ("Bearer abc", Some("abc")),
            ("bearer  abc ", Some("abc")),
            ("Basic abc", None),
            ("Bearer ", None),
            ("abc", None),
        ] {
            let request = http::Request::builder().header(AUTHORIZATION, header);
            let (parts, ()) = request.body(()).unwrap().into_parts();
            assert_eq!(bearer_token(&parts), token, "{header}");
        }
    }
}
