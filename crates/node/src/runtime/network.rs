//! The pods' network: one bridge per node, a link and an address per pod.
//!
//! Everything is done over netlink. Only the firewall needs a program, `nft`; without it pods are reachable from the
//! machine and isolated from each other by the bridge, and have no way out.

use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};

use futures::TryStreamExt;
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::{
    Handle, LinkBridge, LinkBridgePort, LinkUnspec, LinkVeth, RouteMessageBuilder, new_connection,
};
use rustix::fs::{Mode, OFlags};
use rustix::thread::LinkNameSpaceType;

use crate::config::PodNetwork;
use crate::names::Names;

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
    #[error("entering the network namespace {path}")]
    Enter {
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("the thread that configures a pod's network died")]
    ThreadDied,
    #[error("running nft")]
    RunFirewall(#[source] std::io::Error),
    #[error("nft refused the rules: {0}")]
    Firewall(String),
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

/// The node's side of the pods' network.
#[derive(Debug, Clone)]
pub struct Network {
    names: Names,
    range: PodNetwork,
    handle: Handle,
    bridge: u32,
}

impl Network {
    /// Makes the bridge, or finds the one an earlier run left.
    pub async fn open(names: Names, range: PodNetwork) -> Result<Self, NetworkError> {
        let (connection, handle, _) = new_connection().map_err(NetworkError::Socket)?;
        tokio::spawn(connection);
        let bridge = if let Ok(index) = index_of(&handle, &names.bridge).await {
            index
        } else {
            let add = handle.link().add(LinkBridge::new(&names.bridge).build());
            add.execute()
                .await
                .naming(format_args!("making bridge {}", names.bridge))?;
            index_of(&handle, &names.bridge).await?
        };
        // The bridge's own link-local address would be a way from pods to the machine's IPv6 services.
        let _ = std::fs::write(
            format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", names.bridge),
            "1",
        );
        let address = handle
            .address()
            .add(bridge, range.host(1).into(), range.prefix_length)
            .replace();
        address
            .execute()
            .await
            .naming("giving the bridge its address")?;
        up(&handle, bridge).await?;
        Ok(Self {
            names,
            range,
            handle,
            bridge,
        })
    }

    pub fn gateway(&self) -> Ipv4Addr {
        self.range.host(1)
    }

    pub fn range(&self) -> PodNetwork {
        self.range
    }

    /// The address of the pod in `slot`.
    pub fn address(&self, slot: u32) -> Ipv4Addr {
        self.range.host(slot + 2)
    }

    /// Connects the namespace pinned at `pin` to the bridge.
    pub async fn connect(&self, slot: u32, pin: &Path) -> Result<Ipv4Addr, NetworkError> {
        let name = self.names.link(slot);
        let namespace = open_namespace(pin)?;
        self.disconnect(slot).await?;
        let peer = format!("{name}p");
        let add = self.handle.link().add(LinkVeth::new(&name, &peer).build());
        add.execute()
            .await
            .naming(format_args!("making link {name}"))?;
        let host_side = index_of(&self.handle, &name).await?;
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6"), "1");
        let join = LinkUnspec::new_with_index(host_side)
            .controller(self.bridge)
            .up()
            .build();
        self.handle
            .link()
            .set(join)
            .execute()
            .await
            .naming(format_args!("joining {name} to the bridge"))?;
        let isolate = LinkBridgePort::new(host_side).isolated(true).build();
        self.handle
            .link()
            .set_port(isolate)
            .execute()
            .await
            .naming(format_args!("isolating {name}"))?;
        let peer_index = index_of(&self.handle, &peer).await?;
        let give = LinkUnspec::new_with_index(peer_index)
            .name("eth0".to_owned())
            .setns_by_fd(namespace.as_raw_fd())
            .build();
        self.handle
            .link()
            .set(give)
            .execute()
            .await
            .naming(format_args!("giving {peer} to the pod"))?;
        let address = self.address(slot);
        let (prefix, gateway) = (self.range.prefix_length, self.gateway());
        in_namespace(namespace, move || {
            configure_inside(address, prefix, gateway)
        })
        .await??;
        Ok(address)
    }

    /// Removes a pod's link, if there is one.
    pub async fn disconnect(&self, slot: u32) -> Result<(), NetworkError> {
        let name = self.names.link(slot);
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

    /// Removes the bridge; every pod must be gone.
    pub async fn close(&self) -> Result<(), NetworkError> {
        remove_firewall(&self.names)?;
        self.handle
            .link()
            .del(self.bridge)
            .execute()
            .await
            .naming("removing the bridge")
    }
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

fn open_namespace(pin: &Path) -> Result<OwnedFd, NetworkError> {
    rustix::fs::open(pin, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|source| {
        NetworkError::Enter {
            path: pin.display().to_string(),
            source: source.into(),
        }
    })
}

/// Runs `work` on a thread of its own inside a network namespace. The thread ends with the work, so no other code ever
/// runs in the wrong namespace.
async fn in_namespace<T: Send + 'static>(
    namespace: OwnedFd,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NetworkError> {
    let (send, receive) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let entered = rustix::thread::move_into_link_name_space(
            namespace.as_fd(),
            Some(LinkNameSpaceType::Network),
        )
        .map_err(|source| NetworkError::Enter {
            path: "of a pod".to_owned(),
            source: source.into(),
        });
        let _ = send.send(entered.map(|()| work()));
    });
    receive.await.map_err(|_| NetworkError::ThreadDied)?
}

/// Opens a TCP connection from inside a pod's network namespace.
pub async fn connect_inside(
    pin: &Path,
    port: u16,
) -> Result<std::io::Result<std::net::TcpStream>, NetworkError> {
    let namespace = open_namespace(pin)?;
    in_namespace(namespace, move || {
        let timeout = std::time::Duration::from_secs(10);
        std::net::TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), timeout)
    })
    .await
}

