//! The `commands` engine: run a command, get its output.

use std::time::Duration;

use bytes::Bytes;
use http::Method;
use serde::{Deserialize, Serialize};
use tracing::Span;

use crate::connector::{Call, CallOptions};
use crate::encoding::command_line;
use crate::error::{Error, ErrorKind};
use crate::sandbox::Sandbox;

/// The largest answer of a command, in bytes.
const MAX_EXECUTION_RESPONSE_SIZE: u64 = 16 * 1024 * 1024;

/// What a command printed, and how it ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct ExecutionResult {
    #[serde(default)]
    pub stdout: String,
    #[serde(default)]
    pub stderr: String,
    /// 0 is success. A command that a signal killed has the signal's negative number.
    #[serde(default)]
    pub exit_code: i32,
    /// Whether it was killed because its time was over.
    #[serde(default)]
    pub timed_out: bool,
}

impl ExecutionResult {
    pub fn is_success(&self) -> bool {
        self.exit_code == 0
    }
}

/// How a command is run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    pub call: CallOptions,
    /// How long the command may run before the sandbox kills it. The sandbox has a limit of its own when none is given.
    pub time_limit: Option<Duration>,
}

impl From<CallOptions> for RunOptions {
    fn from(call: CallOptions) -> Self {
        Self {
            call,
            time_limit: None,
        }
    }
}

#[derive(Serialize)]
struct ExecuteRequest<'a> {
    command: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_seconds: Option<f64>,
}

/// Runs commands in a sandbox. See [`Sandbox::commands`].
#[derive(Clone, Debug)]
pub struct Commands {
    sandbox: Sandbox,
}

impl Commands {
    pub(crate) fn new(sandbox: Sandbox) -> Self {
        Self { sandbox }
    }

    /// Runs a command line, split into words as a shell does but without a shell, in the sandbox's base directory. It is sent
    /// once: running a command twice may do harm.
    pub async fn run(&self, command: &str) -> Result<ExecutionResult, Error> {
        self.run_with(command, &RunOptions::default()).await
    }

    /// As [`Commands::run`], within other limits, or more than once if it fails on the way.
    pub async fn run_with(
        &self,
        command: &str,
        options: &RunOptions,
    ) -> Result<ExecutionResult, Error> {
        self.sandbox
            .operate("run", |connector| async move {
                let span = Span::current();
                span.record("sandbox.command", command);
                let request = ExecuteRequest {
                    command,
                    timeout_seconds: options.time_limit.map(|limit| limit.as_secs_f64()),
                };
                let body =
                    serde_json::to_vec(&request).map_err(|cause| ErrorKind::InvalidResponse {
                        operation: "run",
                        cause,
                    })?;
                let answer = connector
                    .send(Call {
                        operation: "run",
                        method: Method::POST,
                        endpoint: "execute".into(),
                        content_type: Some("application/json".into()),
                        body: Bytes::from(body),
                        max_attempts: options.call.max_attempts.unwrap_or(1),
                        timeout: options.call.timeout,
                    })
                    .await?;
                let result: ExecutionResult = answer.json(MAX_EXECUTION_RESPONSE_SIZE).await?;
                span.record("sandbox.exit_code", result.exit_code);
                Ok(result)
            })
            .await
    }

    /// Runs a program with exactly these arguments.
    pub async fn run_program(
        &self,
        program: &str,
        arguments: &[&str],
    ) -> Result<ExecutionResult, Error> {
        let words = std::iter::once(program).chain(arguments.iter().copied());
        self.run(&command_line(words)).await
    }

    /// Runs a piece of Python.
    pub async fn run_code(&self, code: &str) -> Result<ExecutionResult, Error> {
        self.run_program("python3", &["-c", code]).await
    }
}
