//! Compiles network policies to rules. Pure: policies, pods and namespaces in, [`Rules`] out.
//!
//! If policies select a pod for a direction, the union of what they allow is allowed, and nothing else. If no policy selects it for a
//! direction, the node's configuration applies ([`Unselected`]).
//!
//! Chains are named by a hash of their content and sets by the rule that uses them, so that compiling again after a change creates new
//! names only for what has changed.

mod compile;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::networking::v1::NetworkPolicy;

pub use compile::{Compiled, compile, selecting};
pub use rules::{Chain, Direction, Peers, Ports, Protocol, Rule, Rules};

/// The traffic that is allowed in a direction for which no policy selects a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unselected {
    /// Only the node reaches them; they reach public addresses and the node's resolver.
    #[default]
    Isolated,
    /// Everything, as in Kubernetes.
    Open,
}

/// A named port of a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPort {
    pub name: String,
    pub protocol: Protocol,
    pub number: u16,
}

/// The properties of a pod that policies refer to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodFacts {
    pub namespace: String,
    pub labels: BTreeMap<String, String>,
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<NamedPort>,
    /// Whether it runs on this node, which judges its traffic.
    pub judged: bool,
}

impl PodFacts {
    /// The properties from the pod's object. It is not local and has no address until the node sets both.
    pub fn of(pod: &Pod) -> Self {
        let spec = pod.spec.iter();
        let containers = spec.flat_map(|spec| {
            let sidecars = spec.init_containers.iter().flatten();
            spec.containers.iter().chain(
                sidecars.filter(|container| container.restart_policy.as_deref() == Some("Always")),
            )
        });
        let ports = containers.flat_map(|container| container.ports.iter().flatten());
        let named = ports.filter_map(|port| {
            Some(NamedPort {
                name: port.name.clone()?,
                protocol: Protocol::parse(port.protocol.as_deref())?,
                number: u16::try_from(port.container_port).ok()?,
            })
        });
        Self {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            addresses: Vec::new(),
            ports: named.collect(),
            judged: false,
        }
    }
}

/// The input of the compiler.
#[derive(Debug, Clone, Default)]
pub struct World {
    pub pods: Vec<PodFacts>,
    /// The labels of each namespace.
    pub namespaces: BTreeMap<String, BTreeMap<String, String>>,
    pub policies: Vec<NetworkPolicy>,
    pub unselected: Unselected,
    /// The addresses of the node's resolver. For policies it is the cluster's DNS.
    pub resolver: Vec<IpAddr>,
}

impl World {
    /// The resolver as a pod that a policy for cluster DNS selects.
    fn resolver_as_pod(&self) -> PodFacts {
        let port = |name: &str, protocol| NamedPort {
            name: name.to_owned(),
            protocol,
            number: 53,
        };
        PodFacts {
            namespace: "kube-system".to_owned(),
            labels: BTreeMap::from([("k8s-app".to_owned(), "kube-dns".to_owned())]),
            addresses: self.resolver.clone(),
            ports: vec![port("dns", Protocol::Udp), port("dns-tcp", Protocol::Tcp)],
            judged: false,
        }
    }
}
