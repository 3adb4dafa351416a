//! What a pass over a claim needs of the process that runs it.

use std::sync::Arc;
use std::time::Duration;

use api::{Sandbox, SandboxClaim, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::jiff::Timestamp;

use super::super::Obstacle;
use crate::pass::{Objects, RequestError};
use crate::warm_queue::{Request, Reservation};

/// The API server, the caches and the memory of a process, for a pass over one claim.
pub trait Environment: Send + Sync {
    type Error: RequestError;
    type Reservation: Reservation;
    /// See [`Environment::acquiring`].
    type Acquiring: Send;

    fn now(&self) -> Timestamp;

    fn claims(&self) -> impl Objects<SandboxClaim, Error = Self::Error>;
    fn sandboxes(&self) -> impl Objects<Sandbox, Error = Self::Error>;
    fn templates(&self) -> impl Objects<SandboxTemplate, Error = Self::Error>;
    fn warm_pools(&self) -> impl Objects<SandboxWarmPool, Error = Self::Error>;
    fn network_policies(&self) -> impl Objects<NetworkPolicy, Error = Self::Error>;

    /// When the process first saw the claim.
    fn first_observed(&self) -> Timestamp;

    /// The best sandbox that the warm queue has for a request, set aside for this pass.
    fn reserve(&self, request: &Request) -> Option<Self::Reservation>;

    /// The claims, as the cache shows them, whose [`unfinished_binding`](super::super::unfinished_binding) is this sandbox.
    fn claims_bound_to(&self, sandbox: &str) -> Vec<Arc<SandboxClaim>>;

    /// Counts the claim as one that is getting its sandbox, until the guard is dropped.
    fn acquiring(&self) -> Self::Acquiring;

    /// Notes that the claim has this sandbox, or may have it: the answer to the write can be lost.
    fn note_acquired(&self, claim: &SandboxClaim, sandbox: &str);

    /// The noted sandbox. The API server must be asked for it before the claim gets another.
    fn acquired(&self, claim: &SandboxClaim) -> Option<String>;

    /// Drops the note: the cache shows that the claim owns the sandbox, or the server has refused the write.
    fn forget_acquired(&self, claim: &SandboxClaim);

    /// How long the first status of a claim whose sandbox is starting is still delayed, if it is. The delay begins with the first call.
    fn delay_first_status(&self) -> Option<Duration>;

    /// Ends that delay: a status is published.
    fn end_status_delay(&self);

    /// Whether the claim, which is Ready, becomes so for the first time. True once.
    fn is_first_ready(&self, claim: &SandboxClaim) -> bool;

    /// The claim with the trace context of this pass, if it carries none and traces are exported.
    fn with_trace(&self, claim: &Arc<SandboxClaim>) -> Arc<SandboxClaim>;

    /// Whether the binding writes the trace context to the claim.
    fn persists_trace(&self) -> bool;

    /// Emits an event, a metric or a log line about the claim.
    fn announce(&self, claim: &SandboxClaim, announcement: Announcement<'_, Self::Error>);
}

/// An announcement about a claim: an event, a metric or a log line.
#[derive(Debug)]
pub enum Announcement<'a, E> {
    /// The claim got its sandbox.
    Provisioned {
        sandbox: &'a Sandbox,
        source: Source<'a>,
        /// Whether the warm queue was asked for one.
        wanted_warm: bool,
    },
    /// A part of the claim's metadata does not reach its pod (why).
    MetadataNotApplied(&'a str),
    /// A new obstacle.
    Blocked(&'a Obstacle),
    /// The claim is Ready for the first time.
    FirstReady {
        sandbox: &'a Sandbox,
    },
    Expired,
    /// A network policy of an older controller could not be deleted. The next pass tries again.
    LegacyPolicyNotDeleted(&'a E),
}

/// Where a claim's sandbox came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<'a> {
    /// From a warm pool, unless the sandbox had no owner.
    Adopted {
        warm_pool: Option<&'a str>,
        was_ready: bool,
    },
    Created,
}
