//! Upgraded connections: once both sides have agreed to change protocols, bytes pass both ways until one side ends, the
//! sandbox goes away, or the router's time to stop is up. No time limit applies.

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

use crate::answer::Failure;
use crate::body::{ProxyBody, RequestBody};
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
    /// Cancelled when requests in flight have had their time.
    pub cut: CancellationToken,
}

impl Tunnels {
    /// Asks the sandbox to change protocols, and joins both sides if it agrees. What it says otherwise is the answer.
    pub async fn open(
        &self,
        upstream: &Upstream,
        stream: TcpStream,
        request: Request<RequestBody>,
        client_side: OnUpgrade,
        patience: Duration,
        target: &Target,
    ) -> Result<Response<ProxyBody>, Failure> {
        let passage = request.body().passage();
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|_| broken(None, target))?;
        let gone = upstream.gone();
        let (watching, cut) = (gone.clone(), self.cut.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                _ = connection.with_upgrades() => {}
                () = watching.cancelled() => {}
                () = cut.cancelled() => {}
            }
        });
        let answered = within(patience, passage.as_deref(), sender.send_request(request)).await;
        let mut response = answered
            .ok_or_else(|| timed_out(passage.as_deref(), target))?
            .map_err(|_| broken(passage.as_deref(), target))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            headers::strip_hop_by_hop(response.headers_mut());
            return Ok(response.map(|body| ProxyBody::spawned(body, patience)));
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
        let cut = self.cut.clone();
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
                () = cut.cancelled() => {}
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
