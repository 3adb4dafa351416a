//! The endpoints with the real kubectl as the client, over WebSocket and over SPDY, through a proxy.
//!
//! Needs `kubectl` on the PATH, so it is built only with the feature `client-tests`.

use std::process::{Output, Stdio};
use std::time::Duration;

use crate::support::Cluster;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

const TIMEOUT: Duration = Duration::from_secs(120);

/// The transport that kubectl uses for exec, attach and cp, and for port-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Transport {
    WebSocket,
    Spdy,
}

const BOTH: [Transport; 2] = [Transport::WebSocket, Transport::Spdy];

struct Kubectl<'a> {
    cluster: &'a Cluster,
    transport: Transport,
    home: tempfile::TempDir,
}

impl<'a> Kubectl<'a> {
    fn new(cluster: &'a Cluster, transport: Transport) -> Self {
        let home = tempfile::tempdir().unwrap();
        Self {
            cluster,
            transport,
            home,
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let websockets = (self.transport == Transport::WebSocket).to_string();
        let mut command = Command::new("kubectl");
        command
            .arg(format!("--server=http://{}", self.cluster.api))
            .args(arguments)
            .env("HOME", self.home.path())
            .env("KUBECONFIG", self.home.path().join("none"))
            .env("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", &websockets)
            .env("KUBECTL_PORT_FORWARD_WEBSOCKETS", &websockets)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        command
    }

    async fn run(&self, arguments: &[&str]) -> Output {
        self.run_with_input(arguments, b"").await
    }

    async fn run_with_input(&self, arguments: &[&str], input: &[u8]) -> Output {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .spawn()
            .expect("kubectl on the PATH");
        let mut stdin = child.stdin.take().unwrap();
        let feeding = async {
            // A command that does not read its input makes kubectl exit before all of it is written.
            let _ = stdin.write_all(input).await;
            drop(stdin);
        };
        let (output, ()) = timeout(TIMEOUT, async {
            tokio::join!(child.wait_with_output(), feeding)
        })
        .await
        .unwrap_or_else(|_| panic!("{:?}: kubectl {arguments:?} hangs", self.transport));
        output.unwrap()
    }

    /// Runs kubectl, asserts that it succeeds and returns its standard output.
    async fn succeed(&self, arguments: &[&str], input: &[u8]) -> Vec<u8> {
        let output = self.run_with_input(arguments, input).await;
        assert!(
            output.status.success(),
            "{:?}: kubectl {arguments:?}: {}",
            self.transport,
            text(&output.stderr)
        );
        output.stdout
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test]
async fn a_client_without_credentials_is_asked_for_them() {
    let cluster = Cluster::start().await;
    let kubectl = Kubectl::new(&cluster, Transport::WebSocket);
    let server = format!("--server=http://{}", cluster.kubelet);
    let stranger = kubectl.run(&[&server, "get", "--raw", "/healthz"]).await;
    let errors = text(&stranger.stderr);
    assert!(errors.contains("provide credentials"), "{errors}");
}

#[tokio::test]
async fn exec_gives_output_and_exit_code() {
    let cluster = Cluster::start().await;
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let script = "echo out; echo err >&2; exit 7";
        let output = kubectl
            .run(&["exec", "web", "--", "sh", "-c", script])
            .await;
        assert_eq!(text(&output.stdout), "out\n", "{transport:?}: {output:?}");
        let errors = text(&output.stderr);
        assert!(errors.starts_with("err\n"), "{transport:?}: {errors}");
        assert!(
            errors.contains("command terminated with exit code 7"),
            "{transport:?}: {errors}"
        );
        assert_eq!(output.status.code(), Some(7), "{transport:?}");
        let success = kubectl.run(&["exec", "web", "--", "true"]).await;
        assert_eq!(
            (success.status.code(), text(&success.stderr)),
            (Some(0), String::new()),
            "{transport:?}"
        );
    }
}

#[tokio::test]
async fn exec_carries_megabytes_and_the_end_of_input() {
    let cluster = Cluster::start().await;
    let input: Vec<u8> = (0..8_000_000_u32)
        .map(|number| number.to_le_bytes()[1])
        .collect();
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let command = ["exec", "-i", "web", "--", "cat"];
        let output = kubectl.succeed(&command, &input).await;
        assert!(
            output == input,
            "{transport:?}: {} bytes came back",
            output.len()
        );
    }
}

