//! The `agent-sandbox` binary. The commands are in the modules.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod arguments;
mod assets;
mod bench;
mod build_info;
mod connection;
mod data_directory;
mod generate;
mod image;
mod logging;
mod node_flags;
mod node_identity;
mod open_files;
mod output;
mod parts;
mod private_system;
mod reset;
mod rootless;
mod run;
mod sandboxes;
mod signals;
mod terminal;
mod token;
mod up;
mod visible;

use std::process::ExitCode;

/// The API server and the controllers allocate and free many small values, which this allocator does much faster than the C library's
/// (ADR 33).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    // As the runtime inside a sandbox, the binary starts itself again for a command on a terminal.
    if let Some(code) = sandboxd::run_terminal_helper() {
        return code;
    }
    telemetry::panics::count();
    match arguments::parse().and_then(arguments::Arguments::execute) {
        Ok(code) => code,
        Err(error) => {
            logging::fatal(&output::chain(&error));
            ExitCode::FAILURE
        }
    }
}