fn configure_inside(
    address: Ipv4Addr,
    prefix_length: u8,
    gateway: Ipv4Addr,
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
        let add = handle.address().add(link, address.into(), prefix_length);
        add.execute()
            .await
            .naming(format_args!("giving the pod address {address}"))?;
        up(&handle, link).await?;
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .gateway(gateway)
            .build();
        handle
            .route()
            .add(route)
            .execute()
            .await
            .naming("setting the pod's default route")?;
        connection.abort();
        Ok(())
    })
}

/// The rules that keep pods from each other, from the machine and from private networks, and let them out to the
/// internet. Pure, so that it can be read and tested.
pub fn firewall_rules(names: &Names, range: PodNetwork) -> String {
    let Names { table, bridge, .. } = names;
    format!(
        "\
add table inet {table}
delete table inet {table}
table inet {table} {{
  set private {{
    type ipv4_addr; flags interval;
    elements = {{ 0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 169.254.0.0/16, 172.16.0.0/12, 192.168.0.0/16, 198.18.0.0/15, 224.0.0.0/4, 240.0.0.0/4 }}
  }}
  chain from_pods {{
    ct state established,related accept
    ip saddr != {range} drop
    meta nfproto ipv6 drop
    ip daddr @private drop
    accept
  }}
  chain forward {{
    type filter hook forward priority filter - 5; policy accept;
    iifname \"{bridge}\" jump from_pods
    oifname \"{bridge}\" ct state established,related accept
    oifname \"{bridge}\" drop
  }}
  chain input {{
    type filter hook input priority filter - 5; policy accept;
    iifname \"{bridge}\" ct state established,related accept
    iifname \"{bridge}\" drop
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {range} oifname != \"{bridge}\" masquerade
  }}
}}
"
    )
}

/// Puts the rules into force, in one transaction.
pub fn install_firewall(names: &Names, range: PodNetwork) -> Result<(), NetworkError> {
    run_nft(&firewall_rules(names, range))?;
    // Without this the kernel drops what pods send to the internet. Rules above keep it to pods' own traffic.
    let _ = std::fs::write("/proc/sys/net/ipv4/ip_forward", "1");
    Ok(())
}

fn remove_firewall(names: &Names) -> Result<(), NetworkError> {
    match run_nft(&format!(
        "add table inet {0}\ndelete table inet {0}\n",
        names.table
    )) {
        Err(NetworkError::RunFirewall(error)) if error.kind() == std::io::ErrorKind::NotFound => {
            Ok(())
        }
        other => other,
    }
}

fn run_nft(rules: &str) -> Result<(), NetworkError> {
    use std::io::Write;
    let mut child = Command::new("nft")
        .args(["-f", "-"])
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(NetworkError::RunFirewall)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin
            .write_all(rules.as_bytes())
            .map_err(NetworkError::RunFirewall)?;
    }
    let output = child
        .wait_with_output()
        .map_err(NetworkError::RunFirewall)?;
    if output.status.success() {
        Ok(())
    } else {
        Err(NetworkError::Firewall(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ))
    }
}
