//! The client's metrics: its operations on sandboxes with their durations, and the time to connect. In Prometheus' text
//! format, with the metric names of the published SDKs where these have one.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bucket bounds for operations, in seconds.
const SECONDS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0,
];
/// Bucket bounds in milliseconds, as in the published SDKs.
const MILLISECONDS: &[f64] = &[
    100.0, 250.0, 500.0, 750.0, 1000.0, 1250.0, 1500.0, 2000.0, 2500.0, 5000.0, 10_000.0, 30_000.0,
    60_000.0, 120_000.0, 240_000.0,
];

/// Whether an operation succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Outcome {
    Success,
    Failure,
}

impl Outcome {
    fn of<T, E>(result: &Result<T, E>) -> Self {
        match result {
            Ok(_) => Self::Success,
            Err(_) => Self::Failure,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Failure => "failure",
        }
    }
}

/// The unit of a histogram, and its buckets.
#[derive(Clone, Copy, Debug)]
struct Scale {
    per_second: f64,
    bounds: &'static [f64],
}

const IN_SECONDS: Scale = Scale {
    per_second: 1.0,
    bounds: SECONDS,
};
const IN_MILLISECONDS: Scale = Scale {
    per_second: 1000.0,
    bounds: MILLISECONDS,
};

#[derive(Clone, Debug)]
struct Histogram {
    scale: Scale,
    buckets: Vec<u64>,
    sum: Duration,
    count: u64,
}

impl Histogram {
    fn new(scale: Scale) -> Self {
        Self {
            scale,
            buckets: vec![0; scale.bounds.len()],
            sum: Duration::ZERO,
            count: 0,
        }
    }

    fn observe(&mut self, duration: Duration) {
        let value = duration.as_secs_f64() * self.scale.per_second;
        let mut bounds = self.scale.bounds.iter();
        if let Some(at) = bounds.position(|bound| value <= *bound)
            && let Some(bucket) = self.buckets.get_mut(at)
        {
            *bucket = bucket.saturating_add(1);
        }
        self.sum = self.sum.saturating_add(duration);
        self.count = self.count.saturating_add(1);
    }

    fn render(&self, text: &mut String, name: &str, labels: &str) {
        let mut below = 0_u64;
        for (bound, bucket) in self.scale.bounds.iter().zip(&self.buckets) {
            below = below.saturating_add(*bucket);
            let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {below}");
        }
        let (count, sum) = (self.count, self.sum.as_secs_f64() * self.scale.per_second);
        let _ = writeln!(text, "{name}_bucket{{{labels},le=\"+Inf\"}} {count}");
        let _ = writeln!(text, "{name}_sum{{{labels}}} {sum}");
        let _ = writeln!(text, "{name}_count{{{labels}}} {count}");
    }
}

type ByOutcome = BTreeMap<(&'static str, Outcome), Histogram>;

/// The metrics of one kind of operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationMetrics {
    /// The name in spans: `run`, `read`, `upload`, ….
    pub operation: &'static str,
    pub requests: u64,
    pub errors: u64,
    /// The sum of all durations.
    pub total_duration: Duration,
}

/// The metrics of a [`crate::Client`]. See [`crate::Client::metrics`].
#[derive(Debug, Default)]
pub struct Metrics {
    operations: Mutex<ByOutcome>,
    /// By connection mode.
    discoveries: Mutex<ByOutcome>,
    /// Suspensions and resumptions.
    changes: Mutex<ByOutcome>,
}

impl Metrics {
    pub(crate) fn operated<T, E>(
        &self,
        operation: &'static str,
        took: Duration,
        result: &Result<T, E>,
    ) {
        observe(&self.operations, IN_SECONDS, operation, took, result);
    }

    /// `mode` is the connection mode.
    pub(crate) fn discovered<T, E>(
        &self,
        mode: &'static str,
        took: Duration,
        result: &Result<T, E>,
    ) {
        observe(&self.discoveries, IN_MILLISECONDS, mode, took, result);
    }

    /// `change` is `suspend` or `resume`.
    pub(crate) fn changed<T, E>(
        &self,
        change: &'static str,
        took: Duration,
        result: &Result<T, E>,
    ) {
        observe(&self.changes, IN_MILLISECONDS, change, took, result);
    }

    /// Requests, errors and durations, by operation. An operation with retries counts once.
    pub fn operations(&self) -> Vec<OperationMetrics> {
        let mut all: Vec<OperationMetrics> = Vec::new();
        for ((operation, outcome), histogram) in &*lock(&self.operations) {
            let errors = match outcome {
                Outcome::Success => 0,
                Outcome::Failure => histogram.count,
            };
            match all.last_mut() {
                Some(last) if last.operation == *operation => {
                    last.requests = last.requests.saturating_add(histogram.count);
                    last.errors = last.errors.saturating_add(errors);
                    last.total_duration = last.total_duration.saturating_add(histogram.sum);
                }
                _ => all.push(OperationMetrics {
                    operation,
                    requests: histogram.count,
                    errors,
                    total_duration: histogram.sum,
                }),
            }
        }
        all
    }

