//! Startup, liveness and readiness probes.
//!
//! A kubelet waits up to a period before the first probe. Here the first probe is sent at once and repeated after milliseconds until
//! the container first passes, so that a pod becomes ready without delay. The period applies after that, and to counting failures.
//!
//! The node sends probes of the pod's own address. A probe that names another host is sent from inside the pod's network, so it
//! reaches only what the pod itself reaches: neither this machine's loopback nor what policies deny to the pod (SSRF).

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http_body_util::Empty;
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Container, HTTPGetAction, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use saturating_time::SaturatingTime;
use tokio::net::TcpStream;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, sleep, timeout};

use crate::grpc_health::{self, HealthError};
use crate::runtime::agent::{AgentError, Output, Session};
use crate::runtime::{ContainerId, Runtime, RuntimeError};
use crate::unverified_tls;
use api::errors::chain;

/// The first pause, and the fraction by which each pause grows: a slowly starting container is noticed soon after it is up, and is not
/// probed very often.
const FIRST_RETRY: Duration = Duration::from_millis(1);
const RETRY_GROWTH: u32 = 6;

/// The timeout of waiting for the exit of a command that was killed after its own timeout.
const KILL_WAIT: Duration = Duration::from_secs(1);

/// The kind of a probe.
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

/// Why one attempt of a probe or a hook failed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("no such port")]
    NoPort,
    #[error("looking up {0}: it has no address")]
    NoAddress(String),
    #[error("timed out after {0:?}")]
    TimedOut(Duration),
    #[error("command exited with {code}: {output}")]
    Command { code: i32, output: String },
    #[error("HTTP probe failed with statuscode: {0}")]
    HttpStatus(u16),
    #[error(transparent)]
    Health(#[from] HealthError),
    #[error(transparent)]
    Request(#[from] http::Error),
    #[error(transparent)]
    Http(#[from] hyper::Error),
    #[error(transparent)]
    Connection(#[from] std::io::Error),
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

/// The timing and thresholds of a probe.
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

/// Counts results and decides when a threshold is crossed. Pure.
#[derive(Debug)]
pub struct Counter {
    timing: Timing,
    in_a_row: u32,
    last: Option<bool>,
    verdict: Option<bool>,
    /// When the last failure was counted. At most one failure per period counts.
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

    /// Adds a result from `at` this time since the container started. Returns whether the verdict changed.
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

    /// The pause before the next attempt.
    pub fn pause(&mut self) -> Duration {
        if self.verdict == Some(true) {
            return self.timing.period;
        }
        let pause = self.retry.min(self.timing.period);
        self.retry = self
            .retry
            .saturating_add(self.retry.checked_div(RETRY_GROWTH).unwrap_or_default())
            .min(self.timing.period);
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
        let answer = ask(runtime, id, container, probe, address, timing.timeout).await;
        if counter.take(answer.is_ok(), began.elapsed()) {
            report(match answer {
                Ok(()) => Verdict::Passing,
                Err(error) => Verdict::Failing(chain(&error)),
            });
        }
        sleep(counter.pause()).await;
    }
}

/// One attempt of a probe, with `limit` as its timeout.
async fn ask<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    container: &Container,
    probe: &Probe,
    address: IpAddr,
    limit: Duration,
) -> Result<(), ProbeError> {
    if let Some(action) = &probe.exec {
        let command = action.command.clone().unwrap_or_default();
        return exec(runtime, id, command, Some(limit)).await;
    }
    let asked = async {
        if let Some(action) = &probe.http_get {
            http_get(runtime, id, action, container, address).await
        } else if let Some(action) = &probe.tcp_socket {
            let target =
                Target::of(action.host.as_deref(), &action.port, container, address).await?;
            target.connect(runtime, id).await.map(drop)
        } else if let Some(action) = &probe.grpc {
            let port = u16::try_from(action.port).map_err(|_| ProbeError::NoPort)?;
            let service = action.service.as_deref().unwrap_or_default();
            let health = grpc_health::check(SocketAddr::new(address, port), service);
            Ok(health.await?)
        } else {
            Ok(())
        }
    };
    within(Some(limit), asked)
        .await
        .unwrap_or(Err(ProbeError::TimedOut(limit)))
}

/// Applies a timeout, if there is one.
pub async fn within<T>(
    limit: Option<Duration>,
    work: impl Future<Output = T>,
) -> Result<T, Elapsed> {
    match limit {
        Some(limit) => timeout(limit, work).await,
        None => Ok(work.await),
    }
}

/// Runs a command in the container, which passes if it exits with 0. After the timeout it is killed with its children, so that attempts
/// do not accumulate.
pub async fn exec<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    command: Vec<String>,
    limit: Option<Duration>,
) -> Result<(), ProbeError> {
    let request = shim_protocol::ExecRequest {
        arguments: command,
        environment: Vec::new(),
        terminal: false,
        stdin: false,
        window: None,
    };
    let deadline = limit.map(|limit| (limit, Instant::now().later_by(limit)));
    let left = || deadline.map(|(_, deadline)| deadline.saturating_duration_since(Instant::now()));
    let late = |_| ProbeError::TimedOut(limit.unwrap_or_default());
    let mut session = within(left(), runtime.exec(id, request))
        .await
        .map_err(late)??;
    let outcome = within(left(), outcome_of(&mut session)).await;
    if outcome.is_err() {
        let killed = async {
            session.input.signal(libc::SIGKILL).await?;
            while !matches!(session.output.next().await?, Output::Exit(_)) {}
            Ok::<(), AgentError>(())
        };
        let _ = timeout(KILL_WAIT, killed).await;
    }
    outcome.map_err(late)?
}

async fn outcome_of(session: &mut Session) -> Result<(), ProbeError> {
    const MOST_OUTPUT: usize = 10 << 10;
    let mut written = Vec::new();
    loop {
        match session.output.next().await? {
            Output::Stdout(data) | Output::Stderr(data) => {
                let room = MOST_OUTPUT.saturating_sub(written.len());
                written.extend_from_slice(&data[..data.len().min(room)]);
            }
            Output::Exit(exit) if exit.code == 0 => return Ok(()),
            Output::Exit(exit) => {
                return Err(ProbeError::Command {
                    code: exit.code,
                    output: String::from_utf8_lossy(&written).trim().to_owned(),
                });
            }
        }
    }
}

/// The target of a probe.
struct Target {
    address: SocketAddr,
    /// In the form of a URL's authority.
    host: String,
    sender: Sender,
}

/// The network that a probe is sent from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sender {
    Node,
    Pod,
}

impl Target {
    fn new(address: SocketAddr, host: String, pod: IpAddr) -> Self {
        let sender = if address.ip() == pod {
            Sender::Node
        } else {
            Sender::Pod
        };
        Self {
            address,
            host,
            sender,
        }
    }

    /// The pod's own address, unless the probe names another host. A host name is resolved by the machine's resolver, whose error is
    /// not shown to the pod's user.
    async fn of(
        host: Option<&str>,
        port: &IntOrString,
        container: &Container,
        pod: IpAddr,
    ) -> Result<Self, ProbeError> {
        let port = port_number(port, container).ok_or(ProbeError::NoPort)?;
        let Some(name) = host.filter(|host| !host.is_empty()) else {
            let address = SocketAddr::new(pod, port);
            return Ok(Self::new(address, address.to_string(), pod));
        };
        if let Ok(address) = name.parse() {
            let address = SocketAddr::new(address, port);
            return Ok(Self::new(address, address.to_string(), pod));
        }
        let found = tokio::net::lookup_host((name, port)).await;
        let address = found.ok().and_then(|mut found| found.next());
        let address = address.ok_or_else(|| ProbeError::NoAddress(name.to_owned()))?;
        Ok(Self::new(address, format!("{name}:{port}"), pod))
    }

    async fn connect<R: Runtime>(
        &self,
        runtime: &R,
        id: &ContainerId,
    ) -> Result<TcpStream, ProbeError> {
        let connected = match self.sender {
            Sender::Node => TcpStream::connect(self.address).await,
            Sender::Pod => runtime.connect_from(&id.pod, self.address).await?,
        };
        Ok(connected?)
    }
}

/// A port by number, or by its name in the container's ports.
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

/// A connection with or without TLS.
trait Stream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin {}

impl<T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin> Stream for T {}

/// Sends an HTTP request, which passes with a status below 400.
pub async fn http_get<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    action: &HTTPGetAction,
    container: &Container,
    address: IpAddr,
) -> Result<(), ProbeError> {
    let target = Target::of(action.host.as_deref(), &action.port, container, address).await?;
    let stream = target.connect(runtime, id).await?;
    let stream: Box<dyn Stream> = if action.scheme.as_deref() == Some("HTTPS") {
        Box::new(unverified_tls::connect(stream, target.address.ip()).await?)
    } else {
        Box::new(stream)
    };
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
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
        request = request.header("host", target.host);
    }
    for header in headers {
        request = request.header(&header.name, &header.value);
    }
    let request = request.body(Empty::<bytes::Bytes>::new())?;
    let response = sender.send_request(request).await;
    connection.abort();
    let status = response?.status();
    if status.as_u16() < 400 {
        Ok(())
    } else {
        Err(ProbeError::HttpStatus(status.as_u16()))
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
