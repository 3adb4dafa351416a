//! The `commands` engine: run a command and return its output.

use std::time::Duration;

use bytes::Bytes;
use http::Method;
use serde::{Deserialize, Serialize};
use tracing::Span;

use crate::connector::{Call, CallOptions};
use crate::encoding::command_line;
use crate::error::{Error, ErrorKind};
use crate::sandbox::Sandbox;

/// How much longer than its command a call may take: for the network, and for killing a command that reaches its time limit.
const ROUND_TRIP_ALLOWANCE: Duration = Duration::from_secs(30);

/// The largest factor by which JSON escapes expand a byte: `\u001b` has six.
const JSON_EXPANSION: u64 = 6;
/// The size of a response beside its two streams.
const ANSWER_OVERHEAD: u64 = 64 * 1024;

/// A command's output and exit code.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct ExecutionResult {
    #[serde(default)]
    pub stdout: String,
    #[serde(default)]
    pub stderr: String,
    /// 0 is success. A command that a signal killed has the negative number of the signal.
    #[serde(default)]
    pub exit_code: i32,
    /// Whether the command was killed at its time limit.
    #[serde(default)]
    pub timed_out: bool,
    /// Whether output is missing because a stream exceeded the sandbox's limit, or [`crate::Options::max_output_size`].
    /// [`Sandbox::process`] streams output of any length.
    #[serde(default)]
    pub truncated: bool,
}

impl ExecutionResult {
    pub fn is_success(&self) -> bool {
        self.exit_code == 0
    }

    /// Truncates each stream to at most this many bytes.
    fn cut_to(&mut self, bytes: u64) {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        for stream in [&mut self.stdout, &mut self.stderr] {
            if stream.len() > bytes {
                let end = (0..=bytes).rev().find(|end| stream.is_char_boundary(*end));
                stream.truncate(end.unwrap_or(0));
                self.truncated = true;
            }
        }
    }
}

/// The size of the largest response with two streams of this length.
fn largest_answer(stream: u64) -> u64 {
    let streams = stream.saturating_mul(2 * JSON_EXPANSION);
    streams.saturating_add(ANSWER_OVERHEAD)
}

/// Options for running a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunOptions {
    pub call: CallOptions,
    /// How long the command may run before the sandbox kills it; without a value the sandbox's own limit applies. Unless `call` sets another timeout, the
    /// call waits for at least this long. A router ends requests after its own proxy timeout (180 s by default): use [`Sandbox::process`] for longer commands.
    pub time_limit: Option<Duration>,
}

impl RunOptions {
    /// The timeout of the call, if not the client's default.
    fn call_timeout(&self, default: Duration) -> Option<Duration> {
        let for_command = || {
            let limit = self.time_limit?.saturating_add(ROUND_TRIP_ALLOWANCE);
            Some(limit.max(default))
        };
        self.call.timeout.or_else(for_command)
    }
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

    /// Runs a command line, split into words as by a shell but without a shell, in the sandbox's base directory. It is sent
    /// once: running a command twice may do harm.
    pub async fn run(&self, command: &str) -> Result<ExecutionResult, Error> {
        self.run_with(command, &RunOptions::default()).await
    }

    /// As [`Commands::run`], with other limits, or with retries if the request fails.
    pub async fn run_with(
        &self,
        command: &str,
        options: &RunOptions,
    ) -> Result<ExecutionResult, Error> {
        let client_options = self.sandbox.options();
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
                        timeout: options.call_timeout(client_options.request_timeout),
                    })
                    .await?;
                let largest = client_options.max_output_size;
                let mut result: ExecutionResult = answer.json(largest_answer(largest)).await?;
                result.cut_to(largest);
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

    /// Runs Python code.
    pub async fn run_code(&self, code: &str) -> Result<ExecutionResult, Error> {
        self.run_program("python3", &["-c", code]).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_waits_for_its_command() {
        let default = Duration::from_secs(180);
        let limited = |seconds| RunOptions {
            time_limit: Some(Duration::from_secs(seconds)),
            ..RunOptions::default()
        };
        assert_eq!(RunOptions::default().call_timeout(default), None);
        assert_eq!(limited(5).call_timeout(default), Some(default));
        assert_eq!(
            limited(600).call_timeout(default),
            Some(Duration::from_secs(630))
        );
        let forever = RunOptions {
            time_limit: Some(Duration::MAX),
            ..RunOptions::default()
        };
        assert_eq!(forever.call_timeout(default), Some(Duration::MAX));
        let explicit = RunOptions {
            call: CallOptions::timeout(Duration::from_secs(1)),
            ..limited(600)
        };
        assert_eq!(explicit.call_timeout(default), Some(Duration::from_secs(1)));
    }

    #[test]
    fn output_is_truncated_between_characters_and_flagged() {
        let mut result = ExecutionResult {
            stdout: "aü".into(),
            stderr: "b".into(),
            ..ExecutionResult::default()
        };
        result.cut_to(2);
        assert_eq!(
            (
                result.stdout.as_str(),
                result.stderr.as_str(),
                result.truncated
            ),
            ("a", "b", true)
        );
        let mut whole = ExecutionResult {
            stdout: "aü".into(),
            ..ExecutionResult::default()
        };
        whole.cut_to(3);
        assert!(!whole.truncated);
    }
}
