//! Fail-closed networking: another program has removed the nftables table, or there is no nftables; and neighbours that try the node's
//! own addresses.

use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::time::Duration;

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::Api;
use kube::api::ListParams;
use rtnetlink::packet_route::rule::RuleMessage;
use testkit::eventually;

use crate::fixture::{Network, addresses, open, to, to_each};
use crate::support::internet::{self, PUBLIC, on_own_network};

/// The machine's addresses on its network.
const MACHINE: [&str; 2] = ["203.0.113.254", "2001:db8::fe"];
const SERVICE: u16 = 7777;
/// The timeout of an attempt that should fail.
const ATTEMPT: Duration = Duration::from_millis(600);

fn connects(target: SocketAddr) -> bool {
    TcpStream::connect_timeout(&target, ATTEMPT).is_ok()
}

/// Queries a cluster name that does not exist. Returns whether there is any response.
fn is_answered(resolver: SocketAddr) -> bool {
    let any: IpAddr = if resolver.is_ipv4() {
        [0; 4].into()
    } else {
        [0_u8; 16].into()
    };
    let socket = UdpSocket::bind((any, 0)).unwrap();
    socket.set_read_timeout(Some(ATTEMPT)).unwrap();
    let question = b"\0\x07\x01\0\0\x01\0\0\0\0\0\0\x01x\x07cluster\x05local\0\0\x01\0\x01";
    let mut answer = [0; 512];
    socket.send_to(question, resolver).is_ok() && socket.recv_from(&mut answer).is_ok()
}

/// Removes every table of the test's network namespace, as `systemctl restart nftables` does.
fn flush_ruleset() {
    let flushed = Command::new("nft").args(["flush", "ruleset"]).status();
    assert!(flushed.unwrap().success());
}

/// Asserts that a neighbour with a route to the node's addresses in the pod network gets no response, and this machine does.
async fn neighbours_reach_nothing(network: &Network) {
    let node = network.node_addresses();
    let listeners = node
        .iter()
        .map(|own| TcpListener::bind((*own, 8080)).unwrap());
    let listeners: Vec<_> = listeners.collect();
    for own in node {
        let reached = network.internet.run(move || {
            let [service, resolver] = [8080, 53].map(|port| SocketAddr::new(own, port));
            [connects(service), connects(resolver), is_answered(resolver)]
        });
        assert_eq!(reached, [false; 3], "at {own}: the router, the resolver");
        let here = tokio::task::spawn_blocking(move || {
            let [service, resolver] = [8080, 53].map(|port| SocketAddr::new(own, port));
            [connects(service), connects(resolver), is_answered(resolver)]
        });
        let here = here.await.unwrap();
        assert_eq!(here, [true; 3], "{own} from the machine itself");
    }
    drop(listeners);
}

#[test]
fn a_neighbour_cannot_reach_the_nodes_addresses_in_the_pod_network() {
    on_own_network(|| async {
        let network = Network::start().await;
        neighbours_reach_nothing(&network).await;
        network.finish().await;
    });
}

#[test]
fn without_nftables_neighbours_and_pods_reach_nothing_of_the_machine() {
    on_own_network(|| async {
        let network = Network::start_with(|config| {
            config.firewall_program = "/no/such/nft".into();
        })
        .await;
        neighbours_reach_nothing(&network).await;
        let machine_service = TcpListener::bind(("::", SERVICE)).unwrap();
        let (a, b) = network.pair().await;
        let mut expected = to(&a, &b, "tcp/8080", false);
        expected.extend(to(&a, &b, "udp/5353", false));
        let machine = network.node_addresses().into_iter();
        let machine = machine.chain(MACHINE.map(|own| own.parse().unwrap()));
        expected.extend(to_each(&a, machine, &format!("tcp/{SERVICE}"), false));
        expected.extend(to_each(&a, PUBLIC, "tcp/80", false));
        // Every pod that no policy selects reaches the resolver.
        expected.extend(to_each(&a, network.node_addresses(), "tcp/53", true));
        network.expect("without nftables", &expected).await;
        // The router and probes reach pods.
        for address in addresses(&a) {
            let target = SocketAddr::new(address, 8080);
            let reached = tokio::task::spawn_blocking(move || connects(target));
            assert!(reached.await.unwrap(), "{target}");
        }
        drop(machine_service);
        network.finish().await;
    });
}

/// The connections that succeed, tried from inside the network namespaces, because the node is down and runs no commands.
struct Attempts<'a> {
    network: &'a Network,
    pin: std::path::PathBuf,
    pod: &'a Pod,
    other: &'a Pod,
}

