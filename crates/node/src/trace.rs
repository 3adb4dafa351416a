//! Trace spans of the node's work for a pod, in the trace that the pod belongs to. Without an exporter, no spans are created.

use k8s_openapi::api::core::v1::Pod;
use telemetry::{TraceContext, spans};
use tracing::field::Empty;
use tracing::{Span, info_span};

/// The span of a step towards a running pod, under this name. It is a child of the span that requested the pod.
pub(crate) fn step(pod: &Pod, name: &'static str) -> Span {
    if !spans::are_exported() {
        return Span::none();
    }
    let span = info_span!(
        "node",
        otel.name = name,
        otel.status_code = Empty,
        otel.status_description = Empty,
        namespace = pod.metadata.namespace,
        pod = pod.metadata.name,
        container = Empty,
    );
    let annotations = pod.metadata.annotations.as_ref();
    let context = annotations.and_then(|annotations| annotations.get(api::labels::TRACE_CONTEXT));
    if let Some(context) = context.and_then(|text| TraceContext::from_annotation(text)) {
        spans::continue_from(&span, &context);
    }
    span
}

/// Records in the span why its step failed.
pub(crate) fn failed(reason: &str) {
    let span = Span::current();
    span.record("otel.status_code", "ERROR");
    span.record("otel.status_description", reason);
}
