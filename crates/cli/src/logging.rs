//! Where log lines and spans go when parts run under a command of this binary: lines to standard error, spans to a collector.

use std::io::IsTerminal;

use telemetry::{Exporter, TraceContext, spans};
use tracing::{Instrument, info_span};
use tracing_subscriber::{EnvFilter, Layer};

/// The variables that name a collector.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
];

/// Who reads the log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// An operator of a system that runs: warnings are shown, and requests if they were asked for.
    Operator,
    /// A user of a command, whose errors are the command's own: nothing is shown.
    User,
}

/// Sends log lines to standard error. `RUST_LOG` chooses what is shown, such as `RUST_LOG=info`.
pub fn start(audience: Audience) {
    install(audience, None);
}

/// Runs a part for an operator: its log lines go to standard error and, if asked for, its spans to a collector. What is left of
/// them is sent before this returns.
pub async fn observed<T>(
    service: &'static str,
    traces: bool,
    part: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let exporter = if traces {
        Some(Exporter::start(service).await?)
    } else {
        None
    };
    install(Audience::Operator, exporter.as_ref());
    let outcome = part.await;
    if let Some(exporter) = exporter {
        exporter.stop().await;
    }
    outcome
}

/// Runs a command for a user. If the environment names a collector, the command is a span there, below the one that `TRACEPARENT`
/// names: whoever traces what it starts sees what became of it.
pub async fn traced<T>(
    name: &'static str,
    command: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    if !ENDPOINTS.iter().any(is_set) {
        install(Audience::User, None);
        return command.await;
    }
    let exporter = Exporter::start("agent-sandbox").await?;
    install(Audience::User, Some(&exporter));
    let span = info_span!("command", otel.name = name);
    let variable = |name: &str| std::env::var(name).ok();
    let parent = variable("TRACEPARENT")
        .and_then(|parent| TraceContext::new(&parent, variable("TRACESTATE").as_deref()));
    if let Some(parent) = parent {
        spans::continue_from(&span, &parent);
    }
    let outcome = command.instrument(span).await;
    exporter.stop().await;
    outcome
}

/// Sends the trace of a command along with its requests.
#[derive(Debug)]
pub struct CurrentTrace;

impl sdk::trace::Propagator for CurrentTrace {
    fn inject(&self, set: &mut dyn FnMut(&str, String)) {
        if let Some(context) = spans::current() {
            for (name, value) in context.headers() {
                set(name, value.to_owned());
            }
        }
    }
}

fn install(audience: Audience, exporter: Option<&Exporter>) {
    let default = match audience {
        // Lines of the target `access` exist only with --access-log. What becomes of a watch is told by whoever has it.
        Audience::Operator => "warn,access=info,kube_runtime::watcher=error",
        Audience::User => "off",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none())
        .with_filter(filter);
    telemetry::export::install(lines, exporter).expect("logging is started once");
}
