//! Policies that name pods, namespaces and blocks of addresses.

use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use crate::fixture::{
    Network, addresses, egress_of, ingress_of, open_egress, open_ingress, to, to_each,
};
use crate::support::internet::{PUBLIC, on_own_network};

#[test]
fn policies_decide_which_pods_reach_a_pod() {
    on_own_network(|| async {
        let network = Network::start().await;
        let ((a, b), c) = tokio::join!(network.pair(), network.server("other", "c"));
        let same = json!([{"from": [{"podSelector": {"matchLabels": {"app": "a"}}}]}]);
        let namespaces = json!([{"from": [{"namespaceSelector": {"matchLabels": {"team": "x"}}}]}]);
        let both = json!([{"from": [{"namespaceSelector": {"matchLabels": {"team": "x"}}, "podSelector": {"matchLabels": {"app": "d"}}}]}]);
        // Whether a and c reach b.
        let cases = [
            ("nothing is allowed", json!([]), false, false),
            ("everything is allowed", json!([{}]), true, true),
            ("pods of the namespace", same, true, false),
            ("pods of other namespaces", namespaces, false, true),
            (
                "pods of other namespaces with a label that no pod has",
                both,
                false,
                false,
            ),
        ];
        for (case, rules, from_a, from_c) in cases {
            network
                .policies(&[
                    ("t", open_egress()),
                    ("other", open_egress()),
                    ("t", ingress_of("b", &rules)),
                ])
                .await;
            let mut expected = Vec::new();
            for what in ["tcp/8080", "udp/5353"] {
                expected.extend(to(&a, &b, what, from_a));
                expected.extend(to(&c, &b, what, from_c));
            }
            network.expect(case, &expected).await;
        }

        let [a4, a6] = [0, 1].map(|family| addresses(&a)[family]);
        let blocks = json!([{"from": [{"ipBlock": {"cidr": format!("{a4}/32")}},
            {"ipBlock": {"cidr": "::/0", "except": [format!("{a6}/128")]}}]}]);
        network
            .policies(&[
                ("t", open_egress()),
                ("other", open_egress()),
                ("t", ingress_of("b", &blocks)),
            ])
            .await;
        let [b4, b6] = [0, 1].map(|family| addresses(&b)[family]);
        let expected = [
            (&a, format!("tcp {b4} 8080"), true),
            (&a, format!("tcp {b6} 8080"), false),
            (&c, format!("tcp {b4} 8080"), false),
            (&c, format!("tcp {b6} 8080"), true),
        ];
        network.expect("blocks of addresses", &expected).await;
        network.finish().await;
    });
}

#[test]
fn policies_decide_whom_a_pod_reaches() {
    on_own_network(|| async {
        let network = Network::start().await;
        let ((a, b), c) = tokio::join!(network.pair(), network.server("other", "c"));
        // Whether a reaches b, c and the internet.
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
        let allow = async |rules: Value| {
            network
                .policies(&[
                    ("t", open_ingress()),
                    ("other", open_ingress()),
                    ("t", egress_of("a", &rules)),
                ])
                .await;
        };
        for (case, rules, same, other, outside) in cases {
            allow(rules).await;
            let mut expected = to(&a, &b, "tcp/8080", same);
            expected.extend(to(&a, &c, "tcp/8080", other));
            expected.extend(to_each(&a, PUBLIC, "tcp/80", outside));
            network.expect(case, &expected).await;
        }
        // Added and removed labels take effect.
        allow(json!([{"to": [{"podSelector": {"matchLabels": {"open": "yes"}}}]}])).await;
        for (case, label, passes) in [
            ("before the label", None, false),
            ("with the label", Some(json!("yes")), true),
            ("without the label", Some(Value::Null), false),
        ] {
            if let Some(label) = label {
                let patch = Patch::Merge(json!({"metadata": {"labels": {"open": label}}}));
                let (pods, parameters) = (network.pods("t"), PatchParams::default());
                pods.patch("b", &parameters, &patch).await.unwrap();
            }
            network.expect(case, &to(&a, &b, "tcp/8080", passes)).await;
        }
        network.finish().await;
    });
}
