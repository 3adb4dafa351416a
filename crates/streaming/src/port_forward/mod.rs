//! Port-forward: connects the streams of a client to ports of a pod. The caller's [`Connect`] opens the connections to the pod.

mod spdy;
mod websocket;

use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::Settings;
use crate::upgrade::{Offer, Upgrade};
use crate::websocket::{Tunnel, accept};

/// SPDY tunnelled through a WebSocket, which newer clients use.
const TUNNEL_PROTOCOL: &str = "SPDY/3.1+portforward.k8s.io";

/// The protocols that port-forward offers.
pub const OFFER: Offer = Offer {
    spdy: &["portforward.k8s.io"],
    websocket: &[
        TUNNEL_PROTOCOL,
        "v4.channel.k8s.io",
        "v4.base64.channel.k8s.io",
        "base64.v4.channel.k8s.io",
    ],
};

/// A bidirectional connection to a port.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// Why a port could not be reached, as a message for the user.
#[derive(Debug, Clone, thiserror::Error, PartialEq, Eq)]
#[error("{0}")]
pub struct Failure(pub String);

/// Opens connections to the ports of one pod.
pub trait Connect: Clone + Send + Sync + 'static {
    fn connect(&self, port: u16) -> BoxFuture<'static, Result<Box<dyn Duplex>, Failure>>;

    /// The name of the pod in error messages.
    fn name(&self) -> &str;
}

/// Whether the ports come from the query string of the request and not from stream headers.
pub fn ports_in_request(upgrade: &Upgrade) -> bool {
    matches!(upgrade, Upgrade::WebSocket { protocol, .. } if *protocol != Some(TUNNEL_PROTOCOL))
}

/// Serves a client on an upgraded connection until it disconnects.
///
/// `ports` are those of the query string, used if [`ports_in_request`] is true.
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

/// The error message for a client whose port cannot be reached.
fn connect_error(port: u16, pod: &str, failure: &Failure) -> String {
    format!("error forwarding port {port} to pod {pod}: {failure}")
}
