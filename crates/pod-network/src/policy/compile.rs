//! The compiler from network policies to rules.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::core::{Selector, SelectorExt};

use super::{Chain, Direction, Peers, PodFacts, Ports, Protocol, Rule, Rules, Unselected, World};
use crate::address_block::{AddressBlock, disjoint};
use crate::names::short_hash;

/// Blocks that are not public: private networks, loopback, ranges for documentation and benchmarks that sites use internally,
/// multicast.
const NOT_PUBLIC: [&str; 15] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/3",
    "::/127",
    "::ffff:0:0/96",
    "64:ff9b::/96",
    "fc00::/7",
    "fe80::/10",
    "ff00::/8",
];
/// The names of the sets of public addresses and of the resolver's addresses.
const PUBLIC_SET: &str = "public";
const RESOLVER_SET: &str = "resolver";
/// The label with the name of a namespace. The API server sets it, and policies rely on it.
const NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";

/// The rules, and the problems in the policies. An invalid part of a policy allows nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Compiled {
    pub rules: Rules,
    pub problems: BTreeSet<String>,
}

/// The peers and ports of a policy's rule, as the API lists them.
type Listed<'a> = (
    Option<&'a Vec<NetworkPolicyPeer>>,
    Option<&'a Vec<NetworkPolicyPort>>,
);

/// A policy with parsed selectors.
struct Policy<'a> {
    identity: String,
    object: &'a NetworkPolicy,
    namespace: &'a str,
    /// Absent if it is invalid: then the policy selects all pods and allows nothing.
    selector: Option<Selector>,
}

impl<'a> Policy<'a> {
    fn of(object: &'a NetworkPolicy, problems: &mut BTreeSet<String>) -> Self {
        let namespace = object.metadata.namespace.as_deref().unwrap_or_default();
        let name = object.metadata.name.as_deref().unwrap_or_default();
        let selector = object
            .spec
            .as_ref()
            .and_then(|spec| spec.pod_selector.clone())
            .unwrap_or_default();
        let parsed = parse(&selector);
        if parsed.is_none() {
            problems.insert(format!(
                "network policy {namespace}/{name}: spec.podSelector cannot be understood; every pod of the namespace is taken to be selected"
            ));
        }
        Self {
            identity: format!("{namespace}/{name}"),
            object,
            namespace,
            selector: parsed,
        }
    }

    fn selects(&self, pod: &PodFacts) -> bool {
        pod.namespace == self.namespace
            && self
                .selector
                .as_ref()
                .is_none_or(|selector| selector.matches(&pod.labels))
    }

    fn judges(&self, direction: Direction) -> bool {
        let Some(spec) = &self.object.spec else {
            return direction == Direction::Ingress;
        };
        let listed = spec.policy_types.iter().flatten();
        let mut listed = listed.map(String::as_str).peekable();
        if listed.peek().is_some() {
            let wanted = match direction {
                Direction::Ingress => "Ingress",
                Direction::Egress => "Egress",
            };
            return listed.any(|kind| kind == wanted);
        }
        direction == Direction::Ingress
            || spec.egress.as_ref().is_some_and(|rules| !rules.is_empty())
    }

    /// The peers and ports of each of its rules for a direction.
    fn clauses(&self, direction: Direction) -> Vec<Listed<'a>> {
        let Some(spec) = self
            .object
            .spec
            .as_ref()
            .filter(|_| self.selector.is_some())
        else {
            return Vec::new();
        };
        match direction {
            Direction::Ingress => {
                let rules = spec.ingress.iter().flatten();
                rules
                    .map(|rule| (rule.from.as_ref(), rule.ports.as_ref()))
                    .collect()
            }
            Direction::Egress => {
                let rules = spec.egress.iter().flatten();
                rules
                    .map(|rule| (rule.to.as_ref(), rule.ports.as_ref()))
                    .collect()
            }
        }
    }
}

fn parse(selector: &LabelSelector) -> Option<Selector> {
    Selector::try_from(selector.clone()).ok()
}

