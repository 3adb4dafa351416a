//! Notices over netlink when links and routing rules are removed.

use futures::StreamExt;
use futures::channel::mpsc::UnboundedReceiver;
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::sys::SocketAddr;
use rtnetlink::{MulticastGroup, new_multicast_connection};
use tokio::task::JoinHandle;

use super::links::{NetworkError, name_of};
use crate::names::Names;

/// What was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The link of a slot.
    Link(u32),
    /// A routing rule of any program.
    Rule,
}

/// A netlink socket that receives removals of links and routing rules.
#[derive(Debug)]
pub struct RemovalMonitor {
    names: Names,
    messages: UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>,
    connection: JoinHandle<()>,
}

impl Drop for RemovalMonitor {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl RemovalMonitor {
    /// Opens the socket. Earlier removals are not received.
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

    /// The next removal, including the node's own. `None` when the socket is closed.
    pub async fn next(&mut self) -> Option<Removal> {
        loop {
            let (message, _) = self.messages.next().await?;
            let NetlinkPayload::InnerMessage(message) = message.payload else {
                continue;
            };
            match message {
                RouteNetlinkMessage::DelLink(link) => {
                    let slot = name_of(&link).and_then(|name| self.names.slot_of(name));
                    if let Some(slot) = slot {
                        return Some(Removal::Link(slot));
                    }
                }
                RouteNetlinkMessage::DelRule(_) => return Some(Removal::Rule),
                _ => {}
            }
        }
    }
}
