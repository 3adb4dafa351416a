//! Protection against SSRF: decides which addresses a registry may have. Pure, except for checking whether an address belongs to
//! this machine.
//!
//! Users who may create pods choose image references, and a registry chooses its redirects and its token server. The node follows
//! them as root, from this machine's network. So it refuses to connect to this machine, its link or its pods, unless the operator
//! allows that registry by name. A name is resolved once and the checked address is the one that is dialled, which prevents DNS
//! rebinding.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::connect::dns::{GaiResolver, Name};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tower_service::Service;

use super::CONNECT_TIMEOUT;

type BoxError = Box<dyn std::error::Error + Send + Sync>;
type Future<T> = Pin<Box<dyn std::future::Future<Output = Result<T, BoxError>> + Send>>;

/// Whether an address belongs to a pod.
pub type IsPods = dyn Fn(IpAddr) -> bool + Send + Sync;

/// Which registries may be reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Destinations {
    /// All registries: only the operator names images.
    #[default]
    Any,
    /// Registries outside this machine, its link and its pod network, and registries that the operator has allowed, as `host` or
    /// `host:port`.
    Elsewhere { allowed: Vec<String> },
}

/// The error for an image, a redirect or a token server on an address that tenants may not reach through this process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{host} is on this machine, on its link or in its pods' network, which images may not be pulled from; --allow-registry {host} allows it"
)]
pub struct Refused {
    pub host: String,
}

/// Checks hosts and addresses. The pod addresses are set after construction, because they are known later.
#[derive(Default)]
pub struct Guard {
    destinations: Destinations,
    is_pods: OnceLock<Box<IsPods>>,
}

impl std::fmt::Debug for Guard {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Guard")
            .field("destinations", &self.destinations)
            .finish_non_exhaustive()
    }
}

impl Guard {
    pub fn new(destinations: Destinations) -> Self {
        Self {
            destinations,
            is_pods: OnceLock::new(),
        }
    }

    /// Sets the check for pod addresses. Only the first call has an effect.
    pub fn keep_from(&self, is_pods: Box<IsPods>) {
        let _ = self.is_pods.set(is_pods);
    }

    /// Whether the operator allows a host, whatever its address.
    fn is_allowed(&self, host: &str, port: u16) -> bool {
        match &self.destinations {
            Destinations::Any => true,
            Destinations::Elsewhere { allowed } => {
                let with_port = format!("{host}:{port}");
                allowed
                    .iter()
                    .any(|allowed| allowed == host || *allowed == with_port)
            }
        }
    }

    /// Whether an address belongs neither to this machine nor to its link nor to a pod.
    fn is_external(&self, address: IpAddr) -> bool {
        let address = embedded_ipv4(address);
        let is_pods = self.is_pods.get().is_some_and(|is_pods| is_pods(address));
        !is_local_class(address) && !is_pods && !is_of_this_machine(address)
    }
}

/// Unwraps an IPv4 address that is embedded in an IPv6 address: IPv4-mapped, NAT64 or 6to4.
fn embedded_ipv4(address: IpAddr) -> IpAddr {
    let IpAddr::V6(six) = address.to_canonical() else {
        return address.to_canonical();
    };
    let four = |high: u16, low: u16| {
        let bits = (u32::from(high) << 16) | u32::from(low);
        IpAddr::V4(Ipv4Addr::from_bits(bits))
    };
    match six.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => four(high, low),
        _ => IpAddr::V6(six),
    }
}

/// Whether the address class is local on every machine, such as loopback or link-local.
fn is_local_class(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            address.is_loopback()
                || address.is_link_local()
                || address.is_multicast()
                || address.is_broadcast()
                || address.octets()[0] == 0
        }
        IpAddr::V6(address) => {
            address.is_loopback()
                || address.is_unspecified()
                || address.is_multicast()
                || address.is_unicast_link_local()
        }
    }
}

/// Whether an interface of this machine has the address: then a socket can be bound to it. If the kernel lets sockets be bound to
/// any address (`ip_nonlocal_bind`), the route decides: a packet to a local address has that address as its source.
fn is_of_this_machine(address: IpAddr) -> bool {
    let can_bind = |address: IpAddr| UdpSocket::bind((address, 0)).is_ok();
    // Addresses reserved for documentation (RFC 5737, RFC 3849), which no machine has.
    let foreign = match address {
        IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::new(198, 51, 100, 253)),
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0, 0, 0, 0, 0xfd)),
    };
    if !can_bind(address) {
        return false;
    }
    !can_bind(foreign) || routes_to_itself(address).unwrap_or(true)
}

