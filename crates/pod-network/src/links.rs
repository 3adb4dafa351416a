//! The links of pods: a veth pair between each pod's network namespace and the node.
//!
//! Links are routed, not bridged: the node has a route to each pod's addresses, and a pod has one route, to the node. Pods share no
//! layer-2 segment, so no pod can impersonate another or the node there, and all traffic between pods passes the node's rules
//! ([`firewall`](super::firewall)). Both ends have static neighbour entries, so there is no ARP or neighbour discovery.
//!
//! Each link has a packet filter ([`link_filter`](super::link_filter)), and routing rules ([`routing_rules`](super::routing_rules))
//! drop packets that the nftables table has not judged.
//!
//! Everything is configured over netlink. This module does not know which traffic may pass.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use futures::TryStreamExt;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::link::{InfoData, InfoVeth, LinkAttribute, LinkMessage};
use rtnetlink::packet_route::route::RouteScope;
use rtnetlink::{Handle, LinkBridge, LinkUnspec, LinkVeth, RouteMessageBuilder, new_connection};
use serde::{Deserialize, Serialize};

use super::address_block::AddressBlock;
use super::firewall::Surroundings;
use super::link_filter::{self, Ends};
use super::namespaces::{in_namespace, open_namespace};
use super::routing_rules::{self, Scope};
pub use super::sysctls::NoIpv6;
use super::sysctls::{forward_everything, ipv6_is_usable, set_ipv6, use_marks_in_source_checks};
use crate::names::{Names, short_hash};
use crate::pod_cidr::PodNetwork;

/// The hardware addresses of both ends. All pods have the same, because a link has only two ends; the second digit marks them as
/// locally administered.
const NODE_END: [u8; 6] = [0x02, 0, 0, 0, 0, 0x01];
/// The version of the configuration of links ([`link_filter`], sysctls). Links of earlier versions are created again.
const FILTER_VERSION: u32 = 1;
const POD_END: [u8; 6] = [0x02, 0, 0, 0, 0, 0x02];

#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error("opening a netlink socket")]
    Socket(#[source] std::io::Error),
    #[error("{operation}")]
    Netlink {
        operation: String,
        #[source]
        source: rtnetlink::Error,
    },
    #[error("link {0} does not exist")]
    NoSuchLink(String),
    #[error("the route to {0} cannot be encoded")]
    Route(AddressBlock),
    #[error("entering the network namespace {path}")]
    Enter {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("locking the routing rules of this machine")]
    RulesLock(#[source] std::io::Error),
    #[error("the thread that configures a pod's network died")]
    ThreadDied,
    #[error(transparent)]
    Firewall(#[from] super::firewall::FirewallError),
}

trait Naming<T> {
    fn naming(self, operation: impl std::fmt::Display) -> Result<T, NetworkError>;
}

impl<T> Naming<T> for Result<T, rtnetlink::Error> {
    fn naming(self, operation: impl std::fmt::Display) -> Result<T, NetworkError> {
        self.map_err(|source| NetworkError::Netlink {
            operation: operation.to_string(),
            source,
        })
    }
}

/// The IPv6 network of the pods' addresses: a unique local one, derived from the node's name on its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PodNetwork6 {
    prefix: u64,
}

impl PodNetwork6 {
    fn of(names: &Names) -> Self {
        let digits = short_hash(names.cgroup.as_bytes(), 5);
        let site = u64::from_str_radix(&digits, 16).unwrap_or(0);
        Self {
            prefix: (0xfd << 56) | (site << 16),
        }
    }

    pub fn host(&self, number: u32) -> Ipv6Addr {
        Ipv6Addr::from_bits((u128::from(self.prefix) << 64) | u128::from(number))
    }

    pub fn block(&self) -> AddressBlock {
        AddressBlock::new(self.host(0).into(), 64)
    }
}

/// Whether the node forwards the traffic of pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Forwarding {
    On,
    /// There is no nftables table to enforce policies, so pods reach only the node.
    Off,
}

/// The configuration with which a pod's link was created. A node with another configuration creates the link again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wiring {
    /// The range of the pods' addresses.
    pub range: String,
    range6: Option<String>,
    forwarding: Forwarding,
    /// The version of the packet filter. Absent for links of nodes that had no filter.
    #[serde(default)]
    filter: u32,
}

/// The addresses of a node and its pods. Pure, except for checking whether the machine has IPv6.
#[derive(Debug, Clone)]
pub struct Layout {
    pub names: Names,
    /// The node's index on its machine.
    pub node_index: u32,
    pub range: PodNetwork,
    range6: Result<PodNetwork6, NoIpv6>,
}

