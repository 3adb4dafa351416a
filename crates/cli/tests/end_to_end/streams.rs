//! Logs, exec, attach and port-forward through the API server to the node, as a client in Rust uses them, and who is let in.
//! Needs root: it starts containers.

use std::path::Path;
use std::time::Duration;

use crate::support::{Up, get};
use futures::AsyncBufReadExt;
use http::Request;
use k8s_openapi::api::core::v1::{Node, PersistentVolumeClaim, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::storage::v1::StorageClass;
use kube::api::{AttachParams, LogParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::runtime::wait::{await_condition, conditions};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Config, ResourceExt};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub const DEADLINE: Duration = Duration::from_secs(120);

async fn config(up: &Up) -> Config {
    let path = up.ready()["kubeconfig"].as_str().expect("a path");
    let kubeconfig = Kubeconfig::read_from(Path::new(path)).expect("a kubeconfig");
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .expect("a kubeconfig that can be used")
}

pub async fn client(up: &Up) -> Client {
    Client::try_from(config(up).await).expect("a client")
}

pub async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, Box::pin(work))
        .await
        .expect("it happens in time")
}

/// A pod that says what it hears, and serves HTTP on its own loopback.
async fn talker(client: &Client) -> Api<Pod> {
    let script = "python3 -m http.server --bind 127.0.0.1 8000 >/dev/null 2>&1 & \
                  until bash -c ': </dev/tcp/127.0.0.1/8000' 2>/dev/null; do sleep 0.05; done; echo ready; \
                  while read line; do echo heard $line; done";
    let pod = json!({
        "metadata": {"name": "talker"},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "main", "image": "host", "command": ["sh", "-c", script], "stdin": true}],
        },
    });
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let pod = serde_json::from_value(pod).expect("a pod");
    pods.create(&PostParams::default(), &pod)
        .await
        .expect("the pod is made");
    let running = await_condition(pods.clone(), "talker", conditions::is_pod_running());
    Box::pin(within(running)).await.expect("the pod runs");
    pods
}

#[tokio::test]
async fn a_containers_streams_are_reached_through_the_api() {
    let up = Up::start(&["--no-quickstart"]);
    let client = client(&up).await;
    let pods = Box::pin(talker(&client)).await;

    let parameters = AttachParams::default()
        .stdin(true)
        .stdout(true)
        .stderr(true);
    let script = ["sh", "-c", "cat; echo err >&2; exit 3"];
    let mut exec = pods.exec("talker", script, &parameters).await.unwrap();
    let mut stdin = exec.stdin().unwrap();
    stdin.write_all(b"from outside").await.unwrap();
    stdin.shutdown().await.unwrap();
    drop(stdin);
    let (mut out, mut err) = (String::new(), String::new());
    let mut stdout = exec.stdout().unwrap();
    within(stdout.read_to_string(&mut out)).await.unwrap();
    let mut stderr = exec.stderr().unwrap();
    within(stderr.read_to_string(&mut err)).await.unwrap();
    let status = within(exec.take_status().unwrap()).await.unwrap();
    assert_eq!((out.as_str(), err.as_str()), ("from outside", "err\n"));
    let causes = status.details.unwrap().causes;
    assert_eq!(causes.unwrap()[0].message.as_deref(), Some("3"));

    let following = LogParams {
        follow: true,
        ..LogParams::default()
    };
    let mut lines = pods.log_stream("talker", &following).await.unwrap().lines();
    let mut attached = pods
        .attach("talker", &AttachParams::default().stdin(true))
        .await
        .unwrap();
    let mut stdin = attached.stdin().unwrap();
    stdin.write_all(b"you\n").await.unwrap();
    let mut heard = Vec::new();
    while heard.last().is_none_or(|line| line != "heard you") {
        let line = within(futures::StreamExt::next(&mut lines)).await;
        heard.push(line.unwrap().unwrap());
    }
    assert_eq!(heard, ["ready", "heard you"]);

    let mut forwarding = pods.portforward("talker", &[8000]).await.unwrap();
    let mut stream = forwarding.take_stream(8000).unwrap();
    stream.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    within(stream.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.contains("200 OK"), "{answer}");
    within(pods.delete("talker", &kube::api::DeleteParams::default()))
        .await
        .unwrap();
}

