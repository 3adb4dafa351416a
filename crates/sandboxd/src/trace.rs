//! The trace that a request belongs to: handed to the command it runs, and answered with how long that took.
//!
//! Nothing is exported from inside a sandbox. Who runs in it must not reach the collector, so the router exports the span of a
//! command from what is answered here. A command that traces itself finds its parent in `TRACEPARENT` and `TRACESTATE`.

use std::collections::BTreeMap;
use std::time::Duration;

use http::Response;
use http::header::{HeaderMap, HeaderName, HeaderValue};

const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");
const CARRIED: [(&str, &str); 2] = [("traceparent", "TRACEPARENT"), ("tracestate", "TRACESTATE")];
/// Longer headers are no trace context.
const LONGEST: usize = 512;

/// The trace of one request.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    environment: BTreeMap<String, String>,
}

impl Trace {
    pub fn of(headers: &HeaderMap) -> Self {
        let mut environment = BTreeMap::new();
        for (header, variable) in CARRIED {
            let value = headers.get(header).and_then(|value| value.to_str().ok());
            if let Some(value) = value.filter(|value| !value.is_empty() && value.len() <= LONGEST) {
                environment.insert(variable.to_owned(), value.to_owned());
            }
        }
        // The second means nothing without the first.
        if !environment.contains_key(CARRIED[0].1) {
            environment.clear();
        }
        Self { environment }
    }

    /// Hands the trace to a command, unless it is told of another.
    pub fn hand_to(&self, environment: &mut BTreeMap<String, String>) {
        for (name, value) in &self.environment {
            environment
                .entry(name.clone())
                .or_insert_with(|| value.clone());
        }
    }

    /// Says on the answer how long the command took, to whoever traces it.
    pub fn tell<B>(&self, response: &mut Response<B>, took: Duration) {
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
    fn a_command_inherits_the_trace_unless_it_brings_its_own() {
        let trace = Trace::of(&headers(&[("traceparent", PARENT), ("tracestate", "a=1")]));
        let mut environment = BTreeMap::from([("TRACESTATE".to_owned(), "own=1".to_owned())]);
        trace.hand_to(&mut environment);
        assert_eq!(environment["TRACEPARENT"], PARENT);
        assert_eq!(environment["TRACESTATE"], "own=1");
    }

    #[test]
    fn only_who_traces_is_told_the_time() {
        let mut response = Response::new(());
        let took = Duration::from_micros(1_500);
        Trace::of(&headers(&[("tracestate", "a=1")])).tell(&mut response, took);
        assert!(response.headers().is_empty());
        Trace::of(&headers(&[("traceparent", PARENT)])).tell(&mut response, took);
        assert_eq!(response.headers()[SERVER_TIMING], "execute;dur=1.500");
    }
}
