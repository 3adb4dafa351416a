//! A machine on which nothing can judge traffic.

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use crate::fixture::{Network, to, to_each};
use crate::support::internet::{PUBLIC, on_own_network};

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
        let (a, b) = network.pair().await;
        let mut expected = to(&a, &b, "tcp/8080", false);
        expected.extend(to_each(&a, PUBLIC, "tcp/80", false));
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
