//! `--log-format json`: every line that a part writes to standard error is a JSON object.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::{agent_sandbox, require_root};

/// Generous: a machine that runs many tests stalls.
const DEADLINE: Duration = Duration::from_secs(120);

/// A part whose lines go to a file.
struct Part {
    child: Child,
    lines: tempfile::NamedTempFile,
}

impl Part {
    fn start(command: &mut Command) -> Self {
        let lines = tempfile::NamedTempFile::new().unwrap();
        let stderr = File::create(lines.path()).unwrap();
        let child = command
            .env("RUST_LOG", "info")
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .unwrap();
        Self { child, lines }
    }

    /// Waits for something, or for the part to end.
    fn wait_for(&mut self, what: &str, mut is_there: impl FnMut(&str) -> bool) {
        let deadline = Instant::now() + DEADLINE;
        while !is_there(&std::fs::read_to_string(self.lines.path()).unwrap()) {
            if self.child.try_wait().unwrap().is_some() {
                return;
            }
            assert!(Instant::now() < deadline, "waited for {what}");
            std::thread::park_timeout(Duration::from_millis(10));
        }
    }

    /// Ends the part and reads its lines.
    fn end(mut self) -> Vec<Value> {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, Signal::TERM);
        self.child.wait().unwrap();
        let text = std::fs::read_to_string(self.lines.path()).unwrap();
        let lines: Vec<Value> = text
            .lines()
            .map(|line| {
                serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
            })
            .collect();
        for line in &lines {
            for field in ["timestamp", "level", "message"] {
                assert!(line[field].is_string(), "{field} of {line}");
            }
        }
        lines
    }
}

fn says(lines: &[Value], words: &str) -> bool {
    let mut messages = lines.iter().filter_map(|line| line["message"].as_str());
    messages.any(|message| message.contains(words))
}

fn part(home: &Path, words: &[&str]) -> Command {
    let mut command = agent_sandbox(home);
    // No kubeconfig exists in any of the searched places.
    command.args(words).env("HOME", home);
    command
}

#[test]
fn every_line_of_the_router_is_json() {
    let home = tempfile::tempdir().unwrap();
    let flags = [
        "router",
        "--log-format=json",
        "--http-bind-address=127.0.0.1:0",
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
        "--enable-otel-metrics",
    ];
    let mut router = Part::start(&mut part(home.path(), &flags));
    router.wait_for("the router", |lines| lines.contains("serving HTTP"));
    let lines = router.end();
    assert!(
        says(&lines, "--enable-otel-metrics has no effect: "),
        "{lines:#?}"
    );
    assert!(says(&lines, "serving HTTP"), "{lines:#?}");
}

#[test]
fn a_part_that_fails_says_so_in_json() {
    let home = tempfile::tempdir().unwrap();
    let kubeconfig = home.path().join("none");
    let kubeconfig = kubeconfig.to_str().unwrap();
    for words in [
        &["router", "--log-format=json", "--kubeconfig", kubeconfig][..],
        &["router", "--log-format=json", "--path-routing-prefix=x"],
        &["node", "--log-format", "json", "--kubeconfig", kubeconfig],
        &[
            "controller",
            "--log-format=json",
            "--kubeconfig",
            kubeconfig,
        ],
    ] {
        let mut failing = Part::start(&mut part(home.path(), words));
        failing.wait_for("its end", |_| false);
        let lines = failing.end();
        let last = lines
            .last()
            .unwrap_or_else(|| panic!("{words:?} says nothing"));
        assert_eq!(last["level"], "ERROR", "{words:?}: {last}");
    }
}

#[test]
fn every_line_of_the_runtime_is_json() {
    let home = tempfile::tempdir().unwrap();
    let base = home.path().join("base");
    let flags = [
        "sandboxd",
        "--",
        "--log-format=json",
        "--listen=127.0.0.1:0",
        "--init-listen=none",
        "--base-dir",
        base.to_str().unwrap(),
    ];
    let mut runtime = Part::start(&mut part(home.path(), &flags));
    runtime.wait_for("the runtime", |lines| lines.contains("serving"));
    assert!(says(&runtime.end(), "serving"));
}

#[test]
fn every_line_of_up_is_json() {
    require_root();
    let home = tempfile::tempdir().unwrap();
    let ready = home.path().join("ready.json");
    let flags = [
        "up",
        "--log-format=json",
        "--no-quickstart",
        "--api-listen=127.0.0.1:0",
        "--router-listen=127.0.0.1:0",
        "--metrics-bind-address=127.0.0.1:0",
        "--ready-file",
        ready.to_str().unwrap(),
    ];
    let mut up = Part::start(&mut part(home.path(), &flags));
    up.wait_for("up", |_| ready.exists());
    let started = ready.exists();
    let lines = up.end();
    let _ = agent_sandbox(home.path()).arg("reset").output();
    assert!(started, "{lines:#?}");
    assert!(!lines.is_empty(), "with RUST_LOG=info something is logged");
}
