//! WebSocket channels: the first byte of each message is the number of its channel.
//!
//! Two tasks serve a connection. The reader task passes messages to the readers of the channels. If one of them is slow, it
//! blocks the other channels too; the protocol has no flow control per channel. The writer task sends what the writers of the
//! channels queue, and closes the connection when the last writer is dropped.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{BufMut, Bytes, BytesMut};
use futures::stream::{SplitSink, SplitStream};
use futures::{Sink, SinkExt, StreamExt};
use saturating_time::SaturatingTime;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_util::io::StreamReader;
use tokio_util::sync::{CancellationToken, PollSender};
use tracing::debug;

use super::normal_close;
use crate::{CHUNK, Input, Output, Settings};

/// The capacity of the queue to each channel reader, and of the queue to the client, in messages.
const QUEUE: usize = 8;

/// The first byte of a message that closes a channel. The second byte is the number of that channel.
const CLOSE_SIGNAL: u8 = 255;

/// The encoding of channel number and data in a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// Binary messages; the first byte is the channel number.
    Binary,
    /// Like `Binary`, and the client may close a channel with the message `255, channel`.
    BinaryWithClose,
    /// Text messages: the channel number as a digit, then base64.
    Base64,
}

/// A decoded message from the client.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    Data(u8, Bytes),
    Close(u8),
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MessageError {
    #[error("a close signal names {0} channels, not one")]
    CloseSignal(usize),
    #[error("a message is not base64")]
    Base64(#[source] base64::DecodeError),
    #[error("a message has no channel number")]
    NoChannel,
}

impl Encoding {
    /// Decodes a message. An empty message gives `None`.
    pub fn decode(self, mut message: Bytes) -> Result<Option<Received>, MessageError> {
        if message.is_empty() {
            return Ok(None);
        }
        let data = message.split_off(1);
        let channel = message[0];
        match self {
            Self::BinaryWithClose if channel == CLOSE_SIGNAL => match data[..] {
                [closed] => Ok(Some(Received::Close(closed))),
                _ => Err(MessageError::CloseSignal(data.len())),
            },
            Self::Binary | Self::BinaryWithClose => Ok(Some(Received::Data(channel, data))),
            Self::Base64 => {
                let channel = channel.checked_sub(b'0').ok_or(MessageError::NoChannel)?;
                let data = STANDARD.decode(&data).map_err(MessageError::Base64)?;
                Ok(Some(Received::Data(channel, data.into())))
            }
        }
    }

    pub fn encode(self, channel: u8, data: &[u8]) -> Message {
        match self {
            Self::Binary | Self::BinaryWithClose => {
                let mut message = BytesMut::with_capacity(data.len() + 1);
                message.put_u8(channel);
                message.extend_from_slice(data);
                Message::Binary(message.freeze())
            }
            Self::Base64 => {
                let mut message = String::from(char::from(b'0'.wrapping_add(channel)));
                STANDARD.encode_string(data, &mut message);
                Message::text(message)
            }
        }
    }
}

/// A WebSocket that carries several channels. The connection closes when this value and all its writers are dropped.
#[derive(Debug)]
pub struct Channels {
    encoding: Encoding,
    outgoing: mpsc::Sender<Message>,
    incoming: Vec<Option<mpsc::Receiver<Bytes>>>,
    disconnected: CancellationToken,
}

impl Channels {
    /// Serves `count` channels in two tasks.
    pub fn serve<T>(
        socket: WebSocketStream<T>,
        encoding: Encoding,
        count: u8,
        settings: Settings,
    ) -> Self
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sink, stream) = socket.split();
        let (outgoing, queued) = mpsc::channel(QUEUE);
        let (senders, incoming) = (0..count)
            .map(|_| mpsc::channel(QUEUE))
            .map(|(sender, receiver)| (Some(sender), Some(receiver)))
            .unzip();
        let disconnected = CancellationToken::new();
        let sent = Arc::new(AtomicU64::new(0));
        let reader = Reader {
            stream,
            encoding,
            senders,
            sent: Arc::clone(&sent),
            idle: settings.idle,
        };
        let reader_disconnected = disconnected.clone();
        tokio::spawn(async move {
            let _over = reader_disconnected.drop_guard();
            reader.run().await;
        });
        let first_message = match encoding {
            Encoding::BinaryWithClose => Instant::now().later_by(settings.settle),
            Encoding::Binary | Encoding::Base64 => Instant::now(),
        };
        let writer = write(
            sink,
            queued,
            disconnected.clone(),
            sent,
            first_message,
            settings.linger,
        );
        tokio::spawn(writer);
        Self {
            encoding,
            outgoing,
            incoming,
            disconnected,
        }
    }

    /// The data that the client sends on a channel. Each channel has one reader, so a second call returns `None`.
    pub fn reader(&mut self, channel: u8) -> Option<Input> {
        let receiver = self.incoming.get_mut(usize::from(channel))?.take()?;
        let messages = futures::stream::unfold(receiver, |mut receiver| async move {
            let message = receiver.recv().await?;
            Some((Ok::<_, io::Error>(message), receiver))
        });
        Some(Box::new(StreamReader::new(Box::pin(messages))))
    }

    /// A writer that sends to the client on a channel.
    pub fn writer(&self, channel: u8) -> Output {
        Box::new(ChannelWriter {
            channel,
            encoding: self.encoding,
            sender: PollSender::new(self.outgoing.clone()),
        })
    }

    /// Sends one message, which may be empty.
    pub async fn send(&self, channel: u8, data: &[u8]) {
        // If the client has disconnected, `closed` reports it.
        let _ = self
            .outgoing
            .send(self.encoding.encode(channel, data))
            .await;
    }

    /// Waits until the client has disconnected.
    pub fn closed(&self) -> impl Future<Output = ()> + Send + use<> {
        self.disconnected.clone().cancelled_owned()
    }
}

