//! Signals at every stage of `run` and `claim`: the operation ends and leaves nothing behind. Needs root: it starts
//! containers.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use api::SandboxTemplate;
use kube::Api;
use kube::api::PostParams;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::machine::{self, Holdings};
use crate::streams::client;
use crate::support::{Up, agent_sandbox, require_root, stdout_of};

const DEADLINE: Duration = Duration::from_secs(120);

/// A process of the test's own. It is killed if the test fails.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(child.spawn().expect("the binary starts"))
    }

    /// Waits until the command in the sandbox says that it runs.
    fn await_started(&mut self) {
        let output = self.0.stdout.as_mut().expect("standard output is piped");
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).unwrap();
        assert_eq!(line, "started\n");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it runs");
    }

    fn exit_code(&mut self) -> Option<i32> {
        eventually("its end", || self.0.try_wait().unwrap()).code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

/// The directory of the one private system at `home`.
fn private_system(home: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(home).unwrap().flatten();
    let mut found = entries.map(|entry| entry.path()).filter(|path| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("run-"))
    });
    found.next()
}

fn assert_nothing_is_left(home: &Path) {
    assert_eq!(private_system(home), None);
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    assert!(!mounts.contains(home.to_str().unwrap()), "{mounts}");
    let shares = std::fs::read_dir("/run/agent-sandbox/shares").into_iter();
    for share in shares.flatten().flatten() {
        let owner = std::fs::read_to_string(share.path()).unwrap_or_default();
        assert!(!Path::new(&owner).starts_with(home), "{owner} has a share");
    }
}

const SLEEP: [&str; 5] = ["run", "--", "sh", "-c", "echo started; exec sleep 1000"];

#[test]
fn a_signal_while_the_system_starts_leaves_nothing() {
    require_root();
    let home = tempfile::tempdir().unwrap();
    let mut running = Running::start(agent_sandbox(home.path()).args(SLEEP));
    eventually("the directory of the system", || {
        private_system(home.path())
    });
    running.signal(Signal::INT);
    assert_eq!(running.exit_code(), Some(130));
    assert_nothing_is_left(home.path());
}

/// A `run` with a private system of its own, whose command has begun.
struct PrivateRun {
    home: TempDir,
    running: Running,
    system: PathBuf,
    tag: String,
}

impl PrivateRun {
    fn start() -> Self {
        require_root();
        let home = tempfile::tempdir().unwrap();
        let mut running = Running::start(agent_sandbox(home.path()).args(SLEEP));
        running.await_started();
        let system = private_system(home.path()).unwrap();
        let tag = machine::tag_of(&system);
        Self {
            home,
            running,
            system,
            tag,
        }
    }

    /// The processes, mounts and network devices of the system, which stay until this system removes them.
    fn holdings(&self) -> Holdings {
        machine::holdings(&self.system, &self.tag)
    }
}

#[test]
fn a_signal_while_the_command_runs_ends_it_and_leaves_nothing() {
    let mut run = PrivateRun::start();
    assert!(!run.holdings().processes.is_empty());
    run.running.signal(Signal::INT);
    assert_eq!(run.running.exit_code(), Some(130));
    assert_eq!(run.holdings(), Holdings::default());
    assert_nothing_is_left(run.home.path());
}

#[test]
fn what_a_killed_run_leaves_is_given_back_by_the_next() {
    let mut run = PrivateRun::start();
    run.running.signal(Signal::KILL);
    assert_eq!(run.running.exit_code(), None);
    assert!(!run.holdings().processes.is_empty());

    let answer = stdout_of(agent_sandbox(run.home.path()).args(["run", "--", "echo", "next"]));
    assert_eq!(answer, "next\n");
    assert_eq!(run.holdings(), Holdings::default());
    assert_nothing_is_left(run.home.path());
}

/// A template whose sandboxes never become ready.
fn create_template_that_waits(up: &Up) {
    let template = serde_json::json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxTemplate", "metadata": {"name": "waits"},
        "spec": {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 0, "containers": [{
            "name": "main", "image": "host", "command": ["sleep", "1000"],
            "readinessProbe": {"exec": {"command": ["false"]}},
        }]}}},
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let templates: Api<SandboxTemplate> = Api::default_namespaced(client(up).await);
        let template = serde_json::from_value(template).unwrap();
        let created = templates.create(&PostParams::default(), &template).await;
        created.unwrap();
    });
}

#[test]
fn a_signal_while_a_sandbox_is_claimed_takes_the_claim_back() {
    let up = Up::start(&[]);
    create_template_that_waits(&up);
    let claims = || stdout_of(up.command().args(["list", "-o", "name"]));
    let attempts: [(&[&str], Signal, i32); 3] = [
        (
            &["run", "--template", "waits", "--", "true"],
            Signal::INT,
            130,
        ),
        (
            &["run", "--template", "waits", "--", "true"],
            Signal::QUIT,
            131,
        ),
        (&["claim", "mine", "--template", "waits"], Signal::TERM, 143),
    ];
    for (arguments, signal, code) in attempts {
        let mut running = Running::start(up.command().args(arguments));
        eventually("the claim", || (!claims().is_empty()).then_some(()));
        running.signal(signal);
        assert_eq!(running.exit_code(), Some(code), "{arguments:?}");
        assert_eq!(claims(), "", "{arguments:?}");
    }
}

#[test]
fn signals_reach_the_command() {
    let up = Up::start(&[]);
    let trap =
        |name: &str| format!("trap 'exit 9' {name}; echo started; while :; do sleep 0.05; done");
    for (name, signal) in [
        ("HUP", Signal::HUP),
        ("QUIT", Signal::QUIT),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
        ("TERM", Signal::TERM),
    ] {
        let mut running = Running::start(up.command().args(["run", "--", "sh", "-c", &trap(name)]));
        running.await_started();
        running.signal(signal);
        assert_eq!(running.exit_code(), Some(9), "{name}");
    }
    assert_eq!(stdout_of(up.command().args(["list", "-o", "name"])), "");
}
