//! A machine on which network policies cannot be enforced.

use k8s_openapi::api::core::v1::{Node, NodeCondition, Pod};
use kube::Api;
use kube::api::PostParams;
use kube::core::Status;
use kube::core::response::reason;
use serde_json::json;
use testkit::{Tap, eventually};

use crate::fixture::{Network, open, to, to_each};
use crate::support::internet::{PUBLIC, on_own_network};
use crate::support::is_ready;

/// The node's condition about network policies.
async fn enforced(network: &Network) -> NodeCondition {
    let nodes = Api::<Node>::all(network.machine.client.clone());
    let status = nodes.get("test-node").await.unwrap().status.unwrap();
    let conditions = status.conditions.unwrap();
    let mut conditions = conditions.into_iter();
    conditions
        .find(|condition| condition.type_ == "NetworkPolicyEnforced")
        .unwrap()
}

/// Creates a pod, and waits until its status has the reason why it does not run.
async fn refused(network: &Network, name: &str) -> String {
    let pod = json!({"metadata": {"name": name, "labels": {"app": name}},
        "spec": {"containers": [{"name": "c", "image": "host"}]}});
    let pod = serde_json::from_value(pod).unwrap();
    network
        .pods("t")
        .create(&PostParams::default(), &pod)
        .await
        .unwrap();
    let waits = |pod: &Pod| {
        let statuses = pod.status.as_ref()?.container_statuses.as_ref()?;
        let waiting = statuses[0].state.clone()?.waiting?;
        let is_refused = waiting.reason.as_deref() == Some("NetworkPolicyNotEnforced");
        waiting.message.filter(|_| is_refused)
    };
    let pod = network
        .machine
        .pod_with(name, "refused", |pod| waits(pod).is_some())
        .await;
    waits(&pod).unwrap()
}

#[test]
fn without_nftables_selected_pods_do_not_run_and_others_have_no_network() {
    on_own_network(|| async {
        let mut works = None;
        let mut network = Network::start_with(|config| {
            let nowhere = "/no/such/nft".into();
            works = Some(std::mem::replace(&mut config.firewall_program, nowhere));
        })
        .await;
        let enforced = enforced(&network).await;
        assert_eq!(enforced.status, "False");
        let message = enforced.message.unwrap();
        assert!(message.contains("running nft"), "{message}");
        let policy = json!({"podSelector": {"matchLabels": {"app": "selected"}}});
        network.policies(&[("t", policy)]).await;
        let (a, b) = network.pair().await;
        let mut expected = to(&a, &b, "tcp/8080", false);
        expected.extend(to_each(&a, PUBLIC, "tcp/80", false));
        network
            .expect("nothing judges its traffic", &expected)
            .await;
        let message = refused(&network, "selected").await;
        assert!(message.contains("t/p0"), "{message}");

        // Once nftables is installed, the existing pods have a network, too.
        network.machine.stop_node().await;
        network.machine.config.firewall_program = works.unwrap();
        network.machine.start_node().await;
        network.policies(&[("t", open())]).await;
        let mut expected = to(&a, &b, "tcp/8080", true);
        expected.extend(to_each(&a, PUBLIC, "tcp/80", true));
        network.expect("rules judge its traffic", &expected).await;
        network.finish().await;
    });
}

#[test]
fn a_node_without_access_to_policies_names_the_missing_role_and_runs_pods_once_it_has_it() {
    on_own_network(|| async {
        let mut network = Network::start().await;
        network.machine.stop_node().await;
        let (tap, client) = Tap::on(network.machine.client.clone());
        tap.answer(|seen| {
            let is_hidden = seen.path.ends_with("/networkpolicies");
            let status = || Status::failure("networkpolicies is forbidden", reason::FORBIDDEN);
            is_hidden.then(|| status().with_code(403))
        });
        network.machine.node_client = client;
        network.machine.start_node().await;
        eventually("the node to say so", || async {
            let enforced = enforced(&network).await;
            let message = enforced.message.unwrap_or_default();
            (enforced.status == "False" && message.contains("agent-sandbox-node")).then_some(())
        })
        .await;
        let message = refused(&network, "hidden").await;
        assert!(message.contains("agent-sandbox-node"), "{message}");
        tap.refuse_nothing();
        network.machine.pod_with("hidden", "Ready", is_ready).await;
        eventually("policies to be enforced", || async {
            (enforced(&network).await.status == "True").then_some(())
        })
        .await;
        network.finish().await;
    });
}
