//! What happens to sandboxes when the process that made them is told to stop. The process is this test program, run again.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use sdk::CreateOptions;
use support::{World, is_delete, options};

const ROLE: &str = "SDK_TEST_ROLE";
const TERM: i32 = 15;

/// Makes a sandbox, says so, and waits for the signal.
async fn be_stopped() {
    let world = World::start().await;
    let client = world.client(options("http://127.0.0.1:9"));
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    let id = sandbox.id().to_owned();
    world.inject(move |request| {
        if is_delete(request) {
            println!("deleting {} of {id}", request.uri().path().ends_with(&id));
        }
        None
    });
    let _cleanup = client.enable_auto_cleanup().unwrap();
    println!("made {}", sandbox.id());
    std::future::pending::<()>().await;
}

#[test]
fn a_signal_ends_the_sandboxes_and_then_the_process() {
    if std::env::var_os(ROLE).is_some() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .unwrap();
        return runtime.block_on(be_stopped());
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_signal_ends_the_sandboxes_and_then_the_process",
            "--nocapture",
        ])
        .env(ROLE, "child")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let made = lines
        .find(|line| line.contains("made sandbox-claim-"))
        .unwrap();
    let id = made.rsplit(' ').next().unwrap().to_owned();
    let signalled = Command::new("kill")
        .args(["-TERM", &child.id().to_string()])
        .status();
    assert!(signalled.unwrap().success());
    let status = child.wait().unwrap();
    assert_eq!(status.signal(), Some(TERM), "{status:?}");
    let said: Vec<_> = lines.collect();
    assert!(
        said.iter()
            .any(|line| line.contains(&format!("deleting true of {id}"))),
        "{said:?}"
    );
}