impl Layout {
    pub fn new(names: Names, node_index: u32, range: PodNetwork) -> Self {
        let range6 = ipv6_is_usable().map(|()| PodNetwork6::of(&names));
        Self {
            names,
            node_index,
            range,
            range6,
        }
    }

    /// The node's address for pods.
    pub fn node_addresses(&self) -> Vec<IpAddr> {
        let six = self.range6.as_ref().ok().map(|range| range.host(1).into());
        std::iter::once(self.range.host(1).into())
            .chain(six)
            .collect()
    }

    /// The ranges of the pods' addresses.
    pub fn ranges(&self) -> Vec<AddressBlock> {
        let four = AddressBlock::new(self.range.address.into(), self.range.prefix_length);
        let six = self.range6.as_ref().ok().map(PodNetwork6::block);
        std::iter::once(four).chain(six).collect()
    }

    /// The reason why pods have no IPv6 address. `None` if they have one.
    pub fn without_ipv6(&self) -> Option<NoIpv6> {
        self.range6.as_ref().err().copied()
    }

    /// The properties of this network that its rules depend on.
    pub fn surroundings(&self, firewall_program: PathBuf) -> Surroundings {
        Surroundings::new(
            firewall_program,
            &self.names,
            self.ranges(),
            self.node_addresses(),
        )
    }
}

/// The node's side of the pod network.
#[derive(Debug, Clone)]
pub struct Network {
    layout: Layout,
    handle: Handle,
    holder: u32,
    forwarding: Forwarding,
    /// Locked while routing rules are changed.
    rules_lock: PathBuf,
}

impl Network {
    /// Creates the interface that has the node's addresses, or opens the one of an earlier run.
    ///
    /// `rules_lock` is the file that all nodes of the machine lock while they change its routing rules.
    pub async fn open(
        layout: Layout,
        forwarding: Forwarding,
        rules_lock: PathBuf,
    ) -> Result<Self, NetworkError> {
        let (connection, handle, _) = new_connection().map_err(NetworkError::Socket)?;
        tokio::spawn(connection);
        let name = &layout.names.holder;
        let holder = if let Ok(index) = index_of(&handle, name).await {
            index
        } else {
            // A bridge without ports, because every kernel that runs containers supports bridges.
            let add = handle.link().add(LinkBridge::new(name).build());
            add.execute()
                .await
                .naming(format_args!("making interface {name}"))?;
            index_of(&handle, name).await?
        };
        if layout.range6.is_ok() {
            set_ipv6(name);
        }
        up(&handle, holder).await?;
        for address in layout.node_addresses() {
            add_address(&handle, holder, address)
                .await
                .naming("giving the node its address among pods")?;
        }
        let network = Self {
            layout,
            handle,
            holder,
            forwarding,
            rules_lock,
        };
        network.install_rules().await?;
        // Last, so that nothing is forwarded before the rules are in force.
        if forwarding == Forwarding::On {
            use_marks_in_source_checks();
            forward_everything(network.layout.range6.is_ok());
        }
        Ok(network)
    }

    /// Installs the routing rules that drop packets which the table has not judged. Idempotent.
    pub async fn install_rules(&self) -> Result<(), NetworkError> {
        let scope = Scope {
            node_index: self.layout.node_index,
            ranges: self.layout.ranges(),
            node: self.layout.node_addresses(),
            forwarding: self.forwarding,
        };
        routing_rules::install(&self.handle, &self.rules_lock, &scope).await
    }

    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The current configuration of links.
    pub fn wiring(&self) -> Wiring {
        let range6 = self.layout.range6.as_ref().ok();
        Wiring {
            range: self.range().to_string(),
            range6: range6.map(|range| range.block().to_string()),
            forwarding: self.forwarding,
            filter: FILTER_VERSION,
        }
    }

    pub fn gateway(&self) -> Ipv4Addr {
        self.layout.range.host(1)
    }

    pub fn range(&self) -> PodNetwork {
        self.layout.range
    }

    /// The address of the pod in `slot`.
    pub fn address(&self, slot: u32) -> Ipv4Addr {
        self.layout.range.host(slot + 2)
    }

    pub fn ipv6_address(&self, slot: u32) -> Option<Ipv6Addr> {
        let range = self.layout.range6.as_ref().ok()?;
        Some(range.host(slot + 2))
    }

