//! The `agent-sandbox` binary: composes the parts. What it does is in the modules.

mod arguments;
mod assets;
mod connection;
mod data_directory;
mod generate;
mod logging;
mod output;
mod run;
mod sandboxes;
mod terminal;
mod up;

use std::process::ExitCode;

fn main() -> ExitCode {
    match arguments::parse().execute() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
