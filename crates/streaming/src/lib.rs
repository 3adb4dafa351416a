//! The kubelet's streaming API, server side: exec, attach, port-forward and logs over SPDY and WebSocket.
//!
//! This crate owns the wire protocols and the HTTP endpoints. It does not know how pods and containers run: a node implements
//! [`kubelet::Backend`] and serves [`kubelet::router`]. It has no client side.
//!
//! ```text
//! kubelet (routes, access, query) ─► remote_command, port_forward ─► spdy │ websocket
//! ```
//!
//! After the upgrade, the connection is a plain byte stream, so it works through any byte-for-byte proxy, for example
//! kube-apiserver's.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

pub mod kubelet;
pub mod port_forward;
pub mod remote_command;
pub mod spdy;
pub mod upgrade;
pub mod websocket;

use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

/// Bytes from the client, or from a process.
pub type Input = Box<dyn AsyncRead + Send + Unpin>;

/// Bytes to the client, or to a process.
pub type Output = Box<dyn AsyncWrite + Send + Unpin>;

/// The size of the buffer for copying a stream, in bytes.
const CHUNK: usize = 32 * 1024;

/// The timeouts of streaming connections.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Idle timeout: how long a connection may stay open without a byte in either direction.
    pub idle: Duration,
    /// How long a client may take to open the streams that its request names.
    pub stream_creation: Duration,
    /// How long a client may take to close the connection after the server has closed its side.
    pub linger: Duration,
    /// How long to wait for further output after a command has exited, if no output arrives. Without this timeout, a background
    /// process that inherited stdout would keep the client connected for ever.
    pub drain: Duration,
    /// The delay after the handshake before the first message to a WebSocket client of protocol v5. client-go before 0.35 starts
    /// reading messages while it still creates their streams, and drops messages that arrive too early.
    pub settle: Duration,
}

impl Default for Settings {
    /// The kubelet's defaults, where the kubelet has such a setting.
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(4 * 60 * 60),
            stream_creation: Duration::from_secs(30),
            linger: Duration::from_secs(60),
            drain: Duration::from_secs(2),
            settle: Duration::from_millis(10),
        }
    }
}

impl Settings {
    fn timeouts(&self) -> spdy::Timeouts {
        spdy::Timeouts {
            idle: self.idle,
            linger: self.linger,
        }
    }
}

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
