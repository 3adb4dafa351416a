//! Who reaches whom, with real traffic: pods, the machine, and an internet beside it.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use std::net::{IpAddr, UdpSocket};
use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use support::internet::{self, Internet, PRIVATE, PUBLIC, on_own_network};
use support::{Machine, eventually, eventually_within, is_ready};

/// Answers on two TCP ports and one UDP port of every family, and counts what it is asked.
const SERVER: &str = r"
import socket, threading, sys
def tcp(family, port):
    s = socket.socket(family, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    s.bind(('', port)); s.listen(512)
    def serve():
        while True:
            c, _ = s.accept()
            threading.Thread(target=echo, args=(c,), daemon=True).start()
    threading.Thread(target=serve, daemon=True).start()
def echo(c):
    with c:
        while (data := c.recv(4096)): c.sendall(data)
def udp(family, port):
    s = socket.socket(family, socket.SOCK_DGRAM)
    if family == socket.AF_INET6: s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    s.bind(('', port))
    def serve():
        while True:
            data, peer = s.recvfrom(4096)
            if data == b'forbidden': open('/tmp/forbidden', 'a').write('x')
            s.sendto(data, peer)
    threading.Thread(target=serve, daemon=True).start()
for family in (socket.AF_INET, socket.AF_INET6):
    for port in (8080, 8081): tcp(family, port)
    udp(family, 5353)
open('/tmp/serving', 'w').close()
threading.Event().wait()
";

/// Tries many things at once: prints a word per argument, `yes` or `no`.
const PROBE: &str = r"
import socket, sys, concurrent.futures
def probe(what):
    protocol, address, port = what.split()
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    kind = socket.SOCK_DGRAM if protocol == 'udp' else socket.SOCK_STREAM
    try:
        with socket.socket(family, kind) as s:
            s.settimeout(0.6)
            s.connect((address, int(port)))
            if protocol == 'udp':
                s.send(b'question'); s.recv(100)
        return 'yes'
    except OSError:
        return 'no'
with concurrent.futures.ThreadPoolExecutor(64) as pool:
    print(' '.join(pool.map(probe, sys.argv[1:])))
";

struct Network {
    machine: Machine,
    internet: Internet,
}

impl Network {
    async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    async fn start_with(adjust: impl FnOnce(&mut agent_sandbox_node::Config)) -> Self {
        let internet = Internet::beside_machine().await;
        let machine = Machine::start_with(adjust).await;
        let other = json!({"metadata": {"name": "other", "labels": {"team": "x"}}});
        let namespaces = Api::<Namespace>::all(machine.client.clone());
        namespaces
            .create(
                &PostParams::default(),
                &serde_json::from_value(other).unwrap(),
            )
            .await
            .unwrap();
        let network = machine.runtime().network().layout();
        let ranges = network.ranges();
        let ranges = ranges.iter();
        internet.route_to_pods(
            ranges
                .map(|range| (range.address().to_string(), range.length()))
                .collect(),
        );
        Self { machine, internet }
    }

    fn pods(&self, namespace: &str) -> Api<Pod> {
        Api::namespaced(self.machine.client.clone(), namespace)
    }

    async fn server(&self, namespace: &str, name: &str) -> Pod {
        let pod = json!({"metadata": {"name": name, "labels": {"app": name}}, "spec": {
            "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "host", "command": ["python3", "-c", SERVER],
            "ports": [{"name": "web", "containerPort": 8080}, {"name": "names", "containerPort": 5353, "protocol": "UDP"}],
            "readinessProbe": {"exec": {"command": ["test", "-e", "/tmp/serving"]}, "periodSeconds": 1}}]}});
        let pods = self.pods(namespace);
        pods.create(
            &PostParams::default(),
            &serde_json::from_value(pod).unwrap(),
        )
        .await
        .unwrap();
        eventually("the pod to serve", || async {
            pods.get_opt(name).await.unwrap().filter(is_ready)
        })
        .await
    }

    /// Replaces all policies by these, by namespace.
    async fn policies(&self, policies: &[(&str, Value)]) {
        for namespace in ["t", "other"] {
            let api = Api::<NetworkPolicy>::namespaced(self.machine.client.clone(), namespace);
            for policy in api.list(&ListParams::default()).await.unwrap() {
                api.delete(&policy.name_any(), &DeleteParams::default())
                    .await
                    .unwrap();
            }
        }
        for (index, (namespace, spec)) in policies.iter().enumerate() {
            let api = Api::<NetworkPolicy>::namespaced(self.machine.client.clone(), namespace);
            let policy = json!({"metadata": {"name": format!("p{index}")}, "spec": spec});
            let policy = serde_json::from_value(policy).unwrap();
            api.create(&PostParams::default(), &policy).await.unwrap();
        }
    }

    async fn probe(&self, from: &Pod, what: &[String]) -> Vec<bool> {
        let mut command = vec!["python3", "-c", PROBE];
        command.extend(what.iter().map(String::as_str));
        let (code, out, err) = self.machine.exec(from, &command).await;
        assert_eq!(code, 0, "{err}");
        out.split_whitespace().map(|word| word == "yes").collect()
    }

    /// Waits until exactly what is expected to pass does: rules take effect a moment after the policy is written.
    async fn expect(&self, case: &str, expected: &[(&Pod, String, bool)]) {
        let last = std::sync::Mutex::new(String::new());
        let matches = || async {
            let mut wrong = Vec::new();
            let mut rest = expected.to_vec();
            while let Some((from, _, _)) = rest.first().cloned() {
                let (own, others): (Vec<_>, Vec<_>) = rest
                    .into_iter()
                    .partition(|(pod, _, _)| pod.uid() == from.uid());
                rest = others;
                let what: Vec<String> = own.iter().map(|(_, what, _)| what.clone()).collect();
                let found = self.probe(from, &what).await;
                let differ = own
                    .iter()
                    .zip(found)
                    .filter(|((_, _, wanted), found)| wanted != found);
                wrong.extend(differ.map(|((from, what, wanted), _)| {
                    format!("{} to {what}: expected {wanted}", from.name_any())
                }));
            }
            *last.lock().unwrap() = format!("{wrong:#?}");
            wrong.is_empty().then_some(())
        };
        let limit = Duration::from_secs(12);
        let outcome = tokio::time::timeout(limit, async { while matches().await.is_none() {} });
        assert!(outcome.await.is_ok(), "{case}: {}", last.lock().unwrap());
    }

    async fn finish(self) {
        for pod in self
            .pods("other")
            .list(&ListParams::default())
            .await
            .unwrap()
        {
            let now = DeleteParams::default().grace_period(0);
            let _ = self.pods("other").delete(&pod.name_any(), &now).await;
        }
        self.machine.finish().await;
    }
}

fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let status = pod.status.as_ref().unwrap();
    let addresses = status.pod_ips.as_ref().unwrap();
    addresses
        .iter()
        .map(|address| address.ip.parse().unwrap())
        .collect()
}

/// The same expectation for every address of the target.
fn to<'a>(from: &'a Pod, target: &Pod, what: &str, passes: bool) -> Vec<(&'a Pod, String, bool)> {
    let (protocol, port) = what.split_once('/').unwrap();
    let addresses = addresses(target);
    assert_eq!(addresses.len(), 2, "an address of each family");
    addresses
        .iter()
        .map(|address| (from, format!("{protocol} {address} {port}"), passes))
        .collect()
}

#[test]
fn policies_decide_which_pods_talk_and_on_which_ports() {
    on_own_network(|| async {
        let network = Network::start().await;
        let (a, b, c) = tokio::join!(
            network.server("t", "a"),
            network.server("t", "b"),
            network.server("other", "c")
        );
        let open_egress = json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]});
        let always = [("t", open_egress.clone()), ("other", open_egress)];
        let ingress = |rule: Value| json!({"podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Ingress"], "ingress": rule});
        let same = json!([{"from": [{"podSelector": {"matchLabels": {"app": "a"}}}]}]);
        let namespaces = json!([{"from": [{"namespaceSelector": {"matchLabels": {"team": "x"}}}]}]);
        let both = json!([{"from": [{"namespaceSelector": {"matchLabels": {"team": "x"}}, "podSelector": {"matchLabels": {"app": "d"}}}]}]);
        let number = json!([{"ports": [{"port": 8081}]}]);
        let name = json!([{"ports": [{"port": "web"}, {"port": "names", "protocol": "UDP"}]}]);
        let range = json!([{"ports": [{"port": 8000, "endPort": 8080}]}]);
        let protocol = json!([{"ports": [{"protocol": "UDP"}]}]);
        // What a and c reach of b: TCP 8080, TCP 8081, UDP 5353.
        let cases = [
            (
                "nothing is allowed",
                json!([]),
                [false, false, false],
                [false, false, false],
            ),
            (
                "everything is allowed",
                json!([{}]),
                [true, true, true],
                [true, true, true],
            ),
            (
                "pods of the namespace",
                same,
                [true, true, true],
                [false, false, false],
            ),
            (
                "pods of other namespaces",
                namespaces,
                [false, false, false],
                [true, true, true],
            ),
            (
                "pods of other namespaces with a label nobody has",
                both,
                [false, false, false],
                [false, false, false],
            ),
            (
                "a port by its number",
                number,
                [false, true, false],
                [false, true, false],
            ),
            (
                "ports by their names",
                name,
                [true, false, true],
                [true, false, true],
            ),
            (
                "a range of ports",
                range,
                [true, false, false],
                [true, false, false],
            ),
            (
                "a whole protocol",
                protocol,
                [false, false, true],
                [false, false, true],
            ),
        ];
        let ports = ["tcp/8080", "tcp/8081", "udp/5353"];
        for (case, rule, from_a, from_c) in cases {
            let mut policies = always.to_vec();
            policies.push(("t", ingress(rule)));
            network.policies(&policies).await;
            let mut expected = Vec::new();
            for (index, port) in ports.iter().enumerate() {
                expected.extend(to(&a, &b, port, from_a[index]));
                expected.extend(to(&c, &b, port, from_c[index]));
            }
            network.expect(case, &expected).await;
        }
        blocks_of_addresses(&network, &a, &b, &c).await;
        egress_forms(&network, &a, &b, &c).await;
        network.finish().await;
    });
}

