//! Follows each request to the end of its answer: counts it, and logs it if asked to.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::Method;
use tokio::time::Instant;
use tracing::Span;

use crate::metrics::Metrics;
use crate::trace;

/// A request on its way. When it is dropped, with its answer's body, the request is over.
pub struct Tracked {
    metrics: Arc<Metrics>,
    started: Instant,
    pub status: u16,
    pub bytes: u64,
    logged: Option<Box<LoggedRequest>>,
    /// The span of the request, if it is traced.
    span: Option<Span>,
}

/// What the access log says about a request.
#[derive(Debug)]
pub struct LoggedRequest {
    pub method: Method,
    pub path: String,
    pub sandbox: String,
    pub client: std::net::IpAddr,
}

impl Tracked {
    pub fn start(metrics: &Arc<Metrics>) -> Self {
        metrics.active_requests.fetch_add(1, Ordering::Relaxed);
        Self {
            metrics: Arc::clone(metrics),
            started: Instant::now(),
            status: 0,
            bytes: 0,
            logged: None,
            span: None,
        }
    }

    pub fn trace(&mut self, span: Span) {
        self.span = Some(span);
    }

    pub fn log(&mut self, request: LoggedRequest) {
        self.logged = Some(Box::new(request));
    }
}

impl fmt::Debug for Tracked {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Tracked")
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.metrics.active_requests.fetch_sub(1, Ordering::Relaxed);
        let duration = self.started.elapsed();
        // 499 stands for a client that left before there was an answer.
        let status = if self.status == 0 { 499 } else { self.status };
        self.metrics.finished(status, duration, self.bytes);
        if let Some(span) = &self.span {
            trace::ended(span, status);
        }
        if let Some(logged) = &self.logged {
            tracing::info!(
                target: "access",
                method = %logged.method,
                path = %logged.path,
                sandbox = %logged.sandbox,
                client = %logged.client,
                status,
                bytes = self.bytes,
                duration_ms = duration.as_secs_f64() * 1000.0,
            );
        }
    }
}
