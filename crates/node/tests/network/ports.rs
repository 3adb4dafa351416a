//! Policies that name ports and protocols.

use serde_json::json;
use testkit::eventually;

use crate::fixture::{Network, addresses, egress_of, ingress_of, open_egress, to};
use crate::support::internet::on_own_network;

#[test]
fn policies_decide_which_ports_of_a_pod_are_reached() {
    on_own_network(|| async {
        let network = Network::start().await;
        let (a, b) = network.pair().await;
        let cases = [
            (
                "a port by its number",
                json!([{"ports": [{"port": 8081}]}]),
                [false, true, false],
            ),
            (
                "ports by their names",
                json!([{"ports": [{"port": "web"}, {"port": "names", "protocol": "UDP"}]}]),
                [true, false, true],
            ),
            (
                "a range of ports",
                json!([{"ports": [{"port": 8000, "endPort": 8080}]}]),
                [true, false, false],
            ),
            (
                "a whole protocol",
                json!([{"ports": [{"protocol": "UDP"}]}]),
                [false, false, true],
            ),
        ];
        for (case, rules, passes) in cases {
            network
                .policies(&[("t", open_egress()), ("t", ingress_of("b", &rules))])
                .await;
            let ports = ["tcp/8080", "tcp/8081", "udp/5353"].into_iter().zip(passes);
            let expected: Vec<_> = ports
                .flat_map(|(port, passes)| to(&a, &b, port, passes))
                .collect();
            network.expect(case, &expected).await;
        }
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
        let (a, b) = network.pair().await;
        let heard = || {
            let output = std::process::Command::new("python3")
                .args(["-c", ASSOCIATE])
                .args([&a, &b].map(|pod| addresses(pod)[0].to_string()))
                .args([&a, &b].map(|pod| network.pin(pod)))
                .output()
                .unwrap();
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{errors}");
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        };
        for (ports, expected) in [
            (json!([{"protocol": "SCTP"}]), "[9, 10]"),
            (json!([{"protocol": "SCTP", "port": 9}]), "[9]"),
            (json!([{"protocol": "TCP"}, {"protocol": "UDP"}]), "[]"),
        ] {
            network
                .policies(&[
                    ("t", egress_of("a", &json!([{}]))),
                    ("t", ingress_of("b", &json!([{"ports": ports}]))),
                ])
                .await;
            eventually(&format!("{expected} to be heard"), || async {
                (heard() == expected).then_some(())
            })
            .await;
        }
        network.finish().await;
    });
}
