//! What network policies come to once compiled: which pod is judged by which chain, and what a chain lets pass.
//!
//! A rule names its peers by a set rather than listing them, so that pods that come and go change the members of sets and
//! nothing else. Everything is judged by who opened the connection: [`Rules::permits`] says what that means, and the kernel's
//! rules that [`firewall`](crate::firewall) writes mean the same.

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

    /// As Kubernetes writes it; TCP when it says nothing.
    pub fn parse(text: Option<&str>) -> Option<Self> {
        match text {
            None | Some("TCP") => Some(Self::Tcp),
            Some("UDP") => Some(Self::Udp),
            Some("SCTP") => Some(Self::Sctp),
            Some(_) => None,
        }
    }
}

/// Ports of one protocol, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ports {
    pub protocol: Protocol,
    pub first: u16,
    pub last: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Peers {
    Anyone,
    /// The members of the set of this name.
    In(String),
}

/// Lets a connection pass.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rule {
    pub peers: Peers,
    /// Every port of every protocol when absent.
    pub ports: Option<Ports>,
}

/// What pods that the same policies select are allowed; what no rule allows is denied.
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
    /// Which chain judges connections to an address of this node's pods.
    pub ingress: BTreeMap<IpAddr, String>,
    /// Which chain judges connections from an address of this node's pods.
    pub egress: BTreeMap<IpAddr, String>,
}

/// A connection that somebody opens.
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
    /// Whether a connection passes: the opener's rules and the target's must both allow it. An address without a chain is
    /// not one of this node's pods.
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
