//! Tables of the meaning of each form of a policy, and a comparison with a simple interpreter of policies.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::networking::v1::{NetworkPolicy, NetworkPolicyPeer, NetworkPolicyPort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::rules::Connection;
use super::*;
use crate::address_block::AddressBlock;

const RESOLVER: &str = "10.200.0.1";
const INTERNET: &str = "203.0.113.7";

fn pod(namespace: &str, label: &str, address: &str, ports: &[(&str, Protocol, u16)]) -> PodFacts {
    PodFacts {
        namespace: namespace.to_owned(),
        labels: BTreeMap::from([("app".to_owned(), label.to_owned())]),
        addresses: vec![
            address.parse().unwrap(),
            address.replace("10.200.0.", "fd00::").parse().unwrap(),
        ],
        ports: ports
            .iter()
            .map(|(name, protocol, number)| NamedPort {
                name: (*name).to_owned(),
                protocol: *protocol,
                number: *number,
            })
            .collect(),
        judged: true,
    }
}

/// Two pods in `n`, one in the labelled namespace `m`.
fn world(policies: &[Value]) -> World {
    let policies = policies.iter().enumerate().map(|(index, spec)| {
        let object =
            json!({"metadata": {"name": format!("p{index}"), "namespace": "n"}, "spec": spec});
        serde_json::from_value::<NetworkPolicy>(object).unwrap()
    });
    World {
        pods: vec![
            pod("n", "a", "10.200.0.2", &[("web", Protocol::Tcp, 8080)]),
            pod("n", "b", "10.200.0.3", &[("web", Protocol::Tcp, 9090)]),
            pod("m", "a", "10.200.0.4", &[("web", Protocol::Udp, 8080)]),
        ],
        namespaces: BTreeMap::from([
            ("n".to_owned(), BTreeMap::new()),
            (
                "m".to_owned(),
                BTreeMap::from([("team".to_owned(), "x".to_owned())]),
            ),
        ]),
        policies: policies.collect(),
        unselected: Unselected::Open,
        resolver: vec![RESOLVER.parse().unwrap()],
    }
}

/// `10.200.0.2>10.200.0.3:tcp/80`
fn connection(text: &str) -> Connection {
    let (from, rest) = text.split_once('>').unwrap();
    let (to, rest) = rest.rsplit_once(':').unwrap();
    let (protocol, port) = rest.split_once('/').unwrap();
    Connection {
        from: from.parse().unwrap(),
        to: to.parse().unwrap(),
        protocol: match protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => Protocol::Sctp,
        },
        port: port.parse().unwrap(),
    }
}

fn check(policies: &[Value], allowed: &[&str], denied: &[&str]) {
    let compiled = compile(&world(policies));
    assert!(compiled.problems.is_empty(), "{:?}", compiled.problems);
    for text in allowed {
        assert!(
            compiled.rules.permits(connection(text)),
            "{text} is allowed by {policies:?}: {:#?}",
            compiled.rules
        );
    }
    for text in denied {
        assert!(
            !compiled.rules.permits(connection(text)),
            "{text} is denied by {policies:?}: {:#?}",
            compiled.rules
        );
    }
}

#[test]
fn a_selected_pod_is_closed_in_the_direction_it_is_selected_for() {
    let select = json!({"podSelector": {"matchLabels": {"app": "a"}}});
    let with = |more: Value| {
        let mut spec = select.clone();
        spec.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        spec
    };
    let into = "10.200.0.3>10.200.0.2:tcp/80";
    let out = "10.200.0.2>10.200.0.3:tcp/80";
    let others = "10.200.0.3>10.200.0.4:tcp/80";
    check(std::slice::from_ref(&select), &[out, others], &[into]);
    check(
        &[with(json!({"policyTypes": ["Egress"]}))],
        &[into, others],
        &[out],
    );
    check(
        &[with(json!({"policyTypes": ["Ingress", "Egress"]}))],
        &[others],
        &[into, out],
    );
    // Egress rules without policy types select for both directions.
    check(&[with(json!({"egress": [{}]}))], &[out], &[into]);
    check(&[with(json!({"ingress": [{}]}))], &[out, into], &[]);
    // The union of several policies is allowed.
    check(
        &[
            with(json!({"ingress": [{"ports": [{"port": 80}]}]})),
            with(json!({"ingress": [{"ports": [{"port": 81}]}]})),
        ],
        &[into, "10.200.0.3>10.200.0.2:tcp/81"],
        &["10.200.0.3>10.200.0.2:tcp/82"],
    );
}

