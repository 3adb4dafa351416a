//! Hears over netlink of links and routing rules that are removed.

use futures::StreamExt;
use futures::channel::mpsc::UnboundedReceiver;
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::sys::SocketAddr;
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::task::JoinHandle;

use super::links::{NetworkError, name_of};
use crate::names::Names;

/// What another program took away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// The link of a slot.
    Link(u32),
    /// A routing rule, of whomever.
    Rule,
}

/// Hears of losses.
#[derive(Debug)]
pub struct Losses {
    names: Names,
    messages: UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>,
    connection: JoinHandle<()>,
}

impl Drop for Losses {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Losses {
    /// Hears of what happens from now on.
    pub fn open(names: Names) -> Result<Self, NetworkError> {
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Ipv4Rule,
            MulticastGroup::Ipv6Rule,
        ];
        let opened = new_multicast_connection(&groups);
        let (connection, _, messages) = opened.map_err(NetworkError::Socket)?;
        Ok(Self {
            names,
            messages,
            connection: tokio::spawn(connection),
        })
    }

    /// The next loss, also of what the node removed itself; nothing once the socket is closed.
    pub async fn next(&mut self) -> Option<Loss> {
        loop {
            let (message, _) = self.messages.next().await?;
            let NetlinkPayload::InnerMessage(message) = message.payload else {
                continue;
            };
            match message {
                RouteNetlinkMessage::DelLink(link) => {
                    let slot = name_of(&link).and_then(|name| self.names.slot_of(name));
                    if let Some(slot) = slot {
                        return Some(Loss::Link(slot));
                    }
                }
                RouteNetlinkMessage::DelRule(_) => return Some(Loss::Rule),
                _ => {}
            }
        }
    }
}