fn routes_to_itself(address: IpAddr) -> std::io::Result<bool> {
    let any: IpAddr = match address {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((address, 9))?;
    Ok(socket.local_addr()?.ip() == address)
}

/// A resolver that returns only addresses outside this machine, its link and its pods.
#[derive(Debug, Clone)]
pub struct GuardedResolver {
    guard: Arc<Guard>,
    resolver: GaiResolver,
}

impl Service<Name> for GuardedResolver {
    type Response = std::vec::IntoIter<SocketAddr>;
    type Error = BoxError;
    type Future = Future<Self::Response>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.resolver.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, name: Name) -> Self::Future {
        let guard = Arc::clone(&self.guard);
        let host = name.as_str().to_owned();
        let resolving = self.resolver.call(name);
        Box::pin(async move {
            let external: Vec<SocketAddr> = resolving
                .await?
                .filter(|address| guard.is_external(address.ip()))
                .collect();
            if external.is_empty() {
                return Err(Refused { host }.into());
            }
            Ok(external.into_iter())
        })
    }
}

/// A connector that refuses registries on forbidden addresses.
#[derive(Debug, Clone)]
pub struct GuardedConnector {
    guard: Arc<Guard>,
    unrestricted: HttpConnector,
    external: HttpConnector<GuardedResolver>,
}

impl GuardedConnector {
    pub fn new(guard: Arc<Guard>) -> Self {
        let mut unrestricted = HttpConnector::new();
        let mut external = HttpConnector::new_with_resolver(GuardedResolver {
            guard: Arc::clone(&guard),
            resolver: GaiResolver::new(),
        });
        unrestricted.set_connect_timeout(Some(CONNECT_TIMEOUT));
        unrestricted.enforce_http(false);
        external.set_connect_timeout(Some(CONNECT_TIMEOUT));
        external.enforce_http(false);
        Self {
            guard,
            unrestricted,
            external,
        }
    }
}

impl Service<Uri> for GuardedConnector {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = Future<Self::Response>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let host = uri.host().unwrap_or_default();
        let plain = uri.scheme_str() == Some("http");
        let port = uri.port_u16().unwrap_or(if plain { 80 } else { 443 });
        if self.guard.is_allowed(host, port) {
            let connecting = self.unrestricted.call(uri);
            return Box::pin(async move { connecting.await.map_err(Into::into) });
        }
        // An IP literal is not resolved, so it must be checked here.
        let literal = host.trim_start_matches('[').trim_end_matches(']');
        if let Ok(address) = literal.parse()
            && !self.guard.is_external(address)
        {
            let host = host.to_owned();
            return Box::pin(async move { Err(Refused { host }.into()) });
        }
        let connecting = self.external.call(uri);
        Box::pin(async move { connecting.await.map_err(Into::into) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_machine_its_link_and_its_pods_are_not_external() {
        let guard = Guard::new(Destinations::Elsewhere {
            allowed: Vec::new(),
        });
        guard.keep_from(Box::new(|address| match address {
            IpAddr::V4(address) => address.octets().starts_with(&[10, 200]),
            IpAddr::V6(address) => address.segments().starts_with(&[0xfd00, 1]),
        }));
        for (address, is_external) in [
            ("198.51.100.7", true),
            ("10.201.0.7", true),
            ("192.168.77.7", true),
            ("2001:db8::7", true),
            ("fd00:2::7", true),
            ("127.0.0.1", false),
            ("127.8.8.8", false),
            ("0.0.0.0", false),
            ("0.1.2.3", false),
            ("169.254.169.254", false),
            ("224.0.0.1", false),
            ("255.255.255.255", false),
            ("10.200.3.4", false),
            ("::", false),
            ("::1", false),
            ("::ffff:127.0.0.1", false),
            ("::ffff:169.254.169.254", false),
            ("64:ff9b::7f00:1", false),
            ("64:ff9b::a9fe:a9fe", false),
            ("2002:7f00:1::1", false),
            ("fe80::1", false),
            ("ff02::1", false),
            ("fd00:1::7", false),
        ] {
            let parsed = address.parse().unwrap();
            assert_eq!(guard.is_external(parsed), is_external, "{address}");
        }
    }

    #[test]
    fn interface_addresses_belong_to_this_machine() {
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        // Without a route there is no local address to test.
        if socket.connect("198.51.100.1:9").is_ok() {
            let own = socket.local_addr().unwrap().ip();
            assert!(is_of_this_machine(own), "{own}");
        }
        assert!(!is_of_this_machine("198.51.100.1".parse().unwrap()));
    }

    #[test]
    fn the_operator_allows_a_host_or_one_port_of_it() {
        let guard = Guard::new(Destinations::Elsewhere {
            allowed: vec!["localhost:5000".to_owned(), "registry.lan".to_owned()],
        });
        for (host, port, is_allowed) in [
            ("localhost", 5000, true),
            ("localhost", 5001, false),
            ("registry.lan", 443, true),
            ("registry.lan", 1, true),
            ("evil.registry.lan", 443, false),
        ] {
            assert_eq!(guard.is_allowed(host, port), is_allowed, "{host}:{port}");
        }
        assert!(Guard::default().is_allowed("localhost", 1));
    }
}
