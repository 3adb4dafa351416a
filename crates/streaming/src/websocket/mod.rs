//! The two ways in which Kubernetes uses a WebSocket: many channels in one, by a byte before each message, and as a tunnel for
//! another protocol's bytes. Framing, pings and the closing handshake are tungstenite's.

mod channels;
mod tunnel;

pub use channels::{Channels, Encoding, MessageError};
pub use tunnel::Tunnel;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};

/// The longest message accepted. Clients that send a file in one message exist.
const MESSAGE_MAX: usize = 16 * 1024 * 1024;

/// Speaks WebSocket on a connection that has been upgraded.
pub async fn accept<T>(io: T) -> WebSocketStream<T>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let config = WebSocketConfig::default()
        .read_buffer_size(crate::CHUNK)
        .write_buffer_size(0)
        .max_message_size(Some(MESSAGE_MAX))
        .max_frame_size(Some(MESSAGE_MAX));
    WebSocketStream::from_raw_socket(io, Role::Server, Some(config)).await
}

/// The end that clients take for an orderly one.
fn normal_close() -> Message {
    Message::Close(Some(CloseFrame {
        code: CloseCode::Normal,
        reason: "".into(),
    }))
}