async fn blocks_of_addresses(network: &Network, a: &Pod, b: &Pod, c: &Pod) {
    let v4 = |pod: &Pod| addresses(pod)[0].to_string();
    let v6 = |pod: &Pod| addresses(pod)[1].to_string();
    let open_egress = json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]});
    let block = json!({"podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Ingress"], "ingress": [{"from": [
        {"ipBlock": {"cidr": format!("{}/32", v4(a))}},
        {"ipBlock": {"cidr": "::/0", "except": [format!("{}/128", v6(a))]}}]}]});
    network
        .policies(&[
            ("t", open_egress.clone()),
            ("other", open_egress),
            ("t", block),
        ])
        .await;
    let expected = [
        (a, format!("tcp {} 8080", v4(b)), true),
        (a, format!("tcp {} 8080", v6(b)), false),
        (c, format!("tcp {} 8080", v4(b)), false),
        (c, format!("tcp {} 8080", v6(b)), true),
    ];
    network.expect("blocks of addresses", &expected).await;
}

async fn egress_forms(network: &Network, a: &Pod, b: &Pod, c: &Pod) {
    let open_ingress = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]});
    let egress = |rule: Value| json!({"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Egress"], "egress": rule});
    let public = |passes: bool| {
        PUBLIC
            .map(|address| (a, format!("tcp {address} 80"), passes))
            .to_vec()
    };
    let cases = [
        ("no way out", json!([]), false, false, false),
        (
            "only pods of the namespace",
            json!([{"to": [{"podSelector": {}}]}]),
            true,
            false,
            false,
        ),
        (
            "only pods of another namespace",
            json!([{"to": [{"namespaceSelector": {"matchLabels": {"team": "x"}}}]}]),
            false,
            true,
            false,
        ),
        (
            "a port name of the pods it goes to",
            json!([{"ports": [{"port": "web"}]}]),
            true,
            true,
            false,
        ),
        (
            "public addresses",
            json!([{"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8"]}}, {"ipBlock": {"cidr": "::/0", "except": ["fc00::/7"]}}]}]),
            false,
            false,
            true,
        ),
        ("everywhere", json!([{}]), true, true, true),
    ];
    for (case, rule, same, other, outside) in cases {
        network
            .policies(&[
                ("t", open_ingress.clone()),
                ("other", open_ingress.clone()),
                ("t", egress(rule)),
            ])
            .await;
        let mut expected = to(a, b, "tcp/8080", same);
        expected.extend(to(a, c, "tcp/8080", other));
        expected.extend(public(outside));
        network.expect(case, &expected).await;
    }
    // A label given or taken away is heeded.
    let labels = |value: Value| Patch::Merge(json!({"metadata": {"labels": value}}));
    network
        .policies(&[
            ("t", open_ingress.clone()),
            ("other", open_ingress),
            (
                "t",
                egress(json!([{"to": [{"podSelector": {"matchLabels": {"open": "yes"}}}]}])),
            ),
        ])
        .await;
    network
        .expect("before the label", &to(a, b, "tcp/8080", false))
        .await;
    let pods = network.pods("t");
    let parameters = PatchParams::default();
    pods.patch("b", &parameters, &labels(json!({"open": "yes"})))
        .await
        .unwrap();
    network
        .expect("with the label", &to(a, b, "tcp/8080", true))
        .await;
    pods.patch("b", &parameters, &labels(json!({"open": null})))
        .await
        .unwrap();
    network
        .expect("without the label", &to(a, b, "tcp/8080", false))
        .await;
}

/// The policy that a template gets that says nothing of its network.
fn secure_default() -> Value {
    json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "sandbox-router"}}}]}],
        "egress": [{"to": [
            {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"]}},
            {"ipBlock": {"cidr": "::/0", "except": ["fc00::/7", "fe80::/10"]}}]}]})
}