    /// All metrics, in Prometheus' text format.
    pub fn render(&self) -> String {
        let mut text = String::new();
        let operations = lock(&self.operations).clone();
        let name = "sandbox_client_requests_total";
        heading(&mut text, name, "counter", "Operations on sandboxes.");
        for ((operation, outcome), histogram) in &operations {
            let status = outcome.as_str();
            let count = histogram.count;
            let _ = writeln!(
                text,
                "{name}{{operation=\"{operation}\",status=\"{status}\"}} {count}"
            );
        }
        let name = "sandbox_client_request_duration_seconds";
        let help = "How long operations on sandboxes took, all attempts included.";
        heading(&mut text, name, "histogram", help);
        for ((operation, outcome), histogram) in &operations {
            let status = outcome.as_str();
            let labels = format!("operation=\"{operation}\",status=\"{status}\"");
            histogram.render(&mut text, name, &labels);
        }
        let name = "sandbox_client_discovery_latency_ms";
        let help = "Latency of establishing connection to the sandbox in milliseconds";
        heading(&mut text, name, "histogram", help);
        for ((mode, outcome), histogram) in &*lock(&self.discoveries) {
            let labels = format!("mode=\"{mode}\",status=\"{}\"", outcome.as_str());
            histogram.render(&mut text, name, &labels);
        }
        let changes = lock(&self.changes).clone();
        for (change, what) in [("suspend", "suspending"), ("resume", "resuming")] {
            let name = format!("sandbox_client_{change}_latency_ms");
            let help = format!("Latency of {what} the sandbox in milliseconds");
            heading(&mut text, &name, "histogram", &help);
            for ((_, outcome), histogram) in changes.iter().filter(|((of, _), _)| *of == change) {
                let labels = format!("status=\"{}\"", outcome.as_str());
                histogram.render(&mut text, &name, &labels);
            }
        }
        text
    }
}

fn observe<T, E>(
    histograms: &Mutex<ByOutcome>,
    scale: Scale,
    what: &'static str,
    took: Duration,
    result: &Result<T, E>,
) {
    let mut histograms = lock(histograms);
    let histogram = histograms.entry((what, Outcome::of(result)));
    histogram
        .or_insert_with(|| Histogram::new(scale))
        .observe(took);
}

fn heading(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_counted_with_their_time_and_outcome() {
        let metrics = Metrics::default();
        let second = Duration::from_secs(1);
        metrics.operated("run", second, &Ok::<(), ()>(()));
        metrics.operated("run", second * 20, &Err::<(), ()>(()));
        metrics.operated("read", Duration::from_millis(7), &Ok::<(), ()>(()));
        metrics.discovered("port_forward", second, &Ok::<(), ()>(()));
        metrics.changed("resume", second, &Err::<(), ()>(()));
        let run = OperationMetrics {
            operation: "run",
            requests: 2,
            errors: 1,
            total_duration: second * 21,
        };
        assert_eq!(metrics.operations()[1], run);
        let text = metrics.render();
        for line in [
            "sandbox_client_requests_total{operation=\"run\",status=\"failure\"} 1",
            "sandbox_client_request_duration_seconds_bucket{operation=\"read\",status=\"success\",le=\"0.005\"} 0",
            "sandbox_client_request_duration_seconds_bucket{operation=\"read\",status=\"success\",le=\"0.01\"} 1",
            "sandbox_client_request_duration_seconds_bucket{operation=\"read\",status=\"success\",le=\"10\"} 1",
            "sandbox_client_request_duration_seconds_bucket{operation=\"run\",status=\"failure\",le=\"10\"} 0",
            "sandbox_client_request_duration_seconds_bucket{operation=\"run\",status=\"failure\",le=\"30\"} 1",
            "sandbox_client_request_duration_seconds_bucket{operation=\"run\",status=\"failure\",le=\"+Inf\"} 1",
            "sandbox_client_request_duration_seconds_sum{operation=\"run\",status=\"failure\"} 20",
            "sandbox_client_discovery_latency_ms_bucket{mode=\"port_forward\",status=\"success\",le=\"750\"} 0",
            "sandbox_client_discovery_latency_ms_bucket{mode=\"port_forward\",status=\"success\",le=\"1000\"} 1",
            "sandbox_client_discovery_latency_ms_sum{mode=\"port_forward\",status=\"success\"} 1000",
            "sandbox_client_resume_latency_ms_count{status=\"failure\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }
}
