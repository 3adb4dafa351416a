//! Tracks each request until its response has ended: counts it, and writes the access log if that is enabled.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::Method;
use tokio::time::Instant;
use tracing::Span;

use crate::metrics::Metrics;
use crate::trace;

/// A request that is being served. It is dropped with the body of its response, which marks the end of the request.
pub struct Tracked {
    metrics: Arc<Metrics>,
    started: Instant,
    pub status: u16,
    pub bytes: u64,
    logged: Option<Box<LoggedRequest>>,
    /// The span of the request, if it is traced.
    span: Option<Span>,
}

/// The fields of a request that the access log contains.
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
        // 499 (nginx's code): the client disconnected before there was a response.
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