#[test]
fn the_secure_default_admits_the_router_and_reaches_only_public_addresses() {
    on_own_network(|| async {
        let network = Network::start().await;
        network.policies(&[("t", secure_default())]).await;
        let (sandbox, router, neighbour) = tokio::join!(
            network.server("t", "sandbox"),
            network.server("t", "sandbox-router"),
            network.server("t", "neighbour"),
        );
        // The router goes where it likes.
        let egress = json!({"podSelector": {"matchLabels": {"app": "sandbox-router"}}, "policyTypes": ["Egress"], "egress": [{}]});
        network
            .policies(&[("t", secure_default()), ("t", egress)])
            .await;
        let mut expected = to(&router, &sandbox, "tcp/8080", true);
        expected.extend(to(&neighbour, &sandbox, "tcp/8080", false));
        expected.extend(to(&sandbox, &neighbour, "tcp/8080", false));
        for address in PUBLIC {
            expected.push((&sandbox, format!("tcp {address} 80"), true));
        }
        // The others answer datagrams from another of their addresses than the one asked.
        for address in [PUBLIC[0], PUBLIC[2]] {
            expected.push((&sandbox, format!("udp {address} 80"), true));
        }
        // Carrier-grade NAT is not among what page 13 excepts; private, link-local and metadata addresses are.
        for address in PRIVATE
            .into_iter()
            .filter(|address| !address.starts_with("100."))
        {
            expected.push((&sandbox, format!("tcp {address} 80"), false));
            expected.push((&sandbox, format!("udp {address} 80"), false));
        }
        for address in network
            .machine
            .runtime()
            .network()
            .layout()
            .node_addresses()
        {
            // The cluster's own resolver, too.
            expected.push((&sandbox, format!("udp {address} 53"), false));
            expected.push((&sandbox, format!("tcp {address} 53"), false));
        }
        network.expect("the secure default", &expected).await;
        // The node reaches every pod, whatever the policies say: probes and the router of one machine depend on it.
        for address in addresses(&sandbox) {
            tokio::net::TcpStream::connect((address, 8080))
                .await
                .unwrap();
        }
        // The internet does not, even with a route.
        for address in addresses(&sandbox) {
            let reached = network.internet.run(move || {
                let target = std::net::SocketAddr::new(address, 8080);
                std::net::TcpStream::connect_timeout(&target, Duration::from_millis(600)).is_ok()
            });
            assert!(!reached, "the internet reaches {address}");
        }
        network.finish().await;
    });
}

#[test]
fn pods_that_no_policy_selects_are_isolated_and_the_machine_is_out_of_reach() {
    on_own_network(|| async {
        let network = Network::start().await;
        let (a, b) = tokio::join!(network.server("t", "a"), network.server("other", "b"));
        let machine_service = std::net::TcpListener::bind("[::]:7777").unwrap();
        let mut expected = to(&a, &b, "tcp/8080", false);
        for address in PUBLIC {
            expected.push((&a, format!("tcp {address} 80"), true));
        }
        for address in PRIVATE {
            expected.push((&a, format!("tcp {address} 80"), false));
        }
        let layout = network.machine.runtime().network().layout();
        let own = layout
            .node_addresses()
            .into_iter()
            .map(|address| address.to_string());
        let own: Vec<String> = own
            .chain(["203.0.113.254".to_owned(), "2001:db8::fe".to_owned()])
            .collect();
        for address in &own {
            expected.push((&a, format!("tcp {address} 7777"), false));
        }
        network.expect("nobody selects it", &expected).await;
        // Not even a policy that allows everything opens the machine itself.
        let open = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]});
        network
            .policies(&[("t", open.clone()), ("other", open)])
            .await;
        let mut expected = to(&a, &b, "tcp/8080", true);
        for address in &own {
            expected.push((&a, format!("tcp {address} 7777"), false));
        }
        network.expect("everything is allowed", &expected).await;
        drop(machine_service);
        network.finish().await;
    });
}

#[test]
fn unselected_pods_may_be_opened_as_kubernetes_has_it() {
    on_own_network(|| async {
        let network = Network::start_with(|config| {
            config.unselected_pods = agent_sandbox_node::network::policy::Unselected::Open;
        })
        .await;
        let (a, b) = tokio::join!(network.server("t", "a"), network.server("other", "b"));
        let mut expected = to(&a, &b, "tcp/8080", true);
        expected.extend(to(&b, &a, "udp/5353", true));
        expected.push((&a, "tcp 10.99.0.1 80".to_owned(), true));
        network.expect("open", &expected).await;
        network.finish().await;
    });
}

