//! Commands and files: against a scripted faulty router, and against the real runtime.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use sdk::{CallOptions, CreateOptions, EntryKind, ErrorKind, Options, RunOptions, Sandbox};
use support::http_server::{Runtime, ScriptedRouter, answer};
use support::{World, options};

const DONE: &str = r#"{"stdout":"out","stderr":"err","exit_code":3}"#;

async fn sandbox(world: &World, options: Options) -> Sandbox {
    let client = world.client(options);
    client.create(CreateOptions::from_pool("p")).await.unwrap()
}

#[tokio::test]
async fn a_request_names_its_sandbox() {
    let world = World::start().await;
    let router = ScriptedRouter::always(200, DONE).await;
    let mut options = options(&format!("{}/prefix/", router.url));
    options
        .headers
        .insert("authorization", "Bearer secret".parse().unwrap());
    let sandbox = sandbox(&world, options).await;
    let result = sandbox.commands().run("echo 'a b'").await.unwrap();
    assert_eq!(
        (
            result.stdout.as_str(),
            result.stderr.as_str(),
            result.exit_code
        ),
        ("out", "err", 3)
    );
    assert!(!result.is_success());

    let request = &router.received()[0];
    assert_eq!(
        (request.method.as_str(), request.target.as_str()),
        ("POST", "/prefix/execute")
    );
    assert_eq!(request.body, r#"{"command":"echo 'a b'"}"#);
    assert_eq!(
        request.header("x-sandbox-id"),
        sandbox.sandbox_name().unwrap()
    );
    assert_eq!(request.header("x-sandbox-namespace"), "default");
    assert_eq!(request.header("x-sandbox-port"), "8888");
    assert_eq!(request.header("content-type"), "application/json");
    assert_eq!(request.header("authorization"), "Bearer secret");
    assert_eq!(request.header("x-request-id").len(), 36);
    assert_eq!(request.header("x-sandbox-timeout"), "");
}

#[tokio::test]
async fn a_command_is_sent_once_by_default() {
    let world = World::start().await;
    let router = ScriptedRouter::start(|number, _| {
        if number % 3 == 0 {
            answer(200, DONE)
        } else {
            answer(503, "busy")
        }
    })
    .await;
    let sandbox = sandbox(&world, options(&router.url)).await;
    let error = sandbox.commands().run("x").await.unwrap_err();
    assert_eq!(error.http_status().unwrap(), 503);
    assert!(
        error
            .to_string()
            .ends_with("run: 503 Service Unavailable: busy"),
        "{error}"
    );
    assert_eq!(router.received().len(), 1);

    let twice: RunOptions = CallOptions::default().with_max_attempts(2).into();
    sandbox.commands().run_with("x", &twice).await.unwrap();
    let received = router.received();
    assert_eq!(received.len(), 3);
    assert_eq!(
        received[1].header("x-request-id"),
        received[2].header("x-request-id")
    );
    assert_ne!(
        received[0].header("x-request-id"),
        received[1].header("x-request-id")
    );
}

#[tokio::test]
async fn file_operations_are_tried_six_times() {
    let world = World::start().await;
    for status in [500, 502, 503, 504] {
        let router = ScriptedRouter::start(move |_, _| answer(status, "ill")).await;
        let sandbox = sandbox(&world, options(&router.url)).await;
        let error = sandbox.files().read("a").await.unwrap_err();
        assert!(
            matches!(
                error.kind(),
                ErrorKind::RetriesExhausted { attempts: 6, .. }
            ),
            "{error:?}"
        );
        assert_eq!(error.http_status().unwrap().as_u16(), status);
        assert_eq!(router.received().len(), 6);
    }
}

#[tokio::test]
async fn refusals_are_final() {
    let world = World::start().await;
    for status in [400, 403, 404, 413] {
        let router = ScriptedRouter::start(move |_, _| answer(status, r#"{"message":"no"}"#)).await;
        let sandbox = sandbox(&world, options(&router.url)).await;
        let error = sandbox.files().list("a").await.unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Http { .. }), "{error:?}");
        assert_eq!(router.received().len(), 1);
    }
}

#[tokio::test]
async fn every_attempt_sends_the_whole_upload() {
    let world = World::start().await;
    let router =
        ScriptedRouter::start(|number, _| answer(if number < 3 { 502 } else { 200 }, "{}")).await;
    let sandbox = sandbox(&world, options(&router.url)).await;
    sandbox.files().write("a.txt", "content").await.unwrap();
    let received = router.received();
    assert_eq!(received.len(), 3);
    assert_eq!(received[0].body, received[2].body);
    assert!(
        received[2]
            .header("content-type")
            .starts_with("multipart/form-data; boundary=")
    );
}

#[tokio::test]
async fn a_path_is_one_segment_of_the_url() {
    let world = World::start().await;
    let router = ScriptedRouter::always(200, "[]").await;
    let sandbox = sandbox(&world, options(&router.url)).await;
    sandbox.files().list("../a b/ü").await.unwrap();
    assert_eq!(router.received()[0].target, "/list/..%2Fa%20b%2F%C3%BC");
}

#[tokio::test]
async fn uploads_and_downloads_are_limited() {
    let world = World::start().await;
    let router = ScriptedRouter::start(|_, request| {
        // JSON may expand a stream sixfold, and there are two streams.
        let size = if request.target == "/execute" {
            1 << 20
        } else {
            11
        };
        answer(200, vec![b' '; size])
    })
    .await;
    let bounded = Options {
        max_download_size: 10,
        max_upload_size: 10,
        max_output_size: 1024,
        ..options(&router.url)
    };
    let sandbox = sandbox(&world, bounded).await;
    let error = sandbox.files().read("a").await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ResponseTooLarge { limit: 10, .. }),
        "{error:?}"
    );
    let error = sandbox.commands().run("yes").await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::ResponseTooLarge { .. }),
        "{error:?}"
    );

    let sent = router.received().len();
    let error = sandbox.files().write("a", [0; 11]).await.unwrap_err();
    assert!(
        matches!(
            error.kind(),
            ErrorKind::UploadTooLarge {
                size: 11,
                limit: 10
            }
        ),
        "{error:?}"
    );
    for name in ["a/b", "..", ""] {
        let error = sandbox.files().write(name, "x").await.unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::InvalidFileName { .. }),
            "{error:?}"
        );
    }
    assert_eq!(
        router.received().len(),
        sent,
        "refused before anything was sent"
    );
    sandbox.files().write("a", [0; 10]).await.unwrap();
}

