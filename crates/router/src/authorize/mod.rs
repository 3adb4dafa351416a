//! Who may use a sandbox. One of three answers, chosen once: anybody, whoever the Kubernetes API vouches for, or whoever
//! holds a token signed for that sandbox.

pub mod scoped_token;
mod token_review;

use std::path::PathBuf;
use std::time::SystemTime;

use http::HeaderMap;

use crate::answer::Failure;
use crate::config::AuthorizationMode;
use crate::headers::{bearer_token, shown_token};
use crate::identify::Target;
use scoped_token::{TokenError, TokenKey};
pub(crate) use token_review::RBAC;
use token_review::{ReviewError, TokenReviewer};

#[derive(Debug, thiserror::Error)]
pub enum AuthorizerError {
    #[error("token review needs a connection to a Kubernetes API")]
    NoClient,
    #[error("cannot read the key of scoped tokens from {path}")]
    ReadKey {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} holds no usable key")]
    Key {
        path: PathBuf,
        #[source]
        source: scoped_token::KeyError,
    },
}

#[derive(Debug)]
pub(crate) enum Authorizer {
    Anybody,
    Reviewed(Box<TokenReviewer>),
    Scoped(Box<TokenKey>),
}

impl Authorizer {
    pub fn new(
        mode: &AuthorizationMode,
        client: Option<&kube::Client>,
    ) -> Result<Self, AuthorizerError> {
        match mode {
            AuthorizationMode::None => Ok(Authorizer::Anybody),
            AuthorizationMode::TokenReview { audiences } => {
                let client = client.ok_or(AuthorizerError::NoClient)?.clone();
                Ok(Authorizer::Reviewed(Box::new(TokenReviewer::new(
                    client,
                    audiences.clone(),
                ))))
            }
            AuthorizationMode::ScopedToken { key_file } => {
                let bytes = std::fs::read(key_file).map_err(|source| AuthorizerError::ReadKey {
                    path: key_file.clone(),
                    source,
                })?;
                let key = TokenKey::parse(&bytes).map_err(|source| AuthorizerError::Key {
                    path: key_file.clone(),
                    source,
                })?;
                Ok(Authorizer::Scoped(Box::new(key)))
            }
        }
    }

    pub async fn check(&self, headers: &HeaderMap, target: &Target) -> Result<(), Failure> {
        match self {
            Authorizer::Anybody => Ok(()),
            Authorizer::Reviewed(reviewer) => {
                let token = bearer_token(headers)
                    .ok_or(Failure::Unauthenticated("A bearer token is required."))?;
                match reviewer.review(token).await {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(Failure::Unauthenticated("The bearer token is not valid.")),
                    Err(ReviewError(error)) => {
                        tracing::warn!(%error, "a token cannot be reviewed; this account needs `create` on tokenreviews, and the API server must be reachable");
                        Err(Failure::AuthorizationUnavailable)
                    }
                }
            }
            Authorizer::Scoped(key) => {
                let token = shown_token(headers)
                    .ok_or(Failure::Unauthenticated("A sandbox token is required."))?;
                let scope = key
                    .verify(token, SystemTime::now())
                    .map_err(|error| match error {
                        TokenError::Expired => {
                            Failure::Unauthenticated("The sandbox token has expired.")
                        }
                        _ => Failure::Unauthenticated("The sandbox token is not valid."),
                    })?;
                if scope.permits(
                    target.sandbox.namespace(),
                    target.sandbox.name(),
                    target.port,
                ) {
                    Ok(())
                } else {
                    Err(Failure::Forbidden(
                        "The sandbox token is for another sandbox or port.",
                    ))
                }
            }
        }
    }
}
