//! Queues, reconciles and requests, under the names that controller-runtime and client-go gave them.

use std::time::Duration;

use prometheus::{HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts};

use super::{Metrics, WELL_FORMED};
use crate::instrumentation::{ReconcileResult, RequestReport, Verb};

/// Histogram buckets for reconciles in seconds: controller-runtime's, and finer ones below.
const RECONCILE_BUCKETS: &[f64] = &[
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, //
    0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9,
    1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 15.0, 20.0,
    25.0, 30.0, 40.0, 50.0, 60.0,
];
/// Histogram buckets for queues in seconds: the powers of ten that client-go uses, and halves between those that matter here.
const QUEUE_BUCKETS: &[f64] = &[
    1e-8, 1e-7, 1e-6, 1e-5, 5e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2, 1e-1, 0.5, 1.0, 10.0, 100.0,
    1_000.0,
];

#[derive(Debug)]
pub(super) struct Machinery {
    host: String,
    depth: IntGaugeVec,
    adds: IntCounterVec,
    retries: IntCounterVec,
    waited: HistogramVec,
    worked: HistogramVec,
    reconciles: IntCounterVec,
    errors: IntCounterVec,
    panics: IntCounterVec,
    reconcile_time: HistogramVec,
    active: IntGaugeVec,
    workers: IntGaugeVec,
    requests: IntCounterVec,
    requests_by_kind: IntCounterVec,
}

const QUEUE: &[&str] = &["name", "controller"];
const CONTROLLER: &[&str] = &["controller"];

fn counters(name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    IntCounterVec::new(Opts::new(name, help), labels).expect(WELL_FORMED)
}

fn gauges(name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    IntGaugeVec::new(Opts::new(name, help), labels).expect(WELL_FORMED)
}

fn durations(name: &str, help: &str, labels: &[&str], buckets: &[f64]) -> HistogramVec {
    let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
    HistogramVec::new(options, labels).expect(WELL_FORMED)
}

impl Machinery {
    pub fn new(host: &str) -> Self {
        Self {
            host: host.to_owned(),
            depth: gauges("workqueue_depth", "Current depth of workqueue", QUEUE),
            adds: counters(
                "workqueue_adds_total",
                "Total number of adds handled by workqueue",
                QUEUE,
            ),
            retries: counters(
                "workqueue_retries_total",
                "Total number of retries handled by workqueue",
                QUEUE,
            ),
            waited: durations(
                "workqueue_queue_duration_seconds",
                "How long in seconds an item stays in workqueue before being requested",
                QUEUE,
                QUEUE_BUCKETS,
            ),
            worked: durations(
                "workqueue_work_duration_seconds",
                "How long in seconds processing an item from workqueue takes.",
                QUEUE,
                QUEUE_BUCKETS,
            ),
            reconciles: counters(
                "controller_runtime_reconcile_total",
                "Total number of reconciliations per controller",
                &["controller", "result"],
            ),
            errors: counters(
                "controller_runtime_reconcile_errors_total",
                "Total number of reconciliation errors per controller",
                CONTROLLER,
            ),
            panics: counters(
                "controller_runtime_reconcile_panics_total",
                "Total number of reconciliation panics per controller",
                CONTROLLER,
            ),
            reconcile_time: durations(
                "controller_runtime_reconcile_time_seconds",
                "Length of time per reconciliation per controller",
                CONTROLLER,
                RECONCILE_BUCKETS,
            ),
            active: gauges(
                "controller_runtime_active_workers",
                "Number of currently used workers per controller",
                CONTROLLER,
            ),
            workers: gauges(
                "controller_runtime_max_concurrent_reconciles",
                "Maximum number of concurrent reconciles per controller",
                CONTROLLER,
            ),
            requests: counters(
                "rest_client_requests_total",
                "Number of HTTP requests, partitioned by status code, method, and host.",
                &["code", "method", "host"],
            ),
            requests_by_kind: counters(
                "agent_sandbox_api_requests_total",
                "Requests to the API server on behalf of reconciles, by kind, verb and outcome.",
                &["kind", "verb", "outcome"],
            ),
        }
    }