#[test]
fn a_pod_cannot_send_from_an_address_that_is_not_its_own() {
    on_own_network(|| async {
        let network = Network::start().await;
        let open = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]});
        network.policies(&[("t", open)]).await;
        let (a, b) = tokio::join!(network.server("t", "a"), network.server("t", "b"));
        network.expect("open", &to(&a, &b, "udp/5353", true)).await;
        let pin = network_pin(&network, &a);
        // From inside, with all the rights over the namespace that the default tier never gives.
        let victim = addresses(&b)[0].to_string();
        let victim: &'static str = victim.leak();
        for (spoofed, target) in [
            (victim, PUBLIC[0]),
            ("198.51.100.99", PUBLIC[0]),
            ("10.99.0.1", PUBLIC[0]),
            ("2001:db8:5::5", PUBLIC[2]),
        ] {
            let sent = internet::inside(&pin, move || {
                internet::take_address("eth0", spoofed);
                let send = |from: &str, text: &str| {
                    let socket = UdpSocket::bind((from.parse::<IpAddr>().unwrap(), 0)).unwrap();
                    socket
                        .send_to(text.as_bytes(), (target.parse::<IpAddr>().unwrap(), 80))
                        .is_ok()
                };
                send(spoofed, "forged")
            });
            assert!(sent, "the pod's own end lets it go");
        }
        // What is sent honestly after that arrives, and nothing of the rest has.
        let own = addresses(&a)[0];
        internet::inside(&pin, move || {
            let socket = UdpSocket::bind((own, 0)).unwrap();
            socket
                .send_to(b"honest", (PUBLIC[0].parse::<IpAddr>().unwrap(), 80))
                .unwrap();
        });
        let received = network.internet.received.clone();
        eventually("the honest datagram", || async {
            let received = received.lock().unwrap();
            received
                .iter()
                .any(|(_, text)| text == "honest")
                .then_some(())
        })
        .await;
        let forged: Vec<_> = received
            .lock()
            .unwrap()
            .iter()
            .filter(|(_, text)| text == "forged")
            .cloned()
            .collect();
        assert!(forged.is_empty(), "{forged:?}");
        network.finish().await;
    });
}

/// Where the pod's network namespace is pinned.
fn network_pin(network: &Network, pod: &Pod) -> PathBuf {
    let data = &network.machine.config.data_dir;
    let record = data
        .join("pods")
        .join(pod.uid().unwrap())
        .join("sandbox.json");
    let record: Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
    data.join("run/slots")
        .join(record["slot"].to_string())
        .join("network")
}

#[test]
fn a_connection_that_is_no_longer_allowed_is_cut_and_one_that_is_allowed_again_goes_on() {
    on_own_network(|| async {
        let network = Network::start().await;
        let (a, b) = tokio::join!(network.server("t", "a"), network.server("t", "b"));
        let open = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]});
        let closed = json!({"podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Ingress", "Egress"]});
        let only_a = json!({"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Ingress", "Egress"], "ingress": [{}], "egress": [{}]});
        network.policies(&[("t", open.clone())]).await;
        network.expect("open", &to(&a, &b, "tcp/8080", true)).await;
        // Keeps one connection and says every 50 ms whether something came back.
        let script = format!(
            r"
import socket, time
s = socket.create_connection(('{}', 8080)); s.settimeout(0.05)
while True:
    try: s.send(b'x')
    except OSError: pass
    try: answered = len(s.recv(4096)) > 0
    except OSError: answered = False
    open('/tmp/talk', 'w').write('yes' if answered else 'no'); time.sleep(0.05)
",
            addresses(&b)[0]
        );
        let background = "python3 -c \"$0\" > /dev/null 2>&1 &";
        network
            .machine
            .exec(&a, &["sh", "-c", background, &script])
            .await;
        let talks = |wanted: &'static str| {
            let (machine, a) = (&network.machine, &a);
            async move {
                eventually_within(
                    Duration::from_secs(20),
                    &format!("the connection to answer {wanted}"),
                    || async {
                        let (_, out, _) = machine.exec(a, &["cat", "/tmp/talk"]).await;
                        (out == wanted).then_some(())
                    },
                )
                .await;
            }
        };
        talks("yes").await;
        network.policies(&[("t", only_a), ("t", closed)]).await;
        talks("no").await;
        network.policies(&[("t", open)]).await;
        talks("yes").await;
        network.finish().await;
    });
}

/// Begins an SCTP association with two ports of a pod and prints which of them heard of it. Neither end needs a kernel that
/// speaks SCTP: the packets are made and read by hand, in the network namespaces of two pods.
const ASSOCIATE: &str = r"
import ctypes, os, socket, struct, sys, time
source, target, pins = sys.argv[1], sys.argv[2], sys.argv[3:]
def crc32c(data):
    crc = 0xffffffff
    for byte in data:
        crc ^= byte
        for _ in range(8): crc = crc >> 1 ^ 0x82f63b78 * (crc & 1)
    return crc ^ 0xffffffff
def raw(pin):
    with open(pin) as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0x40000000) == 0
    return socket.socket(socket.AF_INET, socket.SOCK_RAW, 132)
