//! `bench node --hostile`: the latency of a pod while another pod attacks.
//!
//! The speed of a shared machine changes from minute to minute, so every attack is compared with the quiet time right before and right
//! after it.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::Context;
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::NAMESPACE;
use super::pods::{Distribution, remove_pod, start_pod};

const PAUSE: Duration = Duration::from_millis(5);
/// The timeout of a request.
const LONGEST: Duration = Duration::from_secs(5);
/// The time between the start of an attack and the measurement.
const UNFOLD: Duration = Duration::from_secs(2);

/// The size of the measurement.
#[derive(Debug, Clone)]
pub struct Options {
    /// Requests before, during and after each attack.
    pub requests: usize,
    /// The names of the attacks; all attacks if it is empty.
    pub attacks: Vec<String>,
}

/// The names of all attacks.
pub fn attacks() -> impl Iterator<Item = &'static str> {
    ATTACKS.iter().map(|(name, _)| *name)
}

/// The attacks, as Python programs that run until they are killed.
const ATTACKS: [(&str, &str); 8] = [
    (
        "fork bomb",
        "import os, time\nwhile True:\n    try: os.fork()\n    except OSError: time.sleep(0.01)",
    ),
    (
        "memory bomb",
        "x = []\nwhile True: x.append(bytearray(4 << 20))",
    ),
    (
        "CPU hog",
        "import os\n[os.fork() for _ in range(4)]\nwhile True: pass",
    ),
    (
        "disk filling",
        "f = open('/tmp/x', 'wb')\nwhile True:\n    f.write(bytes(1 << 20)); f.flush()\n    if f.tell() > 256 << 20: f.seek(0)",
    ),
    (
        "inodes",
        "import itertools, os\nos.mkdir('/tmp/many')\nfor n in itertools.count():\n    try: os.close(os.open(f'/tmp/many/{n % 200000}', os.O_CREAT | os.O_WRONLY))\n    except OSError: pass",
    ),
    (
        "descriptors",
        "import os\nwhile True:\n    held = []\n    try:\n        while True: held.append(os.open('/dev/null', 0))\n    except OSError:\n        for d in held: os.close(d)",
    ),
    (
        "log flood",
        "import sys\nwhile True: sys.stdout.write('x' * 1000 + '\\n')",
    ),
    (
        "connection flood",
        "import socket, itertools\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\nfor n in itertools.count():\n    try: s.sendto(b'x', ('192.0.2.1', n % 65535 + 1))\n    except OSError: pass",
    ),
];

/// The figures of one attack.
#[derive(Debug, Clone)]
pub struct Beside {
    pub attack: &'static str,
    /// Requests before the attack and after it.
    pub quiet: Distribution,
    /// Requests during the attack.
    pub latency: Distribution,
    /// The ratios of median and 99th percentile during the attack to those of the quiet time.
    pub ratio: f64,
    pub p99_ratio: f64,
}

pub async fn run(client: Client, options: &Options) -> anyhow::Result<Vec<Beside>> {
    let pods = Api::<Pod>::namespaced(client, NAMESPACE);
    let neighbour = start_pod(&pods, "neighbour").await?.pod;
    let address = neighbour.status.and_then(|status| status.pod_ip);
    let address = address.and_then(|address| address.parse().ok());
    let address = address.context("the pod has no address")?;
    let address = SocketAddr::new(address, 8888);
    let requests = options.requests;
    let mut attacks = Vec::new();
    let mut before = latencies(address, "no attack", requests).await?;
    let wanted = |name: &str| {
        options.attacks.is_empty() || options.attacks.iter().any(|attack| attack == name)
    };
    for (attack, script) in ATTACKS.into_iter().filter(|(name, _)| wanted(name)) {
        let object = json!({"metadata": {"name": "attacker"}, "spec": {"terminationGracePeriodSeconds": 0, "containers": [{"name": "c",
            "image": "host", "command": ["python3", "-c", script], "resources": {"limits": {"memory": "512Mi"}}}]}});
        let object: Pod = serde_json::from_value(object)?;
        pods.create(&PostParams::default(), &object).await?;
        tokio::time::sleep(UNFOLD).await;
        let during = latencies(address, attack, requests).await;
        remove_pod(&pods, "attacker").await?;
        let during = Distribution::of(during?);
        let after = latencies(address, "no attack", requests).await?;
        let quiet = Distribution::of([before, after.clone()].concat());
        before = after;
        attacks.push(Beside {
            attack,
            quiet,
            latency: during,
            ratio: during.p50_ms / quiet.p50_ms,
            p99_ratio: during.p99_ms / quiet.p99_ms,
        });
    }
    remove_pod(&pods, "neighbour").await?;
    Ok(attacks)
}

/// The latencies of requests beside an attack. A failed request fails the measurement.
async fn latencies(
    address: SocketAddr,
    beside: &'static str,
    requests: usize,
) -> anyhow::Result<Vec<Duration>> {
    let mut sample = Vec::new();
    let mut failures: Vec<std::io::Error> = Vec::new();
    for _ in 0..requests {
        let began = Instant::now();
        let asked = tokio::time::timeout(LONGEST, request(address)).await;
        sample.push(began.elapsed());
        failures.extend(asked.unwrap_or_else(|late| Err(late.into())).err());
        tokio::time::sleep(PAUSE).await;
    }
    let failed = failures.len();
    match failures.into_iter().next() {
        None => Ok(sample),
        Some(error) => Err(error).with_context(|| {
            format!("{failed} of {requests} requests to a pod beside {beside} failed")
        }),
    }
}

async fn request(address: SocketAddr) -> std::io::Result<()> {
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    stream
        .write_all(b"GET / HTTP/1.1\r\nhost: neighbour\r\nconnection: close\r\n\r\n")
        .await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    if answer.starts_with(b"HTTP/1.1 200 ") {
        Ok(())
    } else {
        let line = answer.split(|byte| *byte == b'\r').next();
        let line = String::from_utf8_lossy(line.unwrap_or_default()).into_owned();
        Err(std::io::Error::other(format!("it answered {line:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failed_request_fails_the_measurement() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            for number in 0.. {
                let (mut stream, _) = listener.accept().await.unwrap();
                let status = if number == 1 { "503 no" } else { "200 OK" };
                let mut request = [0; 256];
                let _ = stream.read(&mut request).await;
                let answer = format!("HTTP/1.1 {status}\r\n\r\n");
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        let error = latencies(address, "no attack", 10).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "1 of 10 requests to a pod beside no attack failed"
        );
    }
}
