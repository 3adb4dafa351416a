//! Port-forward over WebSocket channels: a data channel and an error channel for each port, for a single connection to that port.

use futures::future::{Either, join_all, select};
use std::pin::pin;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy, split};

use super::{Connect, connect_error};
use crate::websocket::{Channels, Encoding, accept};
use crate::{Input, Output, Settings};

pub async fn serve<T>(
    io: T,
    protocol: Option<&str>,
    ports: &[u16],
    connect: impl Connect,
    settings: Settings,
) where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let encoding = match protocol {
        Some(name) if name.contains("base64") => Encoding::Base64,
        _ => Encoding::Binary,
    };
    let socket = accept(io).await;
    let count = u8::try_from(ports.len().saturating_mul(2)).unwrap_or(u8::MAX);
    let mut channels = Channels::serve(socket, encoding, count, settings);
    let mut forwards = Vec::new();
    for (data, port) in (0..count).step_by(2).zip(ports) {
        // The first message on each channel is its port number.
        channels.send(data, &port.to_le_bytes()).await;
        channels.send(data + 1, &port.to_le_bytes()).await;
        if let Some(from) = channels.reader(data) {
            let (to, error) = (channels.writer(data), channels.writer(data + 1));
            forwards.push(forward(*port, from, to, error, connect.clone()));
        }
    }
    let disconnected = pin!(channels.closed());
    select(pin!(join_all(forwards)), disconnected).await;
}

/// Serves one port until its target closes the connection. The protocol cannot close a single channel, only the whole connection.
async fn forward(
    port: u16,
    mut from: Input,
    mut to: Output,
    mut error: Output,
    connect: impl Connect,
) {
    let target = match connect.connect(port).await {
        Ok(target) => target,
        Err(failure) => {
            let message = connect_error(port, connect.name(), &failure);
            let _ = error.write_all(message.as_bytes()).await;
            return;
        }
    };
    let (mut target_read, mut target_write) = split(target);
    let inward = async {
        let _ = copy(&mut from, &mut target_write).await;
        let _ = target_write.shutdown().await;
    };
    let outward = copy(&mut target_read, &mut to);
    if let Either::Right(((), outward)) = select(pin!(outward), pin!(inward)).await {
        let _ = outward.await;
    }
}
