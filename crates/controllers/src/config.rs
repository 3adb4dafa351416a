//! The settings of the controllers, in any process.

use std::num::NonZeroUsize;
use std::time::Duration;

/// Settings of [`crate::run`]. The defaults are those of the command line, but for leader election and probes, which belong to
/// the process and not to the controllers.
#[derive(Clone, Debug)]
pub struct Config {
    /// Also run the controllers of SandboxTemplate, SandboxClaim and SandboxWarmPool.
    pub extensions: bool,
    /// Also run the controllers of the OpenKruise dialect. They need the kinds of the extensions to be installed.
    pub kruise: bool,
    /// The DNS suffix of services, for `status.serviceFQDN`.
    pub cluster_domain: String,
    /// How many sandboxes are reconciled at a time. No sandbox is reconciled by two workers at once.
    pub sandbox_workers: NonZeroUsize,
    pub claim_workers: NonZeroUsize,
    pub warm_pool_workers: NonZeroUsize,
    pub template_workers: NonZeroUsize,
    /// How many sandboxes a pool makes or deletes in one reconcile.
    pub warm_pool_max_batch_size: NonZeroUsize,
    /// How many sandboxes a batch claim takes at a time.
    pub batch_claim_max_batch_size: NonZeroUsize,
    /// Adopt only objects that carry the label `agents.x-k8s.io/adoptable: "true"`.
    pub require_adoptable_label: bool,
    /// Requests a second to the API server; unset does not limit them.
    pub requests: Option<RequestLimit>,
    /// How long the network policy of a deleted template stays although no sandbox of the template is left. A reconcile that began before
    /// the deletion may still create a sandbox.
    pub unused_policy_grace: Duration,
}

/// A limit on requests to the API server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestLimit {
    /// Requests a second in the long run. Positive.
    pub per_second: f64,
    /// How many may be sent at once after a pause.
    pub burst: NonZeroUsize,
}

const fn workers(count: usize) -> NonZeroUsize {
    match NonZeroUsize::new(count) {
        Some(count) => count,
        None => NonZeroUsize::MIN,
    }
}

impl Config {
    pub const DEFAULT_SANDBOX_WORKERS: NonZeroUsize = workers(64);
    pub const DEFAULT_CLAIM_WORKERS: NonZeroUsize = workers(64);
    pub const DEFAULT_WARM_POOL_WORKERS: NonZeroUsize = workers(8);
    pub const DEFAULT_TEMPLATE_WORKERS: NonZeroUsize = workers(8);
    pub const DEFAULT_WARM_POOL_MAX_BATCH_SIZE: NonZeroUsize = workers(300);
    pub const UNUSED_POLICY_GRACE: Duration = Duration::from_secs(30);
    pub const DEFAULT_BATCH_CLAIM_MAX_BATCH_SIZE: NonZeroUsize = workers(10);
}

impl Default for Config {
    fn default() -> Self {
        Self {
            extensions: false,
            kruise: false,
            cluster_domain: "cluster.local".to_owned(),
            sandbox_workers: Self::DEFAULT_SANDBOX_WORKERS,
            claim_workers: Self::DEFAULT_CLAIM_WORKERS,
            warm_pool_workers: Self::DEFAULT_WARM_POOL_WORKERS,
            template_workers: Self::DEFAULT_TEMPLATE_WORKERS,
            warm_pool_max_batch_size: Self::DEFAULT_WARM_POOL_MAX_BATCH_SIZE,
            batch_claim_max_batch_size: Self::DEFAULT_BATCH_CLAIM_MAX_BATCH_SIZE,
            require_adoptable_label: false,
            requests: None,
            unused_policy_grace: Self::UNUSED_POLICY_GRACE,
        }
    }
}
