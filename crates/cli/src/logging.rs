//! Where log lines of the parts go when they run under a command of this binary: to standard error, warnings unless asked.

use tracing_subscriber::EnvFilter;

/// Sends log lines to standard error. `RUST_LOG` chooses what is shown, such as `RUST_LOG=info`.
pub fn start() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
}