impl Attempts<'_> {
    fn all(&self) -> Vec<(String, bool)> {
        let mut targets: Vec<(&str, SocketAddr)> = Vec::new();
        for address in addresses(self.other) {
            targets.push(("pod to pod", SocketAddr::new(address, 8080)));
        }
        let node = self.network.machine.config.pod_network;
        assert!(node.is_none(), "the default range");
        for own in MACHINE.into_iter().map(|own| own.parse().unwrap()) {
            targets.push(("pod to machine", SocketAddr::new(own, SERVICE)));
        }
        for address in PUBLIC {
            let address = address.parse().unwrap();
            targets.push(("pod to outside", SocketAddr::new(address, 80)));
        }
        let from_pod = internet::inside(&self.pin, move || {
            targets
                .into_iter()
                .map(|(case, target)| (format!("{case} {target}"), connects(target)))
                .collect::<Vec<_>>()
        });
        let own = addresses(self.pod);
        let from_outside = self.network.internet.run(move || {
            let targets = own.into_iter().map(|own| SocketAddr::new(own, 8080));
            targets
                .map(|target| (format!("outside to pod {target}"), connects(target)))
                .collect::<Vec<_>>()
        });
        from_pod.into_iter().chain(from_outside).collect()
    }
}

/// Sends datagrams to the machine and to the network, from the pod's address and from one that is not its own.
fn send_forged(pin: &std::path::Path, sources: &[&'static str]) {
    for source in sources.iter().copied() {
        internet::inside(pin, move || {
            internet::take_address("eth0", source);
            let source: IpAddr = source.parse().unwrap();
            let socket = UdpSocket::bind((source, 0)).unwrap();
            let four = source.is_ipv4();
            let targets = MACHINE.map(|own| (own, SERVICE)).into_iter();
            let targets = targets.chain(PUBLIC.map(|address| (address, 80)));
            for (target, port) in targets.filter(|(target, _)| target.contains('.') == four) {
                let target: IpAddr = target.parse().unwrap();
                let _ = socket.send_to(b"forged", (target, port));
            }
        });
    }
}

#[test]
fn without_the_table_nothing_passes_though_the_node_is_down() {
    on_own_network(|| async {
        let mut network = Network::start().await;
        network.policies(&[("t", open())]).await;
        let machine_service = TcpListener::bind(("::", SERVICE)).unwrap();
        let datagrams = UdpSocket::bind(("::", SERVICE)).unwrap();
        let (a, b) = network.pair().await;
        let mut allowed = to(&a, &b, "tcp/8080", true);
        allowed.extend(to_each(&a, PUBLIC, "tcp/80", true));
        network.expect("with the table", &allowed).await;
        let pin = network.pin(&a);
        network.machine.stop_node().await;
        let attempts = Attempts {
            network: &network,
            pin: pin.clone(),
            pod: &a,
            other: &b,
        };
        let reached = |all: Vec<(String, bool)>| -> Vec<String> {
            all.into_iter()
                .filter_map(|(case, passed)| passed.then_some(case))
                .collect()
        };
        let judged = reached(attempts.all());
        assert!(
            judged.iter().any(|case| case.starts_with("pod to pod")),
            "{judged:?}"
        );
        flush_ruleset();
        assert_eq!(reached(attempts.all()), Vec::<String>::new());
        send_forged(&pin, &["198.51.100.99", "203.0.113.1", "2001:db8:5::5"]);
        // A packet of the machine itself arrives after all others that could have.
        let own = SocketAddr::new(MACHINE[0].parse().unwrap(), SERVICE);
        let sender = UdpSocket::bind("0.0.0.0:0").unwrap();
        sender.send_to(b"own", own).unwrap();
        datagrams
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let mut buffer = [0; 16];
        let (count, from) = datagrams.recv_from(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"own", "from {from}");
        let forged = network.internet.received.lock().unwrap().clone();
        assert!(
            !forged.iter().any(|(_, text)| text == "forged"),
            "{forged:?}"
        );
        // The node restores the rules, and the other pod has only its own addresses.
        network.machine.start_node().await;
        let mut allowed = to(&b, &a, "tcp/8080", true);
        allowed.extend(to_each(&b, PUBLIC, "tcp/80", true));
        network.expect("with the table again", &allowed).await;
        drop(machine_service);
        network.finish().await;
    });
}

/// Waits until an event about the node has a reason.
async fn node_event(network: &Network, reason: &str) -> Event {
    let events = Api::<Event>::all(network.machine.client.clone());
    eventually("the node's event", || async {
        let listed = events.list(&ListParams::default()).await.unwrap();
        let mut about = listed
            .items
            .into_iter()
            .filter(|event| event.involved_object.kind.as_deref() == Some("Node"));
        about.find(|event| event.reason.as_deref() == Some(reason))
    })
    .await
}

async fn enforced_message(network: &Network) -> (String, String) {
    let nodes = Api::<Node>::all(network.machine.client.clone());
    let status = nodes.get("test-node").await.unwrap().status.unwrap();
    let conditions = status.conditions.unwrap();
    let mut conditions = conditions.into_iter();
    let found = conditions.find(|condition| condition.type_ == "NetworkPolicyEnforced");
    let found = found.unwrap();
    (found.status, found.message.unwrap_or_default())
}

#[test]
fn a_table_that_another_program_removes_or_changes_is_restored_at_once_and_reported() {
    on_own_network(|| async {
        let network = Network::start().await;
        let policy = serde_json::json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"port": 8080}]}], "egress": [{}]});
        network.policies(&[("t", policy)]).await;
        let (a, b) = network.pair().await;
        let mut expected = to(&a, &b, "tcp/8080", true);
        expected.extend(to(&a, &b, "tcp/8081", false));
        network.expect("before", &expected).await;
        flush_ruleset();
        network
            .expect("after the table was removed", &expected)
            .await;
        let event = node_event(&network, "NetworkRulesRestored").await;
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        // Rules within the table count, too.
        let table = &network.machine.runtime().network().layout().names.table;
        let accept = ["insert", "rule", "inet", table, "judge", "accept"];
        assert!(Command::new("nft").args(accept).status().unwrap().success());
        network.expect("after a rule was added", &expected).await;
        eventually("the node to count both", || async {
            let (status, message) = enforced_message(&network).await;
            (status == "True" && message.contains("2 times")).then_some(())
        })
        .await;
        network.finish().await;
    });
}

