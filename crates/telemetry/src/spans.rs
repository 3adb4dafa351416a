//! Joins `tracing` spans to contexts from elsewhere, and reads the context of a span to send it along.
//!
//! Everything here does nothing, and answers with nothing, while no exporter runs.

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

/// Whether spans go anywhere. Ask before doing what only a trace needs.
#[inline]
pub fn are_exported() -> bool {
    EXPORTED.load(Ordering::Relaxed)
}

pub(crate) fn set_exported(exported: bool) {
    EXPORTED.store(exported, Ordering::Relaxed);
}

/// Makes a span, which must not have been entered yet, the child of a context.
pub fn continue_from(span: &Span, context: &TraceContext) {
    if are_exported() {
        // It fails for a span that no exporter sees, or one that has begun; either way the trace begins here instead.
        let _ = span.set_parent(extracted(context));
    }
}

/// The context of a span, for those that it calls. `None` if the span is not exported.
pub fn context_of(span: &Span) -> Option<TraceContext> {
    if !are_exported() {
        return None;
    }
    injected(&span.context())
}

/// The context of the span that is entered now.
pub fn current() -> Option<TraceContext> {
    if !are_exported() {
        return None;
    }
    context_of(&Span::current())
}

/// Exports a child of `span` that another process told of after the fact: it ended at `end` and took `duration`.
pub fn told_child(
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
