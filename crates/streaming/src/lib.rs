//! The kubelet's streaming API, server side: exec, attach, port-forward and logs over SPDY and WebSocket.
//!
//! This crate owns the wire protocols and the HTTP endpoints, and knows nothing of how pods and containers run: a node implements
//! [`kubelet::Backend`] and serves [`kubelet::router`]. It has no client side.
//!
//! ```text
//! kubelet (routes, access, query) ─► remote_command, port_forward ─► spdy │ websocket
//! ```
//!
//! Everything after an upgrade is a plain byte stream, so any byte-for-byte proxy (kube-apiserver's, for one) may stand between.

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

/// How much of a stream is moved at a time.
const CHUNK: usize = 32 * 1024;

/// The timing of streaming connections.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// How long a connection may stay without a byte in either direction.
    pub idle: Duration,
    /// How long a client may take to open the streams that it asked for.
    pub stream_creation: Duration,
    /// How long a client may take to close after we have.
    pub linger: Duration,
    /// How long the output of a command that has ended is awaited, while none arrives: a background process that inherited it
    /// must not hold the client for ever.
    pub drain: Duration,
    /// How long nothing is sent to a WebSocket client of the fifth version, counted from the handshake. client-go before 0.35 reads
    /// messages while it still creates the streams they belong to, and throws away those that come first.
    pub settle: Duration,
}

impl Default for Settings {
    /// The kubelet's defaults, where it has them.
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
