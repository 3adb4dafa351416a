//! What the parts share to be observed: traces that cross them, and the figures of the process.
//!
//! | module | owns |
//! |---|---|
//! | [`context`] | the W3C trace context as text: headers and the annotation `opentelemetry.io/trace-context` |
//! | [`spans`] | joining a `tracing` span to such a context, and reading the context of one |
//! | [`export`] | sending spans to an OpenTelemetry collector |
//! | [`process`] | the process' own metrics, in Prometheus' text |
//! | [`panics`] | counting panics, of which each is a bug |
//!
//! The parts report through `tracing` and ask [`spans::are_exported`] before they do anything that only a trace needs. Until an
//! exporter is started that is one relaxed load, and nothing else here runs.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod context;
pub mod export;
pub mod panics;
pub mod process;
pub mod spans;

pub use context::TraceContext;
pub use export::Exporter;
