//! Sends spans to an OpenTelemetry collector: OTLP over gRPC, in batches, from a thread of its own.
//!
//! The standard environment variables say where and how: `OTEL_EXPORTER_OTLP_ENDPOINT` (`http://localhost:4317` unless set),
//! `…_HEADERS`, `…_TIMEOUT`, `…_INSECURE`, each also as `OTEL_EXPORTER_OTLP_TRACES_…`; `OTEL_TRACES_SAMPLER` and its `_ARG`;
//! `OTEL_BSP_…` for the batches; `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` for who we are. A collector that does not
//! answer costs spans, never work: the line of finished spans is bounded and drops.

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

/// The name of what makes the spans, as tools file them.
pub(crate) const SCOPE: &str = "agent-sandbox-controller";
/// How long starting may take.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the last spans may take to be sent when the process ends.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);
/// The crates whose spans are exported. Others, above all those that carry the export itself, are nobody's trace.
const TRACED: [&str; 5] = [
    "agent_sandbox",
    "agent_sandbox_node",
    "controllers",
    "router",
    "sdk",
];

/// Why no spans can be exported.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot set up the OTLP exporter; check the OTEL_EXPORTER_OTLP_* variables")]
    Build(#[source] ExporterBuildError),
    #[error("the OTLP exporter was not set up within {START_TIMEOUT:?}")]
    TimedOut,
}

/// A running export of spans. To be stopped before the process ends, or the last spans are lost.
#[derive(Debug)]
pub struct Exporter {
    provider: SdkTracerProvider,
}

impl Exporter {
    /// Starts to export the spans of a process that calls itself `service`, unless `OTEL_SERVICE_NAME` names it. Called within
    /// a tokio runtime, which must outlive the exporter.
    pub async fn start(service: &'static str) -> Result<Self, Error> {
        Self::start_to(service, None).await
    }

    /// The same, to this endpoint whatever the environment says, if one is given.
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

    /// The layer of a subscriber that takes in the spans to export.
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

    /// Sends what is left, and exports nothing more.
    pub async fn stop(self) {
        spans::set_exported(false);
        let provider = self.provider;
        let stopping =
            tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(FLUSH_TIMEOUT));
        if let Ok(Err(error)) = stopping.await {
            warn!(%error, "the last spans were not sent; is the collector reachable?");
        }
    }
}

/// Makes log lines, and spans if they are exported, what this process does with its reports. Fails where that is settled already.
pub fn install(
    lines: impl Layer<Registry> + Send + Sync + 'static,
    exporter: Option<&Exporter>,
) -> Result<(), TryInitError> {
    let lines = tracing_subscriber::registry().with(lines.with_filter(filter_fn(tells_no_bodies)));
    match exporter {
        None => lines.try_init(),
        Some(exporter) => lines.with(exporter.layer()).try_init(),
    }
}

/// Whether log lines of this origin tell no bodies of answers. The Kubernetes client logs the whole body of an answer that it cannot
/// decode, which may hold the secrets of every tenant; what failed is told by whoever asked.
fn tells_no_bodies(origin: &Metadata<'_>) -> bool {
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
    fn the_body_of_an_answer_is_never_logged() {
        let lines = Lines::default();
        let kept = lines.clone();
        let layer = tracing_subscriber::fmt::layer().with_writer(move || kept.clone());
        let layer = layer.with_filter(filter_fn(tells_no_bodies));
        let subscriber = tracing_subscriber::registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            // As the Kubernetes client does.
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
