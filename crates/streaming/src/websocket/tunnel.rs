//! A WebSocket as a byte stream: the concatenated binary messages are the bytes of another protocol.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use futures::{Sink, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::{Error, Message};

use super::normal_close;
use crate::CHUNK;

#[derive(Debug)]
pub struct Tunnel<T> {
    socket: WebSocketStream<T>,
    unread: Bytes,
    closing: bool,
}

impl<T> Tunnel<T> {
    pub fn new(socket: WebSocketStream<T>) -> Self {
        Self {
            socket,
            unread: Bytes::new(),
            closing: false,
        }
    }
}

fn failed(error: Error) -> io::Error {
    match error {
        Error::Io(error) => error,
        other => io::Error::other(other),
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncRead for Tunnel<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.unread.is_empty() {
            match ready!(Pin::new(&mut self.socket).poll_next(context)) {
                Some(Ok(Message::Binary(data))) => self.unread = data,
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                Some(Ok(Message::Text(_))) => {
                    return Poll::Ready(Err(io::Error::new(
                        io::ErrorKind::InvalidData,
                        "received a text message in a binary tunnel",
                    )));
                }
                None
                | Some(
                    Ok(Message::Close(_)) | Err(Error::ConnectionClosed | Error::AlreadyClosed),
                ) => return Poll::Ready(Ok(())),
                Some(Err(error)) => return Poll::Ready(Err(failed(error))),
            }
        }
        let length = buffer.remaining().min(self.unread.len());
        buffer.put_slice(&self.unread[..length]);
        self.unread.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Tunnel<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(Pin::new(&mut self.socket).poll_ready(context)).map_err(failed)?;
        let length = data.len().min(CHUNK);
        let message = Message::Binary(Bytes::copy_from_slice(&data[..length]));
        Pin::new(&mut self.socket)
            .start_send(message)
            .map_err(failed)?;
        Poll::Ready(Ok(length))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket)
            .poll_flush(context)
            .map_err(failed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.closing {
            ready!(Pin::new(&mut self.socket).poll_ready(context)).map_err(failed)?;
            self.closing = true;
            match Pin::new(&mut self.socket).start_send(normal_close()) {
                Ok(()) | Err(Error::ConnectionClosed | Error::Protocol(_)) => {}
                Err(error) => return Poll::Ready(Err(failed(error))),
            }
        }
        match ready!(Pin::new(&mut self.socket).poll_flush(context)) {
            Ok(()) | Err(Error::ConnectionClosed) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(failed(error))),
        }
    }
}
