//! Interactive processes in the real runtime.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use sdk::process::{Event, Start};
use sdk::{CreateOptions, ErrorKind, Sandbox};
use support::http_server::{Runtime, ScriptedRouter};
use support::{World, options};

async fn sandbox(world: &World, url: &str) -> Sandbox {
    let client = world.client(options(url));
    client.create(CreateOptions::from_pool("p")).await.unwrap()
}

#[tokio::test]
async fn stdout_stderr_and_exit_are_separate_and_in_order() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let sandbox = sandbox(&world, &runtime.url).await;
    let start = Start {
        cwd: Some("/".into()),
        env: [("WORD".to_owned(), "out".to_owned())].into(),
        ..Start::command("echo $WORD; pwd; echo err >&2; exit 7")
    };
    let process = sandbox.process().start(start).await.unwrap();
    assert!(process.pid().is_some());
    let output = process.output(1000).await.unwrap();
    assert_eq!(output.stdout, b"out\n/\n");
    assert_eq!(output.stderr, b"err\n");
    assert_eq!(output.exit.exit_code, 7);
}

#[tokio::test]
async fn a_process_reads_its_input_while_it_runs() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let sandbox = sandbox(&world, &runtime.url).await;
    let mut process = sandbox.process().start(Start::argv(["cat"])).await.unwrap();
    process.control().write("first\n").await.unwrap();
    assert_eq!(
        process.next().await.unwrap(),
        Some(Event::Stdout("first\n".into()))
    );

    let large = vec![b'x'; 300_000];
    let control = process.control().clone();
    let expected = large.len();
    tokio::spawn(async move {
        control.write(large).await.unwrap();
        control.close_stdin().await.unwrap();
    });
    let output = process.output(1_000_000).await.unwrap();
    assert_eq!(output.stdout.len(), expected);
    assert_eq!(output.exit.exit_code, 0);
}

#[tokio::test]
async fn a_signal_reaches_the_process() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let sandbox = sandbox(&world, &runtime.url).await;
    let start =
        Start::command("trap 'echo caught; exit 5' INT; echo ready; while :; do sleep 0.02; done");
    let mut process = sandbox.process().start(start).await.unwrap();
    assert_eq!(
        process.next().await.unwrap(),
        Some(Event::Stdout("ready\n".into()))
    );
    process.control().signal("SIGINT").await.unwrap();
    assert_eq!(
        process.next().await.unwrap(),
        Some(Event::Stdout("caught\n".into()))
    );
    assert_eq!(process.wait().await.unwrap().exit_code, 5);

    let process = sandbox
        .process()
        .start(Start::argv(["sleep", "100"]))
        .await
        .unwrap();
    process.control().kill().await.unwrap();
    assert_eq!(
        process.wait().await.unwrap().signal.as_deref(),
        Some("SIGKILL")
    );
}

#[tokio::test]
async fn a_command_that_cannot_start_is_an_exit_with_the_reason() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let sandbox = sandbox(&world, &runtime.url).await;
    let mut process = sandbox
        .process()
        .start(Start::argv(["no-such-program"]))
        .await
        .unwrap();
    assert_eq!(process.pid(), None);
    let Some(Event::Exit(exit)) = process.next().await.unwrap() else {
        panic!("an exit is the only event");
    };
    assert_eq!(exit.exit_code, 127);
    assert!(exit.error.is_some());
    assert_eq!(process.next().await.unwrap(), None);
    testkit::eventually("writing to be refused", async || {
        let error = process.control().write("x").await.err()?;
        assert!(matches!(error.kind(), ErrorKind::ProcessEnded), "{error:?}");
        Some(())
    })
    .await;
}

#[tokio::test]
async fn dropping_a_process_ends_it() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let sandbox = sandbox(&world, &runtime.url).await;
    let process = sandbox
        .process()
        .start(Start::argv(["sleep", "1000"]))
        .await
        .unwrap();
    let entry = format!("/proc/{}", process.pid().unwrap());
    assert!(std::path::Path::new(&entry).exists());
    drop(process);
    testkit::eventually("the process to be gone", async || {
        (!std::path::Path::new(&entry).exists()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_time_limit_kills_the_process() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let sandbox = sandbox(&world, &runtime.url).await;
    let start = Start {
        time_limit: Some(Duration::from_millis(100)),
        ..Start::argv(["sleep", "100"])
    };
    let output = sandbox.process().output(start, 100).await.unwrap();
    assert!(output.exit.timed_out);
    assert_eq!(output.exit.exit_code, 124);
}

#[tokio::test]
async fn a_router_without_the_endpoint_is_an_error_with_its_response() {
    let world = World::start().await;
    let router = ScriptedRouter::always(404, r#"{"detail":"Not Found"}"#).await;
    let sandbox = sandbox(&world, &router.url).await;
    let error = sandbox
        .process()
        .start(Start::argv(["true"]))
        .await
        .unwrap_err();
    assert_eq!(error.http_status().unwrap(), 404);
    let request = &router.received()[0];
    assert_eq!(request.target, "/v1/exec");
    assert_eq!(
        request.header("x-sandbox-id"),
        sandbox.sandbox_name().unwrap()
    );
    assert_eq!(request.header("upgrade"), "websocket");
}
