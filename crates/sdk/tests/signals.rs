//! Auto-cleanup: sandboxes are deleted when the process that created them receives a signal. The process is this test program, run again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use sdk::CreateOptions;
use support::{NEVER, World, is_delete, is_watch, options};

const ROLE: &str = "SDK_TEST_ROLE";
const ID: &str = "mine";
const TERM: i32 = 15;

/// The state of the process when it receives the signal.
#[derive(Clone, Copy)]
enum Stage {
    /// It has a sandbox.
    Made,
    /// It waits for a sandbox that never becomes ready.
    Waiting,
}

/// Creates a sandbox or waits for one, prints that, and is stopped.
async fn be_stopped(stage: Stage) {
    let world = World::start().await;
    let client = world.client(options("http://127.0.0.1:9"));
    let _cleanup = client.enable_auto_cleanup().unwrap();
    world.inject(move |request| {
        if is_delete(request) {
            println!("deleting {}", request.uri().path());
        }
        if is_watch(request) {
            println!("waiting for {ID}");
        }
        None
    });
    let request = match stage {
        Stage::Made => CreateOptions::from_pool("p"),
        Stage::Waiting => CreateOptions::from_template(NEVER),
    };
    let _sandbox = client.create(request.name(ID)).await.unwrap();
    println!("made {ID}");
    std::future::pending::<()>().await;
}

#[test]
fn a_signal_deletes_the_sandboxes_and_then_ends_the_process() {
    stop_when_it_prints(
        "made",
        Stage::Made,
        "a_signal_deletes_the_sandboxes_and_then_ends_the_process",
    );
}

#[test]
fn a_signal_deletes_a_sandbox_that_is_not_ready_yet() {
    stop_when_it_prints(
        "waiting for",
        Stage::Waiting,
        "a_signal_deletes_a_sandbox_that_is_not_ready_yet",
    );
}

fn stop_when_it_prints(line: &str, stage: Stage, test: &str) {
    if std::env::var_os(ROLE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        return runtime.block_on(be_stopped(stage));
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(ROLE, "child")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let expected = format!("{line} {ID}");
    lines.find(|line| line.contains(&expected)).unwrap();
    let signalled = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status();
    assert!(signalled.unwrap().success());
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(TERM), "{status:?}");
    let rest: Vec<_> = lines.collect();
    assert!(
        rest.iter()
            .any(|line| line.contains("deleting ") && line.ends_with(&format!("/{ID}"))),
        "{rest:?}"
    );
}
