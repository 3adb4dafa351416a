//! Where log lines and spans go when parts run under a command of this binary: lines to standard error, spans to a collector.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, ValueEnum};
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use telemetry::{Exporter, TraceContext, spans};
use tracing::{Instrument, info_span};
use tracing_subscriber::{EnvFilter, Layer};

/// The variables that name a collector.
const ENDPOINTS: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
];

/// Whether everything on standard error is JSON. Chosen once, by the command that runs.
static JSON: AtomicBool = AtomicBool::new(false);

/// How lines on standard error look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For people
    #[default]
    Text,
    /// One object a line, with timestamp, level, message and the fields of the line
    Json,
}

impl From<controllers::manager::Format> for Format {
    fn from(format: controllers::manager::Format) -> Self {
        match format {
            controllers::manager::Format::Json => Self::Json,
            controllers::manager::Format::Text => Self::Text,
        }
    }
}

/// The flag of every command that runs a part.
#[derive(Clone, Copy, Debug, Default, Args)]
#[group(skip)]
pub struct LogFlags {
    /// How lines on standard error look
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "text")]
    pub log_format: Format,
}

/// Sets the format of lines on standard error. To be called before anything is printed.
pub fn choose(format: Format) {
    JSON.store(format == Format::Json, Ordering::Relaxed);
}

fn is_json() -> bool {
    JSON.load(Ordering::Relaxed)
}

/// Prints a notice to the user who started a part; it concerns no single request.
pub fn notice(text: &str) {
    if is_json() {
        tracing::warn!("{text}");
    } else {
        eprintln!("{text}");
    }
}

/// Prints why the process fails, whether logging is set up or not.
pub fn fatal(reason: &str) {
    if is_json() {
        let line = json!({
            "timestamp": Timestamp::now().to_string(),
            "level": "ERROR",
            "message": reason,
            "target": "agent_sandbox",
        });
        eprintln!("{line}");
    } else {
        eprintln!("error: {reason}");
    }
}

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

/// Runs a part for an operator: its log lines go to standard error and, if asked for, its spans to a collector. The last
/// spans are sent before this returns.
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

/// Runs a command for a user. If the environment names an OTLP collector, the command is exported as a span. `TRACEPARENT` names
/// its parent, so that the trace of the calling program contains the command.
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
        // Lines of the target `access` exist only with --access-log. The components log the failures of their own watches, so
        // kube's warnings would only repeat them.
        Audience::Operator => "warn,access=info,kube_runtime::watcher=error",
        Audience::User => "off",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = if is_json() {
        // As the controllers write them.
        lines
            .json()
            .flatten_event(true)
            .with_current_span(true)
            .with_span_list(false)
            .boxed()
    } else {
        let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        lines.with_ansi(colours).boxed()
    };
    telemetry::export::install(lines.with_filter(filter), exporter)
        .expect("logging is started once");
}