sender, receiver = raw(pins[0]), raw(pins[1])
heard, end = set(), time.monotonic() + 1
receiver.settimeout(0.05)
while time.monotonic() < end:
    for port in (9, 10):
        init = struct.pack('!BBHIIHHI', 1, 0, 20, 7, 1500, 1, 1, 1)
        head = lambda crc: struct.pack('!HHI', 5000, port, 0) + struct.pack('<I', crc)
        sender.sendto(head(crc32c(head(0) + init)) + init, (target, 0))
    try:
        while True:
            packet = receiver.recv(1500)
            if socket.inet_ntoa(packet[12:16]) == source: heard.add(struct.unpack('!H', packet[22:24])[0])
    except TimeoutError: pass
print(sorted(heard))
";

#[test]
fn policies_judge_sctp_by_port_too() {
    on_own_network(|| async {
        let network = Network::start().await;
        let (a, b) = tokio::join!(network.server("t", "a"), network.server("t", "b"));
        let pin = |pod: &Pod| {
            let data = &network.machine.config.data_dir;
            let record = data
                .join("pods")
                .join(pod.uid().unwrap())
                .join("sandbox.json");
            let record: Value = serde_json::from_slice(&std::fs::read(record).unwrap()).unwrap();
            let slot = u32::try_from(record["slot"].as_u64().unwrap()).unwrap();
            network.machine.runtime().slots().pins(slot).network
        };
        let heard = || {
            let output = std::process::Command::new("python3")
                .args(["-c", ASSOCIATE])
                .args([&a, &b].map(|pod| addresses(pod)[0].to_string()))
                .args([pin(&a), pin(&b)])
                .output()
                .unwrap();
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{errors}");
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        };
        let out = json!({"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Egress"], "egress": [{}]});
        let within = |ports: Value| json!({"podSelector": {"matchLabels": {"app": "b"}}, "policyTypes": ["Ingress"], "ingress": [{"ports": ports}]});
        for (ports, expected) in [
            (json!([{"protocol": "SCTP"}]), "[9, 10]"),
            (json!([{"protocol": "SCTP", "port": 9}]), "[9]"),
            (json!([{"protocol": "TCP"}, {"protocol": "UDP"}]), "[]"),
        ] {
            network
                .policies(&[("t", out.clone()), ("t", within(ports))])
                .await;
            eventually(&format!("{expected} to be heard"), || async {
                (heard() == expected).then_some(())
            })
            .await;
        }
        network.finish().await;
    });
}

#[test]
fn changes_of_policies_and_pods_leave_no_gap_in_either_direction() {
    on_own_network(|| async {
        let network = Network::start().await;
        let (a, b, c) = tokio::join!(
            network.server("t", "a"),
            network.server("t", "b"),
            network.server("t", "c")
        );
        // In force all the time: a reaches b, and not c.
        let lasting = json!({"podSelector": {"matchLabels": {"app": "a"}}, "policyTypes": ["Egress"],
            "egress": [{"to": [{"podSelector": {"matchLabels": {"app": "b"}}}]}]});
        let open = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{}]});
        network.policies(&[("t", lasting), ("t", open)]).await;
        let mut expected = to(&a, &b, "tcp/8080", true);
        expected.extend(to(&a, &c, "udp/5353", false));
        network.expect("the lasting policies", &expected).await;
        let script = format!(
            r"
import socket, os
done = failed = 0
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.setblocking(False)
while not os.path.exists('/tmp/stop'):
    try:
        with socket.create_connection(('{}', 8080), timeout=0.9) as s:
            s.send(b'x'); s.recv(1)
        done += 1
    except OSError: failed += 1
    try: u.sendto(b'forbidden', ('{}', 5353))
    except OSError: pass
    open('/tmp/count.new', 'w').write(f'{{done}} {{failed}}'); os.rename('/tmp/count.new', '/tmp/count')
",
            addresses(&b)[0],
            addresses(&c)[0]
        );
        let background = "python3 -c \"$0\" > /tmp/problem 2>&1 &";
        network
            .machine
            .exec(&a, &["sh", "-c", background, &script])
            .await;
        let api = Api::<NetworkPolicy>::namespaced(network.machine.client.clone(), "t");
        for round in 0..12_u16 {
            // Comes, changes and goes beside them: for other pods, for the same one, with new sets and chains.
            let extra = json!({"metadata": {"name": "extra"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"ports": [{"port": 7000 + round}]}],
                "egress": [{"to": [{"ipBlock": {"cidr": format!("192.0.2.{round}/32")}}]}]}});
            api.create(
                &PostParams::default(),
                &serde_json::from_value(extra).unwrap(),
            )
            .await
            .unwrap();
            let passing = json!({"metadata": {"name": format!("passing-{round}"), "labels": {"app": "b"}}, "spec": {
                "terminationGracePeriodSeconds": 0, "containers": [{"name": "c", "image": "host", "command": ["sleep", "100"]}]}});
            let pods = network.pods("t");
            let passing: Pod = serde_json::from_value(passing).unwrap();
            pods.create(&PostParams::default(), &passing).await.unwrap();
            network.machine.ready(&passing.name_any()).await;
            api.delete("extra", &DeleteParams::default()).await.unwrap();
            network.machine.delete(&passing.name_any()).await;
        }
        let counts = || async {
            let (_, out, _) = network.machine.exec(&a, &["cat", "/tmp/count"]).await;
            let mut words = out
                .split_whitespace()
                .map(|word| word.parse::<u32>().unwrap());
            Some((words.next()?, words.next()?))
        };
        eventually("some attempts", || async {
            counts().await.filter(|(done, _)| *done > 20)
        })
        .await;
        network.machine.exec(&a, &["touch", "/tmp/stop"]).await;
        let (done, failed) = counts().await.unwrap();
        assert_eq!(
            failed,
            0,
            "of {} attempts that are always allowed",
            done + failed
        );
        let (code, ..) = network
            .machine
            .exec(&c, &["test", "-e", "/tmp/forbidden"])
            .await;
        assert_ne!(code, 0, "something passed that is never allowed");
        network.finish().await;
    });
}

