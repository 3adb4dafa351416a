//! Authorization for a router that serves one machine: trusted local users are identified by the owner of their socket; other
//! clients need a token for the sandbox, or the token of an account that may also reach the sandbox's pod through the API.
//!
//! The published clients send no credential, so the owner of the connection has to serve as one.

use std::time::{Duration, SystemTime};

use http::header::{self, HeaderMap, HeaderName};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::{Api, PostParams};
use saturating_time::SaturatingTime;
use tokio::time::Instant;

use super::scoped_token::{TokenError, TokenKey};
use super::token_review::{Digest, ReviewError, digest};
use crate::failure::Failure;
use crate::headers::{Origin, shown_token};
use crate::identify::{SandboxKey, Target};

const CACHE_ALLOWED_FOR: Duration = Duration::from_secs(10);
const CACHE_REFUSED_FOR: Duration = Duration::from_secs(2);
/// The cache is cleared when it is full, so that guessed tokens cannot fill the memory.
const MAX_CACHED: usize = 20_000;

/// Headers by which a proxy reports that it forwards a request for another client.
const FORWARDING_HEADERS: [HeaderName; 3] = [
    header::FORWARDED,
    header::VIA,
    HeaderName::from_static("x-forwarded-for"),
];

#[derive(Debug)]
pub struct LocalUsers {
    pub users: Vec<u32>,
    pub key: Option<TokenKey>,
    /// `None` without a Kubernetes API, which could review tokens.
    pub accounts: Option<Accounts>,
}

impl LocalUsers {
    pub async fn check(
        &self,
        headers: &HeaderMap,
        target: &Target,
        origin: &Origin,
    ) -> Result<(), Failure> {
        if !is_forwarded(headers)
            && origin.counts_for(target.sandbox.namespace())
            && origin.user().is_some_and(|user| self.users.contains(&user))
        {
            return Ok(());
        }
        let token = shown_token(headers).ok_or(Failure::NotALocalUser)?;
        if let Some(key) = &self.key {
            match key.verify(token, SystemTime::now()) {
                Ok(opened) => return super::permit(&opened, target),
                Err(TokenError::Expired) => return Err(super::EXPIRED),
                // It may be an account's token.
                Err(_) => {}
            }
        }
        let Some(accounts) = &self.accounts else {
            return Err(super::NOT_VALID);
        };
        match accounts.access(token, &target.sandbox).await {
            Ok(Access::Allowed) => Ok(()),
            Ok(Access::Forbidden) => Err(Failure::Forbidden(
                "The token's account may not create pods/portforward for this sandbox's pod.",
            )),
            Ok(Access::Unknown) => Err(super::NOT_VALID),
            Err(error) => Err(super::unavailable(&error)),
        }
    }
}

/// Whether a proxy forwarded the request. Then the connection is the proxy's and does not identify the client (confused deputy).
fn is_forwarded(headers: &HeaderMap) -> bool {
    FORWARDING_HEADERS
        .iter()
        .any(|name| headers.contains_key(name))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Allowed,
    Forbidden,
    /// The API knows no account with this token.
    Unknown,
}

/// The permissions of Kubernetes accounts, cached for some seconds.
pub struct Accounts {
    tokens: Api<TokenReview>,
    access: Api<SubjectAccessReview>,
    remembered: papaya::HashMap<(Digest, SandboxKey), (Access, Instant)>,
}

impl std::fmt::Debug for Accounts {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Accounts").finish_non_exhaustive()
    }
}

impl Accounts {
    pub fn new(client: &kube::Client) -> Self {
        Self {
            tokens: Api::all(client.clone()),
            access: Api::all(client.clone()),
            remembered: papaya::HashMap::new(),
        }
    }

    async fn access(&self, token: &str, sandbox: &SandboxKey) -> Result<Access, ReviewError> {
        let question = (digest(token), sandbox.clone());
        let now = Instant::now();
        if let Some((access, until)) = self.remembered.pin().get(&question)
            && now < *until
        {
            return Ok(*access);
        }
        let access = match self.account(token).await? {
            None => Access::Unknown,
            Some(account) => {
                if self.may_reach(account, sandbox).await? {
                    Access::Allowed
                } else {
                    Access::Forbidden
                }
            }
        };
        if self.remembered.len() >= MAX_CACHED {
            self.remembered.pin().clear();
        }
        let lasting = match access {
            Access::Allowed => CACHE_ALLOWED_FOR,
            Access::Forbidden | Access::Unknown => CACHE_REFUSED_FOR,
        };
        let until = now.later_by(lasting);
        self.remembered.pin().insert(question, (access, until));
        Ok(access)
    }

    async fn account(&self, token: &str) -> Result<Option<UserInfo>, ReviewError> {
        let review = TokenReview {
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences: None,
            },
            ..TokenReview::default()
        };
        let reviewed = self.tokens.create(&PostParams::default(), &review).await;
        let status = reviewed.map_err(ReviewError)?.status;
        Ok(status
            .filter(|status| status.authenticated == Some(true))
            .and_then(|status| status.user))
    }

    /// Whether an account may forward ports of a pod, and so reach every port of it through the API. The router grants no more than that.
    async fn may_reach(
        &self,
        account: UserInfo,
        sandbox: &SandboxKey,
    ) -> Result<bool, ReviewError> {
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: account.username,
                groups: account.groups,
                uid: account.uid,
                extra: account.extra,
                resource_attributes: Some(ResourceAttributes {
                    verb: Some("create".to_owned()),
                    version: Some("v1".to_owned()),
                    resource: Some("pods".to_owned()),
                    subresource: Some("portforward".to_owned()),
                    namespace: Some(sandbox.namespace().to_owned()),
                    name: Some(sandbox.name().to_owned()),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        let reviewed = self.access.create(&PostParams::default(), &review).await;
        let status = reviewed.map_err(ReviewError)?.status;
        Ok(status.is_some_and(|status| status.allowed))
    }
}
