//! Exec and attach over SPDY: the client opens one stream per purpose and names it in the `streamType` header.

use std::collections::HashMap;

use saturating_time::SaturatingTime;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::{ClientStreams, Error, Streams, Version};
use crate::spdy::{Connection, Limits, Stream};
use crate::{Input, Output, Settings};

/// The header that names the purpose of a stream.
const STREAM_TYPE: &str = "streamType";

/// Waits until the client has opened the streams that it asked for.
pub async fn open<T>(
    io: T,
    version: Version,
    wanted: Streams,
    settings: Settings,
) -> Result<ClientStreams, Error>
where
    T: AsyncRead + AsyncWrite + Send + 'static,
{
    let mut connection = Connection::serve(io, Limits::default(), settings.timeouts());
    let mut missing = expected(version, wanted);
    let mut streams: HashMap<&'static str, Stream> = HashMap::new();
    let deadline = Instant::now().later_by(settings.stream_creation);
    while !missing.is_empty() {
        let incoming = timeout_at(deadline, connection.accept())
            .await
            .map_err(|_| Error::Timeout)?
            .ok_or(Error::Disconnected)?;
        let kind = incoming.headers().get(STREAM_TYPE).unwrap_or_default();
        if let Some(position) = missing.iter().position(|wanted| *wanted == kind) {
            streams.insert(missing.swap_remove(position), incoming.accept());
        } else {
            debug!(kind, "refused a stream that the request did not ask for");
            incoming.refuse();
        }
    }
    let mut input = |kind| streams.remove(kind).map(|stream| Box::new(stream) as Input);
    let (stdin, resize) = (input("stdin"), input("resize"));
    let mut output = |kind| {
        let stream = streams.remove(kind)?;
        Some(Box::new(stream.write_only()) as Output)
    };
    Ok(ClientStreams {
        stdin,
        stdout: output("stdout"),
        stderr: output("stderr"),
        resize,
        error: output("error").ok_or(Error::Disconnected)?,
        version,
        disconnected: Box::pin(connection.closed()),
        _connection: Box::new(connection),
    })
}

fn expected(version: Version, wanted: Streams) -> Vec<&'static str> {
    let streams = [
        ("error", true),
        ("stdin", wanted.stdin),
        ("stdout", wanted.stdout),
        ("stderr", wanted.stderr),
        ("resize", wanted.tty && version.resizes()),
    ];
    let chosen = streams.into_iter().filter(|(_, wanted)| *wanted);
    chosen.map(|(kind, _)| kind).collect()
}
