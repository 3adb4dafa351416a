//! The router's metrics, and their Prometheus text format. Plain atomics: counting costs a request a few nanoseconds.

use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the duration histogram, in seconds.
const BUCKETS: [f64; 14] = [
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 180.0,
];

/// The router's counters.
#[derive(Debug, Default)]
pub struct Metrics {
    /// By the first digit of the status code.
    requests: [AtomicU64; 6],
    buckets: [AtomicU64; BUCKETS.len()],
    duration_microseconds: AtomicU64,
    response_bytes: AtomicU64,
    pub(crate) active_requests: AtomicI64,
    pub(crate) active_tunnels: AtomicI64,
    pub(crate) open_connections: AtomicI64,
    pub(crate) dials: AtomicU64,
    pub(crate) failed_dials: AtomicU64,
    pub(crate) reused_connections: AtomicU64,
}

impl Metrics {
    pub(crate) fn finished(&self, status: u16, duration: Duration, bytes: u64) {
        self.requests[usize::from(status / 100).min(5)].fetch_add(1, Ordering::Relaxed);
        let seconds = duration.as_secs_f64();
        if let Some(bucket) = BUCKETS.iter().position(|bound| seconds <= *bound) {
            self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        }
        let microseconds = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        self.duration_microseconds
            .fetch_add(microseconds, Ordering::Relaxed);
        self.response_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The number of requests in flight.
    pub fn active_requests(&self) -> i64 {
        self.active_requests.load(Ordering::Relaxed)
    }

    /// The number of open upgraded connections.
    pub fn active_tunnels(&self) -> i64 {
        self.active_tunnels.load(Ordering::Relaxed)
    }

    /// The number of open client connections.
    pub fn open_connections(&self) -> i64 {
        self.open_connections.load(Ordering::Relaxed)
    }

    /// All metrics in Prometheus' text format. `sandboxes` is the size of the registry, `in_step` whether the watch on sandboxes
    /// works, if there is one.
    pub fn render(&self, sandboxes: usize, in_step: Option<bool>) -> String {
        let mut text = String::new();
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        heading(
            &mut text,
            "requests_total",
            "counter",
            "Requests answered, by class of status.",
        );
        for (class, counter) in self.requests.iter().enumerate().skip(1) {
            let _ = writeln!(
                text,
                "agent_sandbox_router_requests_total{{code=\"{class}xx\"}} {}",
                read(counter)
            );
        }
        self.render_durations(&mut text);
        for (name, kind, help, value) in [
            (
                "response_bytes_total",
                "counter",
                "Bytes of answers' bodies.",
                read(&self.response_bytes),
            ),
            (
                "dials_total",
                "counter",
                "Connections opened to sandboxes.",
                read(&self.dials),
            ),
            (
                "failed_dials_total",
                "counter",
                "Dials that failed.",
                read(&self.failed_dials),
            ),
            (
                "reused_connections_total",
                "counter",
                "Requests over a connection used before.",
                read(&self.reused_connections),
            ),
            ("sandboxes", "gauge", "Sandboxes known.", sandboxes as u64),
        ] {
            heading(&mut text, name, kind, help);
            let _ = writeln!(text, "agent_sandbox_router_{name} {value}");
        }
        let watch = in_step.map(|in_step| {
            (
                "watch_synced",
                "Whether the watch on sandboxes is in step.",
                i64::from(in_step),
            )
        });
        let gauges = [
            (
                "active_requests",
                "Requests being answered.",
                self.active_requests(),
            ),
            (
                "active_tunnels",
                "Upgraded connections.",
                self.active_tunnels(),
            ),
            (
                "open_connections",
                "Clients' connections.",
                self.open_connections(),
            ),
        ];
        for (name, help, value) in watch.into_iter().chain(gauges) {
            heading(&mut text, name, "gauge", help);
            let _ = writeln!(text, "agent_sandbox_router_{name} {value}");
        }
        text
    }

    fn render_durations(&self, text: &mut String) {
        const NAME: &str = "agent_sandbox_router_request_duration_seconds";
        heading(
            text,
            "request_duration_seconds",
            "histogram",
            "From a request's head to the end of its answer.",
        );
        let mut cumulated = 0;
        for (bound, counter) in BUCKETS.iter().zip(&self.buckets) {
            cumulated += counter.load(Ordering::Relaxed);
            let _ = writeln!(text, "{NAME}_bucket{{le=\"{bound}\"}} {cumulated}");
        }
        let total: u64 = self
            .requests
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .sum();
        let seconds =
            Duration::from_micros(self.duration_microseconds.load(Ordering::Relaxed)).as_secs_f64();
        let _ = writeln!(
            text,
            "{NAME}_bucket{{le=\"+Inf\"}} {total}\n{NAME}_sum {seconds}\n{NAME}_count {total}"
        );
    }
}

fn heading(text: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(
        text,
        "# HELP agent_sandbox_router_{name} {help}\n# TYPE agent_sandbox_router_{name} {kind}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_format_has_a_line_for_each_metric() {
        let metrics = Metrics::default();
        metrics.finished(200, Duration::from_millis(2), 10);
        metrics.finished(502, Duration::from_secs(1000), 5);
        let text = metrics.render(3, Some(true));
        for line in [
            "agent_sandbox_router_requests_total{code=\"2xx\"} 1",
            "agent_sandbox_router_requests_total{code=\"5xx\"} 1",
            "agent_sandbox_router_request_duration_seconds_bucket{le=\"0.0025\"} 1",
            "agent_sandbox_router_request_duration_seconds_bucket{le=\"180\"} 1",
            "agent_sandbox_router_request_duration_seconds_bucket{le=\"+Inf\"} 2",
            "agent_sandbox_router_request_duration_seconds_count 2",
            "agent_sandbox_router_response_bytes_total 15",
            "agent_sandbox_router_sandboxes 3",
            "agent_sandbox_router_watch_synced 1",
        ] {
            assert!(
                text.lines().any(|found| found == line),
                "no {line:?} in\n{text}"
            );
        }
        assert!(
            !metrics.render(3, None).contains("watch_synced"),
            "a router without a watch does not report a broken one"
        );
    }
}
