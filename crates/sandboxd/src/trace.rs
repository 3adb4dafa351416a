//! Trace context of a request: passed to the command in its environment; the response reports the command's duration.
//!
//! Nothing is exported from inside a sandbox, because untrusted code must not reach the collector. The router exports the span of a
//! command from the response. A command with its own tracing finds its parent in `TRACEPARENT` and `TRACESTATE`.

use std::collections::BTreeMap;
use std::time::Duration;

use http::Response;
use http::header::{HeaderMap, HeaderName, HeaderValue};

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
const PROPAGATED: [(&str, &str); 2] =
    [("traceparent", "TRACEPARENT"), ("tracestate", "TRACESTATE")];
/// Longer headers are not a trace context.
const LONGEST: usize = 512;

/// The trace of one request.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    environment: BTreeMap<String, String>,
}

impl Trace {
    pub fn of(headers: &HeaderMap) -> Self {
        let mut environment = BTreeMap::new();
        for (header, variable) in PROPAGATED {
            let value = headers.get(header).and_then(|value| value.to_str().ok());
            if let Some(value) = value.filter(|value| !value.is_empty() && value.len() <= LONGEST) {
                environment.insert(variable.to_owned(), value.to_owned());
            }
        }
        // `tracestate` means nothing without `traceparent`.
        if !environment.contains_key(PROPAGATED[0].1) {
            environment.clear();
        }
        Self { environment }
    }

    /// Adds the trace to a command's environment, unless the request sets another.
    pub fn add_to_environment(&self, environment: &mut BTreeMap<String, String>) {
        for (name, value) in &self.environment {
            environment
                .entry(name.clone())
                .or_insert_with(|| value.clone());
        }
    }

    /// Adds the command's duration to the response if the request is traced.
    pub fn add_server_timing<B>(&self, response: &mut Response<B>, took: Duration) {
        if self.environment.is_empty() {
            return;
        }
        let timing = format!("execute;dur={:.3}", took.as_secs_f64() * 1_000.0);
        if let Ok(value) = HeaderValue::from_str(&timing) {
            response.headers_mut().insert(SERVER_TIMING, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| {
                (
                    HeaderName::from_static(name),
                    HeaderValue::from_static(value),
                )
            })
            .collect()
    }

    #[test]
    fn a_command_inherits_the_trace_unless_the_request_sets_one() {
        let trace = Trace::of(&headers(&[("traceparent", PARENT), ("tracestate", "a=1")]));
        let mut environment = BTreeMap::from([("TRACESTATE".to_owned(), "own=1".to_owned())]);
        trace.add_to_environment(&mut environment);
        assert_eq!(environment["TRACEPARENT"], PARENT);
        assert_eq!(environment["TRACESTATE"], "own=1");
    }

    #[test]
    fn only_traced_requests_get_server_timing() {
        let mut response = Response::new(());
        let took = Duration::from_micros(1_500);
        Trace::of(&headers(&[("tracestate", "a=1")])).add_server_timing(&mut response, took);
        assert!(response.headers().is_empty());
        Trace::of(&headers(&[("traceparent", PARENT)])).add_server_timing(&mut response, took);
        assert_eq!(response.headers()[SERVER_TIMING], "execute;dur=1.500");
    }
}