    pub fn register(&self, metrics: &Metrics) {
        for counters in [
            &self.adds,
            &self.retries,
            &self.reconciles,
            &self.errors,
            &self.panics,
            &self.requests,
            &self.requests_by_kind,
        ] {
            metrics.register(counters.clone());
        }
        for gauges in [&self.depth, &self.active, &self.workers] {
            metrics.register(gauges.clone());
        }
        for histograms in [&self.waited, &self.worked, &self.reconcile_time] {
            metrics.register(histograms.clone());
        }
    }

    /// Every series of a controller exists from the start, so that a rate over the first failure is not lost.
    pub fn controller_registered(&self, controller: &'static str, workers: usize) {
        let of = [controller];
        let queue = [controller, controller];
        self.workers.with_label_values(&of).set(count(workers));
        self.active.with_label_values(&of).set(0);
        self.errors.with_label_values(&of).inc_by(0);
        self.panics.with_label_values(&of).inc_by(0);
        self.depth.with_label_values(&queue).set(0);
        self.adds.with_label_values(&queue).inc_by(0);
        self.retries.with_label_values(&queue).inc_by(0);
        for result in RESULTS {
            let labels = [controller, result];
            self.reconciles.with_label_values(&labels).inc_by(0);
        }
    }

    pub fn queue_added(&self, controller: &'static str, depth: usize) {
        let queue = [controller, controller];
        self.adds.with_label_values(&queue).inc();
        self.depth.with_label_values(&queue).set(count(depth));
    }

    pub fn reconcile_started(&self, controller: &'static str, waited: Duration, depth: usize) {
        let queue = [controller, controller];
        let waited = waited.as_secs_f64();
        self.waited.with_label_values(&queue).observe(waited);
        self.depth.with_label_values(&queue).set(count(depth));
        self.active.with_label_values(&[controller]).inc();
    }

    pub fn reconcile_finished(
        &self,
        controller: &'static str,
        took: Duration,
        result: ReconcileResult,
    ) {
        let of = [controller];
        let queue = [controller, controller];
        let seconds = took.as_secs_f64();
        self.active.with_label_values(&of).dec();
        self.worked.with_label_values(&queue).observe(seconds);
        self.reconcile_time.with_label_values(&of).observe(seconds);
        self.reconciles
            .with_label_values(&[controller, result_name(result)])
            .inc();
        match result {
            ReconcileResult::Error => self.errors.with_label_values(&of).inc(),
            ReconcileResult::Panic => {
                self.errors.with_label_values(&of).inc();
                self.panics.with_label_values(&of).inc();
            }
            ReconcileResult::Success | ReconcileResult::RequeueAfter | ReconcileResult::Requeue => {
            }
        }
        if !matches!(
            result,
            ReconcileResult::Success | ReconcileResult::RequeueAfter
        ) {
            self.retries.with_label_values(&queue).inc();
        }
    }

    pub fn requested(&self, report: &RequestReport<'_>) {
        let code = report
            .code
            .map_or_else(|| "<error>".to_owned(), |code| code.to_string());
        let (method, verb) = verb_names(report.verb);
        self.requests
            .with_label_values(&[code.as_str(), method, self.host.as_str()])
            .inc();
        let outcome = match report.code {
            Some(200..300) => "success",
            _ => "error",
        };
        self.requests_by_kind
            .with_label_values(&[report.kind, verb, outcome])
            .inc();
    }
}

const RESULTS: [&str; 4] = ["success", "requeue_after", "requeue", "error"];

fn result_name(result: ReconcileResult) -> &'static str {
    match result {
        ReconcileResult::Success => RESULTS[0],
        ReconcileResult::RequeueAfter => RESULTS[1],
        ReconcileResult::Requeue => RESULTS[2],
        ReconcileResult::Error | ReconcileResult::Panic => RESULTS[3],
    }
}

/// The method of HTTP, and the verb as Kubernetes has it.
fn verb_names(verb: Verb) -> (&'static str, &'static str) {
    match verb {
        Verb::Get => ("GET", "get"),
        Verb::List => ("GET", "list"),
        Verb::Create => ("POST", "create"),
        Verb::Update => ("PUT", "update"),
        Verb::Patch => ("PATCH", "patch"),
        Verb::PatchStatus => ("PATCH", "patch_status"),
        Verb::Delete => ("DELETE", "delete"),
    }
}

fn count(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
