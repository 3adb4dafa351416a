//! The small binary: reads its configuration, runs the server on one thread, and logs to standard error.

use std::process::ExitCode;

use sandboxd::{Config, Invocation, LogFormat, USAGE};

fn main() -> ExitCode {
    if let Some(code) = sandboxd::run_terminal_helper() {
        return code;
    }
    let config = match Config::parse(std::env::args().skip(1), |name| std::env::var(name).ok()) {
        Ok(Invocation::Run(config)) => *config,
        Ok(Invocation::Help) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Ok(Invocation::Version) => {
            println!("sandboxd {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Err(error) => return fail(&error, LogFormat::Text),
    };
    let format = config.log_format;
    let lines = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false);
    match format {
        LogFormat::Text => lines.init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error, format),
    };
    let outcome = runtime.block_on(sandboxd::run(config));
    // Threads that still wait for a disk must not delay the exit.
    runtime.shutdown_background();
    outcome.map_or_else(|error| fail(&error, format), |()| ExitCode::SUCCESS)
}

/// Logs one line with the cause, and returns the exit code of a failed start.
fn fail(error: &dyn std::error::Error, format: LogFormat) -> ExitCode {
    let line = error_chain::chain(error);
    match format {
        LogFormat::Text => eprintln!("sandboxd: {line}"),
        LogFormat::Json => tracing::error!("{line}"),
    }
    ExitCode::FAILURE
}
