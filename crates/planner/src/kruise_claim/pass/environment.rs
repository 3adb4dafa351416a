//! What a pass over a batch claim needs of the process that runs it.

use std::collections::BTreeMap;
use std::future::Future;
use std::net::IpAddr;
use std::time::Duration;

use api::kruise::{SandboxClaim, SandboxSet};
use api::{Sandbox, SandboxTemplate};
use k8s_openapi::jiff::Timestamp;

use super::super::Initialisation;
use crate::pass::{Event, Objects, RequestError};
use crate::warm_queue::{Request, Reservation};

/// The API server, the caches and the memory of a process, for a pass over one claim.
pub trait Environment: Send + Sync {
    type Error: RequestError;
    type Reservation: Reservation;
    /// See [`Environment::acquiring`].
    type Acquiring: Send;

    fn now(&self) -> Timestamp;

    fn claims(&self) -> impl Objects<SandboxClaim, Error = Self::Error>;
    /// The claims under the field manager that reports claims about which nothing can be decided.
    fn claims_as_reporter(&self) -> impl Objects<SandboxClaim, Error = Self::Error>;
    fn sandboxes(&self) -> impl Objects<Sandbox, Error = Self::Error>;
    fn sandbox_sets(&self) -> impl Objects<SandboxSet, Error = Self::Error>;
    fn templates(&self) -> impl Objects<SandboxTemplate, Error = Self::Error>;

    /// How many sandboxes one batch may have.
    fn max_batch(&self) -> usize;

    /// Counts the claim as one that is getting sandboxes, until the guard is dropped.
    fn acquiring(&self) -> Self::Acquiring;

    /// The best sandbox that the warm queue has for a request, set aside for this claim.
    fn reserve(&self, request: &Request) -> Option<Self::Reservation>;

    /// Holds the reservations of the claim's batch, in place of those before.
    fn hold(&self, reservations: Vec<Self::Reservation>);

    /// Puts the claim in the queue of those that wait for a sandbox of this set.
    fn wait_in_line(&self, set_uid: &str);

    /// Remembers that the claim begins no batch for this time.
    fn pause(&self, now: Timestamp, pause: Duration);

    fn paused_until(&self) -> Option<Timestamp>;

    /// A random number, for names.
    fn random_number(&self) -> u64;

    /// A random token, for the lock of a sandbox.
    fn random_token(&self) -> String;

    /// Calls `/init` of a sandbox with the claim's environment variables.
    fn initialise(
        &self,
        address: IpAddr,
        env_vars: &BTreeMap<String, String>,
        token: &str,
    ) -> impl Future<Output = Initialisation> + Send;

    fn emit(&self, claim: &SandboxClaim, event: Event);
}
