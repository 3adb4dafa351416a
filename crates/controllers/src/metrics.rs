//! Counts what the machinery reports, in the names that dashboards for Kubernetes controllers know.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::instrumentation::{Instrumentation, ReconcileResult, Verb};

/// How an exposition is to be served.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Of {
    controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Queued {
    name: &'static str,
    controller: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    controller: &'static str,
    result: ReconcileResult,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    kind: String,
    verb: Verb,
    outcome: &'static str,
}

impl EncodeLabelValue for ReconcileResult {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        let name = match self {
            Self::Success => "success",
            Self::RequeueAfter => "requeue_after",
            Self::Requeue => "requeue",
            Self::Error => "error",
        };
        name.encode(encoder)
    }
}

impl EncodeLabelValue for Verb {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        let name = match self {
            Self::Get => "get",
            Self::Create => "create",
            Self::Update => "update",
            Self::Patch => "patch",
            Self::PatchStatus => "patch_status",
            Self::Delete => "delete",
        };
        name.encode(encoder)
    }
}

/// From a hundredth of a millisecond up to some ten seconds.
#[derive(Clone, Debug)]
struct Seconds;

impl MetricConstructor<Histogram> for Seconds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.000_01, 4.0, 11))
    }
}

type Durations<L> = Family<L, Histogram, Seconds>;

/// The metrics of one process. Others may register theirs beside them.
#[derive(Debug)]
pub struct Metrics {
    registry: Arc<Mutex<Registry>>,
    depth: Family<Queued, Gauge>,
    adds: Family<Queued, Counter>,
    retries: Family<Queued, Counter>,
    waited: Durations<Queued>,
    worked: Durations<Queued>,
    reconciles: Family<Ended, Counter>,
    errors: Family<Of, Counter>,
    reconcile_time: Durations<Of>,
    active: Family<Of, Gauge>,
    workers: Family<Of, Gauge>,
    requests: Family<Request, Counter>,
}

impl Metrics {
    pub fn new() -> Self {
        let durations = || Durations::<Queued>::new_with_constructor(Seconds);
        let metrics = Self {
            registry: Arc::default(),
            depth: Family::default(),
            adds: Family::default(),
            retries: Family::default(),
            waited: durations(),
            worked: durations(),
            reconciles: Family::default(),
            errors: Family::default(),
            reconcile_time: Durations::<Of>::new_with_constructor(Seconds),
            active: Family::default(),
            workers: Family::default(),
            requests: Family::default(),
        };
        metrics.with_registry(|registry| metrics.register(registry));
        metrics
    }

    fn register(&self, registry: &mut Registry) {
        let queue = registry.sub_registry_with_prefix("workqueue");
        queue.register("depth", "Objects ready to be worked on", self.depth.clone());
        queue.register("adds", "Objects added to the queue", self.adds.clone());
        queue.register("retries", "Objects to be tried again", self.retries.clone());
        queue.register(
            "queue_duration_seconds",
            "How long objects waited for a worker",
            self.waited.clone(),
        );
        queue.register(
            "work_duration_seconds",
            "How long work on objects took",
            self.worked.clone(),
        );
        let controller = registry.sub_registry_with_prefix("controller_runtime");
        controller.register(
            "reconcile",
            "Reconciles by how they ended",
            self.reconciles.clone(),
        );
        controller.register(
            "reconcile_errors",
            "Reconciles that failed",
            self.errors.clone(),
        );
        controller.register(
            "reconcile_time_seconds",
            "How long reconciles took",
            self.reconcile_time.clone(),
        );
        controller.register(
            "active_workers",
            "Reconciles under way",
            self.active.clone(),
        );
        controller.register(
            "max_concurrent_reconciles",
            "How many reconciles may be under way at once",
            self.workers.clone(),
        );
        registry.register(
            "agent_sandbox_api_requests",
            "Requests to the API server on behalf of reconciles",
            self.requests.clone(),
        );
    }

    /// Lets others add metrics of their own.
    pub fn with_registry<T>(&self, use_registry: impl FnOnce(&mut Registry) -> T) -> T {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        use_registry(&mut registry)
    }

    /// All metrics as text.
    pub fn exposition(&self) -> String {
        self.with_registry(|registry| {
            let mut text = String::new();
            // Writing to a string cannot fail.
            let _ = encode(&mut text, registry);
            text
        })
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

fn queued(controller: &'static str) -> Queued {
    Queued {
        name: controller,
        controller,
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

impl Instrumentation for Metrics {
    fn controller_registered(&self, controller: &'static str, workers: usize) {
        let of = Of { controller };
        self.workers.get_or_create(&of).set(count(workers));
        self.active.get_or_create(&of).set(0);
        self.errors.get_or_create(&of).inc_by(0);
        self.depth.get_or_create(&queued(controller)).set(0);
    }

    fn queue_added(&self, controller: &'static str, depth: usize) {
        let queued = queued(controller);
        self.adds.get_or_create(&queued).inc();
        self.depth.get_or_create(&queued).set(count(depth));
    }

    fn reconcile_started(&self, controller: &'static str, waited: Duration, depth: usize) {
        let queued = queued(controller);
        self.waited
            .get_or_create(&queued)
            .observe(waited.as_secs_f64());
        self.depth.get_or_create(&queued).set(count(depth));
        self.active.get_or_create(&Of { controller }).inc();
    }

    fn reconcile_finished(
        &self,
        controller: &'static str,
        took: Duration,
        result: ReconcileResult,
    ) {
        let of = Of { controller };
        let queued = queued(controller);
        let seconds = took.as_secs_f64();
        self.active.get_or_create(&of).dec();
        self.worked.get_or_create(&queued).observe(seconds);
        self.reconcile_time.get_or_create(&of).observe(seconds);
        self.reconciles
            .get_or_create(&Ended { controller, result })
            .inc();
        match result {
            ReconcileResult::Error => {
                self.errors.get_or_create(&of).inc();
                self.retries.get_or_create(&queued).inc();
            }
            ReconcileResult::Requeue => {
                self.retries.get_or_create(&queued).inc();
            }
            ReconcileResult::Success | ReconcileResult::RequeueAfter => {}
        }
    }

    fn requested(&self, kind: &str, verb: Verb, _took: Duration, succeeded: bool) {
        let request = Request {
            kind: kind.to_owned(),
            verb,
            outcome: if succeeded { "success" } else { "error" },
        };
        self.requests.get_or_create(&request).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dashboards_find_the_names_they_know() {
        let metrics = Metrics::new();
        metrics.controller_registered("sandbox", 7);
        metrics.queue_added("sandbox", 1);
        metrics.reconcile_started("sandbox", Duration::from_millis(1), 0);
        let took = Duration::from_millis(2);
        metrics.reconcile_finished("sandbox", took, ReconcileResult::Error);
        let text = metrics.exposition();
        for line in [
            "workqueue_adds_total{name=\"sandbox\",controller=\"sandbox\"} 1",
            "workqueue_retries_total{name=\"sandbox\",controller=\"sandbox\"} 1",
            "workqueue_depth{name=\"sandbox\",controller=\"sandbox\"} 0",
            "controller_runtime_reconcile_total{controller=\"sandbox\",result=\"error\"} 1",
            "controller_runtime_reconcile_errors_total{controller=\"sandbox\"} 1",
            "controller_runtime_active_workers{controller=\"sandbox\"} 0",
            "controller_runtime_max_concurrent_reconciles{controller=\"sandbox\"} 7",
            "controller_runtime_reconcile_time_seconds_count{controller=\"sandbox\"} 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