struct Reader<T> {
    stream: SplitStream<WebSocketStream<T>>,
    encoding: Encoding,
    senders: Vec<Option<mpsc::Sender<Bytes>>>,
    sent: Arc<AtomicU64>,
    idle: Duration,
}

impl<T: AsyncRead + AsyncWrite + Unpin> Reader<T> {
    async fn run(mut self) {
        while let Some(message) = self.next().await {
            match self.encoding.decode(message) {
                Ok(Some(Received::Data(channel, data))) => {
                    // Data for an unknown channel, or for a channel without a reader, is discarded.
                    if let Some(Some(sender)) = self.senders.get(usize::from(channel))
                        && !data.is_empty()
                    {
                        let _ = timeout(self.idle, sender.send(data)).await;
                    }
                }
                Ok(Some(Received::Close(channel))) => {
                    if let Some(sender) = self.senders.get_mut(usize::from(channel)) {
                        *sender = None;
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    debug!(
                        error = &error as &dyn std::error::Error,
                        "a WebSocket client violated the channel protocol"
                    );
                    return;
                }
            }
        }
    }

    /// The next message with data. Returns `None` when the connection is closed, broken or exceeds the idle timeout.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            let sent = self.sent.load(Ordering::Relaxed);
            match timeout(self.idle, self.stream.next()).await {
                Err(_elapsed) if self.sent.load(Ordering::Relaxed) == sent => return None,
                Err(_elapsed) => {}
                Ok(Some(Ok(Message::Binary(data)))) => return Some(data),
                Ok(Some(Ok(Message::Text(text)))) => return Some(text.into()),
                Ok(Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)))) => {}
                Ok(None | Some(Ok(Message::Close(_)) | Err(_))) => return None,
            }
        }
    }
}

