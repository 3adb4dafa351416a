//! Sends a request to its sandbox and returns the response. A failed dial is retried; a request that the sandbox may
//! have received is not.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::header::{self, HeaderValue};
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri, Version};
use hyper::body::Incoming;
use saturating_time::SaturatingTime;
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::body::{ProxyBody, RequestBody, UploadProgress};
use crate::failure::Failure;
use crate::headers::{self, Origin};
use crate::identify::Target;
use crate::metrics::Metrics;
use crate::resolve::Resolver;
use crate::trace;
use crate::tunnel::Tunnels;
use crate::upstream::{Link, SendFailure, Upstream};

/// The timeouts of one request.
#[derive(Clone, Copy, Debug)]
struct Timeouts {
    /// Until the head of the response has arrived.
    answer: Duration,
    /// Between chunks of the response, and for dialling.
    idle: Duration,
}

#[derive(Debug)]
pub struct Forwarder {
    pub resolver: Arc<Resolver>,
    pub metrics: Arc<Metrics>,
    pub tunnels: Tunnels,
    pub proxy_timeout: Duration,
    pub dial_timeout: Duration,
    pub response_header_timeout: Option<Duration>,
    pub dial_retries: u32,
    pub dial_retry_delay: Duration,
    pub dial_retry_longest_delay: Duration,
    pub max_request_body_bytes: u64,
}

impl Forwarder {
    pub async fn forward(
        &self,
        mut request: Request<Incoming>,
        target: &Target,
        origin: &Origin,
    ) -> Result<Response<ProxyBody>, Failure> {
        self.check_length(&request)?;
        let idle = target.timeout.map_or(self.proxy_timeout, |timeout| {
            timeout.min(self.proxy_timeout)
        });
        let answer = self
            .response_header_timeout
            .map_or(idle, |timeout| timeout.min(idle));
        let timeouts = Timeouts { answer, idle };
        let upstream = self.resolver.resolve(&target.sandbox).await?;
        let upgrade = headers::requested_upgrade(request.headers())
            .filter(|_| request.version() == Version::HTTP_11);
        let client_side = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
        let speaks_grpc = request.version() == Version::HTTP_2 && is_grpc(request.headers());
        let mut request = self.prepare(request, target, &upstream, origin);
        if let (Some(protocol), Some(client_side)) = (upgrade, client_side) {
            request
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
            request.headers_mut().insert(header::UPGRADE, protocol);
            headers::replace_origin(request.headers_mut());
            let (upstream, stream) = self.dial(upstream, target, idle).await?;
            return self
                .tunnels
                .open(&upstream, stream, request, client_side, answer, target)
                .await;
        }
        if speaks_grpc {
            return self
                .send_multiplexed(upstream, request, target, timeouts)
                .await;
        }
        *request.version_mut() = Version::HTTP_11;
        self.send(upstream, request, target, timeouts).await
    }

    fn check_length(&self, request: &Request<Incoming>) -> Result<(), Failure> {
        if self.max_request_body_bytes == 0 {
            return Ok(());
        }
        let length = request
            .headers()
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if length.is_some_and(|length| length > self.max_request_body_bytes) {
            Err(Failure::BodyTooLarge)
        } else {
            Ok(())
        }
    }

    fn prepare(
        &self,
        request: Request<Incoming>,
        target: &Target,
        upstream: &Upstream,
        origin: &Origin,
    ) -> Request<RequestBody> {
        let (mut parts, body) = request.into_parts();
        let host = upstream.host(target.port);
        let original_host = parts.headers.get(header::HOST).cloned().or_else(|| {
            parts
                .uri
                .authority()
                .and_then(|authority| HeaderValue::from_str(authority.as_str()).ok())
        });
        headers::prepare_request(&mut parts.headers, origin, original_host, host);
        if telemetry::spans::are_exported() {
            trace::inject_context(&mut parts.headers);
        }
        if parts.uri.authority().is_some() || target.consumed_path > 0 {
            parts.uri = origin_form(&parts.uri, target.consumed_path);
        }
        Request::from_parts(parts, RequestBody::new(body, self.max_request_body_bytes))
    }

