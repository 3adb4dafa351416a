//! Exports each request as a span of its caller's trace, if tracing is enabled.
//!
//! A caller that sends `traceparent` is the parent. Otherwise the request joins the trace that created the sandbox, whose context
//! the sandbox carries. The sandbox receives the context of the router's own span. Processes in the sandbox must not reach a
//! collector: the runtime reports the duration of a command by `Server-Timing`, and the router exports its span.

use std::time::{Duration, SystemTime};

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::{Method, Response};
use telemetry::context::{TRACEPARENT, TRACESTATE};
use telemetry::{TraceContext, spans};
use tracing::Span;
use tracing::field::Empty;

use crate::identify::Target;

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
/// The name of a command's duration in `Server-Timing`.
const EXECUTE: &str = "execute";
/// A longer duration is implausible and ignored.
const MAX_EXECUTION: Duration = Duration::from_secs(86_400);

/// The span of a request to a sandbox. `carried` is the context that the sandbox carries.
pub(crate) fn begin(
    method: &Method,
    path: &str,
    headers: &HeaderMap,
    target: &Target,
    carried: Option<&TraceContext>,
) -> Span {
    let span = tracing::info_span!(
        "request",
        otel.name = format!("{method} sandbox"),
        otel.kind = "server",
        otel.status_code = Empty,
        http.request.method = method.as_str(),
        url.path = path,
        http.response.status_code = Empty,
        sandbox.name = target.sandbox.name(),
        sandbox.namespace = target.sandbox.namespace(),
        sandbox.port = target.port,
    );
    let sent = context_in(headers);
    if let Some(parent) = sent.as_ref().or(carried) {
        spans::continue_from(&span, parent);
    }
    span
}

/// Sends the context of the current span to the sandbox.
pub(crate) fn inject_context(headers: &mut HeaderMap) {
    let Some(context) = spans::current() else {
        return;
    };
    headers.remove(TRACESTATE);
    for (name, value) in context.headers() {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(HeaderName::from_static(name), value);
        }
    }
}

/// Records the command's duration as the sandbox reported it.
pub(crate) fn answered<B>(span: &Span, response: &Response<B>) {
    if let Some(duration) = execution_in(response.headers()) {
        spans::export_child(span, "sandboxd.execute", SystemTime::now(), duration, []);
    }
}

/// Records the status with which a request ended.
pub(crate) fn ended(span: &Span, status: u16) {
    span.record("http.response.status_code", status);
    if status >= 500 {
        span.record("otel.status_code", "ERROR");
    }
}

fn context_in(headers: &HeaderMap) -> Option<TraceContext> {
    let text = |name| headers.get(name)?.to_str().ok();
    TraceContext::new(text(TRACEPARENT)?, text(TRACESTATE))
}

fn execution_in(headers: &HeaderMap) -> Option<Duration> {
    let timing = headers.get(SERVER_TIMING)?.to_str().ok()?;
    let execute = timing.split(',').find_map(|metric| {
        let mut parts = metric.split(';').map(str::trim);
        (parts.next()? == EXECUTE).then_some(parts)
    });
    let milliseconds: f64 = execute?
        .find_map(|part| part.strip_prefix("dur="))?
        .parse()
        .ok()?;
    Duration::try_from_secs_f64(milliseconds / 1_000.0)
        .ok()
        .filter(|duration| *duration <= MAX_EXECUTION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn implausible_command_durations_are_ignored() {
        let parsed = |value: &'static str| {
            let headers = HeaderMap::from_iter([(SERVER_TIMING, HeaderValue::from_static(value))]);
            execution_in(&headers)
        };
        let milliseconds = |number| Some(Duration::from_millis(number));
        assert_eq!(parsed("execute;dur=12"), milliseconds(12));
        assert_eq!(parsed("cache;dur=1, execute;desc=x;dur=3"), milliseconds(3));
        for bad in [
            "",
            "execute",
            "execute;dur=",
            "execute;dur=-1",
            "execute;dur=NaN",
            "execute;dur=1e300",
            "execute;dur=90000000",
            "executed;dur=1",
        ] {
            assert_eq!(parsed(bad), None, "{bad}");
        }
    }
}