/// What the API says against a stream of a pod, where it does not switch protocols.
async fn refusal(client: &Client, path: &str) -> kube::core::Status {
    let request = Request::get(format!("/api/v1/namespaces/default/pods/{path}"))
        .header("Connection", "Upgrade")
        .header("Upgrade", "websocket")
        .header("Sec-WebSocket-Version", "13")
        .header("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==")
        .header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        .body(Vec::new())
        .unwrap();
    match within(client.request_text(request)).await {
        Err(kube::Error::Api(status)) => *status,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn streams_of_what_does_not_run_are_refused_with_the_reason() {
    let up = Up::start(&["--no-quickstart"]);
    let client = client(&up).await;
    // The router has a pod to be found by, and runs in the process of `up`.
    for stream in ["log", "exec?command=true&stdout=1", "attach?stdout=1"] {
        let status = refusal(&client, &format!("sandbox-router/{stream}")).await;
        let reason = "runs inside the agent-sandbox process";
        assert!(status.message.contains(reason), "{stream}: {status:?}");
        assert!(
            status
                .message
                .contains("its log is that process's standard error"),
            "{stream}: {status:?}"
        );
        assert_eq!(status.code, 400, "{stream}");
    }

    let pods = Api::<Pod>::default_namespaced(client.clone());
    let pod = json!({"metadata": {"name": "brief"}, "spec": {"restartPolicy": "Never",
        "containers": [{"name": "main", "image": "host", "command": ["true"]}]}});
    let pod = serde_json::from_value(pod).unwrap();
    pods.create(&PostParams::default(), &pod).await.unwrap();
    let has_ended = |pod: Option<&Pod>| {
        let status = pod.and_then(|pod| pod.status.as_ref());
        status.is_some_and(|status| status.phase.as_deref() == Some("Succeeded"))
    };
    let ended = await_condition(pods.clone(), "brief", has_ended);
    within(ended).await.unwrap();
    for stream in ["attach?stdout=1", "exec?command=true&stdout=1"] {
        let status = refusal(&client, &format!("brief/{stream}")).await;
        let expected = "container not found (\"main\"): it has ended";
        assert_eq!((status.code, status.message.as_str()), (404, expected));
    }
}

#[tokio::test]
async fn a_claim_without_a_class_gets_the_default_one_and_a_volume() {
    let up = Up::start(&["--no-quickstart"]);
    let client = client(&up).await;
    let classes = Api::<StorageClass>::all(client.clone());
    let class = classes.get("standard").await.unwrap();
    let mark = class
        .annotations()
        .get("storageclass.kubernetes.io/is-default-class");
    assert_eq!(mark.map(String::as_str), Some("true"));
    let claims = Api::<PersistentVolumeClaim>::default_namespaced(client.clone());
    let claim = json!({"metadata": {"name": "data"}, "spec": {"accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Gi"}}}});
    let claim = serde_json::from_value(claim).unwrap();
    claims.create(&PostParams::default(), &claim).await.unwrap();
    let is_bound = |claim: Option<&PersistentVolumeClaim>| {
        let status = claim.and_then(|claim| claim.status.as_ref());
        status.is_some_and(|status| status.phase.as_deref() == Some("Bound"))
    };
    let bound = await_condition(claims.clone(), "data", is_bound);
    let claim = within(bound).await.unwrap().unwrap();
    let class = claim.spec.unwrap().storage_class_name;
    assert_eq!(class.as_deref(), Some("standard"));
    let now = kube::api::DeleteParams::default();
    claims.delete("data", &now).await.unwrap();
}

