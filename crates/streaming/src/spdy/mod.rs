//! SPDY/3.1 as kubectl, client-go and kube-apiserver speak it over an upgraded HTTP connection.
//!
//! ```text
//! bytes ⇄ codec (frames) ⇄ session (streams, windows, limits) ⇄ connection (tokio) ⇄ Stream: AsyncRead + AsyncWrite
//! ```
//!
//! The codec and the session are pure: bytes in, bytes out, no runtime and no clock. Only `connection` and `stream` know tokio.
//! Nothing here knows Kubernetes, and only the server side exists: the peer opens streams, we answer them.
//!
//! # Flow control
//! The peers' library sends no WINDOW_UPDATE and minds no window, so a server that insisted on windows would stop after 64 KiB.
//! We send the updates the protocol asks for, and limit our own sending by the peer's windows from the moment that it shows that it
//! keeps them (by a SETTINGS initial window or a WINDOW_UPDATE). What bounds memory either way is back-pressure: a connection
//! whose streams hold [`Limits::received`] unread bytes is not read from.

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