#[test]
fn a_pods_deleted_link_is_made_again_and_reported() {
    on_own_network(|| async {
        let network = Network::start().await;
        network.policies(&[("t", open())]).await;
        let (a, b) = network.pair().await;
        let expected = to(&a, &b, "tcp/8080", true);
        network.expect("before", &expected).await;
        let prefix = network
            .machine
            .runtime()
            .network()
            .layout()
            .names
            .link_prefix();
        // All of them: those of slots that wait for pods, too.
        let removing = std::thread::spawn(move || internet::remove_links("", &prefix));
        removing.join().unwrap();
        network
            .expect("after the links were removed", &expected)
            .await;
        let events = Api::<Event>::namespaced(network.machine.client.clone(), "t");
        eventually("the pod's event", || async {
            let listed = events.list(&ListParams::default()).await.unwrap();
            let mut about = listed
                .items
                .into_iter()
                .filter(|event| event.involved_object.name.as_deref() == Some("a"));
            about.find(|event| event.reason.as_deref() == Some("NetworkLinkRestored"))
        })
        .await;
        network.finish().await;
    });
}

async fn routing_rules() -> Vec<RuleMessage> {
    let (connection, handle, _) = rtnetlink::new_connection().unwrap();
    let connection = tokio::spawn(connection);
    let mut rules = Vec::new();
    for version in [rtnetlink::IpVersion::V4, rtnetlink::IpVersion::V6] {
        let listed = handle.rule().get(version).execute();
        rules.extend(listed.try_collect::<Vec<_>>().await.unwrap());
    }
    connection.abort();
    rules
}

#[test]
fn routing_rules_that_another_program_removes_are_restored_and_none_is_left_in_the_end() {
    on_own_network(|| async {
        let before = routing_rules().await;
        let network = Network::start().await;
        let installed = routing_rules().await;
        assert_ne!(installed, before);
        // As `ip rule flush` does: all rules that the machine did not have, including the local table's.
        let (connection, handle, _) = rtnetlink::new_connection().unwrap();
        tokio::spawn(connection);
        for rule in installed.iter().filter(|rule| !before.contains(rule)) {
            // The node may repair some of them concurrently.
            let _ = handle.rule().del(rule.clone()).execute().await;
        }
        eventually("the rules to be back", || async {
            (routing_rules().await == installed).then_some(())
        })
        .await;
        network.finish().await;
        assert_eq!(routing_rules().await, before);
    });
}
