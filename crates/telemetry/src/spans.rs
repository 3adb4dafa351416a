//! Connects `tracing` spans to trace contexts from other processes, and reads the context of a span for propagation.
//!
//! While no exporter runs, these functions do nothing and return `None`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{SpanBuilder, SpanKind, TraceContextExt, Tracer};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt;

use crate::context::{TRACEPARENT, TRACESTATE, TraceContext};

static EXPORTED: AtomicBool = AtomicBool::new(false);

/// Whether spans are exported. Check this before any work that only a trace needs.
#[inline]
pub fn are_exported() -> bool {
    EXPORTED.load(Ordering::Relaxed)
}

pub(crate) fn set_exported(exported: bool) {
    EXPORTED.store(exported, Ordering::Relaxed);
}

/// Makes a span the child of a context. The span must not have been entered yet.
pub fn continue_from(span: &Span, context: &TraceContext) {
    if are_exported() {
        // This fails for a span that is not exported or was already entered. The trace then starts at this span.
        let _ = span.set_parent(extracted(context));
    }
}

/// The context of a span, for propagation to the processes that it calls. `None` if the span is not exported.
pub fn context_of(span: &Span) -> Option<TraceContext> {
    if !are_exported() {
        return None;
    }
    injected(&span.context())
}

/// The context of the current span.
pub fn current() -> Option<TraceContext> {
    if !are_exported() {
        return None;
    }
    context_of(&Span::current())
}

/// Gives a span an attribute. Names with dots need not be declared where the span is made.
pub fn set_attribute(span: &Span, name: &'static str, value: impl Into<String>) {
    if are_exported() {
        span.set_attribute(name, value.into());
    }
}

/// Adds an event to a span, with these attributes. It goes to the trace alone, not to the log.
pub fn add_event(
    span: &Span,
    name: &'static str,
    attributes: impl IntoIterator<Item = (&'static str, String)>,
) {
    if are_exported() {
        let attributes = attributes.into_iter();
        let attributes = attributes.map(|(name, value)| KeyValue::new(name, value));
        span.add_event(name, attributes.collect());
    }
}

/// Exports a child of `span` that another process reported afterwards: it ended at `end` and took `duration`.
pub fn export_child(
    span: &Span,
    name: &'static str,
    end: SystemTime,
    duration: Duration,
    attributes: impl IntoIterator<Item = (&'static str, String)>,
) {
    if !are_exported() {
        return;
    }
    let parent = span.context();
    if !parent.span().span_context().is_sampled() {
        return;
    }
    let start = end.checked_sub(duration).unwrap_or(end);
    let tracer = opentelemetry::global::tracer(crate::export::SCOPE);
    let builder = SpanBuilder::from_name(name)
        .with_kind(SpanKind::Internal)
        .with_start_time(start)
        .with_attributes(
            attributes
                .into_iter()
                .map(|(key, value)| KeyValue::new(key, value)),
        );
    let mut child = tracer.build_with_context(builder, &parent);
    opentelemetry::trace::Span::end_with_timestamp(&mut child, end);
}

fn extracted(context: &TraceContext) -> Context {
    let carrier: HashMap<String, String> = context
        .headers()
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    TraceContextPropagator::new().extract_with_context(&Context::new(), &carrier)
}

fn injected(context: &Context) -> Option<TraceContext> {
    let mut carrier = HashMap::new();
    TraceContextPropagator::new().inject_context(context, &mut carrier);
    TraceContext::new(
        carrier.get(TRACEPARENT)?,
        carrier.get(TRACESTATE).map(String::as_str),
    )
}
