//! Port-forward over SPDY: for each connection, the client opens an error stream and a data stream with the same request ID.

use std::collections::HashMap;

use saturating_time::SaturatingTime;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::{Connect, connect_error};
use crate::Settings;
use crate::spdy::{Connection, Headers, IncomingStream, Limits, Stream};

pub async fn serve<T>(io: T, connect: impl Connect, settings: Settings)
where
    T: AsyncRead + AsyncWrite + Send + 'static,
{
    let mut connection = Connection::serve(io, Limits::default(), settings.timeouts());
    let mut pairs: HashMap<String, Pair> = HashMap::new();
    // Dropping the set when the SPDY connection ends aborts all forwarded connections.
    let mut forwards = JoinSet::new();
    loop {
        let next_deadline = pairs.values().map(|pair| pair.deadline).min();
        let accepted = match next_deadline {
            Some(deadline) => timeout_at(deadline, connection.accept()).await,
            None => Ok(connection.accept().await),
        };
        match accepted {
            Ok(Some(incoming)) => {
                let deadline = Instant::now().later_by(settings.stream_creation);
                if let Some((port, complete)) = pair_up(&mut pairs, incoming, deadline) {
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

struct CompletePair {
    error: Stream,
    data: Stream,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Error,
    Data,
}

/// Parses the headers of a stream: its kind, its request ID and the port.
fn parse_headers(headers: &Headers, stream: u32) -> Option<(Kind, String, u16)> {
    let kind = match headers.get("streamType")? {
        "error" => Kind::Error,
        "data" => Kind::Data,
        _ => return None,
    };
    let port = headers.get("port")?.parse().ok().filter(|port| *port > 0)?;
    let request = match headers.get("requestID") {
        Some(request) if !request.is_empty() => request.to_owned(),
        // Old clients send no request ID. They open the error stream first and then the data stream, whose ID is higher by two.
        _ => match kind {
            Kind::Error => stream.to_string(),
            Kind::Data => stream.checked_sub(2)?.to_string(),
        },
    };
    Some((kind, request, port))
}

/// Adds a stream to its pair and returns the pair when it is complete. Refuses streams with invalid headers and duplicates.
fn pair_up(
    pairs: &mut HashMap<String, Pair>,
    incoming: IncomingStream,
    deadline: Instant,
) -> Option<(u16, CompletePair)> {
    let Some((kind, request, port)) = parse_headers(incoming.headers(), incoming.id()) else {
        debug!(headers = ?incoming.headers(), "refused a stream without valid port-forward headers");
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
        CompletePair {
            error: pair.error?.write_only(),
            data: pair.data?,
        },
    ))
}

async fn forward(port: u16, streams: CompletePair, connect: impl Connect) {
    let CompletePair {
        mut error,
        mut data,
    } = streams;
    match connect.connect(port).await {
        Ok(mut target) => {
            // A reset ends only this one connection. Clients stop all forwarding when they read anything on an error stream, so
            // the server writes nothing there.
            if let Err(error) = copy_bidirectional(&mut data, &mut target).await {
                debug!(port, %error, "a forwarded connection was reset");
            }
        }
        Err(failure) => {
            let message = connect_error(port, connect.name(), &failure);
            let _ = error.write_all(message.as_bytes()).await;
        }
    }
    let _ = error.shutdown().await;
    let _ = data.shutdown().await;
}
