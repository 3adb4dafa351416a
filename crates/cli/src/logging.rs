//! Where log lines of the parts go when they run under a command of this binary: to standard error.

use telemetry::Exporter;
use tracing_subscriber::{EnvFilter, Layer};

/// Who reads the log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// An operator of a system that runs: warnings are shown.
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

fn install(audience: Audience, exporter: Option<&Exporter>) {
    let default = match audience {
        Audience::Operator => "warn",
        Audience::User => "off",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_filter(filter);
    telemetry::export::install(lines, exporter).expect("logging is started once");
}
