//! Upgraded connections: after both sides have agreed to change protocols, bytes are copied both ways until one side closes, the
//! sandbox goes away, or the shutdown timeout passes. No other timeout applies.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use http::{Request, Response, StatusCode, header};
use hyper::client::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use crate::body::{ProxyBody, RequestBody};
use crate::failure::Failure;
use crate::forward::{broken, timed_out, within};
use crate::headers;
use crate::identify::Target;
use crate::metrics::Metrics;
use crate::upstream::Upstream;

const COPY_BUFFER: usize = 16 * 1024;

#[derive(Debug)]
pub struct Tunnels {
    pub metrics: Arc<Metrics>,
    pub tasks: TaskTracker,
    /// Cancelled when the time for requests in flight is over.
    pub abort: CancellationToken,
}

impl Tunnels {
    /// Asks the sandbox to change protocols, and joins both sides if it agrees. Otherwise returns the sandbox's response.
    pub async fn open(
        &self,
        upstream: &Upstream,
        stream: TcpStream,
        request: Request<RequestBody>,
        client_side: OnUpgrade,
        timeout: Duration,
        target: &Target,
    ) -> Result<Response<ProxyBody>, Failure> {
        let progress = request.body().progress();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|_| broken(None, target))?;
        let gone = upstream.gone();
        let (watching, abort) = (gone.clone(), self.abort.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                _ = connection.with_upgrades() => {}
                () = watching.cancelled() => {}
                () = abort.cancelled() => {}
            }
        });
        let answered = within(timeout, progress.as_deref(), sender.send_request(request)).await;
        let mut response = answered
            .ok_or_else(|| timed_out(progress.as_deref(), target))?
            .map_err(|_| broken(progress.as_deref(), target))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            headers::strip_hop_by_hop(response.headers_mut());
            return Ok(response.map(|body| ProxyBody::spawned(body, timeout)));
        }
        self.join(client_side, hyper::upgrade::on(&mut response), gone);
        let protocol = response.headers().get(header::UPGRADE).cloned();
        let mut response = response.map(|_| ProxyBody::full(""));
        headers::strip_hop_by_hop(response.headers_mut());
        response.headers_mut().insert(
            header::CONNECTION,
            header::HeaderValue::from_static("Upgrade"),
        );
        if let Some(protocol) = protocol {
            response.headers_mut().insert(header::UPGRADE, protocol);
        }
        Ok(response)
    }

    fn join(&self, client_side: OnUpgrade, sandbox_side: OnUpgrade, gone: CancellationToken) {
        let open = Open::count(&self.metrics);
        let abort = self.abort.clone();
        let tunnel = async move {
            let _open = open;
            let joined = async {
                let (client, sandbox) = tokio::try_join!(client_side, sandbox_side).ok()?;
                let (mut client, mut sandbox) = (TokioIo::new(client), TokioIo::new(sandbox));
                tokio::io::copy_bidirectional_with_sizes(
                    &mut client,
                    &mut sandbox,
                    COPY_BUFFER,
                    COPY_BUFFER,
                )
                .await
                .ok()
            };
            tokio::select! {
                _ = joined => {}
                () = gone.cancelled() => {}
                () = abort.cancelled() => {}
            }
        };
        // The span of the request, if there is one, lasts as long as the tunnel.
        self.tasks.spawn(tunnel.in_current_span());
    }
}

struct Open(Arc<Metrics>);

impl Open {
    fn count(metrics: &Arc<Metrics>) -> Self {
        metrics.active_tunnels.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(metrics))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.active_tunnels.fetch_sub(1, Ordering::Relaxed);
    }
}
