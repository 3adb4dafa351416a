//! The exact output and exit codes of `up` and `run`. Needs root: it starts containers.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use api::SandboxTemplate;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::streams::client;
use crate::support::{Up, agent_sandbox, require_root, run, stderr_of, stdout_of};
use crate::verbs::pseudo_terminal;

/// How long an `up` may take to stop on a loaded machine.
const DEADLINE: Duration = Duration::from_secs(120);

/// An `up` without pods, for tests of its output and exit code.
pub struct Shown {
    child: Child,
    home: TempDir,
    pub greeting: Vec<String>,
}

impl Shown {
    fn start() -> Self {
        Self::start_with(&[])
    }

    pub fn start_with(arguments: &[&str]) -> Self {
        require_root();
        let home = tempfile::tempdir().unwrap();
        let mut child = agent_sandbox(home.path())
            .args(["up", "--no-quickstart", "--api-listen=127.0.0.1:0"])
            .args(["--router-listen=127.0.0.1:0"])
            .args(["--metrics-bind-address=127.0.0.1:0"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut shown = Self {
            child,
            home,
            greeting: Vec::new(),
        };
        for line in lines.map_while(Result::ok) {
            let is_last = line.contains("--help");
            shown.greeting.push(line);
            if is_last {
                break;
            }
        }
        shown
    }

    pub fn running(&self) -> serde_json::Value {
        let text = fs::read(self.home.path().join("up.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn interrupt(&self) {
        kill_process(Pid::from_child(&self.child), Signal::INT).expect("it runs");
    }

    fn exit_code(&mut self) -> Option<i32> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = agent_sandbox(self.home.path()).arg("reset").output();
    }
}

#[test]
fn up_greets_with_what_to_do_next_and_ends_on_ctrl_c() {
    let mut up = Shown::start();
    let running = up.running();
    let text = |name: &str| running[name].as_str().unwrap().to_owned();
    let first = format!(
        "agent-sandbox is up: API {}, router {}",
        text("apiServer"),
        text("router")
    );
    assert_eq!(up.greeting[0], first);
    let export = format!("  export KUBECONFIG={}", text("kubeconfig"));
    assert!(up.greeting.contains(&export), "{:?}", up.greeting);
    let offers_a_run = |line: &String| line.contains("agent-sandbox run");
    assert!(
        !up.greeting.iter().any(offers_a_run),
        "without a template there is nothing to run"
    );
    up.interrupt();
    assert_eq!(up.exit_code(), Some(0));
    assert!(!up.home.path().join("up.json").exists());
}

#[test]
fn a_second_ctrl_c_does_not_wait_for_requests_under_way() {
    let mut up = Shown::start();
    let metrics = up.running()["metrics"].as_str().unwrap().to_owned();
    let mut slow = TcpStream::connect(metrics.trim_start_matches("http://")).unwrap();
    slow.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
    // A whole request on another connection is answered, so by then the first has been accepted.
    let answer = crate::support::get(&metrics, "/metrics");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    up.interrupt();
    let file = up.home.path().join("up.json");
    let deadline = Instant::now() + DEADLINE;
    while file.exists() {
        assert!(Instant::now() < deadline, "it does not begin to stop");
        std::thread::park_timeout(Duration::from_millis(5));
    }
    assert_eq!(
        up.child.try_wait().unwrap(),
        None,
        "it waits for the request"
    );
    up.interrupt();
    assert_eq!(up.exit_code(), Some(130));
    drop(slow);
}

#[test]
fn a_kept_sandbox_can_be_used_again() {
    let up = Up::start(&[]);
    let output = run(up.command().args([
        "run",
        "--keep",
        "--",
        "sh",
        "-c",
        "echo kept > note; exit 5",
    ]));
    assert_eq!(output.status.code(), Some(5));
    let text = String::from_utf8(output.stderr).unwrap();
    let claim = text.trim_end().strip_prefix("kept as claim ").unwrap();
    let note = stdout_of(up.command().args(["exec", claim, "--", "cat", "note"]));
    assert_eq!(note, "kept\n");
}

#[test]
fn a_command_of_run_has_a_terminal_when_asked_to() {
    let up = Up::start(&[]);
    let (controller, terminal) = pseudo_terminal();
    let script = "test -t 0 && stty size && exit 7";
    let mut command = up.command();
    let mut child = command
        .args(["run", "-t", "--", "sh", "-c", script])
        .stdin(terminal.try_clone().unwrap())
        .stdout(terminal.try_clone().unwrap())
        .stderr(terminal)
        .spawn()
        .unwrap();
    drop(command);
    let mut reader = fs::File::from(controller);
    let mut seen = String::new();
    let mut piece = [0; 256];
    while !seen.contains("33 111") {
        let length = reader.read(&mut piece).expect("the terminal is open");
        seen.push_str(&String::from_utf8_lossy(&piece[..length]));
    }
    assert_eq!(child.wait().unwrap().code(), Some(7));

    let error = stderr_of(up.command().args(["run", "-t", "--", "true"]));
    assert!(error.contains("-t needs a terminal"), "{error}");
    let claims = stdout_of(up.command().args(["list", "-o", "name"]));
    assert_eq!(claims, "", "the sandbox is released all the same");
}

#[test]
fn run_claims_in_the_namespace_that_is_named() {
    let up = Up::start(&[]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let client = client(&up).await;
        let parameters = PostParams::default();
        let mut namespace = Namespace::default();
        namespace.metadata.name = Some("team".to_owned());
        let namespaces: Api<Namespace> = Api::all(client.clone());
        namespaces.create(&parameters, &namespace).await.unwrap();
        let quickstart: Api<SandboxTemplate> = Api::default_namespaced(client.clone());
        let template = quickstart.get("python-runtime-template").await.unwrap();
        let copy = SandboxTemplate::new(&template.name_any(), template.spec);
        let templates: Api<SandboxTemplate> = Api::namespaced(client, "team");
        templates.create(&parameters, &copy).await.unwrap();
    });
    let answer = stdout_of(
        up.command()
            .args(["run", "-n", "team", "--keep", "--", "echo", "hi"]),
    );
    assert_eq!(answer, "hi\n");
    let claims =
        |namespace: &str| stdout_of(up.command().args(["list", "-n", namespace, "-o", "name"]));
    assert_eq!(
        (claims("team").lines().count(), claims("default")),
        (1, String::new())
    );
}

#[test]
fn an_api_without_the_kinds_is_named_with_what_to_install() {
    let home = tempfile::tempdir().unwrap();
    let kubeconfig = home.path().join("kubeconfig");
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let stop = tokio_util::sync::CancellationToken::new();
    let (server, listener) = runtime.block_on(async {
        let server = apiserver::Server::open(apiserver::Config::in_memory());
        let server = server.await.unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        server.write_kubeconfig(&kubeconfig, &url).unwrap();
        (server, listener)
    });
    let stopped = stop.clone();
    let serving = runtime.spawn(async move { server.serve(listener, stopped).await });
    for arguments in [&["list"][..], &["run", "--", "true"], &["claim"]] {
        let mut command = agent_sandbox(home.path());
        command
            .arg(arguments[0])
            .arg("--kubeconfig")
            .arg(&kubeconfig);
        let error = stderr_of(command.args(&arguments[1..]));
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(
            error.contains("context \"agent-sandbox\"") && error.contains("generate crds"),
            "{arguments:?}: {error}"
        );
    }
    stop.cancel();
    runtime.block_on(serving).unwrap().unwrap();
}