#[test]
fn rules_stay_in_force_while_the_node_is_down() {
    on_own_network(|| async {
        let mut network = Network::start().await;
        let (a, b) = tokio::join!(network.server("t", "a"), network.server("t", "b"));
        let policy = json!({"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"ports": [{"port": 8080}]}], "egress": [{}]});
        network.policies(&[("t", policy)]).await;
        let mut expected = to(&a, &b, "tcp/8080", true);
        expected.extend(to(&a, &b, "tcp/8081", false));
        network.expect("with the node", &expected).await;
        let script = format!(
            "import socket, os\nfailed = wrong = 0\nwhile not os.path.exists('/tmp/stop'):\n    for port in (8080, 8081):\n        try:\n            socket.create_connection(('{}', port), timeout=0.3).close()\n            wrong += port == 8081\n        except OSError: failed += port == 8080\nopen('/tmp/result', 'w').write(f'{{failed}} {{wrong}}')",
            addresses(&b)[0]
        );
        let background = "python3 -c \"$0\" > /tmp/problem 2>&1 &";
        network
            .machine
            .exec(&a, &["sh", "-c", background, &script])
            .await;
        network.machine.stop_node().await;
        network.machine.start_node().await;
        network.expect("after the restart", &expected).await;
        network.machine.exec(&a, &["touch", "/tmp/stop"]).await;
        let result = eventually("the result", || async {
            let (code, out, _) = network.machine.exec(&a, &["cat", "/tmp/result"]).await;
            (code == 0 && !out.is_empty()).then_some(out)
        })
        .await;
        assert_eq!(
            result, "0 0",
            "allowed attempts that failed, forbidden ones that passed"
        );
        network.finish().await;
    });
}

#[test]
fn without_a_firewall_pods_that_a_policy_selects_do_not_run_and_others_reach_nobody() {
    on_own_network(|| async {
        let network =
            Network::start_with(|config| config.firewall_program = "/no/such/nft".into()).await;
        let nodes = Api::<k8s_openapi::api::core::v1::Node>::all(network.machine.client.clone());
        let conditions = nodes
            .get("test-node")
            .await
            .unwrap()
            .status
            .unwrap()
            .conditions
            .unwrap();
        let enforced = conditions
            .iter()
            .find(|condition| condition.type_ == "NetworkPolicyEnforced")
            .unwrap();
        assert_eq!(enforced.status, "False");
        let message = enforced.message.clone().unwrap();
        assert!(message.contains("running nft"), "{message}");
        let policy = json!({"podSelector": {"matchLabels": {"app": "selected"}}});
        network.policies(&[("t", policy)]).await;
        let (a, b) = tokio::join!(network.server("t", "a"), network.server("t", "b"));
        let mut expected = to(&a, &b, "tcp/8080", false);
        expected.extend(PUBLIC.map(|address| (&a, format!("tcp {address} 80"), false)));
        network
            .expect("nothing judges its traffic", &expected)
            .await;
        let selected = json!({"metadata": {"name": "selected", "labels": {"app": "selected"}},
            "spec": {"containers": [{"name": "c", "image": "host"}]}});
        let selected = serde_json::from_value(selected).unwrap();
        network
            .pods("t")
            .create(&PostParams::default(), &selected)
            .await
            .unwrap();
        let waits = |pod: &Pod| {
            let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
            let waiting = statuses[0].state.clone()?.waiting?;
            Some((waiting.reason?, waiting.message?))
        };
        let pod = network
            .machine
            .pod_with("selected", "refused", |pod| {
                waits(pod).is_some_and(|(reason, _)| reason == "NetworkPolicyNotEnforced")
            })
            .await;
        let (_, message) = waits(&pod).unwrap();
        assert!(message.contains("t/p0"), "{message}");
        network.finish().await;
    });
}

/// Knows `example.com` and what is below it, as the machine's own resolver does.
fn fake_upstream(address: &'static str) -> std::sync::Arc<std::sync::Mutex<Vec<String>>> {
    let asked = std::sync::Arc::<std::sync::Mutex<Vec<String>>>::default();
    let socket = UdpSocket::bind((address, 53)).unwrap();
    let seen = asked.clone();
    std::thread::spawn(move || {
        let mut buffer = [0; 2048];
        while let Ok((count, from)) = socket.recv_from(&mut buffer) {
            let question = &buffer[..count];
            let name: String = question[12..]
                .iter()
                .take_while(|byte| **byte != 0)
                .map(|byte| char::from(*byte))
                .collect();
            let end = 12 + question[12..].iter().position(|byte| *byte == 0).unwrap() + 5;
            let is_known = name.ends_with("example\u{3}com");
            let has_answer = is_known && question[end - 3] == 1;
            let code = if is_known { 0x80 } else { 0x83 };
            let mut answer = question[..end].to_vec();
            answer[2..12].copy_from_slice(&[0x81, code, 0, 1, 0, u8::from(has_answer), 0, 0, 0, 0]);
            if has_answer {
                answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 203, 0, 113, 1]);
            }
            seen.lock().unwrap().push(name);
            let _ = socket.send_to(&answer, from);
        }
    });
    asked
}