    /// Sends over an idle connection if there is one, or else over a new connection.
    async fn send(
        &self,
        upstream: Arc<Upstream>,
        mut request: Request<RequestBody>,
        target: &Target,
        timeouts: Timeouts,
    ) -> Result<Response<ProxyBody>, Failure> {
        let progress = request.body().progress();
        while let Some(mut link) = upstream.reuse(target.port) {
            match link.send(request, timeouts.answer).await {
                None => return Err(timed_out(progress.as_deref(), target)),
                Some(Ok(response)) => {
                    self.metrics
                        .reused_connections
                        .fetch_add(1, Ordering::Relaxed);
                    return finish(response, link, upstream, target, timeouts.idle);
                }
                Some(Err(SendFailure::Unsent(unsent))) => request = *unsent,
                Some(Err(SendFailure::Broken)) => return Err(broken(progress.as_deref(), target)),
            }
        }
        let (upstream, stream) = self.dial(upstream, target, timeouts.idle).await?;
        let mut link = Link::over(stream).await.map_err(|_| broken(None, target))?;
        match link.send(request, timeouts.answer).await {
            None => Err(timed_out(progress.as_deref(), target)),
            Some(Ok(response)) => finish(response, link, upstream, target, timeouts.idle),
            Some(Err(_)) => Err(broken(progress.as_deref(), target)),
        }
    }

    /// Sends over HTTP/2, which gRPC needs end to end.
    async fn send_multiplexed(
        &self,
        upstream: Arc<Upstream>,
        request: Request<RequestBody>,
        target: &Target,
        timeouts: Timeouts,
    ) -> Result<Response<ProxyBody>, Failure> {
        let progress = request.body().progress();
        let mut request = request;
        let mut uri = request.uri().clone().into_parts();
        uri.scheme = Some(http::uri::Scheme::HTTP);
        uri.authority = request
            .headers()
            .get(header::HOST)
            .and_then(|host| http::uri::Authority::try_from(host.as_bytes()).ok());
        if let Ok(uri) = Uri::from_parts(uri) {
            *request.uri_mut() = uri;
        }
        request.headers_mut().remove(header::HOST);
        let mut sender = if let Some(sender) = upstream.multiplexed(target.port) {
            sender
        } else {
            let (upstream, stream) = self.dial(upstream, target, timeouts.idle).await?;
            upstream
                .multiplex(target.port, stream)
                .await
                .map_err(|_| broken(None, target))?
        };
        let answered = within(
            timeouts.answer,
            progress.as_deref(),
            sender.send_request(request),
        )
        .await;
        let response = answered
            .ok_or_else(|| timed_out(progress.as_deref(), target))?
            .map_err(|_| broken(progress.as_deref(), target))?;
        Ok(response.map(|body| ProxyBody::spawned(body, timeouts.idle)))
    }

    /// Connects, and retries with growing pauses. Each attempt looks the sandbox up again: its address may have changed.
    async fn dial(
        &self,
        mut upstream: Arc<Upstream>,
        target: &Target,
        timeout: Duration,
    ) -> Result<(Arc<Upstream>, TcpStream), Failure> {
        let deadline = Instant::now().later_by(timeout);
        let longest = self.dial_retry_longest_delay;
        let mut pause = self.dial_retry_delay.min(longest);
        for attempt in 0..=self.dial_retries {
            if attempt > 0 {
                tokio::time::sleep_until(Instant::now().later_by(pause).min(deadline)).await;
                pause = pause.saturating_mul(2).min(longest);
                upstream = self.resolver.resolve(&target.sandbox).await?;
            }
            let remaining = deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return Err(timed_out(None, target));
            }
            self.metrics.dials.fetch_add(1, Ordering::Relaxed);
            match upstream
                .dial(target.port, self.dial_timeout.min(remaining))
                .await
            {
                // During the dial, another sandbox may have received the address.
                Ok(_) if upstream.is_retired() => {}
                Ok(stream) => return Ok((upstream, stream)),
                Err(error) => {
                    self.metrics.failed_dials.fetch_add(1, Ordering::Relaxed);
                    tracing::debug!(sandbox = target.sandbox.as_str(), port = target.port, attempt, %error, "cannot dial");
                }
            }
        }
        Err(Failure::CannotConnect {
            name: target.sandbox.name().to_owned(),
        })
    }
}

