//! Pods, as their users see them: through the API, from creation to the end.

mod support;

use serde_json::json;
use support::Machine;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

fn sandboxd() -> serde_json::Value {
    json!({"containers": [{"name": "c", "image": "host", "ports": [{"containerPort": 8888}],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1}}]})
}

async fn http_get(address: &str, path: &str) -> String {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_the_host_image_serves_the_sandbox_api_and_goes_without_a_trace() {
    let machine = Machine::start().await;
    machine.create("p", sandboxd()).await;
    let pod = machine.ready("p").await;
    let status = pod.status.clone().unwrap();
    assert_eq!(status.phase.as_deref(), Some("Running"));
    let container = &status.container_statuses.as_ref().unwrap()[0];
    assert!(container.ready && container.started == Some(true));
    assert!(container.state.as_ref().unwrap().running.is_some());
    assert_eq!(container.restart_count, 0);
    assert!(
        container
            .container_id
            .as_ref()
            .unwrap()
            .starts_with("agent-sandbox://")
    );
    let address = format!("{}:8888", status.pod_ip.unwrap());
    let answer = http_get(&address, "/").await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (code, out, err) = machine.exec(&pod, &["python3", "-c", "print(6 * 7)"]).await;
    assert_eq!((code, out.as_str()), (0, "42\n"), "{err}");
    machine.delete("p").await;
    machine.finish().await;
}