#[tokio::test]
async fn exec_of_a_command_that_stops_reading_ends_well() {
    let cluster = Cluster::start().await;
    let input = vec![b'\n'; 4_000_000];
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let command = [
            "exec",
            "-i",
            "web",
            "--",
            "sh",
            "-c",
            "head -n 1 >/dev/null; echo done",
        ];
        let output = kubectl.succeed(&command, &input).await;
        assert_eq!(text(&output), "done\n", "{transport:?}");
    }
}

#[tokio::test]
async fn exec_reports_why_it_failed() {
    let cluster = Cluster::start().await;
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let missing = kubectl.run(&["exec", "web", "--", "no-such-command"]).await;
        let errors = text(&missing.stderr);
        assert!(
            errors.contains("error executing command in container"),
            "{transport:?}: {errors}"
        );
        assert!(
            errors.contains("no-such-command"),
            "{transport:?}: {errors}"
        );
        assert_eq!(missing.status.code(), Some(1), "{transport:?}");
        let container = kubectl
            .run(&["exec", "web", "-c", "side", "--", "true"])
            .await;
        let errors = text(&container.stderr);
        assert!(
            errors.contains("container not found (\"side\")"),
            "{transport:?}: {errors}"
        );
    }
}

#[tokio::test]
async fn attach_connects_to_the_container() {
    let cluster = Cluster::start().await;
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let output = kubectl.succeed(&["attach", "-i", "web"], b"hello\n").await;
        assert_eq!(text(&output), "attached\nheard hello\n", "{transport:?}");
    }
}

#[tokio::test]
async fn cp_copies_both_ways() {
    let cluster = Cluster::start().await;
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let files = tempfile::tempdir().unwrap();
        let path = |name: &str| files.path().join(name).display().to_string();
        let content: Vec<u8> = (0..2_000_000_u32)
            .map(|number| number.to_le_bytes()[2])
            .collect();
        std::fs::write(path("here"), &content).unwrap();
        let there = format!("web:{}", path("there"));
        kubectl.succeed(&["cp", &path("here"), &there], b"").await;
        kubectl.succeed(&["cp", &there, &path("back")], b"").await;
        assert!(
            std::fs::read(path("back")).unwrap() == content,
            "{transport:?}"
        );
    }
}

#[tokio::test]
async fn logs_are_followed_to_the_end_of_the_container() {
    let mut cluster = Cluster::start().await;
    let kubectl = Kubectl::new(&cluster, Transport::WebSocket);
    let mut child = kubectl
        .command(&["logs", "-f", "--tail=1", "web"])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(
        timeout(TIMEOUT, lines.next_line())
            .await
            .unwrap()
            .unwrap()
            .unwrap(),
        "two"
    );
    cluster.log.send_modify(|log| log.push("three".into()));
    assert_eq!(
        timeout(TIMEOUT, lines.next_line())
            .await
            .unwrap()
            .unwrap()
            .unwrap(),
        "three"
    );
    drop(kubectl);
    cluster.log = tokio::sync::watch::Sender::default();
    assert_eq!(
        timeout(TIMEOUT, lines.next_line()).await.unwrap().unwrap(),
        None
    );
    assert!(
        timeout(TIMEOUT, child.wait())
            .await
            .unwrap()
            .unwrap()
            .success()
    );
}

