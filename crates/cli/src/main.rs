//! The `agent-sandbox` binary: composes the parts. What it does is in the modules.

mod arguments;
mod assets;
mod bench;
mod connection;
mod data_directory;
mod generate;
mod leaks;
mod load;
mod logging;
mod output;
mod parts;
mod run;
mod sandboxes;
mod scrape;
mod terminal;
mod up;

use std::process::ExitCode;

fn main() -> ExitCode {
    // As the runtime inside a sandbox, the binary starts itself again for a command on a terminal.
    if let Some(code) = sandboxd::run_terminal_helper() {
        return code;
    }
    match arguments::parse().execute() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
