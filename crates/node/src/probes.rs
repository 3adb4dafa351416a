//! Probes: asking a container whether it has started, is alive, is ready.
//!
//! A kubelet's first probe waits up to a period. Here the first comes at once and is repeated after milliseconds until
//! the container first answers, so that a pod is ready as soon as it is; only then, and for counting failures, does the
//! period rule.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http_body_util::Empty;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

use crate::runtime::agent::Output;
use crate::runtime::{ContainerId, Runtime};
use crate::unverified_tls;

/// The first repetition, and by which part of itself each pause is longer than the one before: a container that takes long
/// to answer is not asked much too late, nor very often.
const FIRST_RETRY: Duration = Duration::from_millis(1);
const RETRY_GROWTH: u32 = 6;

/// Which of a container's probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Startup,
    Liveness,
    Readiness,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }
}

/// A probe that has crossed one of its thresholds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Passing,
    /// The last reason for failing.
    Failing(String),
}

/// How often a probe runs and when its answer counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    pub initial_delay: Duration,
    pub period: Duration,
    pub timeout: Duration,
    pub successes: u32,
    pub failures: u32,
}

impl Timing {
    pub fn of(probe: &Probe) -> Self {
        let seconds = |value: Option<i32>, default: i32| {
            Duration::from_secs(
                value
                    .filter(|v| *v > 0)
                    .unwrap_or(default)
                    .unsigned_abs()
                    .into(),
            )
        };
        let count = |value: Option<i32>, default: i32| {
            value.filter(|v| *v > 0).unwrap_or(default).unsigned_abs()
        };
        Self {
            initial_delay: seconds(probe.initial_delay_seconds, 0),
            period: seconds(probe.period_seconds, 10),
            timeout: seconds(probe.timeout_seconds, 1),
            successes: count(probe.success_threshold, 1),
            failures: count(probe.failure_threshold, 3),
        }
    }
}

/// Counts answers and says when a threshold is crossed. Pure.
#[derive(Debug)]
pub struct Counter {
    timing: Timing,
    in_a_row: u32,
    last: Option<bool>,
    verdict: Option<bool>,
    /// When the last failure was counted; failures between periods are only retries.
    counted_at: Option<Duration>,
    retry: Duration,
}

impl Counter {
    pub fn new(timing: Timing) -> Self {
        Self {
            timing,
            in_a_row: 0,
            last: None,
            verdict: None,
            counted_at: None,
            retry: FIRST_RETRY,
        }
    }

    /// Takes an answer given `at` this time since the container started; true if the verdict changed.
    pub fn take(&mut self, passed: bool, at: Duration) -> bool {
        if !passed {
            let due = self
                .counted_at
                .is_none_or(|counted| at.saturating_sub(counted) >= self.timing.period);
            if !due {
                return false;
            }
            self.counted_at = Some(at);
        }
        self.in_a_row = if self.last == Some(passed) {
            self.in_a_row + 1
        } else {
            1
        };
        self.last = Some(passed);
        let needed = if passed {
            self.timing.successes
        } else {
            self.timing.failures
        };
        if self.in_a_row >= needed && self.verdict != Some(passed) {
            self.verdict = Some(passed);
            return true;
        }
        false
    }

    /// How long to wait for the next try.
    pub fn pause(&mut self) -> Duration {
        if self.verdict == Some(true) {
            return self.timing.period;
        }
        let pause = self.retry.min(self.timing.period);
        self.retry = (self.retry + self.retry / RETRY_GROWTH).min(self.timing.period);
        pause
    }
}

/// Runs a probe until its future is dropped, reporting each change of verdict.
pub async fn watch<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    container: &Container,
    probe: &Probe,
    address: IpAddr,
    mut report: impl FnMut(Verdict),
) {
    let timing = Timing::of(probe);
    let mut counter = Counter::new(timing);
    let began = Instant::now();
    sleep(timing.initial_delay).await;
    loop {
        let answer =
            match timeout(timing.timeout, ask(runtime, id, container, probe, address)).await {
                Ok(answer) => answer,
                Err(_) => Err(format!("probe timed out after {:?}", timing.timeout)),
            };
        if counter.take(answer.is_ok(), began.elapsed()) {
            report(answer.map_or_else(Verdict::Failing, |()| Verdict::Passing));
        }
        sleep(counter.pause()).await;
    }
}

/// One try of a probe.
async fn ask<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    container: &Container,
    probe: &Probe,
    address: IpAddr,
) -> Result<(), String> {
    if let Some(action) = &probe.http_get {
        http_get(action, container, address).await
    } else if let Some(action) = &probe.tcp_socket {
        let host = action
            .host
            .as_deref()
            .and_then(|host| host.parse().ok())
            .unwrap_or(address);
        let port = port_number(&action.port, container).ok_or_else(|| "no such port".to_owned())?;
        TcpStream::connect(SocketAddr::new(host, port))
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    } else if let Some(action) = &probe.exec {
        exec(runtime, id, action.command.clone().unwrap_or_default()).await
    } else if let Some(action) = &probe.grpc {
        let port = u16::try_from(action.port).map_err(|_| "no such port".to_owned())?;
        crate::grpc_health::check(
            SocketAddr::new(address, port),
            action.service.as_deref().unwrap_or_default(),
        )
        .await
    } else {
        Ok(())
    }
}

