//! The two ways in which Kubernetes uses a WebSocket: as several channels, with a channel byte before each message, and as a
//! tunnel for the bytes of another protocol. tungstenite implements framing, pings and the closing handshake.

mod channels;
mod tunnel;

pub use channels::{Channels, Encoding, MessageError};
pub use tunnel::Tunnel;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::frame::coding::CloseCode;
use tokio_tungstenite::tungstenite::protocol::{CloseFrame, Role, WebSocketConfig};

/// The longest accepted message. Some clients send a whole file in one message.
const MESSAGE_MAX: usize = 16 * 1024 * 1024;

/// Starts the WebSocket protocol on an upgraded connection.
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

/// The close frame of a normal closure.
fn normal_close() -> Message {
    Message::Close(Some(CloseFrame {
        code: CloseCode::Normal,
        reason: "".into(),
    }))
}