/// The names of the policies that select a pod, in either direction.
pub fn selecting<'a>(
    pod: &PodFacts,
    policies: impl IntoIterator<Item = &'a NetworkPolicy>,
) -> Vec<String> {
    let mut ignored = BTreeSet::new();
    policies
        .into_iter()
        .map(|policy| Policy::of(policy, &mut ignored))
        .filter(|policy| policy.selects(pod))
        .map(|policy| policy.identity)
        .collect()
}

/// Compiles the rules of a node.
pub fn compile(world: &World) -> Compiled {
    let mut compiler = Compiler::new(world);
    let mut problems = BTreeSet::new();
    let policies: Vec<Policy<'_>> = world
        .policies
        .iter()
        .map(|policy| Policy::of(policy, &mut problems))
        .collect();
    compiler.problems = problems;
    for pod in world.pods.iter().filter(|pod| pod.judged) {
        for direction in [Direction::Ingress, Direction::Egress] {
            let selecting: Vec<&Policy<'_>> = policies
                .iter()
                .filter(|policy| policy.judges(direction) && policy.selects(pod))
                .collect();
            let rules = if selecting.is_empty() {
                compiler.unselected(direction)
            } else {
                let rules = selecting
                    .into_iter()
                    .flat_map(|policy| compiler.rules_of(policy, direction, pod));
                rules.collect::<BTreeSet<Rule>>().into_iter().collect()
            };
            let chain = compiler.chain(direction, rules);
            let judged = match direction {
                Direction::Ingress => &mut compiler.rules.ingress,
                Direction::Egress => &mut compiler.rules.egress,
            };
            for address in &pod.addresses {
                judged.insert(*address, chain.clone());
            }
        }
    }
    Compiled {
        rules: compiler.rules,
        problems: compiler.problems,
    }
}

struct Compiler<'a> {
    world: &'a World,
    peers: Vec<PodFacts>,
    namespaces: BTreeMap<String, BTreeMap<String, String>>,
    rules: Rules,
    problems: BTreeSet<String>,
}

impl<'a> Compiler<'a> {
    fn new(world: &'a World) -> Self {
        let mut peers = world.pods.clone();
        peers.push(world.resolver_as_pod());
        let mut namespaces = world.namespaces.clone();
        for pod in &peers {
            namespaces.entry(pod.namespace.clone()).or_default();
        }
        for (name, labels) in &mut namespaces {
            labels
                .entry(NAMESPACE_NAME.to_owned())
                .or_insert_with(|| name.clone());
        }
        Self {
            world,
            peers,
            namespaces,
            rules: Rules::default(),
            problems: BTreeSet::new(),
        }
    }

    fn chain(&mut self, direction: Direction, rules: Vec<Rule>) -> String {
        let letter = match direction {
            Direction::Ingress => 'i',
            Direction::Egress => 'e',
        };
        let name = format!("{letter}_{}", short_hash(format!("{rules:?}"), 8));
        self.rules
            .chains
            .entry(name.clone())
            .or_insert(Chain { direction, rules });
        name
    }

    fn set(&mut self, name: String, members: impl IntoIterator<Item = AddressBlock>) -> Peers {
        self.rules
            .sets
            .entry(name.clone())
            .or_insert_with(|| disjoint(members));
        Peers::In(name)
    }

    fn unselected(&mut self, direction: Direction) -> Vec<Rule> {
        match (self.world.unselected, direction) {
            (Unselected::Open, _) => vec![Rule {
                peers: Peers::Anyone,
                ports: None,
            }],
            (Unselected::Isolated, Direction::Ingress) => Vec::new(),
            (Unselected::Isolated, Direction::Egress) => {
                let public = self.set(PUBLIC_SET.to_owned(), public());
                let resolver = self.world.resolver.clone();
                let resolver = self.set(
                    RESOLVER_SET.to_owned(),
                    resolver.into_iter().map(AddressBlock::single),
                );
                let resolver = [Protocol::Tcp, Protocol::Udp].map(|protocol| Rule {
                    peers: resolver.clone(),
                    ports: Some(Ports {
                        protocol,
                        first: 53,
                        last: 53,
                    }),
                });
                let public = Rule {
                    peers: public,
                    ports: None,
                };
                resolver.into_iter().chain([public]).collect()
            }
        }
    }

