//! Leader election: of all replicas, the one that holds a Lease runs the controllers.
//!
//! ```text
//!   standby ──lease free, released or expired──► leading ──renewed in time──► leading
//!                                                  │  └─ not renewed in time, or taken ──► lost: everything stops at once
//!                                                  └─ asked to stop ──► released: a standby takes over within a second
//! ```
//!
//! Every write names the version it was decided upon, so that two replicas can never both win. Whether a lease has expired is
//! measured from when this process saw it change, by its own monotonic clock: the holder's clock is never compared with ours.
//! A leader counts its own lease from before the renewal was sent, so it stops before another replica may start.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client};
use saturating_time::SaturatingTime;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use crate::clock::Clock;

/// The name that replicas of every version contend for.
pub const LEASE_NAME: &str = "a3317529.agent-sandbox.x-k8s.io";

/// How leases are timed.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// How long a standby waits after the last renewal it saw.
    pub lease_duration: Duration,
    /// How long a leader goes on without having renewed.
    pub renew_deadline: Duration,
    /// How often a leader renews.
    pub renew_interval: Duration,
    /// How often a standby looks.
    pub retry_interval: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            renew_interval: Duration::from_secs(2),
            retry_interval: Duration::from_secs(1),
        }
    }
}

/// One replica's participation in the election.
#[derive(Clone)]
pub struct Candidate {
    leases: Api<Lease>,
    namespace: String,
    identity: String,
    clock: Clock,
    timing: Timing,
}

impl std::fmt::Debug for Candidate {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Candidate")
            .field("namespace", &self.namespace)
            .field("identity", &self.identity)
            .finish_non_exhaustive()
    }
}

/// A lease that this replica holds.
#[derive(Debug)]
pub struct Leadership {
    lease: Lease,
    /// When the last successful renewal was sent.
    renewed: Instant,
}

/// A lease of another replica, as a standby last saw it.
struct Sighting {
    version: Option<String>,
    since: Instant,
}

enum Attempt {
    Won(Box<Leadership>),
    HeldBy(String),
}

impl Candidate {
    pub fn new(
        client: Client,
        namespace: &str,
        identity: String,
        clock: Clock,
        timing: Timing,
    ) -> Self {
        Self {
            leases: Api::namespaced(client, namespace),
            namespace: namespace.to_owned(),
            identity,
            clock,
            timing,
        }
    }

    /// Resolves once this replica leads.
    pub async fn acquire(&self) -> Leadership {
        let mut sighting = None;
        let mut last_holder = None;
        loop {
            match self.bounded(self.try_acquire(&mut sighting)).await {
                Ok(Attempt::Won(leadership)) => {
                    info!(identity = self.identity, "became leader");
                    return *leadership;
                }
                Ok(Attempt::HeldBy(holder)) => {
                    if last_holder.as_ref() != Some(&holder) {
                        info!(holder, "standing by");
                        last_holder = Some(holder);
                    }
                }
                Err(error) => {
                    warn!(%error, "cannot contend for the lease; the API server must be reachable, and leases must be allowed to this account");
                }
            }
            tokio::time::sleep(self.timing.retry_interval).await;
        }
    }

    async fn try_acquire(&self, sighting: &mut Option<Sighting>) -> Result<Attempt, kube::Error> {
        let sent = Instant::now();
        let Some(lease) = self.leases.get_opt(LEASE_NAME).await? else {
            return self.write_new(sent).await;
        };
        let spec = lease.spec.as_ref();
        let holder = spec
            .and_then(|spec| spec.holder_identity.clone())
            .unwrap_or_default();
        let version = lease.metadata.resource_version.clone();
        let seen = match sighting {
            Some(seen) if seen.version == version => seen,
            _ => sighting.insert(Sighting {
                version,
                since: Instant::now(),
            }),
        };
        let valid_for = spec
            .and_then(|spec| spec.lease_duration_seconds)
            .and_then(|seconds| u64::try_from(seconds).ok())
            .map_or(self.timing.lease_duration, Duration::from_secs);
        let is_free = holder.is_empty() || holder == self.identity;
        if !is_free && seen.since.elapsed() < valid_for {
            return Ok(Attempt::HeldBy(holder));
        }
        let transitions = spec.and_then(|spec| spec.lease_transitions).unwrap_or(0);
        let taken = Lease {
            metadata: lease.metadata.clone(),
            spec: Some(LeaseSpec {
                lease_transitions: Some(transitions.saturating_add(1)),
                ..self.held(None)
            }),
        };
        let written = self
            .leases
            .replace(LEASE_NAME, &PostParams::default(), &taken)
            .await;
        Self::settle(written, sent, holder)
    }

