//! Observability that all components share: distributed traces and process metrics.
//!
//! | module | owns |
//! |---|---|
//! | [`context`] | the W3C trace context as text: headers and the annotation `opentelemetry.io/trace-context` |
//! | [`spans`] | connecting a `tracing` span to a trace context, and reading the context of a span |
//! | [`export`] | the export of spans to an OpenTelemetry collector |
//! | [`process`] | process metrics in the Prometheus text format |
//! | [`panics`] | panic counters; each panic is a bug |
//!
//! The components report through `tracing` and check [`spans::are_exported`] before any work that only a trace needs. Until an
//! exporter is started, that check is one relaxed load, and nothing else in this crate runs.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod context;
pub mod export;
pub mod panics;
pub mod process;
pub mod spans;

pub use context::TraceContext;
pub use export::Exporter;

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
