//! The defaults: without any policy, and with the policy that a template gets if it specifies none.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fixture::{Network, addresses, egress_of, open, to, to_each};
use crate::support::internet::{PRIVATE, PUBLIC, on_own_network};

/// The policy of a template that specifies none.
pub fn secure_default() -> Value {
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
        // The router has no egress policy.
        let egress = egress_of("sandbox-router", &json!([{}]));
        network
            .policies(&[("t", secure_default()), ("t", egress)])
            .await;
        let mut expected = to(&router, &sandbox, "tcp/8080", true);
        expected.extend(to(&neighbour, &sandbox, "tcp/8080", false));
        expected.extend(to(&sandbox, &neighbour, "tcp/8080", false));
        expected.extend(to_each(&sandbox, PUBLIC, "tcp/80", true));
        // The others answer datagrams from another of their addresses than the one asked.
        expected.extend(to_each(&sandbox, [PUBLIC[0], PUBLIC[2]], "udp/80", true));
        // Carrier-grade NAT is not among what is excepted; private, link-local and metadata addresses are.
        let private = PRIVATE.into_iter();
        let private: Vec<_> = private.filter(|one| !one.starts_with("100.")).collect();
        for protocol in ["tcp", "udp"] {
            expected.extend(to_each(
                &sandbox,
                &private,
                &format!("{protocol}/80"),
                false,
            ));
            // The cluster's own resolver, too.
            let resolver = network.node_addresses();
            expected.extend(to_each(
                &sandbox,
                resolver,
                &format!("{protocol}/53"),
                false,
            ));
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
fn unselected_pods_are_isolated_and_cannot_reach_the_machine() {
    on_own_network(|| async {
        let network = Network::start().await;
        let (a, b) = tokio::join!(network.server("t", "a"), network.server("other", "b"));
        let machine_service = std::net::TcpListener::bind("[::]:7777").unwrap();
        let mut expected = to(&a, &b, "tcp/8080", false);
        expected.extend(to_each(&a, PUBLIC, "tcp/80", true));
        expected.extend(to_each(&a, PRIVATE, "tcp/80", false));
        let own = network.node_addresses().into_iter();
        let own: Vec<String> = own
            .map(|address| address.to_string())
            .chain(["203.0.113.254".to_owned(), "2001:db8::fe".to_owned()])
            .collect();
        expected.extend(to_each(&a, &own, "tcp/7777", false));
        network.expect("no policy selects it", &expected).await;
        // Even a policy that allows everything does not open the machine itself.
        network.policies(&[("t", open()), ("other", open())]).await;
        let mut expected = to(&a, &b, "tcp/8080", true);
        expected.extend(to_each(&a, &own, "tcp/7777", false));
        network.expect("everything is allowed", &expected).await;
        drop(machine_service);
        network.finish().await;
    });
}

#[test]
fn unselected_pods_can_be_allowed_all_traffic_as_in_kubernetes() {
    on_own_network(|| async {
        let network = Network::start_with(|config| {
            config.unselected_pods = pod_network::policy::Unselected::Open;
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