    async fn write_new(&self, sent: Instant) -> Result<Attempt, kube::Error> {
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(LEASE_NAME.to_owned()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                lease_transitions: Some(0),
                ..self.held(None)
            }),
        };
        let written = self.leases.create(&PostParams::default(), &lease).await;
        Self::settle(written, sent, "another replica".to_owned())
    }

    /// A failed precondition means that another replica was faster.
    fn settle(
        written: Result<Lease, kube::Error>,
        sent: Instant,
        holder: String,
    ) -> Result<Attempt, kube::Error> {
        match written {
            Ok(lease) => Ok(Attempt::Won(Box::new(Leadership {
                lease,
                renewed: sent,
            }))),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Attempt::HeldBy(holder)),
            Err(error) => Err(error),
        }
    }

    /// Renews the lease for as long as that succeeds in time. Returns when leadership is lost.
    pub async fn keep(&self, leadership: &mut Leadership) {
        loop {
            tokio::time::sleep(self.timing.renew_interval).await;
            let deadline = leadership.renewed.later_by(self.timing.renew_deadline);
            let renewed = tokio::time::timeout_at(deadline, self.renew(leadership)).await;
            match renewed {
                Ok(true) => {}
                Ok(false) => {
                    warn!(
                        "another replica took the lease; this one stops, and its pod starts it anew"
                    );
                    return;
                }
                Err(_) => {
                    warn!(
                        "the lease could not be renewed in time, so this replica stops; see whether the API server is reachable"
                    );
                    return;
                }
            }
        }
    }

    /// Renews the lease, however often it takes. False means that another replica holds it.
    async fn renew(&self, leadership: &mut Leadership) -> bool {
        loop {
            let sent = Instant::now();
            match self.bounded(self.try_renew(&leadership.lease)).await {
                Ok(Some(lease)) => {
                    leadership.lease = lease;
                    leadership.renewed = sent;
                    return true;
                }
                Ok(None) => return false,
                Err(error) => debug!(%error, "cannot renew the lease yet"),
            }
            tokio::time::sleep(self.timing.retry_interval.min(self.timing.renew_interval)).await;
        }
    }

    async fn try_renew(&self, lease: &Lease) -> Result<Option<Lease>, kube::Error> {
        let renewed = Lease {
            metadata: lease.metadata.clone(),
            spec: Some(self.held(lease.spec.as_ref())),
        };
        match self
            .leases
            .replace(LEASE_NAME, &PostParams::default(), &renewed)
            .await
        {
            Ok(lease) => Ok(Some(lease)),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                // Perhaps our last renewal succeeded and only its response was lost, or a user changed the metadata.
                let current = self.leases.get(LEASE_NAME).await?;
                if !self.holds(&current) {
                    return Ok(None);
                }
                let renewed = Lease {
                    spec: Some(self.held(current.spec.as_ref())),
                    metadata: current.metadata,
                };
                let params = PostParams::default();
                Ok(Some(
                    self.leases.replace(LEASE_NAME, &params, &renewed).await?,
                ))
            }
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Gives the lease up, so that a standby need not wait for it to expire.
    pub async fn release(&self, leadership: Leadership) {
        match self.bounded(self.try_release(leadership.lease)).await {
            Ok(true) => info!("released the lease"),
            Ok(false) => info!("another replica holds the lease"),
            Err(error) => warn!(%error, "cannot release the lease; it expires by itself"),
        }
    }

    /// Releases the lease as the API server has it. False means that another replica holds it.
    ///
    /// A renewal that was cancelled may still reach the API server, so a conflict does not mean that another replica was faster.
    async fn try_release(&self, mut lease: Lease) -> Result<bool, kube::Error> {
        loop {
            let spec = LeaseSpec {
                holder_identity: Some(String::new()),
                lease_duration_seconds: Some(1),
                renew_time: Some(self.clock.micro_time()),
                ..lease.spec.unwrap_or_default()
            };
            let released = Lease {
                metadata: lease.metadata,
                spec: Some(spec),
            };
            let params = PostParams::default();
            match self.leases.replace(LEASE_NAME, &params, &released).await {
                Err(kube::Error::Api(status)) if status.code == 409 => {
                    lease = self.leases.get(LEASE_NAME).await?;
                    if !self.holds(&lease) {
                        return Ok(false);
                    }
                }
                written => return written.map(|_| true),
            }
        }
    }

    fn holds(&self, lease: &Lease) -> bool {
        let spec = lease.spec.as_ref();
        spec.and_then(|spec| spec.holder_identity.as_ref()) == Some(&self.identity)
    }

    /// The spec of a lease that this replica holds as of now.
    fn held(&self, before: Option<&LeaseSpec>) -> LeaseSpec {
        let now = self.clock.micro_time();
        let seconds = self.timing.lease_duration.as_secs().max(1);
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(seconds).unwrap_or(i32::MAX)),
            acquire_time: before
                .and_then(|spec| spec.acquire_time.clone())
                .or_else(|| Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: before.and_then(|spec| spec.lease_transitions),
            ..LeaseSpec::default()
        }
    }

    /// The timeout of a request: a request that hangs must leave time for a retry.
    async fn bounded<T>(
        &self,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, LeaseError> {
        let limit = self
            .timing
            .renew_deadline
            .checked_div(2)
            .unwrap_or_default();
        match tokio::time::timeout(limit, request).await {
            Ok(answer) => answer.map_err(|error| LeaseError::Request(Box::new(error))),
            Err(_) => Err(LeaseError::TimedOut),
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum LeaseError {
    #[error("the API server did not answer in time")]
    TimedOut,
    #[error("{0}")]
    Request(#[source] Box<kube::Error>),
}
