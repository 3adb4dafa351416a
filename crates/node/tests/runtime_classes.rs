//! Runtime classes: pods of other runtimes live as those of the node's own do, and a class that cannot be had is said.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot go on says so by panicking"
)]

mod support;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use support::{Machine, eventually};

async fn class(machine: &Machine, name: &str, handler: &str) {
    let class = json!({"metadata": {"name": name}, "handler": handler});
    let class: RuntimeClass = serde_json::from_value(class).unwrap();
    let classes = Api::<RuntimeClass>::all(machine.client.clone());
    classes
        .create(&PostParams::default(), &class)
        .await
        .unwrap();
}

fn pod(class: &str, script: &str) -> Value {
    json!({"runtimeClassName": class, "restartPolicy": "Never", "containers": [
        {"name": "c", "image": "host", "command": ["sh", "-c", script], "env": [{"name": "A", "value": "b"}]}]})
}

fn condition(pod: &Pod, kind: &str) -> (String, String) {
    let conditions = pod
        .status
        .as_ref()
        .and_then(|status| status.conditions.clone());
    conditions
        .unwrap_or_default()
        .into_iter()
        .find(|condition| condition.type_ == kind)
        .map_or_else(Default::default, |condition| {
            (
                condition.reason.unwrap_or_default(),
                condition.message.unwrap_or_default(),
            )
        })
}

/// What the node says of a handler, once it has tried it.
async fn finding(machine: &Machine, handler: &str) -> Value {
    let nodes = Api::<Node>::all(machine.client.clone());
    eventually("the handlers to be reported", || async {
        let node = nodes.get("test-node").await.unwrap();
        let text = node
            .annotations()
            .get("node.agents.x-k8s.io/runtime-handlers")?
            .clone();
        let all: Vec<Value> = serde_json::from_str(&text).unwrap();
        all.into_iter()
            .find(|finding| finding["handler"] == handler)
    })
    .await
}

/// The lifecycle and exec of pods, under one handler.
async fn lives_like_any_other(handler: &str) {
    let machine = Machine::start().await;
    let found = finding(&machine, handler).await;
    assert_eq!(
        found["works"], true,
        "{handler} does not work here: {found}"
    );
    class(&machine, "other", handler).await;
    let script = "trap 'exit 0' TERM; echo started; while true; do sleep 0.1; done";
    machine.create("p", pod("other", script)).await;
    let running = machine.ready("p").await;
    let (code, out, err) = machine
        .exec(&running, &["sh", "-c", "echo $A; hostname; id -u; exit 3"])
        .await;
    assert_eq!((code, out.as_str()), (3, "b\np\n0\n"), "{err}");
    machine.delete("p").await;

    machine
        .create("ends", pod("other", "echo words; exit 7"))
        .await;
    let ended = machine.phase("ends", "Failed").await;
    let status = ended
        .status
        .as_ref()
        .unwrap()
        .container_statuses
        .as_ref()
        .unwrap()[0]
        .clone();
    assert_eq!(status.state.unwrap().terminated.unwrap().exit_code, 7);
    let log = machine
        .runtime()
        .log_path(&agent_sandbox_node::runtime::ContainerId {
            pod: ended.uid().unwrap(),
            container: "c".into(),
            attempt: 0,
        });
    let log = std::fs::read_to_string(log).unwrap();
    assert!(log.contains("words"), "{log}");

    // One that does not listen is killed.
    machine
        .create(
            "deaf",
            pod("other", "trap '' TERM; while true; do sleep 0.1; done"),
        )
        .await;
    machine.ready("deaf").await;
    machine.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_runc_lives_like_any_other() {
    lives_like_any_other("runc").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_class_that_cannot_be_had_is_a_condition_of_the_pod() {
    let machine = Machine::start().await;
    class(&machine, "strange", "kata").await;
    for (name, class, text) in [
        (
            "absent",
            "nothing",
            "runtime class \"nothing\" does not exist",
        ),
        (
            "strange",
            "strange",
            "has handler \"kata\", which this node does not know",
        ),
    ] {
        machine.create(name, pod(class, "true")).await;
        let kind = "PodReadyToStartContainers";
        let found = machine
            .pod_with(name, "refused", |pod| {
                condition(pod, kind).0 == "RuntimeClassUnavailable"
            })
            .await;
        assert!(
            condition(&found, kind).1.contains(text),
            "{:?}",
            condition(&found, kind)
        );
    }
    class(&machine, "own", "agent-sandbox").await;
    machine.create("own", pod("own", "exec sleep 1000")).await;
    machine.ready("own").await;
    machine.finish().await;
}
