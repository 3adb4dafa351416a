//! What a pass over a pool needs of the process that runs it.

use std::sync::Arc;
use std::time::Duration;

use api::{Sandbox, SandboxTemplate};
use k8s_openapi::jiff::Timestamp;

use crate::pacing::Demand;
use crate::pass::{Event, Objects, RequestError};

/// The API server, the caches and the warm queue of a process, for a pass over one pool.
pub trait Environment<P>: Send + Sync {
    type Error: RequestError;

    fn now(&self) -> Timestamp;

    fn pools(&self) -> impl Objects<P, Error = Self::Error>;
    /// The pools under the field manager that reports pools about which nothing can be decided.
    fn pools_as_reporter(&self) -> impl Objects<P, Error = Self::Error>;
    fn sandboxes(&self) -> impl Objects<Sandbox, Error = Self::Error>;
    fn templates(&self) -> impl Objects<SandboxTemplate, Error = Self::Error>;

    /// The sandboxes that the cache shows with this value of the pools' label.
    fn labelled(&self, value: &str) -> Vec<Arc<Sandbox>>;

    /// How many claims wait for a sandbox.
    fn demand(&self) -> Demand;

    /// Whether a claim has reserved this sandbox in the warm queue.
    fn is_reserved(&self, sandbox: &Sandbox) -> bool;

    /// Withholds a sandbox from claims because it is to be deleted. False if a claim has reserved it.
    fn withhold(&self, sandbox: &str) -> bool;

    /// Offers a withheld sandbox to claims again.
    fn put_back(&self, sandbox: &str);

    /// Sets the revision of the pool that the warm queue prefers.
    fn set_current_revision(&self, pool: &P, revision: &str);

    /// How many sandboxes one pass may create.
    fn max_batch(&self) -> usize;

    /// The rest of the pause after the pool's last decision, if any.
    fn rest(&self) -> Option<Duration>;

    /// Makes a decision, and starts a pause that is proportional to its duration.
    fn measured<T>(&self, decide: impl FnOnce() -> T) -> T;

    fn emit(&self, pool: &P, event: Event);
}
