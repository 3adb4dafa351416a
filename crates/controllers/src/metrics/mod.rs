//! The metrics of one process, under the names that dashboards for Kubernetes controllers use.
//!
//! Names, labels and help texts are a contract with existing dashboards and alerts; buckets may be added,
//! never removed. The submodules do the counting.

mod build;
mod claims;
mod entry_counts;
mod machinery;
mod sandboxes;

use std::time::Duration;

use api::Sandbox;
use prometheus::core::Collector;
use prometheus::{IntGaugeVec, Opts, Registry, TextEncoder};

use crate::cache::Change;
use crate::instrumentation::{
    ClaimReadiness, Count, Instrumentation, Provisioning, ReconcileResult, RequestReport,
};

pub use build::BuildInfo;
use claims::Claims;
use entry_counts::EntryCounts;
use machinery::Machinery;
use sandboxes::Sandboxes;

/// The content type of the exposition.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The metrics of one process. Other components may register theirs in it.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    machinery: Machinery,
    claims: Claims,
    sandboxes: Sandboxes,
    entry_counts: EntryCounts,
    leadership: IntGaugeVec,
}

impl Metrics {
    /// Metrics of a process whose requests go to this host, as `rest_client_requests_total` names it.
    pub fn new(host: &str, build: BuildInfo) -> Self {
        let leadership = IntGaugeVec::new(
            Opts::new(
                "leader_election_master_status",
                "Gauge of if the reporting system is master of the relevant lease, 0 indicates backup, 1 indicates master. \
                 'name' is the string used to identify the lease. Please make sure to group by name.",
            ),
            &["name"],
        )
        .expect(WELL_FORMED);
        let metrics = Self {
            registry: Registry::new(),
            machinery: Machinery::new(host),
            claims: Claims::new(),
            sandboxes: Sandboxes::new(),
            entry_counts: EntryCounts::new(),
            leadership,
        };
        metrics.machinery.register(&metrics);
        metrics.claims.register(&metrics);
        metrics.register(metrics.sandboxes.clone());
        metrics.register(metrics.entry_counts.clone());
        metrics.register(metrics.leadership.clone());
        metrics.register(build.gauge());
        metrics
    }

    /// Adds the metrics of another component.
    pub fn register(&self, collector: impl Collector + 'static) {
        self.registry
            .register(Box::new(collector))
            .expect("every metric is registered once, under a name of its own");
    }

    /// Records whether this process holds a lease.
    pub fn set_leader(&self, lease: &str, leads: bool) {
        let gauge = self.leadership.with_label_values(&[lease]);
        gauge.set(i64::from(leads));
    }

    /// All metrics as text.
    pub fn exposition(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail, and families without series are left out before.
        let _ = TextEncoder::new().encode_utf8(&self.registry.gather(), &mut text);
        text
    }
}

/// Why making a metric of constant parts cannot fail.
const WELL_FORMED: &str = "the name, help and labels are constants that Prometheus allows";

impl Instrumentation for Metrics {
    fn controller_registered(&self, controller: &'static str, workers: usize) {
        self.machinery.controller_registered(controller, workers);
    }

    fn queue_added(&self, controller: &'static str, depth: usize) {
        self.machinery.queue_added(controller, depth);
    }

    fn reconcile_started(&self, controller: &'static str, waited: Duration, depth: usize) {
        self.machinery.reconcile_started(controller, waited, depth);
    }

    fn reconcile_finished(
        &self,
        controller: &'static str,
        took: Duration,
        result: ReconcileResult,
    ) {
        self.machinery.reconcile_finished(controller, took, result);
    }

    fn claim_provisioned(&self, provisioning: &Provisioning<'_>) {
        self.claims.provisioned(provisioning);
    }

    fn claim_ready(&self, readiness: &ClaimReadiness<'_>) {
        self.claims.ready(readiness);
    }

    fn sandbox_changed(&self, change: &Change<'_, Sandbox>) {
        self.sandboxes.count(
            change.before.map(AsRef::as_ref),
            change.after.map(AsRef::as_ref),
        );
    }

    fn count_entries(&self, structure: &'static str, of: &str, count: Count) {
        self.entry_counts.add(structure, of, count);
    }

    fn requested(&self, report: &RequestReport<'_>) {
        self.machinery.requested(report);
    }
}

#[cfg(test)]
mod tests;
