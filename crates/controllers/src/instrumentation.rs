//! What the machinery reports about itself. Every hook does nothing unless an implementation says otherwise, so that nobody
//! pays for what nobody watches.

use std::fmt::Debug;
use std::time::Duration;

/// How a reconcile ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReconcileResult {
    /// Nothing to do until something changes.
    Success,
    /// To be looked at again at a known time.
    RequeueAfter,
    /// To be tried again soon, without anything being wrong.
    Requeue,
    /// It failed and will be tried again, later each time.
    Error,
}

/// What kind of request was sent to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    Get,
    Create,
    Patch,
    PatchStatus,
    Delete,
}

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
    /// A request to the API server ended.
    fn requested(&self, _kind: &str, _verb: Verb, _took: Duration, _succeeded: bool) {}
}

/// Reports to nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Instrumentation for Silent {}
