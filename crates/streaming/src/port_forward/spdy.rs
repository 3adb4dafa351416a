//! Port-forward over SPDY: for each connection the client opens an error stream and a data stream, which share a request id.

use std::collections::HashMap;

use saturating_time::SaturatingTime;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::{Connect, complaint};
use crate::Settings;
use crate::spdy::{Connection, Headers, IncomingStream, Limits, Stream};

pub async fn serve<T>(io: T, connect: impl Connect, settings: Settings)
where
    T: AsyncRead + AsyncWrite + Send + 'static,
{
    let mut connection = Connection::serve(io, Limits::default(), settings.timeouts());
    let mut pairs: HashMap<String, Pair> = HashMap::new();
    // Dropped with the connection, and every forward with it.
    let mut forwards = JoinSet::new();
    loop {
        let patience = pairs.values().map(|pair| pair.deadline).min();
        let accepted = match patience {
            Some(deadline) => timeout_at(deadline, connection.accept()).await,
            None => Ok(connection.accept().await),
        };
        match accepted {
            Ok(Some(incoming)) => {
                let deadline = Instant::now().later_by(settings.stream_creation);
                if let Some((port, complete)) = admit(&mut pairs, incoming, deadline) {
                    forwards.spawn(forward(port, complete, connect.clone()));
                }
            }
            Ok(None) => return,
            Err(_elapsed) => {
                let now = Instant::now();
                pairs.retain(|_, pair| pair.deadline > now);
            }
        }
        while forwards.try_join_next().is_some() {}
    }
}

#[derive(Debug)]
struct Pair {
    deadline: Instant,
    error: Option<Stream>,
    data: Option<Stream>,
}

struct Complete {
    error: Stream,
    data: Stream,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Error,
    Data,
}

/// What the headers of a stream say: what it is for, of which request, to which port.
fn purpose(headers: &Headers, stream: u32) -> Option<(Kind, String, u16)> {
    let kind = match headers.get("streamType")? {
        "error" => Kind::Error,
        "data" => Kind::Data,
        _ => return None,
    };
    let port = headers.get("port")?.parse().ok().filter(|port| *port > 0)?;
    let request = match headers.get("requestID") {
        Some(request) if !request.is_empty() => request.to_owned(),
        // Old clients name no request: they open the error stream and then the data stream, whose number is two higher.
        _ => match kind {
            Kind::Error => stream.to_string(),
            Kind::Data => stream.checked_sub(2)?.to_string(),
        },
    };
    Some((kind, request, port))
}

/// Puts a stream to its pair and returns the pair when it is complete. What fits nowhere is refused.
fn admit(
    pairs: &mut HashMap<String, Pair>,
    incoming: IncomingStream,
    deadline: Instant,
) -> Option<(u16, Complete)> {
    let Some((kind, request, port)) = purpose(incoming.headers(), incoming.id()) else {
        debug!(headers = ?incoming.headers(), "refusing a stream that is not for port-forward");
        incoming.refuse();
        return None;
    };
    let pair = pairs.entry(request.clone()).or_insert(Pair {
        deadline,
        error: None,
        data: None,
    });
    let place = match kind {
        Kind::Error => &mut pair.error,
        Kind::Data => &mut pair.data,
    };
    if place.is_some() {
        incoming.refuse();
        return None;
    }
    *place = Some(incoming.accept());
    if pair.error.is_none() || pair.data.is_none() {
        return None;
    }
    let pair = pairs.remove(&request)?;
    Some((
        port,
        Complete {
            error: pair.error?.write_only(),
            data: pair.data?,
        },
    ))
}

async fn forward(port: u16, streams: Complete, connect: impl Connect) {
    let Complete {
        mut error,
        mut data,
    } = streams;
    match connect.connect(port).await {
        Ok(mut target) => {
            // A target or client that resets ends this one connection; a word on the error stream would make clients give up all.
            if let Err(error) = copy_bidirectional(&mut data, &mut target).await {
                debug!(port, %error, "a forwarded connection was reset");
            }
        }
        Err(failure) => {
            let message = complaint(port, connect.name(), &failure);
            let _ = error.write_all(message.as_bytes()).await;
        }
    }
    let _ = error.shutdown().await;
    let _ = data.shutdown().await;
}