/// The first endpoint of the router's service, once there is one.
async fn endpoint(client: &Client, namespace: &str) -> String {
    let slices: Api<EndpointSlice> = Api::namespaced(client.clone(), namespace);
    let of_the_router =
        watcher::Config::default().labels("kubernetes.io/service-name=sandbox-router-svc");
    let mut slices = std::pin::pin!(watcher(slices, of_the_router).applied_objects());
    while let Some(slice) = futures::StreamExt::next(&mut slices).await {
        let slice = slice.unwrap();
        let port = slice.ports.iter().flatten().find_map(|port| port.port);
        let address = slice
            .endpoints
            .iter()
            .flat_map(|found| &found.addresses)
            .next();
        if let (Some(address), Some(port)) = (address, port) {
            return format!("{address}:{port}");
        }
    }
    panic!("the watch of endpoints ended")
}

#[tokio::test]
async fn the_router_is_behind_its_service_after_a_restart_on_another_port() {
    let mut up = Up::start(&["--no-quickstart"]);
    for _ in 0..2 {
        let client = client(&up).await;
        for namespace in ["default", api::SYSTEM_NAMESPACE] {
            let services: Api<Service> = Api::namespaced(client.clone(), namespace);
            let service = services.get("sandbox-router-svc").await.unwrap();
            let selector = service.spec.unwrap().selector.unwrap();
            let selector: Vec<String> = selector
                .iter()
                .map(|(key, value)| format!("{key}={value}"))
                .collect();
            let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
            let behind = kube::api::ListParams::default().labels(&selector.join(","));
            let pod = pods.list(&behind).await.unwrap().items.remove(0).name_any();
            let mut forwarding = pods.portforward(&pod, &[8080]).await.unwrap();
            let mut stream = forwarding.take_stream(8080).unwrap();
            stream
                .write_all(b"GET /healthz HTTP/1.0\r\n\r\n")
                .await
                .unwrap();
            let mut answer = String::new();
            within(stream.read_to_string(&mut answer)).await.unwrap();
            assert!(answer.contains("200 OK"), "{namespace}: {answer}");
            let endpoint = within(endpoint(&client, namespace)).await;
            let answer = tokio::task::spawn_blocking(move || get(&endpoint, "/healthz"));
            let answer = within(answer).await.unwrap();
            assert!(answer.contains("200 OK"), "{namespace}: {answer}");
        }
        up.restart(rustix::process::Signal::TERM);
    }
}

#[tokio::test]
async fn the_nodes_port_is_open_only_to_those_the_api_server_vouches_for() {
    let up = Up::start(&["--no-quickstart"]);
    let admin = config(&up).await;
    let nodes: Api<Node> = Api::all(Client::try_from(admin.clone()).unwrap());
    let node = nodes.get("agent-sandbox").await.unwrap();
    let status = node.status.unwrap();
    let endpoints = status.daemon_endpoints.unwrap().kubelet_endpoint.unwrap();
    let address = status.addresses.unwrap().remove(0).address;
    assert_eq!(address, "127.0.0.1");

    let ask = async |token: Option<&str>| {
        let mut config = admin.clone();
        config.cluster_url = format!("https://{address}:{}", endpoints.port)
            .parse()
            .unwrap();
        config.auth_info = kube::config::AuthInfo {
            token: token.map(|token| token.to_owned().into()),
            ..kube::config::AuthInfo::default()
        };
        let request = Request::get("/pods").body(Vec::new()).unwrap();
        let client = Client::try_from(config).unwrap();
        let answer = client.send(request.map(Into::into)).await.unwrap();
        answer.status().as_u16()
    };
    assert_eq!(ask(None).await, 401);
    assert_eq!(ask(Some("a-guess")).await, 401);

    let path = up.ready()["kubeconfig"].as_str().unwrap();
    let kubeconfig = Kubeconfig::read_from(Path::new(path)).unwrap();
    let admins = kubeconfig.auth_infos[0].auth_info.clone().unwrap();
    let token = serde_json::to_value(admins).unwrap()["token"].clone();
    assert_eq!(ask(token.as_str()).await, 200);

    let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> =
        Api::default_namespaced(Client::try_from(admin.clone()).unwrap());
    let request = serde_json::from_value(json!({"spec": {"audiences": []}})).unwrap();
    let issued = accounts
        .create_token_request("default", &PostParams::default(), &request)
        .await
        .unwrap();
    assert_eq!(ask(Some(&issued.status.unwrap().token)).await, 403);
}
