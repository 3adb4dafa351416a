//! The endpoints with kube-rs as the client, over WebSocket and through a proxy.

use std::time::Duration;

use crate::support::Cluster;
use futures::{AsyncBufReadExt, SinkExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{Api, AttachParams, AttachedProcess, LogParams, TerminalSize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

const TIMEOUT: Duration = Duration::from_secs(120);

fn pods(cluster: &Cluster) -> Api<Pod> {
    let url = format!("http://{}", cluster.api).parse().unwrap();
    let client = kube::Client::try_from(kube::Config::new(url)).unwrap();
    Api::namespaced(client, "default")
}

fn exit_code(status: &Status) -> Option<String> {
    let causes = status.details.as_ref()?.causes.as_ref()?;
    let cause = causes
        .iter()
        .find(|cause| cause.reason.as_deref() == Some("ExitCode"))?;
    cause.message.clone()
}

async fn read_all(reader: Option<impl tokio::io::AsyncRead + Unpin>) -> String {
    let mut text = String::new();
    let reading = async { reader.expect("the stream").read_to_string(&mut text).await };
    timeout(TIMEOUT, reading)
        .await
        .expect("an end of the output")
        .unwrap();
    text
}

async fn status(process: &mut AttachedProcess) -> Status {
    let status = process.take_status().expect("a status");
    timeout(TIMEOUT, status)
        .await
        .expect("a status in time")
        .expect("a status")
}

fn output() -> AttachParams {
    AttachParams::default()
        .stdin(false)
        .stdout(true)
        .stderr(true)
}

#[tokio::test]
async fn a_command_gives_its_output_and_its_exit_code() {
    let cluster = Cluster::start().await;
    let command = ["sh", "-c", "echo out; echo err >&2; exit 3"];
    let mut process = pods(&cluster)
        .exec("web", command, &output())
        .await
        .unwrap();
    let (stdout, stderr) = (process.stdout(), process.stderr());
    let (stdout, stderr) = tokio::join!(read_all(stdout), read_all(stderr));
    assert_eq!((stdout.as_str(), stderr.as_str()), ("out\n", "err\n"));
}

#[tokio::test]
async fn the_exit_code_is_in_the_status() {
    let cluster = Cluster::start().await;
    let pods = pods(&cluster);
    for (script, success, code) in [
        ("exit 0", "Success", None),
        ("exit 42", "Failure", Some("42")),
    ] {
        let mut process = pods
            .exec("web", ["sh", "-c", script], &output())
            .await
            .unwrap();
        let status = status(&mut process).await;
        assert_eq!(status.status.as_deref(), Some(success));
        assert_eq!(exit_code(&status).as_deref(), code);
    }
}

#[tokio::test]
async fn a_command_that_does_not_exist_is_named_in_the_status() {
    let cluster = Cluster::start().await;
    let mut process = pods(&cluster)
        .exec("web", ["no-such-command"], &output())
        .await
        .unwrap();
    let status = status(&mut process).await;
    assert_eq!(status.reason.as_deref(), Some("InternalError"));
    assert!(status.message.unwrap().contains("no-such-command"));
}

#[tokio::test]
async fn megabytes_of_input_come_back_and_the_command_sees_the_end_of_input() {
    let cluster = Cluster::start().await;
    let params = AttachParams::default()
        .stdin(true)
        .stdout(true)
        .stderr(false);
    let mut process = pods(&cluster).exec("web", ["cat"], &params).await.unwrap();
    let sent: Vec<u8> = (0..5_000_000_u32)
        .map(|number| number.to_le_bytes()[0] ^ number.to_le_bytes()[1])
        .collect();
    let (mut stdin, mut stdout) = (process.stdin().unwrap(), process.stdout().unwrap());
    let mut received = vec![0; sent.len()];
    let sending = async {
        stdin.write_all(&sent).await.unwrap();
        stdin.shutdown().await.unwrap();
        drop(stdin);
    };
    let receiving = async {
        stdout.read_exact(&mut received).await.unwrap();
        stdout.read_to_end(&mut Vec::new()).await.unwrap()
    };
    let ((), rest) = timeout(TIMEOUT, async { tokio::join!(sending, receiving) })
        .await
        .expect("an echo");
    assert_eq!(rest, 0);
    assert!(received == sent);
    assert_eq!(
        status(&mut process).await.status.as_deref(),
        Some("Success")
    );
}

#[tokio::test]
async fn the_size_of_the_terminal_reaches_the_process() {
    let cluster = Cluster::start().await;
    let params = AttachParams::interactive_tty();
    let mut process = pods(&cluster)
        .exec("web", ["sizes"], &params)
        .await
        .unwrap();
    let mut sizes = process.terminal_size().unwrap();
    let mut stdout = tokio::io::BufReader::new(process.stdout().unwrap());
    for (width, height) in [(80, 24), (132, 50)] {
        sizes.send(TerminalSize { width, height }).await.unwrap();
        let mut line = String::new();
        let reading = tokio::io::AsyncBufReadExt::read_line(&mut stdout, &mut line);
        timeout(TIMEOUT, reading).await.expect("a line").unwrap();
        assert_eq!(line, format!("{width}x{height}\n"));
    }
}

#[tokio::test]
async fn a_background_process_does_not_keep_the_client_connected() {
    let cluster = Cluster::start().await;
    let command = ["sh", "-c", "sleep 600 & echo $!"];
    let mut process = pods(&cluster)
        .exec("web", command, &output())
        .await
        .unwrap();
    let background = read_all(process.stdout()).await;
    let killed = std::process::Command::new("kill")
        .arg(background.trim())
        .status()
        .unwrap();
    assert!(killed.success(), "{background:?} still runs");
}

#[tokio::test]
async fn a_command_ends_when_its_client_disconnects() {
    let cluster = Cluster::start().await;
    let process = pods(&cluster)
        .exec("web", ["sleep", "600"], &output())
        .await
        .unwrap();
    cluster.wait_for_commands(1).await;
    process.abort();
    drop(process);
    cluster.wait_for_commands(0).await;
}

#[tokio::test]
async fn attach_succeeds_when_the_container_exits_with_an_error() {
    let cluster = Cluster::start().await;
    let params = AttachParams::default()
        .stdin(true)
        .stdout(true)
        .stderr(false);
    let mut process = pods(&cluster).attach("web", &params).await.unwrap();
    let mut stdin = process.stdin().unwrap();
    stdin.write_all(b"hello\n").await.unwrap();
    stdin.shutdown().await.unwrap();
    drop(stdin);
    assert_eq!(read_all(process.stdout()).await, "attached\nheard hello\n");
    assert_eq!(
        status(&mut process).await.status.as_deref(),
        Some("Success")
    );
}

#[tokio::test]
async fn a_forwarded_port_carries_bytes_both_ways() {
    let cluster = Cluster::start().await;
    let mut forward = pods(&cluster)
        .portforward("web", &[cluster.echo_port])
        .await
        .unwrap();
    let mut stream = forward.take_stream(cluster.echo_port).unwrap();
    let sent = vec![7; 3_000_000];
    let mut received = vec![0; sent.len()];
    let (mut read, mut write) = tokio::io::split(&mut stream);
    let exchange = async { tokio::join!(write.write_all(&sent), read.read_exact(&mut received)) };
    let (written, read) = timeout(TIMEOUT, exchange).await.expect("an echo");
    written.unwrap();
    read.unwrap();
    assert!(received == sent);
    drop(stream);
    timeout(TIMEOUT, forward.join())
        .await
        .expect("an end")
        .unwrap();
}

#[tokio::test]
async fn a_port_without_a_listener_gives_an_error_for_that_port() {
    let cluster = Cluster::start().await;
    let mut forward = pods(&cluster).portforward("web", &[81]).await.unwrap();
    let error = forward.take_error(81).unwrap();
    let message = timeout(TIMEOUT, error)
        .await
        .expect("an error")
        .expect("a message");
    assert_eq!(
        message,
        "error forwarding port 81 to pod web: nothing listens on 81"
    );
}

#[tokio::test]
async fn logs_are_limited_and_followed() {
    let cluster = Cluster::start().await;
    let pods = pods(&cluster);
    let all = pods.logs("web", &LogParams::default()).await.unwrap();
    assert_eq!(all, "one\ntwo\n");
    let limited = LogParams {
        limit_bytes: Some(5),
        ..LogParams::default()
    };
    assert_eq!(pods.logs("web", &limited).await.unwrap(), "one\nt");
    let follow = LogParams {
        follow: true,
        tail_lines: Some(1),
        ..LogParams::default()
    };
    let mut lines = pods.log_stream("web", &follow).await.unwrap().lines();
    let next = |line: Option<String>| line.expect("a line");
    assert_eq!(
        next(timeout(TIMEOUT, lines.try_next()).await.unwrap().unwrap()),
        "two"
    );
    cluster.log.send_modify(|log| log.push("three".into()));
    assert_eq!(
        next(timeout(TIMEOUT, lines.try_next()).await.unwrap().unwrap()),
        "three"
    );
}

#[tokio::test]
async fn bad_requests_get_the_kubelets_status_codes() {
    let cluster = Cluster::start().await;
    for (path, token, status) in [
        ("/healthz", None, 401),
        ("/healthz", Some("wrong-token"), 403),
        ("/healthz", Some("kubelet-token"), 200),
        ("/pods", Some("kubelet-token"), 200),
        ("/exec/default/web/main?command=ls&output=1", None, 401),
        (
            "/exec/default/web/main?command=ls&output=1",
            Some("kubelet-token"),
            400,
        ),
        (
            "/exec/default/web/main?command=ls",
            Some("kubelet-token"),
            400,
        ),
        (
            "/exec/default/web/main?output=1",
            Some("kubelet-token"),
            400,
        ),
        (
            "/exec/default/other/main?command=ls&output=1",
            Some("kubelet-token"),
            404,
        ),
        (
            "/exec/default/web/uid/other?command=ls&output=1",
            Some("kubelet-token"),
            404,
        ),
        ("/portForward/default/other", Some("kubelet-token"), 404),
        (
            "/containerLogs/default/web/other",
            Some("kubelet-token"),
            404,
        ),
        (
            "/containerLogs/default/web/main?tailLines=-3",
            Some("kubelet-token"),
            400,
        ),
    ] {
        let authorization = token.map_or(String::new(), |token| {
            format!("Authorization: Bearer {token}\r\n")
        });
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: kubelet\r\nConnection: close\r\n{authorization}\r\n"
        );
        let mut stream = tokio::net::TcpStream::connect(cluster.kubelet)
            .await
            .unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{path} {token:?}: {answer}"
        );
    }
}
