//! Decides which clients may use a sandbox. One of four modes: every client; clients whose token passes a Kubernetes TokenReview;
//! clients with a token signed for that sandbox; or some users of this machine, and other clients with a token.

mod local_users;
pub mod scoped_token;
mod token_review;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use http::HeaderMap;

use crate::config::AuthorizationMode;
use crate::failure::Failure;
use crate::headers::{Origin, bearer_token, shown_token};
use crate::identify::Target;
use local_users::{Accounts, LocalUsers};
use scoped_token::{Opened, TokenError, TokenKey};
pub(crate) use token_review::RBAC;
use token_review::{ReviewError, TokenReviewer};

#[derive(Debug, thiserror::Error)]
pub enum AuthorizerError {
    #[error("token review requires a connection to a Kubernetes API")]
    NoClient,
    #[error("cannot read the key of scoped tokens from {path}")]
    ReadKey {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} contains no usable key")]
    Key {
        path: PathBuf,
        #[source]
        source: scoped_token::KeyError,
    },
}

#[derive(Debug)]
pub(crate) enum Authorizer {
    EveryClient,
    Reviewed(Box<TokenReviewer>),
    Scoped(Box<TokenKey>),
    Local(Box<LocalUsers>),
}

const EXPIRED: Failure = Failure::Unauthenticated("The sandbox token has expired.");
const NOT_VALID: Failure = Failure::Unauthenticated("The token is not valid.");

impl Authorizer {
    pub fn new(
        mode: &AuthorizationMode,
        client: Option<&kube::Client>,
    ) -> Result<Self, AuthorizerError> {
        match mode {
            AuthorizationMode::None => Ok(Authorizer::EveryClient),
            AuthorizationMode::TokenReview { audiences, cache } => {
                let client = client.ok_or(AuthorizerError::NoClient)?.clone();
                Ok(Authorizer::Reviewed(Box::new(TokenReviewer::new(
                    client,
                    audiences.clone(),
                    *cache,
                ))))
            }
            AuthorizationMode::ScopedToken { key_file } => {
                Ok(Authorizer::Scoped(Box::new(read_key(key_file)?)))
            }
            AuthorizationMode::LocalUsers { users, key_file } => {
                let key = key_file.as_deref().map(read_key).transpose()?;
                Ok(Authorizer::Local(Box::new(LocalUsers {
                    users: users.clone(),
                    key,
                    accounts: client.map(Accounts::new),
                })))
            }
        }
    }

    /// Whether the authorizer needs the local user of a client.
    pub fn asks_for_users(&self) -> bool {
        matches!(self, Authorizer::Local(_))
    }

    pub async fn check(
        &self,
        headers: &HeaderMap,
        target: &Target,
        origin: &Origin,
    ) -> Result<(), Failure> {
        match self {
            Authorizer::EveryClient => Ok(()),
            Authorizer::Reviewed(reviewer) => {
                let token = bearer_token(headers)
                    .ok_or(Failure::Unauthenticated("A bearer token is required."))?;
                match reviewer.review(token).await {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(Failure::Unauthenticated("The bearer token is not valid.")),
                    Err(error) => Err(unavailable(&error)),
                }
            }
            Authorizer::Scoped(key) => {
                let token = shown_token(headers)
                    .ok_or(Failure::Unauthenticated("A sandbox token is required."))?;
                let opened = key
                    .verify(token, SystemTime::now())
                    .map_err(|error| match error {
                        TokenError::Expired => EXPIRED,
                        _ => Failure::Unauthenticated("The sandbox token is not valid."),
                    })?;
                permit(&opened, target)
            }
            Authorizer::Local(users) => users.check(headers, target, origin).await,
        }
    }
}

fn read_key(path: &Path) -> Result<TokenKey, AuthorizerError> {
    let bytes = std::fs::read(path).map_err(|source| AuthorizerError::ReadKey {
        path: path.to_owned(),
        source,
    })?;
    TokenKey::parse(&bytes).map_err(|source| AuthorizerError::Key {
        path: path.to_owned(),
        source,
    })
}

fn permit(opened: &Opened, target: &Target) -> Result<(), Failure> {
    let sandbox = &target.sandbox;
    if opened.permits(sandbox.namespace(), sandbox.name(), target.port) {
        Ok(())
    } else {
        Err(Failure::Forbidden(
            "The sandbox token is for another sandbox or port.",
        ))
    }
}

fn unavailable(ReviewError(error): &ReviewError) -> Failure {
    tracing::warn!(%error, "a token cannot be reviewed; the router's account needs `create` on tokenreviews, and the API server must be reachable");
    Failure::AuthorizationUnavailable
}