    /// The rules of one policy for one pod.
    fn rules_of(&mut self, policy: &Policy<'_>, direction: Direction, pod: &PodFacts) -> Vec<Rule> {
        let mut rules = Vec::new();
        for (index, (peers, ports)) in policy.clauses(direction).into_iter().enumerate() {
            let letter = match direction {
                Direction::Ingress => 'i',
                Direction::Egress => 'e',
            };
            let base = format!("p{}_{letter}{index}", short_hash(&policy.identity, 6));
            let clause = Clause {
                policy,
                peers: peers.filter(|peers| !peers.is_empty()),
                base,
            };
            match ports.filter(|ports| !ports.is_empty()) {
                None => rules.push(Rule {
                    peers: self.peers(&clause),
                    ports: None,
                }),
                Some(ports) => {
                    for port in ports {
                        rules.extend(self.rules_of_port(&clause, port, direction, pod));
                    }
                }
            }
        }
        rules
    }

    fn rules_of_port(
        &mut self,
        clause: &Clause<'_>,
        port: &NetworkPolicyPort,
        direction: Direction,
        pod: &PodFacts,
    ) -> Vec<Rule> {
        let Some(protocol) = Protocol::parse(port.protocol.as_deref()) else {
            self.problems.insert(format!(
                "network policy {}: protocol {:?} is not TCP, UDP or SCTP; the port allows nothing",
                clause.policy.identity,
                port.protocol.as_deref().unwrap_or_default()
            ));
            return Vec::new();
        };
        let numbered = |first: u16, last: u16| Ports {
            protocol,
            first,
            last,
        };
        match &port.port {
            None => vec![Rule {
                peers: self.peers(clause),
                ports: Some(numbered(0, u16::MAX)),
            }],
            Some(IntOrString::Int(number)) => {
                let last = port.end_port.unwrap_or(*number);
                let (Ok(first), Ok(last)) = (u16::try_from(*number), u16::try_from(last)) else {
                    self.problems.insert(format!(
                        "network policy {}: ports {number} to {last} are no port numbers; they allow nothing",
                        clause.policy.identity
                    ));
                    return Vec::new();
                };
                vec![Rule {
                    peers: self.peers(clause),
                    ports: Some(numbered(first, last)),
                }]
            }
            Some(IntOrString::String(name)) => match direction {
                // Ingress: the name is looked up in the ports of the selected pod.
                Direction::Ingress => {
                    let numbers = numbers_of(pod, name, protocol);
                    let numbers: Vec<u16> = numbers.collect();
                    numbers
                        .into_iter()
                        .map(|number| Rule {
                            peers: self.peers(clause),
                            ports: Some(numbered(number, number)),
                        })
                        .collect()
                }
                // Egress: the name is looked up in the ports of each peer, whose numbers may differ.
                Direction::Egress => self.rules_of_named_peers(clause, name, protocol),
            },
        }
    }

    fn rules_of_named_peers(
        &mut self,
        clause: &Clause<'_>,
        name: &str,
        protocol: Protocol,
    ) -> Vec<Rule> {
        let blocks = self.blocks_of(clause);
        let in_a_block = |address: IpAddr| blocks.iter().any(|block| block.contains(address));
        let selected = self.pods_of(clause);
        let mut by_number: BTreeMap<u16, Vec<AddressBlock>> = BTreeMap::new();
        for pod in &self.peers {
            let is_selected = selected.iter().any(|one| std::ptr::eq(*one, pod));
            let addresses = pod.addresses.iter().copied();
            let reached: Vec<_> = addresses
                .filter(|address| is_selected || in_a_block(*address))
                .map(AddressBlock::single)
                .collect();
            if reached.is_empty() {
                continue;
            }
            for number in numbers_of(pod, name, protocol) {
                by_number.entry(number).or_default().extend(&reached);
            }
        }
        by_number
            .into_iter()
            .map(|(number, members)| {
                let set = format!("{}_{}{number}", clause.base, protocol.name());
                Rule {
                    peers: self.set(set, members),
                    ports: Some(Ports {
                        protocol,
                        first: number,
                        last: number,
                    }),
                }
            })
            .collect()
    }