fn finish(
    mut response: Response<Incoming>,
    link: Link,
    upstream: Arc<Upstream>,
    target: &Target,
    timeout: Duration,
) -> Result<Response<ProxyBody>, Failure> {
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        // The client did not ask for an upgrade, and would read the following bytes as another protocol.
        return Err(broken(None, target));
    }
    headers::strip_hop_by_hop(response.headers_mut());
    *response.version_mut() = Version::HTTP_11;
    let port = target.port;
    Ok(response.map(|body| ProxyBody::driven(body, link, upstream, port, timeout)))
}

/// Waits for `answer` until `timeout` has passed since the request began and since the last chunk of its body. `None` after the timeout.
pub async fn within<T>(
    timeout: Duration,
    progress: Option<&UploadProgress>,
    answer: impl Future<Output = T>,
) -> Option<T> {
    let mut answer = std::pin::pin!(answer);
    let mut deadline = Instant::now().later_by(timeout);
    loop {
        if let Ok(answer) = tokio::time::timeout_at(deadline, answer.as_mut()).await {
            return Some(answer);
        }
        deadline = progress?.later_deadline(deadline, timeout)?;
    }
}

/// The failure after a timeout: the client's, if it stopped sending its body, or else the sandbox's.
pub fn timed_out(progress: Option<&UploadProgress>, target: &Target) -> Failure {
    match progress {
        Some(progress) if progress.awaits_client() => Failure::ClientTimedOut,
        _ => Failure::TimedOut {
            name: target.sandbox.name().to_owned(),
        },
    }
}

/// The failure of a broken connection: the client's, if its body failed, or else the sandbox's.
pub fn broken(progress: Option<&UploadProgress>, target: &Target) -> Failure {
    match progress {
        Some(progress) if progress.was_too_large() => Failure::BodyTooLarge,
        Some(progress) if progress.was_unreadable() => Failure::BadRequestBody,
        _ => Failure::BadAnswer {
            name: target.sandbox.name().to_owned(),
        },
    }
}

fn is_grpc(headers: &http::HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// The URI in origin form (path and query), without the part of the path that named the sandbox.
fn origin_form(uri: &Uri, consumed: usize) -> Uri {
    let whole = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    let rest = whole.get(consumed..).unwrap_or_default();
    let rooted = if rest.starts_with('/') {
        rest.to_owned()
    } else {
        format!("/{rest}")
    };
    rooted.parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_timeout_counts_from_the_last_chunk_of_the_body() {
        let timeout = Duration::from_secs(2);
        let elapsed_after = async |chunk_after: Option<Duration>| {
            let (began, progress) = (Instant::now(), UploadProgress::new());
            let never = async {
                if let Some(chunk_after) = chunk_after {
                    tokio::time::sleep(chunk_after).await;
                    progress.note_progress();
                }
                std::future::pending::<()>().await;
            };
            assert_eq!(within(timeout, Some(&progress), never).await, None);
            // Tokio's clock has a resolution of one millisecond.
            Duration::from_millis(u64::try_from(began.elapsed().as_millis()).unwrap())
        };
        let at_once = elapsed_after(Some(Duration::ZERO)).await;
        assert!(
            at_once.abs_diff(timeout) <= Duration::from_millis(5),
            "{at_once:?}"
        );
        let later = elapsed_after(Some(Duration::from_millis(1500))).await;
        assert!(
            later.abs_diff(Duration::from_millis(3500)) <= Duration::from_millis(5),
            "{later:?}"
        );
        let without = elapsed_after(None).await;
        assert!(
            without.abs_diff(timeout) <= Duration::from_millis(5),
            "{without:?}"
        );
    }

    #[test]
    fn the_path_prefix_that_names_the_sandbox_is_not_forwarded() {
        let form = |uri: &str, consumed| origin_form(&uri.parse().unwrap(), consumed).to_string();
        assert_eq!(form("/sandbox/a/b/1/x/y?q=1", 14), "/x/y?q=1");
        assert_eq!(form("/sandbox/a/b/1?q=1", 14), "/?q=1");
        assert_eq!(form("/sandbox/a/b/1", 14), "/");
        assert_eq!(form("http://host:1/x%2Fy?z", 0), "/x%2Fy?z");
    }
}
