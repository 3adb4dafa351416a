//! Deletes the claim of a sandbox whose creation failed or was cancelled.

use std::time::Duration;

use api::labels::CLIENT_FIRST_REQUESTED_AT;
use kube::ResourceExt;

use crate::cluster::Cluster;
use crate::error::{ErrorKind, Key};

/// How often, and at which interval, the SDK looks for a claim whose creation was never confirmed.
const LOOKUPS: u32 = 3;
const LOOKUP_INTERVAL: Duration = Duration::from_millis(200);

/// A claim that is deleted unless `keep` is called. Dropping it, which happens when opening is cancelled, deletes the
/// claim in the background.
#[derive(Debug)]
pub(crate) struct Rollback {
    claim: Option<PendingClaim>,
}

#[derive(Clone, Debug)]
struct PendingClaim {
    cluster: Cluster,
    key: Key,
    limit: Duration,
    /// The value of the annotation that identifies the claim as ours.
    requested_at: String,
    uid: Option<String>,
}

impl Rollback {
    pub(crate) fn new(cluster: Cluster, key: Key, limit: Duration, requested_at: String) -> Self {
        Self {
            claim: Some(PendingClaim {
                cluster,
                key,
                limit,
                requested_at,
                uid: None,
            }),
        }
    }

    /// Records that the claim exists, with this UID.
    pub(crate) fn created(&mut self, uid: Option<String>) {
        if let Some(claim) = &mut self.claim {
            claim.uid = uid;
        }
    }

    /// Keeps the claim, or records that it was never created.
    pub(crate) fn keep(mut self) {
        self.claim = None;
    }

    /// Deletes the claim, and returns the error if that fails.
    pub(crate) async fn undo(mut self) -> Result<(), String> {
        match self.claim.take() {
            Some(claim) => claim.delete().await,
            None => Ok(()),
        }
    }
}

impl Drop for Rollback {
    fn drop(&mut self) {
        let Some(claim) = self.claim.take() else {
            return;
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => {
                runtime.spawn(async move {
                    if let Err(error) = claim.delete().await {
                        tracing::warn!(claim = %claim.key, error, "a claim could not be deleted");
                    }
                });
            }
            Err(_) => {
                tracing::warn!(claim = %claim.key, "a claim was not deleted: there is no runtime to run the request");
            }
        }
    }
}

impl PendingClaim {
    async fn delete(&self) -> Result<(), String> {
        let deleting = async {
            let uid = match &self.uid {
                Some(uid) => uid.clone(),
                None => match self.find().await.map_err(|error| error.to_string())? {
                    Some(uid) => uid,
                    None => return Ok(()),
                },
            };
            match self.cluster.delete_claim(&self.key, Some(uid)).await {
                // Another claim has this name now: ours was deleted.
                Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
                result => result.map_err(|error| error.to_string()),
            }
        };
        tokio::time::timeout(self.limit, deleting)
            .await
            .unwrap_or_else(|_| Err(format!("it took longer than {:?}", self.limit)))
    }

    /// The UID of a claim whose creation is unconfirmed, if it exists and is ours.
    async fn find(&self) -> Result<Option<String>, ErrorKind> {
        for look in 1..=LOOKUPS {
            match self.cluster.claim(&self.key).await {
                Ok(claim) => {
                    let ours = claim.annotations().get(CLIENT_FIRST_REQUESTED_AT)
                        == Some(&self.requested_at);
                    return Ok(claim.uid().filter(|_| ours));
                }
                Err(ErrorKind::ClaimNotFound) => {}
                Err(error) => return Err(error),
            }
            if look < LOOKUPS {
                tokio::time::sleep(LOOKUP_INTERVAL).await;
            }
        }
        Ok(None)
    }
}
