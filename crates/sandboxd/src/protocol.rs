//! The wire format of interactive execution, shared by the server and its clients. Serde only.
//!
//! # `GET /v1/exec` upgraded to a WebSocket
//!
//! ```text
//! client                                             server
//!   │ text    {"type":"start","argv":["python3"],…}    │   exactly once, first
//!   ├─────────────────────────────────────────────────►│
//!   │                    text {"type":"started","pid"} │   the command runs
//!   │◄─────────────────────────────────────────────────┤
//!   │ binary  0x00 + bytes for stdin                   │   any number, any order from here on
//!   │ text    {"type":"resize","rows":40,"cols":120}   │
//!   │ text    {"type":"signal","signal":"SIGINT"}      │   to the command's process group
//!   │ text    {"type":"stdin_close"}                   │
//!   │                      binary 0x01 + stdout bytes  │
//!   │                      binary 0x02 + stderr bytes  │   never with a terminal: it has one stream
//!   │      text {"type":"exit","exit_code":0}          │   exactly once, last; then a normal close
//!   │◄─────────────────────────────────────────────────┤
//! ```
//!
//! - Text frames are JSON objects tagged by `type` ([`ClientMessage`], [`ServerMessage`]); unknown fields are ignored.
//! - Binary frames begin with one channel byte ([`channel`]); an empty payload is allowed and means nothing.
//! - `start` names the command by exactly one of `argv` (executed directly) and `command` (run by `/bin/sh -c`). `cwd` is
//!   relative to the base directory unless absolute; `env` adds to the sandbox's environment.
//! - `exit_code` is the command's, or 128 plus the signal that killed it (`signal` then names it). A command that
//!   cannot start gets no `started`: its `exit` has 127 (not found) or 126 (found, but it cannot run) and an `error`.
//!   A command that reached `timeout_seconds` gets 124 and `timed_out`. With a terminal a failed start is 126 or 127 as
//!   well, and the reason appears on the terminal, as a shell would print it.
//! - When a client disconnects, or closes before `exit`, the command's process group is killed.
//! - An invalid frame closes the connection with code 1008 and the reason.
//! - Flow control is TCP's: a side that does not read stops the other side, including the command. Stdin frames that the
//!   command does not read delay the control frames behind them, once some hundred kilobytes are queued.
//!
//! # `POST /v1/exec`
//!
//! The body is a [`Start`] (without a terminal; `stdin` may contain the whole input). With `Accept: application/x-ndjson`
//! the response is one [`ServerMessage`] per line, including output, ending with `exit`; otherwise it is one JSON object
//! ([`Output`]) when the command has ended.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The first byte of a binary frame.
pub mod channel {
    /// Client to server: bytes for the command's standard input.
    pub const STDIN: u8 = 0;
    /// Server to client: bytes of standard output, or of the terminal.
    pub const STDOUT: u8 = 1;
    /// Server to client: bytes of standard error.
    pub const STDERR: u8 = 2;
}

/// Exit codes that are not the command's own.
pub mod exit_code {
    /// The command reached its time limit.
    pub const TIMED_OUT: i32 = 124;
    /// The command exists but cannot be run.
    pub const CANNOT_RUN: i32 = 126;
    /// The command does not exist.
    pub const NOT_FOUND: i32 = 127;
    /// Added to the number of the signal that killed the command.
    pub const SIGNAL_BASE: i32 = 128;
}

/// The command to run, and its options.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Start {
    /// A command line for `/bin/sh -c`. Exactly one of this and `argv`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// Program and arguments, run without a shell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// Working directory: relative to the base directory, or absolute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Environment variables, added to the sandbox's own.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Run on a terminal: one output stream, echo, job control, Ctrl-C.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub tty: bool,
    /// The terminal's height; 24 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows: Option<u16>,
    /// The terminal's width; 80 when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cols: Option<u16>,
    /// Kill the process group after this long. Over a WebSocket there is no limit unless one is given here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// The whole standard input, for `POST /v1/exec`; a WebSocket sends binary frames instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
}

/// A signal by number, or by name with or without `SIG`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum SignalName {
    Number(i32),
    Name(String),
}

/// A text frame from the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ClientMessage {
    Start(Start),
    Resize { rows: u16, cols: u16 },
    Signal { signal: SignalName },
    StdinClose,
}

/// How a command ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    pub exit_code: i32,
    /// The signal that killed the command, for example `SIGKILL`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<String>,
    /// Why the command could not start, or could not be waited for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub timed_out: bool,
}

/// A chunk of output in a JSON line: text if it is UTF-8, otherwise base64.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Data {
    pub data: String,
    /// `base64`, or absent if `data` is text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<String>,
}

/// A text frame from the server, or a line of an ndjson response. Over a WebSocket, output is sent in binary frames, and
/// `Stdout` and `Stderr` do not occur.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ServerMessage {
    Started { pid: u32 },
    Stdout(Data),
    Stderr(Data),
    Exit(Exit),
}

/// The response of `POST /v1/exec` to a client that did not request a stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    pub stdout: String,
    pub stderr: String,
    #[serde(flatten)]
    pub exit: Exit,
    /// Output beyond the limit was dropped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub truncated: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_have_the_documented_format() {
        let start = ClientMessage::Start(Start {
            argv: Some(vec!["python3".into()]),
            tty: true,
            rows: Some(40),
            ..Start::default()
        });
        assert_eq!(
            serde_json::to_string(&start).unwrap(),
            r#"{"type":"start","argv":["python3"],"tty":true,"rows":40}"#
        );
        assert_eq!(
            serde_json::to_string(&ClientMessage::StdinClose).unwrap(),
            r#"{"type":"stdin_close"}"#
        );
        let exit = ServerMessage::Exit(Exit {
            exit_code: 137,
            signal: Some("SIGKILL".into()),
            ..Exit::default()
        });
        assert_eq!(
            serde_json::to_string(&exit).unwrap(),
            r#"{"type":"exit","exit_code":137,"signal":"SIGKILL"}"#
        );
    }

    #[test]
    fn a_signal_is_a_number_or_a_name() {
        let by_number: ClientMessage =
            serde_json::from_str(r#"{"type":"signal","signal":2}"#).unwrap();
        let by_name: ClientMessage =
            serde_json::from_str(r#"{"type":"signal","signal":"INT"}"#).unwrap();
        assert_eq!(
            by_number,
            ClientMessage::Signal {
                signal: SignalName::Number(2)
            }
        );
        assert_eq!(
            by_name,
            ClientMessage::Signal {
                signal: SignalName::Name("INT".into())
            }
        );
    }
}