    /// The peers of a clause, as a set.
    fn peers(&mut self, clause: &Clause<'_>) -> Peers {
        if clause.peers.is_none() {
            return Peers::Anyone;
        }
        if self.rules.sets.contains_key(&clause.base) {
            return Peers::In(clause.base.clone());
        }
        let pods = self.pods_of(clause);
        let addresses = pods.iter().flat_map(|pod| pod.addresses.iter().copied());
        let mut members: Vec<AddressBlock> = addresses.map(AddressBlock::single).collect();
        members.extend(self.blocks_of(clause));
        self.set(clause.base.clone(), members)
    }

    /// The addresses of the IP blocks of a clause.
    fn blocks_of(&mut self, clause: &Clause<'_>) -> Vec<AddressBlock> {
        let mut members = Vec::new();
        for peer in clause.peers.into_iter().flatten() {
            let Some(block) = &peer.ip_block else {
                continue;
            };
            let except = block.except.iter().flatten();
            let parsed = block.cidr.parse::<AddressBlock>();
            let except: Result<Vec<AddressBlock>, _> = except.map(|text| text.parse()).collect();
            match (parsed, except) {
                (Ok(whole), Ok(except)) => members.extend(whole.without(&except)),
                (Err(error), _) | (_, Err(error)) => {
                    self.problems.insert(format!(
                        "network policy {}: {error}; the ipBlock allows nothing",
                        clause.policy.identity
                    ));
                }
            }
        }
        members
    }

    /// The pods among the peers of a clause: all pods if it has no peers.
    fn pods_of(&self, clause: &Clause<'_>) -> Vec<&PodFacts> {
        let Some(listed) = clause.peers else {
            return self.peers.iter().collect();
        };
        let selectors: Vec<_> = listed
            .iter()
            .filter(|peer| peer.ip_block.is_none())
            .map(|peer| {
                let parsed = |selector: &Option<LabelSelector>| match selector {
                    None => Some(None),
                    Some(selector) => parse(selector).map(Some),
                };
                (parsed(&peer.namespace_selector), parsed(&peer.pod_selector))
            })
            .collect();
        let is_peer = |pod: &PodFacts| {
            selectors.iter().any(|selectors| {
                // An invalid selector matches nothing.
                let (Some(namespaces), Some(pods)) = selectors else {
                    return false;
                };
                let in_namespace = match namespaces {
                    None => pod.namespace == clause.policy.namespace,
                    Some(selector) => self
                        .namespaces
                        .get(&pod.namespace)
                        .is_some_and(|labels| selector.matches(labels)),
                };
                in_namespace
                    && pods
                        .as_ref()
                        .is_none_or(|selector| selector.matches(&pod.labels))
            })
        };
        self.peers.iter().filter(|pod| is_peer(pod)).collect()
    }
}

/// One rule of a policy.
struct Clause<'a> {
    policy: &'a Policy<'a>,
    /// All peers when absent.
    peers: Option<&'a Vec<NetworkPolicyPeer>>,
    /// The prefix of the names of its sets.
    base: String,
}

fn numbers_of<'a>(
    pod: &'a PodFacts,
    name: &'a str,
    protocol: Protocol,
) -> impl Iterator<Item = u16> + 'a {
    pod.ports
        .iter()
        .filter(move |port| port.name == name && port.protocol == protocol)
        .map(|port| port.number)
}

/// The public addresses: all except [`NOT_PUBLIC`].
fn public() -> Vec<AddressBlock> {
    let not: Vec<AddressBlock> = NOT_PUBLIC
        .iter()
        .filter_map(|text| text.parse().ok())
        .collect();
    let everything = [
        IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
    ];
    everything
        .into_iter()
        .flat_map(|address| AddressBlock::new(address, 0).without(&not))
        .collect()
}