    fn addresses(&self, slot: u32) -> Vec<IpAddr> {
        let six = self.ipv6_address(slot).map(IpAddr::from);
        std::iter::once(self.address(slot).into())
            .chain(six)
            .collect()
    }

    /// Connects the namespace pinned at `pin` to the node.
    pub async fn connect(&self, slot: u32, pin: &Path) -> Result<(), NetworkError> {
        let name = self.layout.names.link(slot);
        let namespace = open_namespace(pin)?;
        self.disconnect(slot).await?;
        // The pod's end is created directly in the pod's namespace with its final name.
        let peer = LinkUnspec::new_with_name("eth0")
            .address(POD_END.to_vec())
            .setns_by_fd(namespace.as_raw_fd())
            .build();
        let link = LinkVeth::new(&name, "eth0")
            .set_info_data(InfoData::Veth(InfoVeth::Peer(peer)))
            .address(NODE_END.to_vec())
            .build();
        self.handle
            .link()
            .add(link)
            .execute()
            .await
            .naming(format_args!("making link {name}"))?;
        let index = index_of(&self.handle, &name).await?;
        self.configure_outside(&name, index, slot).await?;
        let (own, node) = (self.addresses(slot), self.layout.node_addresses());
        let forwarding = self.forwarding;
        in_namespace(namespace, move || configure_inside(&own, &node, forwarding)).await?
    }

    async fn configure_outside(
        &self,
        name: &str,
        index: u32,
        slot: u32,
    ) -> Result<(), NetworkError> {
        if self.layout.range6.is_ok() {
            set_ipv6(name);
        }
        let forward = if self.forwarding == Forwarding::On {
            "1"
        } else {
            "0"
        };
        let _ = std::fs::write(
            format!("/proc/sys/net/ipv4/conf/{name}/forwarding"),
            forward,
        );
        // Before the link is up, so that no packet passes unfiltered.
        self.filter(name, index, slot).await?;
        up(&self.handle, index).await?;
        let node = self.layout.node_addresses();
        for address in self.addresses(slot) {
            // The pod has a route to this address of the node, and perhaps to no other.
            let mut own = node.iter().copied();
            let source = own.find(|own| own.is_ipv4() == address.is_ipv4());
            let way = Way::Directly { source };
            route(&self.handle, AddressBlock::single(address), way, index).await?;
            neighbour(&self.handle, index, address, POD_END).await?;
        }
        Ok(())
    }

    async fn filter(&self, name: &str, index: u32, slot: u32) -> Result<(), NetworkError> {
        let range6 = self.layout.range6.as_ref().ok();
        let ends = Ends {
            pod: self.address(slot),
            node: self.gateway(),
            six: range6.map(|range| (range.host(slot + 2), range.host(1))),
        };
        let attached = link_filter::attach(&self.handle, index, &ends, self.forwarding).await;
        match attached.naming(format_args!(
            "attaching a packet filter to link {name} (the kernel needs CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF)"
        )) {
            // The table also drops forged source addresses.
            Err(error) if self.forwarding == Forwarding::On => {
                tracing::warn!(error = %api::errors::chain(&error), "only nftables keeps this pod from forging addresses");
                Ok(())
            }
            other => other,
        }
    }

    /// Whether a slot has its link.
    pub async fn has_link(&self, slot: u32) -> bool {
        let name = self.layout.names.link(slot);
        index_of(&self.handle, &name).await.is_ok()
    }

    /// Removes a pod's link, if it exists, and with it its routes.
    pub async fn disconnect(&self, slot: u32) -> Result<(), NetworkError> {
        let name = self.layout.names.link(slot);
        match index_of(&self.handle, &name).await {
            Ok(index) => self
                .handle
                .link()
                .del(index)
                .execute()
                .await
                .naming(format_args!("removing link {name}")),
            Err(_) => Ok(()),
        }
    }

    /// Removes the node's own interface and its routing rules. All pods must be gone.
    pub async fn close(&self) -> Result<(), NetworkError> {
        routing_rules::remove(&self.handle, &self.rules_lock, self.layout.node_index).await?;
        self.handle
            .link()
            .del(self.holder)
            .execute()
            .await
            .naming("removing the interface of the node's addresses")
    }
}

pub(super) fn name_of(link: &LinkMessage) -> Option<&str> {
    link.attributes
        .iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::IfName(name) => Some(name.as_str()),
            _ => None,
        })
}

