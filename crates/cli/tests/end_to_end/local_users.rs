//! Other local users than the one who started `up`. The tests need root, to change to such a user.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use api::SandboxClaim;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::PostParams;
use kube::runtime::wait::{await_condition, conditions};
use kube::{Api, Client};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::streams::{client, within};
use crate::support::{Up, stdout_of};

/// A UID without an account.
const STRANGER: u32 = 54_322;
const ROOT: u32 = 0;

/// Sends bytes to an address as a user of this machine, and returns the response; empty if the connection fails.
pub fn send_as(user: u32, address: &str, bytes: &str) -> String {
    let script = "exec 3<>/dev/tcp/$HOST/$PORT && printf %s \"$BYTES\" >&3 && cat <&3";
    let output = shell_as(user, address, bytes, script).output();
    let output = output.expect("bash starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn shell_as(user: u32, address: &str, bytes: &str, script: &str) -> Command {
    let (host, port) = address.rsplit_once(':').expect("an address");
    let mut command = Command::new("timeout");
    command
        .args(["20", "bash", "-c", script])
        .env("HOST", host)
        .env("PORT", port)
        .env("BYTES", bytes)
        .current_dir("/")
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .uid(user)
        .gid(user);
    command
}

/// A command for the sandbox, with more header lines.
fn execute(sandbox: &str, command: &str, more: &str) -> String {
    let body = format!(r#"{{"command": "{command}"}}"#);
    format!(
        "POST /execute HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Sandbox-ID: {sandbox}\r\n\
         Content-Type: application/json\r\n{more}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// The sandbox of a claim, and its pod's address.
async fn sandbox_of(client: &Client, claim: &str) -> (String, String) {
    let claims: Api<SandboxClaim> = Api::default_namespaced(client.clone());
    let claim = within(claims.get(claim)).await.expect("the claim");
    let claim = serde_json::to_value(claim).expect("a claim is JSON");
    let sandbox = claim["status"]["sandbox"]["name"]
        .as_str()
        .expect("a sandbox");
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let pod = within(pods.get(sandbox)).await.expect("its pod");
    let address = pod
        .status
        .and_then(|status| status.pod_ip)
        .expect("an address");
    (sandbox.to_owned(), address)
}

/// Sends bytes to the router as an account with the permission to forward ports in a namespace, and returns the response.
async fn send_by_tunnel(client: &Client, namespace: &str, bytes: &str) -> String {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let mut forwarding = within(pods.portforward("sandbox-router", &[8080]))
        .await
        .expect("a tunnel");
    let mut stream = forwarding.take_stream(8080).expect("a stream");
    stream
        .write_all(bytes.as_bytes())
        .await
        .expect("it is sent");
    let mut answer = String::new();
    within(stream.read_to_string(&mut answer))
        .await
        .expect("an answer");
    answer
}

#[tokio::test]
async fn a_tunnel_of_one_namespace_reaches_no_sandbox_of_another() {
    let up = Up::start(&[]);
    stdout_of(up.command().args(["claim", "mine"]));
    let client = client(&up).await;
    let (sandbox, _) = sandbox_of(&client, "mine").await;
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let other = serde_json::from_value(json!({"metadata": {"name": "other"}}));
    within(namespaces.create(&PostParams::default(), &other.expect("a namespace")))
        .await
        .expect("it is created");
    // The router's service exists in every namespace with a claim, even a pending one.
    let claim = json!({"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim", "metadata": {"name": "theirs"}, "spec": {"sandboxTemplateRef": {"name": "absent"}}});
    let claims: Api<SandboxClaim> = Api::namespaced(client.clone(), "other");
    let claim = serde_json::from_value(claim).expect("a claim");
    within(claims.create(&PostParams::default(), &claim))
        .await
        .expect("it is created");
    let pods: Api<Pod> = Api::namespaced(client.clone(), "other");
    within(await_condition(
        pods,
        "sandbox-router",
        conditions::is_pod_running(),
    ))
    .await
    .expect("the router is announced");

    let asked = execute(&sandbox, "echo in", "X-Sandbox-Namespace: default\r\n");
    for namespace in ["default", api::SYSTEM_NAMESPACE] {
        let answer = send_by_tunnel(&client, namespace, &asked).await;
        assert!(
            answer.contains(r#""stdout":"in\n""#),
            "{namespace}: {answer}"
        );
    }
    let refused = send_by_tunnel(&client, "other", &asked).await;
    assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
}

#[tokio::test]
async fn another_user_of_the_machine_runs_nothing_in_a_sandbox_without_a_token() {
    let up = Up::start(&[]);
    stdout_of(up.command().args(["claim", "mine"]));
    let (sandbox, pod) = sandbox_of(&client(&up).await, "mine").await;
    let router = up.ready()["router"].as_str().unwrap();
    let router = router.trim_start_matches("http://");

    let asked = execute(&sandbox, "echo in", "");
    let refused = send_as(STRANGER, router, &asked);
    assert!(refused.starts_with("HTTP/1.1 401 "), "{refused}");
    assert!(refused.contains("agent-sandbox token"), "{refused}");
    let answer = send_as(ROOT, router, &asked);
    assert!(answer.contains(r#""stdout":"in\n""#), "{answer}");

    // Nor by the pod's own address, on any port.
    let direct = format!("{pod}:8888");
    assert_eq!(send_as(STRANGER, &direct, &asked), "");
    let answer = send_as(ROOT, &direct, &asked);
    assert!(answer.contains(r#""stdout":"in\n""#), "{answer}");

    // A socket that was closed meanwhile has no owner, which must not count as root.
    let mark = execute(&sandbox, "touch /tmp/broken-in", "");
    let script = "exec 3<>/dev/tcp/$HOST/$PORT && printf %s \"$BYTES\" >&3";
    for _ in 0..20 {
        shell_as(STRANGER, router, &mark, script)
            .status()
            .expect("bash starts");
    }
    let answer = send_as(ROOT, router, &execute(&sandbox, "ls /tmp", ""));
    assert!(!answer.contains("broken-in"), "{answer}");

    // A request that a proxy forwards comes from another user than the proxy's.
    let passed_on = execute(&sandbox, "echo in", "X-Forwarded-For: 192.0.2.1\r\n");
    let answer = send_as(ROOT, router, &passed_on);
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");

    let with = |token: &str| {
        let line = format!("Authorization: Bearer {}\r\n", token.trim());
        execute(&sandbox, "echo in", &line)
    };
    let scoped = stdout_of(up.command().args(["token", &sandbox]));
    let elsewhere = stdout_of(up.command().args(["token", "another"]));
    let kubeconfig = std::fs::read_to_string(up.home().join("kubeconfig")).unwrap();
    let administrator = kubeconfig.split_once("token").expect("a token").1;
    let administrator = administrator.trim_start_matches(['"', ':', ' ']);
    let administrator = administrator.split(['"', '\n']).next().unwrap_or_default();
    for (token, status) in [
        (scoped.as_str(), "200"),
        (administrator, "200"),
        (&elsewhere, "403"),
        ("no-token-of-ours", "401"),
    ] {
        let answer = send_as(STRANGER, router, &with(token));
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{token}: {answer}"
        );
    }
    let echo = ["exec", "mine", "--", "echo", "by the API"];
    assert_eq!(stdout_of(up.command().args(echo)), "by the API\n");
}
