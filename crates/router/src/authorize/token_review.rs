//! Asks the Kubernetes API whether a bearer token is valid (TokenReview), and caches the result for some seconds. The
//! cache holds digests of tokens only.

use std::time::Duration;

use api::rbac::Rule;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::api::{Api, ObjectMeta, PostParams};
use saturating_time::SaturatingTime;
use tokio::time::Instant;

use crate::config::ReviewCache;

const CACHE_INVALID_FOR: Duration = Duration::from_secs(2);

/// The permissions that `--authz-mode=tokenreview` needs.
pub const RBAC: &[Rule] = &[Rule {
    groups: &["authentication.k8s.io"],
    resources: &["tokenreviews"],
    verbs: &["create"],
}];

#[derive(Debug, thiserror::Error)]
#[error("the token review failed")]
pub struct ReviewError(#[source] pub kube::Error);

pub(super) type Digest = [u8; 32];

pub struct TokenReviewer {
    api: Api<TokenReview>,
    audiences: Vec<String>,
    cache: ReviewCache,
    remembered: papaya::HashMap<Digest, (bool, Instant)>,
}

impl std::fmt::Debug for TokenReviewer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("TokenReviewer")
            .field("audiences", &self.audiences)
            .finish_non_exhaustive()
    }
}

impl TokenReviewer {
    pub fn new(client: kube::Client, audiences: Vec<String>, cache: ReviewCache) -> Self {
        Self {
            api: Api::all(client),
            audiences,
            cache,
            remembered: papaya::HashMap::new(),
        }
    }

    pub async fn review(&self, token: &str) -> Result<bool, ReviewError> {
        let digest = digest(token);
        let now = Instant::now();
        if let Some((valid, until)) = self.remembered.pin().get(&digest)
            && now < *until
        {
            return Ok(*valid);
        }
        let audiences = Some(self.audiences.clone()).filter(|audiences| !audiences.is_empty());
        let review = TokenReview {
            metadata: ObjectMeta::default(),
            spec: TokenReviewSpec {
                token: Some(token.to_owned()),
                audiences,
            },
            status: None,
        };
        let answer = self
            .api
            .create(&PostParams::default(), &review)
            .await
            .map_err(ReviewError)?;
        let valid = answer.status.as_ref().is_some_and(|status| {
            let meant_for_us = self.audiences.is_empty()
                || status
                    .audiences
                    .iter()
                    .flatten()
                    .any(|audience| self.audiences.contains(audience));
            status.authenticated == Some(true) && meant_for_us
        });
        // Cleared when it is full, so that guessed tokens cannot fill the memory.
        if self.remembered.len() >= self.cache.size {
            self.remembered.pin().clear();
        }
        let lasting = if valid {
            self.cache.lifetime
        } else {
            CACHE_INVALID_FOR.min(self.cache.lifetime)
        };
        self.remembered
            .pin()
            .insert(digest, (valid, now.later_by(lasting)));
        Ok(valid)
    }
}

pub(super) fn digest(token: &str) -> Digest {
    let mut digest = Digest::default();
    digest.copy_from_slice(ring::digest::digest(&ring::digest::SHA256, token.as_bytes()).as_ref());
    digest
}
