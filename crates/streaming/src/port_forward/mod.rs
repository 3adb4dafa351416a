//! Port-forward: a client's streams joined to connections to ports of a pod. Who connects, and where the pod is, is the caller's.

mod spdy;
mod websocket;

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::Settings;
use crate::upgrade::{Offer, Upgrade};
use crate::websocket::{Tunnel, accept};

/// SPDY inside a WebSocket, as newer clients do it.
const TUNNEL_PROTOCOL: &str = "SPDY/3.1+portforward.k8s.io";

/// What port-forward speaks.
pub const OFFER: Offer = Offer {
    spdy: &["portforward.k8s.io"],
    websocket: &[
        TUNNEL_PROTOCOL,
        "v4.channel.k8s.io",
        "v4.base64.channel.k8s.io",
        "base64.v4.channel.k8s.io",
    ],
};

/// A connection to a port, both ways.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A port that could not be reached, in words for the user.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct Failure(pub String);

/// Opens connections to the ports of one pod.
pub trait Connect: Clone + Send + Sync + 'static {
    fn connect(&self, port: u16) -> BoxFuture<'static, Result<Box<dyn Duplex>, Failure>>;

    /// The pod, as messages to the client name it.
    fn name(&self) -> &str;
}

/// Whether the upgrade is the one in which the request, not the streams, names the ports.
pub fn ports_in_request(upgrade: &Upgrade) -> bool {
    matches!(upgrade, Upgrade::WebSocket { protocol, .. } if *protocol != Some(TUNNEL_PROTOCOL))
}

/// Serves a client on an upgraded connection until it leaves.
///
/// `ports` are those of the request's query, used where [`ports_in_request`] says so.
pub async fn serve<T>(
    io: T,
    upgrade: &Upgrade,
    ports: &[u16],
    connect: impl Connect,
    settings: Settings,
) where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    match upgrade {
        Upgrade::Spdy { .. } => spdy::serve(io, connect, settings).await,
        Upgrade::WebSocket { protocol, .. } if *protocol == Some(TUNNEL_PROTOCOL) => {
            let tunnel = Tunnel::new(accept(io).await);
            spdy::serve(tunnel, connect, settings).await;
        }
        Upgrade::WebSocket { protocol, .. } => {
            websocket::serve(io, *protocol, ports, connect, settings).await;
        }
    }
}

/// What a client reads when a port cannot be reached.
fn complaint(port: u16, pod: &str, failure: &Failure) -> String {
    format!("error forwarding port {port} to pod {pod}: {failure}")
}
