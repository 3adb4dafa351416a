//! Exports spans to an OpenTelemetry collector: OTLP over gRPC, in batches, from a dedicated thread.
//!
//! It is configured by the standard environment variables: `OTEL_EXPORTER_OTLP_ENDPOINT` (default `http://localhost:4317`),
//! `…_HEADERS`, `…_TIMEOUT`, `…_INSECURE`, each also as `OTEL_EXPORTER_OTLP_TRACES_…`; `OTEL_TRACES_SAMPLER` and its `_ARG`;
//! `OTEL_BSP_…` for the batches; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` for the identity of this process. If the
//! collector does not answer, spans are lost but no work is delayed: the queue of finished spans is bounded and drops spans when
//! full.

use std::time::Duration;

use opentelemetry::trace::TracerProvider;
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tracing::{Metadata, Subscriber, warn};
use tracing_subscriber::filter::{LevelFilter, Targets, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{Layer, Registry};

use crate::spans;

/// The instrumentation scope of the spans.
pub(crate) const SCOPE: &str = "agent-sandbox-controller";
/// The timeout for the start of the exporter.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout for sending the last spans when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// The crates whose spans are exported. Spans of other crates, above all those that perform the export, are not.
const TRACED: [&str; 5] = [
    "agent_sandbox",
    "agent_sandbox_node",
    "controllers",
    "router",
    "sdk",
];

/// Why the exporter could not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot set up the OTLP exporter; check the OTEL_EXPORTER_OTLP_* variables")]
    Build(#[source] ExporterBuildError),
    #[error("the OTLP exporter was not set up within {START_TIMEOUT:?}")]
    TimedOut,
}

/// A running span exporter. Stop it before the process ends; otherwise the last spans are lost.
#[derive(Debug)]
pub struct Exporter {
    provider: SdkTracerProvider,
}

impl Exporter {
    /// Starts to export the spans of this process under the name `service`, unless `OTEL_SERVICE_NAME` is set. Must be called in
    /// a tokio runtime that outlives the exporter.
    pub async fn start(service: &'static str) -> Result<Self, Error> {
        Self::start_to(service, None).await
    }

    /// Like [`Exporter::start`], but sends to `endpoint`, if given, whatever the environment says.
    pub async fn start_to(service: &'static str, endpoint: Option<&str>) -> Result<Self, Error> {
        let endpoint = endpoint.map(str::to_owned);
        let building = tokio::task::spawn_blocking(move || build(service, endpoint));
        match tokio::time::timeout(START_TIMEOUT, building).await {
            Ok(Ok(built)) => {
                let exporter = Self { provider: built? };
                opentelemetry::global::set_tracer_provider(exporter.provider.clone());
                spans::set_exported(true);
                Ok(exporter)
            }
            Ok(Err(_)) | Err(_) => Err(Error::TimedOut),
        }
    }

    /// The subscriber layer that collects the spans to export.
    pub fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'span> LookupSpan<'span> + Send + Sync,
    {
        let tracer: SdkTracer = self.provider.tracer(SCOPE);
        let spans = TRACED.map(|name| (name, LevelFilter::DEBUG));
        tracing_opentelemetry::layer()
            .with_tracer(tracer)
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(Targets::new().with_targets(spans))
    }

    /// Sends the remaining spans and stops the export.
    pub async fn stop(self) {
        spans::set_exported(false);
        let provider = self.provider;
        let stopping =
            tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(FLUSH_TIMEOUT));
        if let Ok(Err(error)) = stopping.await {
            warn!(%error, "the last spans could not be sent; is the collector reachable?");
        }
    }
}

/// Installs the global subscriber: log lines, and spans if they are exported. Fails if a global subscriber is already installed.
pub fn install(
    lines: impl Layer<Registry> + Send + Sync + 'static,
    exporter: Option<&Exporter>,
) -> Result<(), TryInitError> {
    let lines =
        tracing_subscriber::registry().with(lines.with_filter(filter_fn(has_no_response_bodies)));
    match exporter {
        None => lines.try_init(),
        Some(exporter) => lines.with(exporter.layer()).try_init(),
    }
}

/// Whether log lines of this origin never contain response bodies. The Kubernetes client logs the whole body of a response that
/// it cannot decode, which may contain the secrets of every tenant. The caller of the client logs the error itself.
fn has_no_response_bodies(origin: &Metadata<'_>) -> bool {
    origin.target() != "kube_client::client"
}

fn build(service: &'static str, endpoint: Option<String>) -> Result<SdkTracerProvider, Error> {
    let mut exporter = SpanExporter::builder().with_tonic();
    if let Some(endpoint) = endpoint {
        exporter = exporter.with_endpoint(endpoint);
    }
    let exporter = exporter.build().map_err(Error::Build)?;
    let mut resource = Resource::builder();
    if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
        resource = resource.with_service_name(service);
    }
    Ok(SdkTracerProvider::builder()
        .with_batch_exporter(exporter)
        .with_resource(resource.build())
        .build())
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn response_bodies_are_never_logged() {
        let lines = Lines::default();
        let kept = lines.clone();
        let layer = tracing_subscriber::fmt::layer().with_writer(move || kept.clone());
        let layer = layer.with_filter(filter_fn(has_no_response_bodies));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            // The Kubernetes client logs like this.
            tracing::warn!(target: "kube_client::client", "{}, {:?}", "{\"password\":\"hunter2\"}", "an error");
            tracing::warn!(target: "kube_client::client::builder", "failed with status 500");
            tracing::warn!("the watch failed");
        });
        let lines = String::from_utf8(lines.0.lock().unwrap().clone()).unwrap();
        assert!(!lines.contains("hunter2"), "{lines}");
        assert!(
            lines.contains("status 500") && lines.contains("the watch failed"),
            "{lines}"
        );
    }
}