async fn write<T>(
    mut sink: SplitSink<WebSocketStream<T>, Message>,
    mut queued: mpsc::Receiver<Message>,
    disconnected: CancellationToken,
    sent: Arc<AtomicU64>,
    first_message: Instant,
    linger: Duration,
) where
    T: AsyncRead + AsyncWrite + Unpin,
{
    let send_all = async {
        sleep_until(first_message).await;
        while let Some(message) = queued.recv().await {
            if sink.send(message).await.is_err() {
                return;
            }
            sent.fetch_add(1, Ordering::Relaxed);
        }
        let _ = sink.send(normal_close()).await;
    };
    let over = disconnected.run_until_cancelled(send_all).await.is_none();
    if !over {
        // The client answers our close frame with its own, which ends the reader task.
        let _ = timeout(linger, disconnected.cancelled()).await;
    }
    disconnected.cancel();
    let _ = timeout(linger, sink.close()).await;
}

struct ChannelWriter {
    channel: u8,
    encoding: Encoding,
    sender: PollSender<Message>,
}

fn broken() -> io::Error {
    io::ErrorKind::BrokenPipe.into()
}

impl AsyncWrite for ChannelWriter {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.sender.poll_reserve(context)).map_err(|_| broken())?;
        let length = data.len().min(CHUNK);
        let message = self.encoding.encode(self.channel, &data[..length]);
        self.sender.send_item(message).map_err(|_| broken())?;
        Poll::Ready(Ok(length))
    }

    fn poll_flush(self: Pin<&mut Self>, _context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Does nothing for the client: the protocol cannot close a single channel towards the client.
    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.sender)
            .poll_close(context)
            .map_err(|_| broken())
    }
}

#[cfg(test)]
mod tests {
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::*;
    use crate::websocket::accept;

    #[test]
    fn both_encodings_read_what_they_write() {
        for encoding in [
            Encoding::Binary,
            Encoding::BinaryWithClose,
            Encoding::Base64,
        ] {
            let message = encoding.encode(2, b"\x00hello\xff");
            let read = encoding.decode(message.into_data()).unwrap();
            assert_eq!(
                read,
                Some(Received::Data(2, Bytes::from_static(b"\x00hello\xff")))
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_v5_client_has_time_to_create_its_streams() {
        for (encoding, awaited) in [
            (Encoding::BinaryWithClose, Settings::default().settle),
            (Encoding::Binary, Duration::ZERO),
        ] {
            let (near, far) = tokio::io::duplex(1024);
            let mut client = WebSocketStream::from_raw_socket(far, Role::Client, None).await;
            let opened = Instant::now();
            let channels = Channels::serve(accept(near).await, encoding, 5, Settings::default());
            channels.send(1, b"early").await;
            let message = client.next().await.unwrap().unwrap();
            assert_eq!(message.into_data(), &b"\x01early"[..]);
            assert_eq!(opened.elapsed(), awaited, "{encoding:?}");
        }
    }

    #[test]
    fn only_v5_closes_channels() {
        let close = Bytes::from_static(&[255, 0]);
        let fifth = Encoding::BinaryWithClose.decode(close.clone());
        assert_eq!(fifth, Ok(Some(Received::Close(0))));
        let fourth = Encoding::Binary.decode(close);
        assert_eq!(
            fourth,
            Ok(Some(Received::Data(255, Bytes::from_static(&[0]))))
        );
    }

    #[test]
    fn malformed_messages_are_refused() {
        let decode = |encoding: Encoding, message: &'static [u8]| {
            encoding.decode(Bytes::from_static(message))
        };
        assert_eq!(decode(Encoding::Binary, b""), Ok(None));
        assert_eq!(
            decode(Encoding::BinaryWithClose, b"\xff"),
            Err(MessageError::CloseSignal(0))
        );
        assert_eq!(
            decode(Encoding::Base64, b"\x01aGk="),
            Err(MessageError::NoChannel)
        );
        assert!(decode(Encoding::Base64, b"0***").is_err());
    }
}
