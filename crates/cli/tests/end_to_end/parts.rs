//! `up` without some of its parts. Needs root: it starts containers.

use std::process::{Child, Command, Stdio};

use api::Sandbox;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{ListParams, PostParams};
use kube::runtime::wait::await_condition;
use serde_json::json;

use crate::outcomes::Shown;
use crate::streams::{client, within};
use crate::support::{Up, agent_sandbox, get, stderr_of};

/// Ends with the test.
struct Controller(Child);

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn another_controller_can_work_alone_on_the_api() {
    let up = Up::start(&["--controllers=none"]);
    assert_eq!(up.ready()["disabled"], json!(["controllers"]));
    assert_eq!(
        up.ready()["template"],
        json!(null),
        "nothing would start it"
    );
    let metrics = get(up.ready()["metrics"].as_str().unwrap(), "/metrics");
    assert!(!metrics.contains("agent_sandbox_build_info"), "{metrics}");
    let sandboxes = Api::<Sandbox>::default_namespaced(client(&up).await);
    let sandbox = serde_json::from_value(json!({
        "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "one"},
        "spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "host"}]}}},
    }));
    let parameters = PostParams::default();
    let created = sandboxes.create(&parameters, &sandbox.unwrap()).await;
    created.unwrap();
    let controller = Command::new(env!("CARGO_BIN_EXE_agent-sandbox"))
        .args(["controller", "--leader-elect=false"])
        .args(["--metrics-bind-address=127.0.0.1:0"])
        .args(["--health-probe-bind-address=127.0.0.1:0"])
        .env("KUBECONFIG", up.ready()["kubeconfig"].as_str().unwrap())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _controller = Controller(controller.unwrap());
    let ready = await_condition(sandboxes, "one", |sandbox: Option<&Sandbox>| {
        let status = sandbox.and_then(|sandbox| sandbox.status.as_ref());
        let mut conditions = status.into_iter().flat_map(|status| &status.conditions);
        conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
    });
    within(ready).await.unwrap();
}

#[tokio::test]
async fn an_api_server_alone_says_what_does_not_run() {
    let up = Shown::start_with(&["--disable=controllers,node,endpoints,router"]);
    let running = up.running();
    let disabled = [
        "controllers",
        "node",
        "scheduler",
        "volume-provisioner",
        "endpoints",
        "router",
    ];
    assert_eq!(running["disabled"], json!(disabled));
    assert_eq!(running["router"], json!(null));
    let api = running["apiServer"].as_str().unwrap();
    assert_eq!(up.greeting[0], format!("agent-sandbox is up: API {api}"));
    let text = format!("not running: {}", disabled.join(", "));
    assert_eq!(up.greeting[1], text);
    let kubeconfig = running["kubeconfig"].as_str().unwrap();
    let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig).unwrap();
    let options = kube::config::KubeConfigOptions::default();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options);
    let client = kube::Client::try_from(config.await.unwrap()).unwrap();
    let nodes = Api::<Node>::all(client).list(&ListParams::default()).await;
    assert!(nodes.unwrap().items.is_empty());
}

#[test]
fn a_part_that_does_not_exist_is_refused_with_the_list_of_parts() {
    let home = tempfile::tempdir().unwrap();
    let message = stderr_of(agent_sandbox(home.path()).args(["up", "--disable=kubelet"]));
    assert!(
        message.contains("possible values: controllers, node, scheduler"),
        "{message}"
    );
}