#[test]
fn peers_are_pods_namespaces_and_blocks() {
    let from = |peers: Value| json!({"podSelector": {}, "ingress": [{"from": peers}]});
    let same = "10.200.0.3>10.200.0.2:tcp/80";
    let same6 = "fd00::3>fd00::2:tcp/80";
    let other = "10.200.0.4>10.200.0.2:tcp/80";
    let internet = "203.0.113.7>10.200.0.2:tcp/80";
    check(
        &[from(json!([{"podSelector": {}}]))],
        &[same, same6],
        &[other, internet],
    );
    check(
        &[from(
            json!([{"podSelector": {"matchLabels": {"app": "a"}}}]),
        )],
        &[],
        &[same, other, internet],
    );
    check(
        &[from(json!([{"namespaceSelector": {}}]))],
        &[same, other],
        &[internet],
    );
    check(
        &[from(
            json!([{"namespaceSelector": {"matchLabels": {"team": "x"}}}]),
        )],
        &[other],
        &[same, internet],
    );
    check(
        &[from(
            json!([{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "m"}}}]),
        )],
        &[other],
        &[same],
    );
    check(
        &[from(
            json!([{"namespaceSelector": {"matchLabels": {"team": "x"}}, "podSelector": {"matchLabels": {"app": "b"}}}]),
        )],
        &[],
        &[other, same],
    );
    check(
        &[from(
            json!([{"namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}}]),
        )],
        &[same],
        &[other],
    );
    check(
        &[from(
            json!([{"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.0/30"]}}]),
        )],
        &[internet],
        &["203.0.113.2>10.200.0.2:tcp/80", same, same6],
    );
    check(
        &[from(
            json!([{"ipBlock": {"cidr": "::/0", "except": ["fd00::/16"]}}, {"podSelector": {"matchLabels": {"app": "b"}}}]),
        )],
        &["2001:db8::1>fd00::2:tcp/80", same6, same],
        &["fd00::4>fd00::2:tcp/80", internet],
    );
    // A rule without peers allows all peers.
    check(&[from(json!([]))], &[same, other, internet], &[]);
}

#[test]
fn ports_are_numbers_ranges_names_and_whole_protocols() {
    let into = |ports: Value| json!({"podSelector": {}, "ingress": [{"ports": ports}]});
    let to = |what: &str| format!("{INTERNET}>10.200.0.2:{what}");
    check(
        &[into(
            json!([{"port": 80}, {"port": 53, "protocol": "UDP"}, {"port": 9, "protocol": "SCTP"}]),
        )],
        &[&to("tcp/80"), &to("udp/53"), &to("sctp/9")],
        &[&to("tcp/81"), &to("tcp/53"), &to("udp/80"), &to("tcp/9")],
    );
    check(
        &[into(json!([{"port": 100, "endPort": 200}]))],
        &[&to("tcp/100"), &to("tcp/150"), &to("tcp/200")],
        &[&to("tcp/99"), &to("tcp/201"), &to("udp/150")],
    );
    check(
        &[into(json!([{"protocol": "UDP"}]))],
        &[&to("udp/1"), &to("udp/65535")],
        &[&to("tcp/1")],
    );
    // The named port of the target.
    check(
        &[into(json!([{"port": "web"}]))],
        &[&to("tcp/8080"), &format!("{INTERNET}>10.200.0.3:tcp/9090")],
        &[
            &to("tcp/9090"),
            &to("udp/8080"),
            &format!("{INTERNET}>10.200.0.3:tcp/8080"),
        ],
    );
    check(
        &[into(json!([{"port": "nothing"}]))],
        &[],
        &[&to("tcp/8080")],
    );
    // For egress it is the named port of each peer, so each peer is allowed on its own number, and the internet on none.
    check(
        &[
            json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"ports": [{"port": "web"}]}]}),
        ],
        &[
            "10.200.0.2>10.200.0.3:tcp/9090",
            "10.200.0.3>10.200.0.2:tcp/8080",
        ],
        &[
            "10.200.0.2>10.200.0.3:tcp/8080",
            "10.200.0.2>203.0.113.7:tcp/8080",
            "10.200.0.2>10.200.0.4:tcp/8080",
        ],
    );
}

#[test]
fn the_resolver_is_the_cluster_dns_that_policies_name() {
    let dns = json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
                "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}],
        "ports": [{"port": 53, "protocol": "UDP"}, {"port": "dns-tcp"}]}]});
    check(
        &[dns],
        &[
            "10.200.0.2>10.200.0.1:udp/53",
            "10.200.0.2>10.200.0.1:tcp/53",
        ],
        &[
            "10.200.0.2>10.200.0.1:tcp/80",
            "10.200.0.2>203.0.113.7:udp/53",
        ],
    );
}

