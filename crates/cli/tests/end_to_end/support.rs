//! Starts the real binary with a data directory of its own, and stops it at the end of the test, also of a failed one.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::Value;
use tempfile::TempDir;

/// How long the system may take to come up on a loaded machine. No promise about speed: benchmarks make those.
const READY_DEADLINE: Duration = Duration::from_secs(120);

/// The binary under test, with a home of the test's own and no kubeconfig from the environment.
pub fn agent_sandbox(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_agent-sandbox"));
    command
        .env("AGENT_SANDBOX_HOME", home)
        .env_remove("KUBECONFIG")
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> Output {
    command.output().expect("the binary starts")
}

/// The standard output of a command that must succeed.
pub fn stdout_of(command: &mut Command) -> String {
    let output = run(command);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("output is text")
}

/// The standard error of a command that must fail.
pub fn stderr_of(command: &mut Command) -> String {
    let output = run(command);
    assert!(!output.status.success(), "{command:?} succeeded");
    String::from_utf8(output.stderr).expect("errors are text")
}

/// The whole answer to a plain GET.
pub fn get(url: &str, path: &str) -> String {
    get_from_host(url, url.trim_start_matches("http://"), path)
}

/// The same from a server that the caller believes to have this name.
pub fn get_from_host(url: &str, host: &str, path: &str) -> String {
    let address = url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    )
    .expect("it can be asked");
    let mut answer = String::new();
    stream
        .read_to_string(&mut answer)
        .expect("the answer is text");
    answer
}

/// Fails a test that cannot work without root, with the reason.
pub fn require_root() {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test starts containers: run it as root"
    );
}

/// A running `agent-sandbox up`.
pub struct Up {
    home: TempDir,
    child: Child,
    ready: Value,
}

impl Up {
    /// Starts `up` on free ports and waits for its ready file.
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    /// The same, with these environment variables.
    pub fn start_with(arguments: &[&str], variables: &[(String, String)]) -> Self {
        require_root();
        let home = tempfile::tempdir().expect("a temporary directory");
        let mut command = agent_sandbox(home.path());
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let (child, ready) = spawn(home.path(), command, arguments);
        Self { home, child, ready }
    }

    /// Starts an `up` whose writes [`Self::fail_writes`] can make fail: SIGXFSZ, which would end it, is ignored.
    pub fn start_with_writes_that_may_fail() -> Self {
        require_root();
        let home = tempfile::tempdir().expect("a temporary directory");
        let binary = agent_sandbox(home.path());
        let mut command = Command::new("sh");
        command
            .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
            .arg(binary.get_program())
            .env("AGENT_SANDBOX_HOME", home.path())
            .env_remove("KUBECONFIG")
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        let (child, ready) = spawn(home.path(), command, &[]);
        Self { home, child, ready }
    }

    /// Makes every further write to a file fail, as on a disk that fails.
    pub fn fail_writes(&self) {
        let none = Rlimit {
            current: Some(0),
            maximum: Some(0),
        };
        prlimit(Some(Pid::from_child(&self.child)), Resource::Fsize, none)
            .expect("limits of a child can be set");
    }

    /// Waits until the process ends by itself: its exit code and standard error, which must be piped.
    pub fn outcome(&mut self) -> (Option<i32>, String) {
        let mut complaints = String::new();
        let mut stderr = self.child.stderr.take().expect("standard error is piped");
        stderr
            .read_to_string(&mut complaints)
            .expect("complaints are text");
        let status = self.child.wait().expect("the process can be waited for");
        (status.code(), complaints)
    }

    /// Stops `up` with this signal and starts it again on the same data directory.
    pub fn restart(&mut self, signal: rustix::process::Signal) {
        self.signal(signal);
        self.start_again();
    }

    /// Kills `up` with SIGKILL: it cannot clean up.
    pub fn kill(&mut self) {
        self.signal(rustix::process::Signal::KILL);
    }

    /// Starts `up` again on the same data directory.
    pub fn start_again(&mut self) {
        let command = agent_sandbox(self.home.path());
        (self.child, self.ready) = spawn(self.home.path(), command, &[]);
    }

    /// The data directory.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// The binary, set to find this `up`.
    pub fn command(&self) -> Command {
        agent_sandbox(self.home.path())
    }

    /// Sandboxes outlive `up` by design, so a test deletes them while it still runs.
    pub fn delete_everything(&self) {
        let _ = self
            .command()
            .args(["delete", "--all", "--pools", "--all-namespaces", "--wait"])
            .output();
    }

    /// The content of the ready file.
    pub fn ready(&self) -> &Value {
        &self.ready
    }

    pub fn ready_file(&self) -> PathBuf {
        ready_file(self.home.path())
    }

    /// Sends a signal and waits for the process to end.
    pub fn signal(&mut self, signal: rustix::process::Signal) {
        let pid = Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, signal);
        self.child.wait().expect("the process can be waited for");
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.delete_everything();
            self.signal(rustix::process::Signal::TERM);
        }
        // A test that failed, or that killed `up`, leaves more than an `up` that was stopped.
        let _ = self.command().arg("reset").output();
    }
}

fn ready_file(home: &Path) -> PathBuf {
    home.join("ready.json")
}

fn spawn(home: &Path, mut command: Command, arguments: &[&str]) -> (Child, Value) {
    let ready_file = ready_file(home);
    // The ready file of a killed predecessor must not be mistaken for this one's.
    let _ = std::fs::remove_file(&ready_file);
    let mut child = command
        .args([
            "up",
            "--api-listen=127.0.0.1:0",
            "--router-listen=127.0.0.1:0",
        ])
        .args(["--metrics-bind-address=127.0.0.1:0", "--ready-file"])
        .arg(&ready_file)
        .args(arguments)
        .stdout(Stdio::null())
        .spawn()
        .expect("the binary starts");
    let deadline = Instant::now() + READY_DEADLINE;
    loop {
        if let Ok(text) = std::fs::read_to_string(&ready_file) {
            let ready =
                serde_json::from_str(&text).expect("the ready file is JSON and appears whole");
            return (child, ready);
        }
        if let Some(status) = child.try_wait().expect("the process can be asked") {
            panic!("up ended before it was ready: {status}");
        }
        assert!(Instant::now() < deadline, "up was not ready in time");
        std::thread::park_timeout(Duration::from_millis(10));
    }
}
