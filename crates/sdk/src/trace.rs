//! Tracing: spans for operations, and propagation of the trace context in requests and claims.
//!
//! The SDK reports through the `tracing` crate and is independent of exporters. A program that exports traces supplies a
//! [`Propagator`], a few lines over its tracing system; every request and claim then carries the W3C trace context.

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;

use tracing::field::Empty;
use tracing::{Instrument, Span};

use crate::error::Key;

/// Writes the context of the current span into a carrier: header names and values, for example `traceparent`.
///
/// With `opentelemetry` and `tracing-opentelemetry` it is one call: pass the current span's context to the global
/// text-map propagator.
///
/// ```
/// #[derive(Debug)]
/// struct Fixed;
///
/// impl sdk::trace::Propagator for Fixed {
///     fn inject(&self, set: &mut dyn FnMut(&str, String)) {
///         set("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into());
///     }
/// }
/// ```
pub trait Propagator: Send + Sync + fmt::Debug {
    /// Calls `set` once for each entry of the carrier. It is called inside the span whose context is propagated.
    fn inject(&self, set: &mut dyn FnMut(&str, String));
}

/// A context from outside, for a program that is itself part of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteContext {
    pub traceparent: String,
    pub tracestate: Option<String>,
}

impl Propagator for RemoteContext {
    fn inject(&self, set: &mut dyn FnMut(&str, String)) {
        set("traceparent", self.traceparent.clone());
        if let Some(tracestate) = &self.tracestate {
            set("tracestate", tracestate.clone());
        }
    }
}

/// The carrier of the current span. Empty without a propagator.
pub(crate) fn carrier(propagator: Option<&dyn Propagator>) -> BTreeMap<String, String> {
    let mut carrier = BTreeMap::new();
    if let Some(propagator) = propagator {
        propagator.inject(&mut |name, value| {
            carrier.insert(name.to_owned(), value);
        });
    }
    carrier
}

/// The span that covers a handle from opening to closing, and is the parent of all its operations.
pub(crate) fn lifecycle(service: &str, key: &Key) -> Span {
    tracing::info_span!(
        "sandbox.lifecycle",
        otel.name = format!("{service}.lifecycle"),
        otel.status_code = Empty,
        error = Empty,
        sandbox.claim.name = key.claim,
        sandbox.namespace = key.namespace,
        sandbox.name = Empty,
    )
}

/// The span of one operation.
pub(crate) fn operation(parent: &Span, service: &str, name: &'static str) -> Span {
    tracing::info_span!(
        parent: parent,
        "sandbox.operation",
        otel.name = format!("{service}.{name}"),
        otel.kind = "client",
        otel.status_code = Empty,
        error = Empty,
        sandbox.request_id = Empty,
        sandbox.command = Empty,
        sandbox.exit_code = Empty,
        sandbox.file.path = Empty,
        sandbox.file.size = Empty,
        sandbox.file.count = Empty,
        sandbox.file.exists = Empty,
    )
}

/// The span of one step of opening a handle, a child of its lifecycle span.
pub(crate) fn step(service: &str, name: &'static str) -> Span {
    tracing::info_span!(
        "sandbox.step",
        otel.name = format!("{service}.{name}"),
        otel.kind = "client",
        otel.status_code = Empty,
        error = Empty,
        sandbox.claim.name = Empty,
        sandbox.gateway.name = Empty,
        sandbox.gateway.namespace = Empty,
    )
}

/// Runs the work of a span, and marks the span as failed if the work fails.
pub(crate) async fn within<T, E: fmt::Display>(
    span: Span,
    work: impl Future<Output = Result<T, E>>,
) -> Result<T, E> {
    let result = work.instrument(span.clone()).await;
    record(&span, result)
}

/// Marks the span as failed if the result is an error.
pub(crate) fn record<T, E: fmt::Display>(span: &Span, result: Result<T, E>) -> Result<T, E> {
    if let Err(error) = &result {
        span.record("otel.status_code", "ERROR");
        span.record("error", tracing::field::display(error));
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_context_is_propagated_unchanged() {
        let context = RemoteContext {
            traceparent: "00-aa-bb-01".into(),
            tracestate: Some("vendor=1".into()),
        };
        let carrier = carrier(Some(&context));
        assert_eq!(
            serde_json::to_string(&carrier).unwrap(),
            r#"{"traceparent":"00-aa-bb-01","tracestate":"vendor=1"}"#
        );
        assert!(super::carrier(None).is_empty());
    }
}