#[test]
fn pods_with_cluster_dns_find_services_and_the_rest_of_the_world() {
    on_own_network(|| async {
        let internet = Internet::beside_machine().await;
        let asked = fake_upstream("127.0.0.1");
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("resolv.conf");
        std::fs::write(&file, "nameserver 127.0.0.1\nsearch lan.example\n").unwrap();
        let machine = Machine::start_with(|config| config.resolver_file.clone_from(&file)).await;
        let stop = tokio_util::sync::CancellationToken::new();
        tokio::spawn(agent_sandbox_node::endpoints::run(
            machine.client.clone(),
            stop.clone(),
        ));
        let service = json!({"metadata": {"name": "sandbox"}, "spec": {"clusterIP": "None", "selector": {"app": "sandbox"},
            "ports": [{"name": "http", "port": 8080}]}});
        let services =
            Api::<k8s_openapi::api::core::v1::Service>::namespaced(machine.client.clone(), "t");
        services
            .create(
                &PostParams::default(),
                &serde_json::from_value(service).unwrap(),
            )
            .await
            .unwrap();
        let network = Network { machine, internet };
        let namespace = json!({"metadata": {"name": "other"}});
        Api::<Namespace>::all(network.machine.client.clone())
            .create(
                &PostParams::default(),
                &serde_json::from_value(namespace).unwrap(),
            )
            .await
            .unwrap();
        let (sandbox, client) = tokio::join!(
            network.server("t", "sandbox"),
            network.server("t", "client")
        );
        let (_, file, _) = network
            .machine
            .exec(&client, &["cat", "/etc/resolv.conf"])
            .await;
        let gateway = network.machine.runtime().node_address();
        let expected = format!(
            "nameserver {gateway}\nsearch t.svc.cluster.local svc.cluster.local cluster.local lan.example\noptions ndots:5\n"
        );
        assert_eq!(file, expected);
        let looks_up = |name: &'static str| {
            let (machine, client) = (&network.machine, &client);
            async move {
                let code = format!(
                    "import socket\ntry: print(sorted({{a[4][0] for a in socket.getaddrinfo('{name}', 80, socket.AF_INET)}})[0])\nexcept OSError: print('unknown')"
                );
                machine
                    .exec(client, &["python3", "-c", &code])
                    .await
                    .1
                    .trim()
                    .to_owned()
            }
        };
        let address = addresses(&sandbox)[0].to_string();
        for name in [
            "sandbox",
            "sandbox.t",
            "sandbox.t.svc",
            "sandbox.t.svc.cluster.local",
            "sandbox.t.svc.cluster.local.",
        ] {
            eventually(&format!("{name} to resolve"), || async {
                (looks_up(name).await == address).then_some(())
            })
            .await;
        }
        assert_eq!(looks_up("nobody.t.svc.cluster.local").await, "unknown");
        assert_eq!(looks_up("www.example.com").await, "203.0.113.1");
        let asked = asked.lock().unwrap().clone();
        assert!(
            !asked.iter().any(|name| name.ends_with("cluster\u{5}local")),
            "the cluster's names stay inside: {asked:?}"
        );
        // Under the secure default the resolver is out of reach, as page 13 wants it.
        network.policies(&[("t", secure_default())]).await;
        eventually("the resolver to be out of reach", || async {
            (looks_up("www.example.com").await == "unknown").then_some(())
        })
        .await;
        stop.cancel();
        network.finish().await;
    });
}
