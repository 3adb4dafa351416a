//! `cargo xtask kube-up` leaves no process behind, whatever ends it. The programs of the control plane are stand-ins here that only wait.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

const DEADLINE: Duration = Duration::from_secs(120);
const PARTS: [&str; 4] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
];
/// Long enough to be found running, and no burden for long where a test finds that it is left.
const WAITS: &str = "exec sleep 300";
const IS_READY: &str = "exit 0";
const IS_NEVER_READY: &str = "exit 1";

/// A running `kube-up`. Dropping it kills it alone.
struct KubeUp {
    home: TempDir,
    child: Child,
}

impl KubeUp {
    fn start(kubectl: &str, command: &[&str]) -> Self {
        let home = tempfile::tempdir().unwrap();
        let programs = home.path().join("programs");
        fs::create_dir(&programs).unwrap();
        for part in PARTS {
            write_program(&programs.join(part), WAITS);
        }
        write_program(&programs.join("kubectl"), kubectl);
        let child = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .arg("kube-up")
            .arg("--programs")
            .arg(&programs)
            .args(command)
            .env("TMPDIR", home.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self { home, child }
    }

    /// One that runs until it is stopped, and is ready.
    fn ready() -> Self {
        let mut kube_up = Self::start(IS_READY, &[]);
        let output = kube_up.child.stdout.take().unwrap();
        let says_how_to_stop = BufReader::new(output)
            .lines()
            .any(|line| line.unwrap().contains("Press Enter"));
        assert!(says_how_to_stop, "kube-up ended before it was ready");
        kube_up
    }

    fn directory(&self) -> Option<PathBuf> {
        fs::read_dir(self.home.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .find(|path| path.to_string_lossy().contains("agent-sandbox-kubernetes-"))
    }

    /// The process of a part, once it runs.
    fn part(&self, name: &str) -> Pid {
        until(&format!("{name} to run"), || {
            let file = self.directory()?.join(format!("{name}.pid"));
            let pid = parse_pid(&file)?;
            is_running(pid).then_some(pid)
        })
    }

    fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn end(&mut self) -> ExitStatus {
        until("kube-up to end", || self.child.try_wait().unwrap())
    }
}

impl Drop for KubeUp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn write_program(path: &Path, script: &str) {
    fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn parse_pid(file: &Path) -> Option<Pid> {
    Pid::from_raw(fs::read_to_string(file).ok()?.trim().parse().ok()?)
}

/// A process that has ended and is not waited for yet does not run.
fn is_running(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid()));
    status.is_ok_and(|status| !status.contains("State:\tZ"))
}

fn until<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(Instant::now() < deadline, "still waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_signal_to_it_alone_ends_every_part() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut kube_up = KubeUp::ready();
        let parts = PARTS.map(|name| kube_up.part(name));
        kube_up.send(signal);
        assert!(kube_up.end().success(), "{signal:?}");
        assert_eq!(parts.map(is_running), [false; 4], "{signal:?}");
        assert_eq!(kube_up.directory(), None, "{signal:?}");
    }
}

#[test]
fn enter_ends_every_part() {
    let mut kube_up = KubeUp::ready();
    let parts = PARTS.map(|name| kube_up.part(name));
    drop(kube_up.child.stdin.take());
    assert!(kube_up.end().success());
    assert_eq!(parts.map(is_running), [false; 4]);
}

#[test]
fn parts_die_with_it_when_it_is_killed() {
    let mut kube_up = KubeUp::ready();
    let parts = PARTS.map(|name| kube_up.part(name));
    kube_up.send(Signal::KILL);
    kube_up.end();
    for (name, pid) in PARTS.into_iter().zip(parts) {
        until(&format!("{name} to die"), || {
            (!is_running(pid)).then_some(())
        });
    }
}

#[test]
fn it_can_be_interrupted_while_it_starts() {
    let mut kube_up = KubeUp::start(IS_NEVER_READY, &[]);
    let parts = ["etcd", "kube-apiserver"].map(|name| kube_up.part(name));
    kube_up.send(Signal::TERM);
    assert!(!kube_up.end().success());
    assert_eq!(parts.map(is_running), [false; 2]);
}

#[test]
fn the_command_hears_of_the_signal_before_the_control_plane_goes() {
    for (signal, name) in [(Signal::INT, "INT"), (Signal::TERM, "TERM")] {
        // It answers the signal with a question to the control plane.
        let script = format!(
            "trap 'kill -0 $(cat $CONTROL_PLANE/etcd.pid) && touch $TMPDIR/heard; exit' {name}
             echo $$ > $TMPDIR/command.pid
             for _ in $(seq 600); do sleep 0.1; done"
        );
        let mut kube_up = KubeUp::start(IS_READY, &["--", "sh", "-c", &script]);
        let etcd = kube_up.part("etcd");
        let file = kube_up.home.path().join("command.pid");
        let command = until("the command to run", || parse_pid(&file));
        kube_up.send(signal);
        kube_up.end();
        let heard = kube_up.home.path().join("heard");
        assert!(heard.exists(), "{name}: {}", heard.display());
        assert_eq!([command, etcd].map(is_running), [false; 2], "{name}");
    }
}
