//! Who may use a sandbox of a router that serves one machine: the users it trusts, known by their connections, and others by a
//! token for the sandbox or of an account that may reach the sandbox's pod by the API as well.
//!
//! The published clients send no credential, so the user at the other end of the connection has to be one.

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
use crate::answer::Failure;
use crate::headers::{Origin, shown_token};
use crate::identify::{SandboxKey, Target};

const REMEMBER_ALLOWED: Duration = Duration::from_secs(10);
const REMEMBER_REFUSED: Duration = Duration::from_secs(2);
/// Beyond this the memory is emptied: guesses must not fill it.
const MOST_REMEMBERED: usize = 20_000;

/// By these a proxy says that it speaks for somebody else.
const PASSED_ON: [HeaderName; 3] = [
    header::FORWARDED,
    header::VIA,
    HeaderName::from_static("x-forwarded-for"),
];

#[derive(Debug)]
pub struct LocalUsers {
    pub users: Vec<u32>,
    pub key: Option<TokenKey>,
    /// Without a Kubernetes API there is nobody to ask about tokens.
    pub accounts: Option<Accounts>,
}

impl LocalUsers {
    pub async fn check(
        &self,
        headers: &HeaderMap,
        target: &Target,
        origin: &Origin,
    ) -> Result<(), Failure> {
        if !is_passed_on(headers)
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
                // It may be an account's.
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

/// Whether a proxy passed the request on. Then the connection is the proxy's, and says nothing about who asks (confused deputy).
fn is_passed_on(headers: &HeaderMap) -> bool {
    PASSED_ON.iter().any(|name| headers.contains_key(name))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Allowed,
    Forbidden,
    /// The API knows no account by this token.
    Unknown,
}

/// What accounts of the Kubernetes API may do, remembered for some seconds.
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
        if self.remembered.len() >= MOST_REMEMBERED {
            self.remembered.pin().clear();
        }
        let lasting = match access {
            Access::Allowed => REMEMBER_ALLOWED,
            Access::Forbidden | Access::Unknown => REMEMBER_REFUSED,
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

    /// Whoever may forward ports of a pod reaches every port of it by the API. The router gives no more than that.
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