#[test]
fn an_unselected_pod_reaches_only_public_addresses_and_the_resolver() {
    let mut world = world(&[]);
    world.unselected = Unselected::Isolated;
    let rules = compile(&world).rules;
    for text in [
        "10.200.0.2>203.0.113.7:tcp/443",
        "10.200.0.2>8.8.8.8:udp/53",
        "fd00::2>2001:db8::1:tcp/443",
        "10.200.0.2>10.200.0.1:udp/53",
    ] {
        assert!(rules.permits(connection(text)), "{text}");
    }
    for text in [
        "10.200.0.2>10.200.0.3:tcp/80",
        "fd00::2>fd00::3:tcp/80",
        "203.0.113.7>10.200.0.2:tcp/80",
        "10.200.0.2>10.0.0.1:tcp/80",
        "10.200.0.2>172.31.0.1:tcp/80",
        "10.200.0.2>192.168.1.1:tcp/80",
        "10.200.0.2>100.64.0.1:tcp/80",
        "10.200.0.2>169.254.169.254:tcp/80",
        "10.200.0.2>127.0.0.1:tcp/80",
        "10.200.0.2>224.0.0.1:udp/80",
        "10.200.0.2>10.200.0.1:tcp/80",
        "fd00::2>fe80::1:tcp/80",
        "fd00::2>fd99::1:tcp/80",
        "fd00::2>::1:tcp/80",
        "fd00::2>::ffff:10.0.0.1:tcp/80",
    ] {
        assert!(!rules.permits(connection(text)), "{text}");
    }
    // A policy for one direction does not affect the other.
    world.policies = super::tests::world(&[json!({"podSelector": {}, "ingress": [{}]})]).policies;
    let rules = compile(&world).rules;
    assert!(rules.permits(connection("203.0.113.7>10.200.0.2:tcp/80")));
    assert!(!rules.permits(connection("10.200.0.2>10.0.0.1:tcp/80")));
}

#[test]
fn invalid_parts_of_a_policy_allow_nothing_and_are_reported() {
    let selector = json!({"matchExpressions": [{"key": "a", "operator": "Sideways"}]});
    for (spec, expected) in [
        (
            json!({"podSelector": selector, "ingress": [{}]}),
            "spec.podSelector",
        ),
        (
            json!({"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": "here"}}]}]}),
            "\"here\"",
        ),
        (
            json!({"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["there"]}}]}]}),
            "\"there\"",
        ),
        (
            json!({"podSelector": {}, "ingress": [{"ports": [{"port": 80, "protocol": "ICMP"}]}]}),
            "\"ICMP\"",
        ),
        (
            json!({"podSelector": {}, "ingress": [{"ports": [{"port": 70000}]}]}),
            "70000",
        ),
    ] {
        let compiled = compile(&world(&[spec]));
        assert!(
            !compiled
                .rules
                .permits(connection("203.0.113.7>10.200.0.2:tcp/80"))
        );
        let problems: Vec<&String> = compiled.problems.iter().collect();
        assert!(
            problems.len() == 1 && problems[0].contains(expected),
            "{problems:?}"
        );
    }
}

