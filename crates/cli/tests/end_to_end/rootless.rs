//! The binary as an unprivileged user runs it. The tests need root, to change to such a user.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Node;
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::local_users::send_as;
use crate::support::{require_root, run, stdout_of};

/// A UID without an account.
const USER: u32 = 54_321;

/// The user's home, with the binary in it: the binary under test may be in a directory that only root can enter.
struct Home {
    directory: TempDir,
    binary: PathBuf,
}

impl Home {
    fn new() -> Self {
        require_root();
        let directory = tempfile::tempdir().expect("a temporary directory");
        let binary = directory.path().join("agent-sandbox");
        // By another process: one that another test starts meanwhile would keep a file of ours open for writing for a moment, and
        // what is written to cannot be run.
        let copied = Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_agent-sandbox"))
            .arg(&binary)
            .status();
        assert!(copied.is_ok_and(|status| status.success()));
        std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755))
            .expect("it can be made executable");
        chown(directory.path(), Some(USER), Some(USER)).expect("root gives directories away");
        Self { directory, binary }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        command
            .arg(format!("--reuid={USER}"))
            .arg(format!("--regid={USER}"))
            .args(["--clear-groups", "--"])
            .arg(&self.binary)
            .env("AGENT_SANDBOX_HOME", self.path().join("state"))
            .env("HOME", self.path())
            .env_remove("KUBECONFIG")
            .current_dir(self.path())
            .stdin(Stdio::null());
        command
    }
}

#[test]
fn an_unprivileged_user_runs_a_command_in_a_sandbox() {
    let home = Home::new();
    // Root has the usual capabilities, over the one user there is.
    let script = "echo hi; id -u; echo $$ > /tmp/written; test ! -e /root/.ssh && ls /dev/null; \
        grep -E '^(CapEff|NoNewPrivs):' /proc/self/status; chroot / echo inside; exit 7";
    let output = run(home.command().args(["run", "--", "sh", "-c", script]));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "hi\n0\n/dev/null\nCapEff:\t00000000200405fb\nNoNewPrivs:\t0\ninside\n",
        "{stderr}"
    );
    assert_eq!(output.status.code(), Some(7), "{stderr}");
    assert_eq!(
        stderr.matches("without root").count(),
        1,
        "what is missing is reported once: {stderr}"
    );
    let left: Vec<_> = std::fs::read_dir(home.path().join("state"))
        .expect("the state directory is there")
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("run-"))
        .collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

/// A running `up` of the user.
struct Running {
    child: Child,
    ready: Value,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(
            rustix::process::Pid::from_child(&self.child),
            Signal::TERM,
        );
        let _ = self.child.wait();
    }
}

fn up(home: &Home) -> Running {
    let file = home.path().join("ready.json");
    let _ = std::fs::remove_file(&file);
    let child = home
        .command()
        .args([
            "up",
            "--api-listen=127.0.0.1:0",
            "--router-listen=127.0.0.1:0",
        ])
        .args(["--metrics-bind-address=127.0.0.1:0", "--ready-file"])
        .arg(&file)
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary starts");
    let mut running = Running {
        child,
        ready: Value::Null,
    };
    let deadline = Instant::now() + Duration::from_secs(120);
    while running.ready.is_null() {
        if let Ok(text) = std::fs::read_to_string(&file) {
            running.ready = serde_json::from_str(&text).expect("the ready file is JSON");
        } else if let Some(status) = running.child.try_wait().expect("it can be asked") {
            panic!("up ended before it was ready: {status}");
        }
        assert!(Instant::now() < deadline, "up was not ready in time");
        std::thread::park_timeout(Duration::from_millis(10));
    }
    running
}

#[test]
fn an_unprivileged_up_serves_its_machine_and_says_on_the_node_what_it_lacks() {
    let home = Home::new();
    let running = up(&home);
    let answer = stdout_of(
        home.command()
            .args(["run", "--", "echo", "through", "the", "API"]),
    );
    assert_eq!(answer, "through the API\n");
    // The router's port is in the machine's network, which is not that of the process. Its clients are known there.
    let router = running.ready["router"].as_str().expect("a URL");
    let router = router.trim_start_matches("http://");
    let asked =
        "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Sandbox-ID: none\r\n\r\n";
    for (user, status) in [(USER, "404"), (0, "404"), (USER + 1, "401")] {
        let answer = send_as(user, router, asked);
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{user}: {answer}"
        );
    }
    let kubeconfig = running.ready["kubeconfig"]
        .as_str()
        .expect("a path")
        .to_owned();
    let conditions = tokio::runtime::Runtime::new()
        .expect("a runtime")
        .block_on(async {
            let kubeconfig = kube::config::Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
            let options = kube::config::KubeConfigOptions::default();
            let config = kube::Config::from_custom_kubeconfig(kubeconfig, &options)
                .await
                .expect("a configuration");
            let client = kube::Client::try_from(config).expect("a client");
            let nodes = kube::Api::<Node>::all(client);
            let node = nodes.get("agent-sandbox").await.expect("the node");
            node.status
                .and_then(|status| status.conditions)
                .unwrap_or_default()
        });
    let rootless = conditions
        .iter()
        .find(|condition| condition.type_ == "Rootless")
        .expect("the condition is there");
    assert_eq!(rootless.status, "True");
    assert!(
        rootless
            .message
            .as_deref()
            .unwrap_or_default()
            .contains("no network beyond")
    );
    let output = run(home.command().args([
        "up",
        "--data-dir",
        "/proc/nowhere",
        "--api-listen=127.0.0.1:0",
    ]));
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success() && stderr.starts_with("error: ") && stderr.lines().count() == 1,
        "{stderr}"
    );
}
