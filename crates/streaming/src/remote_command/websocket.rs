//! Exec and attach over WebSocket: one channel per purpose; channels 0 to 2 are stdin, stdout and stderr, as in POSIX.

use tokio::io::{AsyncRead, AsyncWrite};

use super::{ClientStreams, Streams, Version};
use crate::Settings;
use crate::websocket::{Channels, Encoding, accept};

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const ERROR: u8 = 3;
const RESIZE: u8 = 4;
const COUNT: u8 = 5;

pub async fn open<T>(
    io: T,
    protocol: Option<&str>,
    wanted: Streams,
    settings: Settings,
) -> ClientStreams
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let encoding = encoding(protocol);
    let socket = accept(io).await;
    let mut channels = Channels::serve(socket, encoding, COUNT, settings);
    // An empty message on the first output channel tells the client that the connection is established.
    let first = match wanted {
        Streams { stdout: true, .. } => STDOUT,
        Streams { stderr: true, .. } => STDERR,
        _ => ERROR,
    };
    channels.send(first, &[]).await;
    ClientStreams {
        stdin: wanted.stdin.then(|| channels.reader(STDIN)).flatten(),
        stdout: wanted.stdout.then(|| channels.writer(STDOUT)),
        stderr: wanted.stderr.then(|| channels.writer(STDERR)),
        resize: channels.reader(RESIZE),
        error: channels.writer(ERROR),
        version: protocol.map_or(Version::Plain, Version::named),
        disconnected: Box::pin(channels.closed()),
        _connection: Box::new(channels),
    }
}

fn encoding(protocol: Option<&str>) -> Encoding {
    match protocol {
        Some("v5.channel.k8s.io") => Encoding::BinaryWithClose,
        Some(name) if name.contains("base64") => Encoding::Base64,
        _ => Encoding::Binary,
    }
}
