//! Measures `POST /execute` of `true` end to end: an HTTP request, a process started and waited for, the response.

use std::io;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The result for one number of clients, each with one command in flight.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    pub clients: usize,
    pub commands_per_second: f64,
    pub p50: Duration,
    pub p99: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("cannot {operation}")]
    Io {
        operation: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("a command did not succeed: {0}")]
    Answer(String),
}

/// Sends commands to the runtime at `address`, for `duration` with each number of clients. Blocks; call it outside of any
/// runtime.
pub fn run(
    address: SocketAddr,
    clients: &[usize],
    duration: Duration,
) -> Result<Vec<Measurement>, BenchError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(failed("make a runtime"))?;
    clients
        .iter()
        .map(|&clients| runtime.block_on(measure(address, clients, duration)))
        .collect()
}

fn failed(operation: &'static str) -> impl FnOnce(io::Error) -> BenchError {
    move |source| BenchError::Io { operation, source }
}

async fn measure(
    address: SocketAddr,
    clients: usize,
    duration: Duration,
) -> Result<Measurement, BenchError> {
    let started = Instant::now();
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..clients {
        running.spawn(client(address, started + duration));
    }
    let mut latencies = Vec::new();
    while let Some(ended) = running.join_next().await {
        latencies.extend(ended.map_err(|error| BenchError::Answer(error.to_string()))??);
    }
    let elapsed = started.elapsed();
    latencies.sort_unstable();
    let percentile = |percent: usize| {
        let index = (latencies.len() * percent / 100).min(latencies.len().saturating_sub(1));
        latencies.get(index).copied().unwrap_or_default()
    };
    #[expect(
        clippy::cast_precision_loss,
        reason = "a rate needs no more than 52 bits"
    )]
    let commands_per_second = latencies.len() as f64 / elapsed.as_secs_f64();
    Ok(Measurement {
        clients,
        commands_per_second,
        p50: percentile(50),
        p99: percentile(99),
    })
}

async fn client(address: SocketAddr, until: Instant) -> Result<Vec<Duration>, BenchError> {
    const REQUEST: &[u8] =
        b"POST /execute HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n{\"command\":\"true\"}";
    let mut stream = TcpStream::connect(address)
        .await
        .map_err(failed("connect"))?;
    let _ = stream.set_nodelay(true);
    let mut latencies = Vec::new();
    let mut buffer = vec![0; 4096];
    while Instant::now() < until {
        let sent = Instant::now();
        stream
            .write_all(REQUEST)
            .await
            .map_err(failed("send a command"))?;
        let mut filled = 0;
        while !buffer[..filled].ends_with(b"}") {
            let count = stream
                .read(&mut buffer[filled..])
                .await
                .map_err(failed("read an answer"))?;
            if count == 0 {
                return Err(BenchError::Answer(
                    "the server closed the connection".into(),
                ));
            }
            filled += count;
        }
        let answer = String::from_utf8_lossy(&buffer[..filled]);
        if !answer.contains("\"exit_code\":0") {
            return Err(BenchError::Answer(answer.into_owned()));
        }
        latencies.push(sent.elapsed());
    }
    Ok(latencies)
}
