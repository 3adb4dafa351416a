//! From network policies to rules. Pure: policies, pods and namespaces in, [`Rules`] out.
//!
//! A pod that a policy selects for a direction is allowed there what some policy that selects it allows, and nothing else. What
//! holds for a pod in a direction for which no policy selects it is the node's choice, [`Unselected`].
//!
//! Chains are named by what they say and sets by the rule they serve, so that compiling again after a change gives new names only
//! to what is new.

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

/// What pods may do in a direction for which no policy selects them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unselected {
    /// Only the node reaches them; they reach public addresses and the node's resolver.
    #[default]
    Isolated,
    /// Everything, as Kubernetes has it.
    Open,
}

/// A port of a container that has a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPort {
    pub name: String,
    pub protocol: Protocol,
    pub number: u16,
}

/// What policies have to know of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodFacts {
    pub namespace: String,
    pub labels: BTreeMap<String, String>,
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<NamedPort>,
    /// Runs on this node, so that its traffic is judged here.
    pub judged: bool,
}

impl PodFacts {
    /// What a pod's object says of it; it is not judged and has no address until the node says so.
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

/// Everything that rules are compiled from.
#[derive(Debug, Clone, Default)]
pub struct World {
    pub pods: Vec<PodFacts>,
    /// The labels of each namespace.
    pub namespaces: BTreeMap<String, BTreeMap<String, String>>,
    pub policies: Vec<NetworkPolicy>,
    pub unselected: Unselected,
    /// Where the node's resolver answers; policies see it as the cluster's DNS.
    pub resolver: Vec<IpAddr>,
}

impl World {
    /// The resolver as a policy that allows cluster DNS would select it.
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