/// Runs a command in the container; it passes if it exits with 0.
pub async fn exec<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    command: Vec<String>,
) -> Result<(), String> {
    const MOST_OUTPUT: usize = 10 << 10;
    let request = shim_protocol::ExecRequest {
        arguments: command,
        environment: Vec::new(),
        terminal: false,
        stdin: false,
        window: None,
    };
    let mut session = runtime
        .exec(id, request)
        .await
        .map_err(|error| crate::errors::chain(&error))?;
    let mut said = Vec::new();
    loop {
        match session
            .output
            .next()
            .await
            .map_err(|error| crate::errors::chain(&error))?
        {
            Output::Stdout(data) | Output::Stderr(data) => {
                said.extend_from_slice(
                    &data[..data.len().min(MOST_OUTPUT - said.len().min(MOST_OUTPUT))],
                );
            }
            Output::Exit(exit) if exit.code == 0 => return Ok(()),
            Output::Exit(exit) => {
                return Err(format!(
                    "command exited with {}: {}",
                    exit.code,
                    String::from_utf8_lossy(&said).trim()
                ));
            }
        }
    }
}

/// A port by number, or by its name in the container.
pub fn port_number(port: &IntOrString, container: &Container) -> Option<u16> {
    match port {
        IntOrString::Int(number) => u16::try_from(*number).ok(),
        IntOrString::String(name) => {
            let named = container
                .ports
                .iter()
                .flatten()
                .find(|port| port.name.as_ref() == Some(name));
            named.map_or_else(
                || name.parse().ok(),
                |port| u16::try_from(port.container_port).ok(),
            )
        }
    }
}

/// A connection, secured or not.
trait Stream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin {}

impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin> Stream for T {}

/// An HTTP request; it passes with a status below 400.
pub async fn http_get(
    action: &HTTPGetAction,
    container: &Container,
    address: IpAddr,
) -> Result<(), String> {
    let host = action
        .host
        .as_deref()
        .and_then(|host| host.parse().ok())
        .unwrap_or(address);
    let port = port_number(&action.port, container).ok_or_else(|| "no such port".to_owned())?;
    let stream = TcpStream::connect(SocketAddr::new(host, port))
        .await
        .map_err(|error| error.to_string())?;
    let stream: Box<dyn Stream> = if action.scheme.as_deref() == Some("HTTPS") {
        let secured = unverified_tls::connect(stream, host).await;
        Box::new(secured.map_err(|error| error.to_string())?)
    } else {
        Box::new(stream)
    };
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|error| error.to_string())?;
    let connection = tokio::spawn(connection);
    let path = action
        .path
        .as_deref()
        .filter(|path| !path.is_empty())
        .unwrap_or("/");
    let path = if path.starts_with('/') {
        path.to_owned()
    } else {
        format!("/{path}")
    };
    let headers = action.http_headers.iter().flatten();
    let own_host = headers
        .clone()
        .any(|header| header.name.eq_ignore_ascii_case("host"));
    let mut request = http::Request::get(path)
        .header("user-agent", "kube-probe/agent-sandbox")
        .header("accept", "*/*");
    if !own_host {
        request = request.header("host", format!("{host}:{port}"));
    }
    for header in headers {
        request = request.header(&header.name, &header.value);
    }
    let request = request
        .body(Empty::<bytes::Bytes>::new())
        .map_err(|error| error.to_string())?;
    let response = sender
        .send_request(request)
        .await
        .map_err(|error| error.to_string());
    connection.abort();
    let status = response?.status();
    if status.as_u16() < 400 {
        Ok(())
    } else {
        Err(format!(
            "HTTP probe failed with statuscode: {}",
            status.as_u16()
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter() -> Counter {
        Counter::new(Timing {
            initial_delay: Duration::ZERO,
            period: Duration::from_secs(1),
            timeout: Duration::from_secs(1),
            successes: 1,
            failures: 3,
        })
    }

    #[test]
    fn quick_retries_do_not_use_up_the_failure_threshold() {
        let mut counter = counter();
        for milliseconds in (0..2000).step_by(10) {
            assert!(
                !counter.take(false, Duration::from_millis(milliseconds)),
                "at {milliseconds} ms"
            );
        }
        assert!(
            counter.take(false, Duration::from_secs(2)),
            "the third period fails it"
        );
    }

    #[test]
    fn the_first_success_counts_at_once_and_slows_the_probe_down() {
        let mut counter = counter();
        assert!(!counter.take(false, Duration::ZERO));
        assert!(counter.pause() < Duration::from_millis(10));
        assert!(counter.take(true, Duration::from_millis(3)));
        assert_eq!(counter.pause(), Duration::from_secs(1));
        assert!(!counter.take(true, Duration::from_secs(1)), "nothing new");
    }
}