#[test]
fn new_and_removed_pods_change_members_of_sets_and_no_chain() {
    let spec = json!({"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {}}]}], "egress": [{"to": [{"namespaceSelector": {}}]}]});
    let mut world = world(&[spec]);
    let before = compile(&world).rules;
    world.pods.push(pod("n", "a", "10.200.0.9", &[]));
    let after = compile(&world).rules;
    assert_eq!(before.chains, after.chains);
    assert_eq!(
        before.sets.keys().collect::<Vec<_>>(),
        after.sets.keys().collect::<Vec<_>>()
    );
    assert_ne!(before.sets, after.sets);
}

/// A direct interpreter of the specification of network policies.
mod naive {
    use super::*;

    fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
        let wanted = selector.match_labels.iter().flatten();
        wanted
            .into_iter()
            .all(|(key, value)| labels.get(key) == Some(value))
            && selector
                .match_expressions
                .iter()
                .flatten()
                .all(|expression| {
                    let value = labels.get(&expression.key);
                    let listed = || {
                        value.is_some_and(|value| {
                            expression.values.iter().flatten().any(|one| one == value)
                        })
                    };
                    match expression.operator.as_str() {
                        "In" => listed(),
                        "NotIn" => !listed(),
                        "Exists" => value.is_some(),
                        _ => value.is_none(),
                    }
                })
    }

    fn peer_matches(
        world: &World,
        policy: &NetworkPolicy,
        peer: &NetworkPolicyPeer,
        address: IpAddr,
    ) -> bool {
        if let Some(block) = &peer.ip_block {
            let within = |text: &String| text.parse::<AddressBlock>().unwrap().contains(address);
            return within(&block.cidr) && !block.except.iter().flatten().any(within);
        }
        world
            .pods
            .iter()
            .filter(|pod| pod.addresses.contains(&address))
            .any(|pod| {
                let namespace = match &peer.namespace_selector {
                    None => Some(&pod.namespace) == policy.metadata.namespace.as_ref(),
                    Some(selector) => selects(selector, &world.namespaces[&pod.namespace]),
                };
                namespace
                    && peer
                        .pod_selector
                        .as_ref()
                        .is_none_or(|selector| selects(selector, &pod.labels))
            })
    }

    /// `target` is the address of the connection's target, whose named ports are used.
    fn port_matches(world: &World, port: &NetworkPolicyPort, connection: Connection) -> bool {
        let protocol = Protocol::parse(port.protocol.as_deref()).unwrap();
        protocol == connection.protocol
            && match &port.port {
                None => true,
                Some(IntOrString::Int(first)) => {
                    (*first..=port.end_port.unwrap_or(*first)).contains(&i32::from(connection.port))
                }
                Some(IntOrString::String(name)) => world.pods.iter().any(|pod| {
                    pod.addresses.contains(&connection.to)
                        && pod.ports.iter().any(|own| {
                            own.name == *name
                                && own.protocol == protocol
                                && own.number == connection.port
                        })
                }),
            }
    }

    fn direction_allows(
        world: &World,
        pod: &PodFacts,
        connection: Connection,
        direction: Direction,
    ) -> bool {
        let peer = match direction {
            Direction::Ingress => connection.from,
            Direction::Egress => connection.to,
        };
        let mut selected = false;
        let mut allowed = false;
        for policy in &world.policies {
            let spec = policy.spec.as_ref().unwrap();
            let types = spec.policy_types.clone().unwrap_or_else(|| {
                let mut types = vec!["Ingress".to_owned()];
                if spec.egress.as_ref().is_some_and(|rules| !rules.is_empty()) {
                    types.push("Egress".to_owned());
                }
                types
            });
            let listed = types.iter().any(|kind| *kind == format!("{direction:?}"));
            let selector = spec.pod_selector.clone().unwrap_or_default();
            if !listed
                || policy.metadata.namespace.as_ref() != Some(&pod.namespace)
                || !selects(&selector, &pod.labels)
            {
                continue;
            }
            selected = true;
            let clauses: Vec<(Vec<NetworkPolicyPeer>, Vec<NetworkPolicyPort>)> = match direction {
                Direction::Ingress => spec
                    .ingress
                    .iter()
                    .flatten()
                    .map(|rule| {
                        (
                            rule.from.clone().unwrap_or_default(),
                            rule.ports.clone().unwrap_or_default(),
                        )
                    })
                    .collect(),
                Direction::Egress => spec
                    .egress
                    .iter()
                    .flatten()
                    .map(|rule| {
                        (
                            rule.to.clone().unwrap_or_default(),
                            rule.ports.clone().unwrap_or_default(),
                        )
                    })
                    .collect(),
            };
            allowed |= clauses.iter().any(|(peers, ports)| {
                (peers.is_empty()
                    || peers
                        .iter()
                        .any(|one| peer_matches(world, policy, one, peer)))
                    && (ports.is_empty()
                        || ports
                            .iter()
                            .any(|port| port_matches(world, port, connection)))
            });
        }
        !selected || allowed
    }

    pub fn permits(world: &World, connection: Connection) -> bool {
        let of = |address: IpAddr| {
            world
                .pods
                .iter()
                .find(|pod| pod.judged && pod.addresses.contains(&address))
        };
        of(connection.from)
            .is_none_or(|pod| direction_allows(world, pod, connection, Direction::Egress))
            && of(connection.to)
                .is_none_or(|pod| direction_allows(world, pod, connection, Direction::Ingress))
    }
}

fn any_selector() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(json!({})),
        prop_oneof!["a", "b"].prop_map(|value| json!({"matchLabels": {"app": value}})),
        prop_oneof!["In", "NotIn"]
            .prop_map(|operator| json!({"matchExpressions": [{"key": "app", "operator": operator, "values": ["a"]}]})),
        prop_oneof!["Exists", "DoesNotExist"]
            .prop_map(|operator| json!({"matchExpressions": [{"key": "team", "operator": operator}]})),
    ]
}

