//! Hooks for metrics: what queues, reconcilers and writes report. Every hook does nothing by default, so that a system without
//! metrics does not pay for them.

use std::fmt::Debug;
use std::time::Duration;

use api::Sandbox;

use crate::cache::Change;

/// How a reconcile ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReconcileResult {
    /// Nothing to do until something changes.
    Success,
    /// To be reconciled again at a known time.
    RequeueAfter,
    /// To be tried again soon, without anything being wrong.
    Requeue,
    /// It failed and will be tried again, later each time.
    Error,
    /// It ended by a bug, and will be tried again, later each time.
    Panic,
}

/// What kind of request was sent to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    Get,
    List,
    Create,
    Update,
    Patch,
    PatchStatus,
    Delete,
}

/// How a claim's sandbox came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Launch {
    /// It was taken from a warm pool.
    Warm,
    /// It was made for the claim.
    Cold,
}

impl Launch {
    /// The value of the label `launch_type`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Warm => "warm",
            Self::Cold => "cold",
        }
    }
}

/// How a claim got its sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Provisioning<'a> {
    pub namespace: &'a str,
    pub template: &'a str,
    pub launch: Launch,
    /// The pool it was taken from, if it was.
    pub pool: Option<&'a str>,
    /// Whether it was Ready when the claim got it.
    pub was_ready: bool,
    /// Whether the claim would have taken a warm sandbox.
    pub wanted_warm: bool,
}

/// How long a claim took to become Ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimReadiness<'a> {
    pub namespace: &'a str,
    pub template: &'a str,
    pub launch: Launch,
    /// Since admission first saw the claim, if an annotation records that time.
    pub since_admission: Option<Duration>,
    /// Since the client requested the claim, if an annotation records that time.
    pub since_request: Option<Duration>,
    /// Since the controller first saw the claim.
    pub since_first_observed: Option<Duration>,
    /// From the sandbox's creation until it was Ready.
    pub sandbox_creation: Option<Duration>,
}

/// How a request to the API server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestReport<'a> {
    pub kind: &'a str,
    pub verb: Verb,
    /// The status of the answer, if there was one.
    pub code: Option<u16>,
    pub took: Duration,
}

/// Counts the entries of a structure.
pub type Count = Box<dyn Fn() -> usize + Send + Sync>;

/// Receives reports from queues, reconcilers and writes. Called on hot paths: an implementation must not block.
pub trait Instrumentation: Debug + Send + Sync {
    /// A controller with this many workers exists.
    fn controller_registered(&self, _controller: &'static str, _workers: usize) {}
    /// An object was put in a controller's queue, which now holds this many.
    fn queue_added(&self, _controller: &'static str, _depth: usize) {}
    /// A worker took an object from the queue, where it had waited this long.
    fn reconcile_started(&self, _controller: &'static str, _waited: Duration, _depth: usize) {}
    fn reconcile_finished(
        &self,
        _controller: &'static str,
        _took: Duration,
        _result: ReconcileResult,
    ) {
    }
    /// A claim got its sandbox.
    fn claim_provisioned(&self, _provisioning: &Provisioning<'_>) {}
    /// A claim became Ready for the first time.
    fn claim_ready(&self, _readiness: &ClaimReadiness<'_>) {}
    /// A sandbox came, changed or went.
    fn sandbox_changed(&self, _change: &Change<'_, Sandbox>) {}
    /// A structure holds entries in memory, and `count` returns how many. `count` must not block.
    fn count_entries(&self, _structure: &'static str, _of: &str, _count: Count) {}
    /// A request to the API server ended.
    fn requested(&self, _report: &RequestReport<'_>) {}
}

/// Discards all reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Instrumentation for Silent {}