/// Starts `kubectl port-forward` and returns its local port.
async fn forwarder(kubectl: &Kubectl<'_>, port: u16) -> (Child, u16) {
    let mapping = format!(":{port}");
    let mut child = kubectl
        .command(&["port-forward", "pod/web", &mapping])
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = timeout(TIMEOUT, lines.next_line())
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    let local = line
        .strip_prefix("Forwarding from 127.0.0.1:")
        .and_then(|rest| rest.split(' ').next());
    let local = local.unwrap_or_else(|| panic!("{line}")).parse().unwrap();
    // kubectl prints a line for each connection, and would block if the pipe were not read.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    (child, local)
}

#[tokio::test]
async fn port_forward_carries_many_connections_at_once() {
    let cluster = Cluster::start().await;
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let (mut child, local) = forwarder(&kubectl, cluster.echo_port).await;
        let exchanges = (0..20_u8).map(|number| async move {
            let mut stream = TcpStream::connect(("127.0.0.1", local)).await.unwrap();
            let (mut read, mut write) = stream.split();
            let sent = vec![number; 500_000];
            let mut received = Vec::new();
            let sending = async {
                write.write_all(&sent).await.unwrap();
                write.shutdown().await.unwrap();
            };
            let (_, ()) = tokio::join!(read.read_to_end(&mut received), sending);
            assert!(
                received == sent,
                "{transport:?}: {} bytes of connection {number}",
                received.len()
            );
        });
        timeout(TIMEOUT, futures::future::join_all(exchanges))
            .await
            .unwrap_or_else(|_| panic!("{transport:?}: port-forward hangs"));
        assert!(
            child.try_wait().unwrap().is_none(),
            "{transport:?}: kubectl ended"
        );
    }
}

#[tokio::test]
async fn port_forward_reports_a_port_without_a_listener() {
    let cluster = Cluster::start().await;
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let (mut child, local) = forwarder(&kubectl, 81).await;
        let mut stream = TcpStream::connect(("127.0.0.1", local)).await.unwrap();
        let ended = timeout(TIMEOUT, stream.read_to_end(&mut Vec::new())).await;
        assert_eq!(ended.unwrap().unwrap_or_default(), 0);
        let mut errors = String::new();
        let reading = child.stderr.take().unwrap();
        timeout(TIMEOUT, BufReader::new(reading).read_to_string(&mut errors))
            .await
            .unwrap()
            .unwrap();
        assert!(
            errors.contains("nothing listens on 81"),
            "{transport:?}: {errors}"
        );
    }
}

#[tokio::test]
async fn killing_kubectl_ends_the_command() {
    let cluster = Cluster::start().await;
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let mut child = kubectl
            .command(&["exec", "web", "--", "sleep", "600"])
            .spawn()
            .unwrap();
        cluster.wait_for_commands(1).await;
        child.kill().await.unwrap();
        cluster.wait_for_commands(0).await;
    }
}

/// `script` gives kubectl a terminal; the command prints the size of that terminal.
#[tokio::test]
async fn the_size_of_the_terminal_reaches_the_command() {
    let cluster = Cluster::start().await;
    for transport in BOTH {
        let kubectl = Kubectl::new(&cluster, transport);
        let shown = kubectl.command(&["exec", "-it", "web", "--", "sizes"]);
        let shown = shown.as_std();
        let line: Vec<String> = std::iter::once(shown.get_program())
            .chain(shown.get_args())
            .map(|word| word.to_string_lossy().into_owned())
            .collect();
        let mut terminal = Command::new("script");
        terminal.args([
            "-qec",
            &format!("stty cols 111 rows 33; {}", line.join(" ")),
            "/dev/null",
        ]);
        for (name, value) in shown.get_envs() {
            terminal.env(name, value.unwrap());
        }
        terminal
            .env("SHELL", "/bin/sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = terminal
            .spawn()
            .expect("script, of util-linux, on the PATH");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let sized = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if line.contains("111x33") {
                    return true;
                }
            }
            false
        };
        assert!(timeout(TIMEOUT, sized).await.unwrap(), "{transport:?}");
        child.kill().await.unwrap();
    }
}
