//! The messages of `process.v1`, with the field numbers that published stubs use.

use std::collections::HashMap;

use bytes::Bytes;
use prost::{Message, Oneof};

#[derive(Clone, PartialEq, Message)]
pub struct Pty {
    #[prost(uint32, tag = "1")]
    pub cols: u32,
    #[prost(uint32, tag = "2")]
    pub rows: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct ProcessConfig {
    #[prost(string, repeated, tag = "1")]
    pub command: Vec<String>,
    #[prost(map = "string, string", tag = "2")]
    pub env_vars: HashMap<String, String>,
    #[prost(string, optional, tag = "3")]
    pub cwd: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StartRequest {
    #[prost(message, optional, tag = "1")]
    pub config: Option<ProcessConfig>,
    #[prost(message, optional, tag = "2")]
    pub pty: Option<Pty>,
}

#[derive(Clone, PartialEq, Message)]
pub struct InitEvent {
    #[prost(int32, tag = "1")]
    pub process_id: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct ExitEvent {
    #[prost(int32, tag = "1")]
    pub exit_code: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct StartResponse {
    #[prost(oneof = "StartResponseEvent", tags = "1, 2, 3, 4")]
    pub event: Option<StartResponseEvent>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum StartResponseEvent {
    #[prost(message, tag = "1")]
    Init(InitEvent),
    #[prost(bytes = "bytes", tag = "2")]
    Stdout(Bytes),
    #[prost(bytes = "bytes", tag = "3")]
    Stderr(Bytes),
    #[prost(message, tag = "4")]
    Exit(ExitEvent),
}

#[derive(Clone, PartialEq, Message)]
pub struct ExecuteRequest {
    #[prost(message, optional, tag = "1")]
    pub config: Option<ProcessConfig>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ExecuteResponse {
    #[prost(int32, tag = "1")]
    pub exit_code: i32,
    #[prost(bytes = "bytes", tag = "2")]
    pub stdout: Bytes,
    #[prost(bytes = "bytes", tag = "3")]
    pub stderr: Bytes,
}

#[derive(Clone, PartialEq, Message)]
pub struct WriteStdinRequest {
    #[prost(int32, tag = "1")]
    pub process_id: i32,
    #[prost(oneof = "WriteStdinPayload", tags = "2, 3")]
    pub payload: Option<WriteStdinPayload>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum WriteStdinPayload {
    #[prost(bytes = "bytes", tag = "2")]
    Input(Bytes),
    #[prost(message, tag = "3")]
    Eof(()),
}

#[derive(Clone, PartialEq, Message)]
pub struct SendSignalRequest {
    #[prost(int32, tag = "1")]
    pub process_id: i32,
    /// The signal number: 2, 9 or 15.
    #[prost(int32, tag = "2")]
    pub signal: i32,
}

#[derive(Clone, PartialEq, Message)]
pub struct ResizeTtyRequest {
    #[prost(int32, tag = "1")]
    pub process_id: i32,
    #[prost(uint32, tag = "2")]
    pub cols: u32,
    #[prost(uint32, tag = "3")]
    pub rows: u32,
}

/// The empty response.
#[derive(Clone, PartialEq, Message)]
pub struct Nothing {}
