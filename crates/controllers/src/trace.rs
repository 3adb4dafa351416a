//! Reconciles as spans of the trace that their object belongs to.
//!
//! The annotation `opentelemetry.io/trace-context` carries a trace from the client that asked for a claim to its sandbox and pod. An
//! object that carries none begins a trace with its first reconcile, whose context it then carries. All of this happens only
//! while spans are exported; the caller asks [`telemetry::spans::are_exported`] first.

use std::sync::Arc;

use api::{Sandbox, SandboxClaim, labels};
use kube::{Resource, ResourceExt};
use serde_json::json;
use telemetry::{TraceContext, spans};
use tracing::{Span, debug};

use crate::context::Context;
use crate::key::ObjectKey;
use crate::writes::{Precondition, Writer};

/// The trace that an object belongs to.
pub(crate) fn context_of<K: Resource>(object: &K) -> Option<TraceContext> {
    let annotations = object.meta().annotations.as_ref()?;
    TraceContext::from_annotation(annotations.get(labels::TRACE_CONTEXT)?)
}

/// Begins the span of a reconcile: names it, joins it to the object's trace, and adds the trace ID to the log lines.
pub(crate) fn begin(span: &Span, kind: &str, parent: Option<&TraceContext>) {
    span.record("otel.name", format!("Reconcile{kind}"));
    if let Some(parent) = parent {
        spans::continue_from(span, parent);
    }
    if let Some(context) = spans::context_of(span) {
        span.record("trace_id", context.trace_id());
    }
}

/// The claim as it is, or with the context of this reconcile if it carries none, for its sandbox to inherit. Binding the claim
/// writes it.
pub(crate) fn with_context(claim: &Arc<SandboxClaim>) -> Arc<SandboxClaim> {
    if spans::are_exported()
        && context_of(claim.as_ref()).is_none()
        && let Some(context) = spans::current()
    {
        let mut traced = SandboxClaim::clone(claim);
        let annotations = traced.annotations_mut();
        annotations.insert(labels::TRACE_CONTEXT.to_owned(), context.to_annotation());
        return Arc::new(traced);
    }
    Arc::clone(claim)
}

/// Adds the sandbox's name to the span of this reconcile.
pub(crate) fn describe(sandbox: &ObjectKey) {
    let span = Span::current();
    spans::set_attribute(&span, "sandbox.name", sandbox.name.to_string());
    spans::set_attribute(&span, "sandbox.namespace", sandbox.namespace.to_string());
}

/// Annotates a sandbox without a trace context with that of this reconcile. A failure does not affect the sandbox.
pub(crate) async fn persist(
    context: &Context,
    key: &ObjectKey,
    sandbox: &Sandbox,
    field_manager: &'static str,
) {
    if context_of(sandbox).is_some() || sandbox.metadata.deletion_timestamp.is_some() {
        return;
    }
    let Some(trace) = spans::current() else {
        return;
    };
    let annotations = json!({ labels::TRACE_CONTEXT: trace.to_annotation() });
    let patch = json!({ "metadata": { "annotations": annotations } });
    let sandboxes = Writer::new(context, &context.caches.sandboxes, field_manager);
    if let Err(error) = sandboxes
        .patch(key, &Precondition::same(sandbox), patch)
        .await
    {
        debug!(%error, "the sandbox does not carry its trace");
    }
}