fn any_peer() -> impl Strategy<Value = Value> {
    let block = prop_oneof![
        Just(json!({"cidr": "0.0.0.0/0", "except": ["10.200.0.2/31", "203.0.113.0/25"]})),
        Just(json!({"cidr": "10.200.0.0/30"})),
        Just(json!({"cidr": "203.0.113.7/32"})),
        Just(json!({"cidr": "::/0", "except": ["fd00::/126"]})),
    ];
    prop_oneof![
        any_selector().prop_map(|pods| json!({"podSelector": pods})),
        any_selector().prop_map(|namespaces| json!({"namespaceSelector": namespaces})),
        (any_selector(), any_selector()).prop_map(
            |(namespaces, pods)| json!({"namespaceSelector": namespaces, "podSelector": pods})
        ),
        block.prop_map(|block| json!({"ipBlock": block})),
    ]
}

fn any_port() -> impl Strategy<Value = Value> {
    let protocol = || prop_oneof!["TCP", "UDP", "SCTP"];
    prop_oneof![
        protocol().prop_map(|protocol| json!({"protocol": protocol})),
        (protocol(), 8079_u16..8082)
            .prop_map(|(protocol, port)| json!({"protocol": protocol, "port": port})),
        (protocol(), 8070_u16..8082).prop_map(
            |(protocol, port)| json!({"protocol": protocol, "port": port, "endPort": port + 5})
        ),
        (protocol(), prop_oneof!["web", "dns"])
            .prop_map(|(protocol, name)| json!({"protocol": protocol, "port": name})),
    ]
}

fn any_policy() -> impl Strategy<Value = NetworkPolicy> {
    let clauses = |side: &'static str| {
        let clause = (
            proptest::collection::vec(any_peer(), 0..3),
            proptest::collection::vec(any_port(), 0..3),
        )
            .prop_map(move |(peers, ports)| json!({side: peers, "ports": ports}));
        proptest::collection::vec(clause, 0..3)
    };
    let types = prop_oneof![
        Just(None),
        Just(Some(json!(["Ingress"]))),
        Just(Some(json!(["Egress"]))),
        Just(Some(json!(["Ingress", "Egress"]))),
    ];
    (prop_oneof!["n", "m"], 0..4_u8, any_selector(), clauses("from"), clauses("to"), types).prop_map(
        |(namespace, number, selector, ingress, egress, types)| {
            let mut object = json!({"metadata": {"name": format!("p{number}"), "namespace": namespace},
                "spec": {"podSelector": selector, "ingress": ingress, "egress": egress}});
            if let Some(types) = types {
                object["spec"]["policyTypes"] = types;
            }
            serde_json::from_value(object).unwrap()
        },
    )
}

/// Removes policies with the same name in a namespace.
fn any_policies() -> impl Strategy<Value = Vec<NetworkPolicy>> {
    proptest::collection::vec(any_policy(), 0..4).prop_map(|policies| {
        let named = policies.into_iter().map(|policy| {
            let key = (
                policy.metadata.namespace.clone(),
                policy.metadata.name.clone(),
            );
            (key, policy)
        });
        named.collect::<BTreeMap<_, _>>().into_values().collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn compiled_rules_mean_what_the_policies_say(
        policies in any_policies(),
        judged in proptest::collection::vec(any::<bool>(), 3),
    ) {
        let mut world = world(&[]);
        world.policies = policies;
        world.resolver = Vec::new();
        for (pod, judged) in world.pods.iter_mut().zip(judged) {
            pod.judged = judged;
        }
        let rules = compile(&world).rules;
        let four = ["10.200.0.2", "10.200.0.3", "10.200.0.4", "203.0.113.7", "203.0.113.200", "10.9.9.9"];
        let six = ["fd00::2", "fd00::3", "fd00::4", "2001:db8::1"];
        for family in [&four[..], &six[..]] {
            for from in family {
                for to in family {
                    for protocol in [Protocol::Tcp, Protocol::Udp, Protocol::Sctp] {
                        for port in [53, 8078, 8080, 9090] {
                            let connection = Connection {
                                from: from.parse().unwrap(),
                                to: to.parse().unwrap(),
                                protocol,
                                port,
                            };
                            prop_assert_eq!(
                                rules.permits(connection),
                                naive::permits(&world, connection),
                                "{:?}",
                                connection
                            );
                        }
                    }
                }
            }
        }
    }
}