/// Removes all links of a node that is not running, and the routing rules of its index. Returns the number of links.
pub async fn remove_all(
    names: &Names,
    node_index: Option<u32>,
    rules_lock: &Path,
) -> Result<usize, NetworkError> {
    let (connection, handle, _) = new_connection().map_err(NetworkError::Socket)?;
    let connection = tokio::spawn(connection);
    if let Some(node_index) = node_index {
        routing_rules::remove(&handle, rules_lock, node_index).await?;
    }
    let links: Vec<LinkMessage> = handle
        .link()
        .get()
        .execute()
        .try_collect()
        .await
        .naming("listing links")?;
    let mut removed = 0;
    for link in links {
        if name_of(&link).is_some_and(|name| names.is_link(name)) {
            let deleted = handle.link().del(link.header.index).execute().await;
            // Removing one end of a veth pair removes the other.
            removed += usize::from(deleted.is_ok());
        }
    }
    connection.abort();
    Ok(removed)
}

async fn add_address(handle: &Handle, link: u32, address: IpAddr) -> Result<(), rtnetlink::Error> {
    let block = if address.is_ipv4() { 32 } else { 128 };
    let mut add = handle.address().add(link, address, block).replace();
    if address.is_ipv6() {
        // Without duplicate address detection, which takes a second: the link has only two ends.
        add.message_mut()
            .attributes
            .push(AddressAttribute::Flags(AddressFlags::Nodad));
    }
    add.execute().await
}

/// The next hop of a route.
#[derive(Debug, Clone, Copy)]
enum Way {
    /// The destination is at the other end of the link. The node uses this source address.
    Directly {
        source: Option<IpAddr>,
    },
    Through(IpAddr),
}

async fn route(handle: &Handle, to: AddressBlock, way: Way, link: u32) -> Result<(), NetworkError> {
    let unwritable = |_| NetworkError::Route(to);
    let mut builder = RouteMessageBuilder::<IpAddr>::new()
        .output_interface(link)
        .destination_prefix(to.address(), to.length())
        .map_err(unwritable)?;
    match way {
        Way::Through(gateway) => {
            builder = builder.gateway(gateway).map_err(unwritable)?.onlink();
        }
        Way::Directly { source } => {
            if to.is_ipv4() {
                builder = builder.scope(RouteScope::Link);
            }
            if let Some(source) = source {
                builder = builder.pref_source(source).map_err(unwritable)?;
            }
        }
    }
    handle
        .route()
        .add(builder.build())
        .replace()
        .execute()
        .await
        .naming(format_args!("setting the route to {to}"))
}

async fn neighbour(
    handle: &Handle,
    link: u32,
    address: IpAddr,
    hardware: [u8; 6],
) -> Result<(), NetworkError> {
    handle
        .neighbours()
        .add(link, address)
        .link_layer_address(&hardware)
        .replace()
        .execute()
        .await
        .naming(format_args!("saying where {address} is"))
}

async fn index_of(handle: &Handle, name: &str) -> Result<u32, NetworkError> {
    let missing = || NetworkError::NoSuchLink(name.to_owned());
    let found: Option<LinkMessage> = handle
        .link()
        .get()
        .match_name(name.to_owned())
        .execute()
        .try_next()
        .await
        .map_err(|_| missing())?;
    found.map(|link| link.header.index).ok_or_else(missing)
}

async fn up(handle: &Handle, index: u32) -> Result<(), NetworkError> {
    let message = LinkUnspec::new_with_index(index).up().build();
    handle
        .link()
        .set(message)
        .execute()
        .await
        .naming("bringing a link up")
}

fn configure_inside(
    own: &[IpAddr],
    node: &[IpAddr],
    forwarding: Forwarding,
) -> Result<(), NetworkError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .map_err(NetworkError::Socket)?;
    runtime.block_on(async move {
        let (connection, handle, _) = new_connection().map_err(NetworkError::Socket)?;
        let connection = tokio::spawn(connection);
        let loopback = index_of(&handle, "lo").await?;
        up(&handle, loopback).await?;
        let link = index_of(&handle, "eth0").await?;
        up(&handle, link).await?;
        for address in own {
            add_address(&handle, link, *address)
                .await
                .naming(format_args!("giving the pod address {address}"))?;
        }
        for address in node {
            neighbour(&handle, link, *address, NODE_END).await?;
            let way = Way::Directly { source: None };
            route(&handle, AddressBlock::single(*address), way, link).await?;
            if forwarding == Forwarding::On {
                route(
                    &handle,
                    AddressBlock::new(*address, 0),
                    Way::Through(*address),
                    link,
                )
                .await?;
            }
        }
        connection.abort();
        Ok(())
    })
}
