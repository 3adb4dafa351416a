//! Compiled network policies: which chain judges which pod, and what a chain accepts.
//!
//! A rule refers to its peers by a set, so that a new or removed pod changes only the members of sets. A connection is judged by the
//! direction in which it was opened. [`Rules::permits`] defines the meaning; [`firewall`](crate::firewall) writes nftables rules with
//! the same meaning.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::address_block::AddressBlock;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Direction {
    Ingress,
    Egress,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Protocol {
    Tcp,
    Udp,
    Sctp,
}

impl Protocol {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }

    /// Parses Kubernetes' spelling; TCP when absent.
    pub fn parse(text: Option<&str>) -> Option<Self> {
        match text {
            None | Some("TCP") => Some(Self::Tcp),
            Some("UDP") => Some(Self::Udp),
            Some("SCTP") => Some(Self::Sctp),
            Some(_) => None,
        }
    }
}

/// A range of ports of one protocol, inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ports {
    pub protocol: Protocol,
    pub first: u16,
    pub last: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peers {
    Anyone,
    /// The members of the set with this name.
    In(String),
}

/// A rule that accepts a connection.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rule {
    pub peers: Peers,
    /// All ports of all protocols when absent.
    pub ports: Option<Ports>,
}

/// The chain of all pods that the same policies select. A connection that no rule accepts is dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    pub direction: Direction,
    pub rules: Vec<Rule>,
}

/// All rules of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules {
    pub sets: BTreeMap<String, BTreeSet<AddressBlock>>,
    pub chains: BTreeMap<String, Chain>,
    /// The chain that judges connections to an address of a pod of this node.
    pub ingress: BTreeMap<IpAddr, String>,
    /// The chain that judges connections from an address of a pod of this node.
    pub egress: BTreeMap<IpAddr, String>,
}

/// A new connection.
#[cfg(test)]
#[derive(Debug, Clone, Copy)]
pub struct Connection {
    pub from: IpAddr,
    pub to: IpAddr,
    pub protocol: Protocol,
    pub port: u16,
}

#[cfg(test)]
impl Rules {
    /// Whether a connection is allowed: the rules of its source and of its target must both accept it. An address without a chain
    /// does not belong to a pod of this node.
    pub fn permits(&self, connection: Connection) -> bool {
        let judged = |chain: Option<&String>, peer: IpAddr| {
            chain.is_none_or(|name| {
                let rules = &self.chains[name].rules;
                rules.iter().any(|rule| self.allows(rule, peer, connection))
            })
        };
        judged(self.egress.get(&connection.from), connection.to)
            && judged(self.ingress.get(&connection.to), connection.from)
    }

    fn allows(&self, rule: &Rule, peer: IpAddr, connection: Connection) -> bool {
        let is_peer = match &rule.peers {
            Peers::Anyone => true,
            Peers::In(set) => self.sets[set].iter().any(|block| block.contains(peer)),
        };
        is_peer
            && rule.ports.is_none_or(|ports| {
                ports.protocol == connection.protocol
                    && (ports.first..=ports.last).contains(&connection.port)
            })
    }
}