#[tokio::test]
async fn timeouts_apply_to_attempts_and_to_calls() {
    let world = World::start().await;
    let router = ScriptedRouter::start(|number, _| {
        if number == 1 {
            Box::pin(std::future::pending())
        } else {
            answer(200, r#"{"exists":true}"#)
        }
    })
    .await;
    let short_timeout = Options {
        per_attempt_timeout: Duration::from_millis(500),
        ..options(&router.url)
    };
    let sandbox = sandbox(&world, short_timeout).await;
    assert!(
        sandbox.files().exists("a").await.unwrap(),
        "the second attempt gets the response"
    );

    let stuck = ScriptedRouter::start(|_, _| Box::pin(std::future::pending())).await;
    let sandbox = self::sandbox(&world, options(&stuck.url)).await;
    // Long enough for the request to arrive on a busy machine.
    let limit: RunOptions = CallOptions::timeout(Duration::from_millis(2_500)).into();
    let error = sandbox
        .commands()
        .run_with("sleep 100", &limit)
        .await
        .unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Timeout { .. }),
        "{error:?}"
    );
    assert_eq!(stuck.received()[0].header("x-sandbox-timeout"), "3");
}

#[tokio::test]
async fn entries_that_are_neither_file_nor_directory_are_left_out() {
    let world = World::start().await;
    let listing = r#"[{"name":"f","size":1,"type":"file","mod_time":1.5},{"name":"s","size":0,"type":"socket","mod_time":1},
                      {"name":"d","size":0,"type":"directory","mod_time":2}]"#;
    let router = ScriptedRouter::always(200, listing).await;
    let sandbox = sandbox(&world, options(&router.url)).await;
    let entries = sandbox.files().list("/").await.unwrap();
    let kinds: Vec<_> = entries
        .iter()
        .map(|entry| (entry.name.as_str(), entry.kind))
        .collect();
    assert_eq!(kinds, [("f", EntryKind::File), ("d", EntryKind::Directory)]);
}

#[tokio::test]
async fn an_invalid_response_is_reported() {
    let world = World::start().await;
    let router = ScriptedRouter::always(200, "<html>").await;
    let sandbox = sandbox(&world, options(&router.url)).await;
    let error = sandbox.commands().run("x").await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::InvalidResponse { .. }),
        "{error:?}"
    );
}

