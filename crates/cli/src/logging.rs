//! Where log lines of the parts go when they run under a command of this binary: to standard error.

use tracing_subscriber::EnvFilter;

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
    let default = match audience {
        Audience::Operator => "warn",
        Audience::User => "off",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
}
