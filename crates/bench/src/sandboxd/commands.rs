//! The throughput and latency of `POST /execute` of `true`: a request over HTTP, a process, the response.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The figures with a number of clients, each with one command in flight.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    pub clients: usize,
    pub commands_per_second: f64,
    pub p50: Duration,
    pub p99: Duration,
}

/// Sends commands to sandboxd at `address`, for `duration` with each number of clients. Blocks; to be called outside of a tokio runtime.
pub fn run(
    address: SocketAddr,
    clients: &[usize],
    duration: Duration,
) -> anyhow::Result<Vec<Measurement>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot make a runtime")?;
    clients
        .iter()
        .map(|&clients| runtime.block_on(measure(address, clients, duration)))
        .collect()
}

async fn measure(
    address: SocketAddr,
    clients: usize,
    duration: Duration,
) -> anyhow::Result<Measurement> {
    let started = Instant::now();
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..clients {
        running.spawn(client(address, started + duration));
    }
    let mut latencies = Vec::new();
    while let Some(ended) = running.join_next().await {
        latencies.extend(ended.context("a client ended unexpectedly")??);
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

async fn client(address: SocketAddr, until: Instant) -> anyhow::Result<Vec<Duration>> {
    const REQUEST: &[u8] =
        b"POST /execute HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 18\r\n\r\n{\"command\":\"true\"}";
    let mut stream = TcpStream::connect(address)
        .await
        .context("cannot connect")?;
    let _ = stream.set_nodelay(true);
    let mut latencies = Vec::new();
    let mut buffer = vec![0; 4096];
    while Instant::now() < until {
        let sent = Instant::now();
        stream
            .write_all(REQUEST)
            .await
            .context("cannot send a command")?;
        let mut filled = 0;
        while !buffer[..filled].ends_with(b"}") {
            let count = stream
                .read(&mut buffer[filled..])
                .await
                .context("cannot read a response")?;
            ensure!(count > 0, "sandboxd closed the connection");
            filled += count;
        }
        let answer = String::from_utf8_lossy(&buffer[..filled]);
        ensure!(
            answer.contains("\"exit_code\":0"),
            "a command did not succeed: {answer}"
        );
        latencies.push(sent.elapsed());
    }
    Ok(latencies)
}