#[tokio::test]
async fn files_and_commands_work_in_a_real_runtime() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let sandbox = sandbox(&world, options(&runtime.url)).await;
    let files = sandbox.files();
    files.write("data.py", "x = 42").await.unwrap();
    let result = sandbox
        .commands()
        .run_code("import data; print(data.x, 'it''s')")
        .await
        .unwrap();
    assert_eq!(
        (result.stdout.as_str(), result.exit_code),
        ("42 its\n", 0),
        "{result:?}"
    );
    let result = sandbox
        .commands()
        .run_program("printf", &["%s|", "a b", "$HOME", ""])
        .await
        .unwrap();
    assert_eq!(result.stdout, "a b|$HOME||");
    let limited = RunOptions {
        time_limit: Some(Duration::from_millis(100)),
        ..RunOptions::default()
    };
    let result = sandbox
        .commands()
        .run_with("sleep 30", &limited)
        .await
        .unwrap();
    assert!(result.timed_out);

    // JSON writes a line end in two bytes: a response may be longer than the output.
    let lines = sandbox
        .commands()
        .run_code("print('\\n' * 9_000_000, end='')")
        .await
        .unwrap();
    assert_eq!((lines.stdout.len(), lines.truncated), (9_000_000, false));
    let long = sandbox
        .commands()
        .run_code("print('x' * 20_000_000)")
        .await
        .unwrap();
    assert_eq!((long.stdout.len(), long.truncated), (16 << 20, true));
    assert!(long.stderr.contains("Output truncated"), "{}", long.stderr);

    assert_eq!(files.read("data.py").await.unwrap(), "x = 42");
    files
        .write_path("deep/er/\"odd\" ü.txt", "x")
        .await
        .unwrap();
    assert!(files.exists("deep/er/\"odd\" ü.txt").await.unwrap());
    assert!(!files.exists("nothing").await.unwrap());
    let names: Vec<_> = files
        .list(".")
        .await
        .unwrap()
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    assert!(
        names.contains(&"data.py".to_owned()) && names.contains(&"deep".to_owned()),
        "{names:?}"
    );
    let error = files.read("nothing").await.unwrap_err();
    assert_eq!(error.http_status().unwrap(), 404);
    let error = files.read("../escape").await.unwrap_err();
    assert_eq!(error.http_status().unwrap(), 403);
}

#[tokio::test]
async fn files_are_inspected_renamed_and_deleted() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let sandbox = sandbox(&world, options(&runtime.url)).await;
    let files = sandbox.files();
    files.write_path("a/ü.txt", "12345").await.unwrap();
    let stat = files.stat("a/ü.txt").await.unwrap();
    assert_eq!(
        (stat.name.as_str(), stat.kind, stat.size, stat.mode & 0o600),
        ("ü.txt", EntryKind::File, 5, 0o600)
    );
    let age = sdk::Timestamp::now().duration_since(stat.modified);
    assert!(age.as_secs() < 600, "{age:?}");
    assert_eq!(files.stat("a").await.unwrap().kind, EntryKind::Directory);
    files.rename("a/ü.txt", "b/c & d?.txt").await.unwrap();
    assert_eq!(files.read("b/c & d?.txt").await.unwrap(), "12345");
    let status = |error: sdk::Error| error.http_status().unwrap().as_u16();
    assert_eq!(status(files.stat("a/ü.txt").await.unwrap_err()), 404);
    assert_eq!(status(files.rename("b", "../x").await.unwrap_err()), 403);
    assert_eq!(status(files.delete("b").await.unwrap_err()), 409);
    files.delete("b/c & d?.txt").await.unwrap();
    files.write_path("b/more", "x").await.unwrap();
    files.delete_recursively("b").await.unwrap();
    assert!(!files.exists("b").await.unwrap());
    assert_eq!(status(files.delete("b").await.unwrap_err()), 404);
}

#[tokio::test]
async fn a_client_counts_its_operations_and_their_failures() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let client = world.client(options(&runtime.url));
    let sandbox = client.create(CreateOptions::from_pool("p")).await.unwrap();
    sandbox.files().write("f", "x").await.unwrap();
    sandbox.files().read("f").await.unwrap();
    sandbox.files().read("missing").await.unwrap_err();
    let counted = client.metrics().operations();
    let counted: Vec<_> = counted
        .iter()
        .map(|found| (found.operation, found.requests, found.errors))
        .collect();
    assert_eq!(counted, [("read", 2, 1), ("upload", 1, 0)]);
    let text = client.metrics().render();
    let line = "sandbox_client_requests_total{operation=\"read\",status=\"failure\"} 1";
    assert!(text.lines().any(|found| found == line), "{text}");
}

#[tokio::test]
async fn large_files_are_streamed() {
    let world = World::start().await;
    let runtime = Runtime::start().await;
    let bounded = Options {
        max_upload_size: 3 << 20,
        ..options(&runtime.url)
    };
    let sandbox = sandbox(&world, bounded).await;
    let piece = Bytes::from(vec![7; 1 << 20]);
    let content = |count| futures::stream::iter(vec![piece.clone(); count]).map(Ok);
    let files = sandbox.files();
    files
        .write_stream("big", content(3), &CallOptions::default())
        .await
        .unwrap();
    let mut stream = files.read_stream("big").await.unwrap();
    assert_eq!(stream.size(), Some(3 << 20));
    let mut read = 0;
    while let Some(piece) = stream.next().await.unwrap() {
        assert!(piece.iter().all(|byte| *byte == 7));
        read += piece.len();
    }
    assert_eq!(read, 3 << 20);
    files
        .write_stream("too-big", content(4), &CallOptions::default())
        .await
        .unwrap_err();
    assert!(!files.exists("too-big").await.unwrap());
}
