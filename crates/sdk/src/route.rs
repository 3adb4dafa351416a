//! Determines the URL of a sandbox: the four connection modes.

use std::net::Ipv6Addr;
use std::sync::Arc;

use api::SYSTEM_NAMESPACE;

use crate::cluster::Cluster;
use crate::error::ErrorKind;
use crate::gateway;
use crate::options::{Connection, InClusterAddress, Options};
use crate::readiness::Bound;
use crate::trace;
use crate::transport::{Dialer, TcpDialer};
use crate::tunnel::{TUNNEL_URL, Tunnel};

/// The connection mode, shared by all sandboxes of a client.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    connection: Connection,
    tunnel: Option<Arc<Tunnel>>,
}

/// The router that discovery found, before the sandbox is known.
#[derive(Clone, Debug)]
pub(crate) enum RouterAddress {
    /// The URL of a router, for every sandbox.
    Url(String),
    /// No router: each sandbox has its own URL.
    PerSandbox,
}

impl Route {
    /// The route, and its dialer.
    pub(crate) fn new(options: &Options, cluster: &Cluster) -> (Self, Arc<dyn Dialer>) {
        let connection = options.connection.clone();
        if matches!(connection, Connection::Tunnel | Connection::TunnelIn { .. }) {
            let limit = options.port_forward_ready_timeout;
            let tunnel = Arc::new(Tunnel::new(cluster.client().clone(), limit));
            let route = Self {
                connection,
                tunnel: Some(Arc::clone(&tunnel)),
            };
            return (route, tunnel);
        }
        let dialer = options
            .dialer
            .clone()
            .unwrap_or_else(|| Arc::new(TcpDialer));
        let route = Self {
            connection,
            tunnel: None,
        };
        (route, dialer)
    }

    /// Discovers the router for sandboxes of this namespace.
    pub(crate) async fn discover(
        &self,
        cluster: &Cluster,
        options: &Options,
        namespace: &str,
    ) -> Result<RouterAddress, ErrorKind> {
        match &self.connection {
            Connection::Direct { url } => Ok(RouterAddress::Url(url.clone())),
            Connection::Gateway {
                name,
                namespace,
                scheme,
            } => {
                let span = trace::step(&options.trace_service_name, "wait_for_gateway");
                span.record("sandbox.gateway.name", name);
                span.record("sandbox.gateway.namespace", namespace);
                let limit = options.gateway_ready_timeout;
                let found = gateway::discover(cluster.client(), name, namespace, *scheme, limit);
                trace::within(span, found).await.map(RouterAddress::Url)
            }
            Connection::Tunnel | Connection::TunnelIn { .. } => {
                let namespaces = match &self.connection {
                    Connection::TunnelIn { namespace } => vec![namespace.clone()],
                    _ => vec![namespace.to_owned(), SYSTEM_NAMESPACE.to_owned()],
                };
                if let Some(tunnel) = &self.tunnel {
                    let span = trace::step(&options.trace_service_name, "port_forward");
                    trace::within(span, tunnel.establish(&namespaces)).await?;
                }
                Ok(RouterAddress::Url(TUNNEL_URL.into()))
            }
            Connection::InCluster(_) => Ok(RouterAddress::PerSandbox),
        }
    }

    /// The base URL of requests for this sandbox. `None` for a sandbox that is addressed by its pod while it has
    /// no pod.
    pub(crate) fn base_url(
        &self,
        router: &RouterAddress,
        bound: &Bound,
        namespace: &str,
        port: u16,
    ) -> Option<String> {
        if let RouterAddress::Url(url) = router {
            return Some(url.trim_end_matches('/').to_owned());
        }
        match &self.connection {
            Connection::InCluster(InClusterAddress::Service { cluster_domain }) => {
                let sandbox = &bound.sandbox;
                Some(format!(
                    "http://{sandbox}.{namespace}.svc.{cluster_domain}:{port}"
                ))
            }
            _ => pod_url(&bound.pod_ips, port),
        }
    }

    /// Whether the URL contains the pod's address, which a new pod changes.
    pub(crate) fn follows_the_pod(&self) -> bool {
        self.connection == Connection::InCluster(InClusterAddress::PodIp)
    }

    /// The name of the connection mode in logs.
    pub(crate) fn label(&self) -> &'static str {
        match &self.connection {
            Connection::Direct { .. } => "direct",
            Connection::Gateway { .. } => "gateway",
            Connection::Tunnel | Connection::TunnelIn { .. } => "tunnel",
            Connection::InCluster(_) => "in-cluster",
        }
    }

    /// The discovery mode's label in the published SDKs' metrics; `None` if there is nothing to discover.
    pub(crate) fn discovery_mode(&self) -> Option<&'static str> {
        match &self.connection {
            Connection::Gateway { .. } => Some("gateway"),
            Connection::Tunnel | Connection::TunnelIn { .. } => Some("port_forward"),
            Connection::Direct { .. } | Connection::InCluster(_) => None,
        }
    }

    /// Why the tunnel failed, if that is known.
    pub(crate) fn failure(&self) -> Option<ErrorKind> {
        self.tunnel.as_ref().and_then(|tunnel| tunnel.failure())
    }
}

pub(crate) fn pod_url(addresses: &[String], port: u16) -> Option<String> {
    let address = addresses.first()?;
    Some(if address.parse::<Ipv6Addr>().is_ok() {
        format!("http://[{address}]:{port}")
    } else {
        format!("http://{address}:{port}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base(connection: Connection, router: &RouterAddress, pod_ips: &[&str]) -> Option<String> {
        let route = Route {
            connection,
            tunnel: None,
        };
        let bound = Bound {
            sandbox: "s".into(),
            pod_ips: pod_ips.iter().map(|ip| (*ip).to_owned()).collect(),
        };
        route.base_url(router, &bound, "team", 8888)
    }

    #[test]
    fn every_connection_mode_has_its_url() {
        let router = RouterAddress::Url("http://router:8080/p/".into());
        let direct = Connection::Direct {
            url: "unused".into(),
        };
        assert_eq!(base(direct, &router, &[]).unwrap(), "http://router:8080/p");
        let by_ip = || Connection::InCluster(InClusterAddress::PodIp);
        let url = base(
            by_ip(),
            &RouterAddress::PerSandbox,
            &["10.0.0.3", "fd00::3"],
        )
        .unwrap();
        assert_eq!(url, "http://10.0.0.3:8888");
        let url = base(by_ip(), &RouterAddress::PerSandbox, &["fd00::3"]).unwrap();
        assert_eq!(url, "http://[fd00::3]:8888");
        assert_eq!(base(by_ip(), &RouterAddress::PerSandbox, &[]), None);
        let by_name = Connection::InCluster(InClusterAddress::Service {
            cluster_domain: "cluster.local".into(),
        });
        let url = base(by_name, &RouterAddress::PerSandbox, &[]).unwrap();
        assert_eq!(url, "http://s.team.svc.cluster.local:8888");
    }
}
