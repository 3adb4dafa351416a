//! SPDY/3.1 as kubectl, client-go and kube-apiserver speak it over an upgraded HTTP connection.
//!
//! ```text
//! bytes ⇄ codec (frames) ⇄ session (streams, windows, limits) ⇄ connection (tokio) ⇄ Stream: AsyncRead + AsyncWrite
//! ```
//!
//! The codec and the session are pure: bytes in, bytes out, without a runtime or a clock. Only `connection` and `stream` use
//! tokio. This module knows nothing of Kubernetes and implements only the server side: the peer opens streams and we answer them.
//!
//! # Flow control
//! The SPDY library of our peers sends no WINDOW_UPDATE and ignores flow-control windows, so a server that enforced them would
//! stall after 64 KiB. We send the WINDOW_UPDATE frames that the protocol requires. We limit our own sending by the peer's
//! windows only once the peer shows that it uses them (by a SETTINGS initial window or a WINDOW_UPDATE). In both cases
//! back-pressure limits memory: the server stops reading from a connection whose streams hold [`Limits::received`] unread bytes.

mod codec;
mod connection;
mod dictionary;
mod frame;
mod headers;
mod session;
mod stream;

pub use codec::{Decoder, Encoder, Error};
pub use connection::{Connection, IncomingStream, Timeouts};
pub use frame::{Frame, GoAwayStatus, ResetStatus};
pub use headers::Headers;
pub use session::{Limits, ReadOutcome, Session, WriteOutcome};
pub use stream::Stream;

/// The token of the `Upgrade` header.
pub const UPGRADE_TOKEN: &str = "SPDY/3.1";
