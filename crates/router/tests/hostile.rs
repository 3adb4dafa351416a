//! Clients and sandboxes that mean harm, or know no better: each gets a clear answer, and nothing is left behind.
#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on fails where it stands"
)]

mod support;

use std::time::Duration;

use support::{
    Running, body, echo, open_descriptors, read_all, read_until, status, upstream, wait_for,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn requests_that_smuggle_are_refused_and_nothing_is_forwarded() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let seen = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let noting = std::sync::Arc::clone(&seen);
    let port = upstream(move |mut stream| {
        let noting = std::sync::Arc::clone(&noting);
        async move {
            let mut pending = Vec::new();
            while let Some(request) = support::next_request(&mut stream, &mut pending).await {
                noting
                    .lock()
                    .unwrap()
                    .push(String::from_utf8_lossy(&request).into_owned());
                let _ = stream
                    .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                    .await;
            }
        }
    })
    .await;
    let route = format!("X-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n");
    let smuggled = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";
    for head in [
        format!(
            "POST / HTTP/1.1\r\nHost: x\r\n{route}Content-Length: 5\r\nContent-Length: 44\r\n\r\nhello{smuggled}"
        ),
        format!("POST / HTTP/1.1\r\nHost: x\r\n{route}Content-Length: +5\r\n\r\nhello{smuggled}"),
        format!(
            "POST / HTTP/1.1\r\nHost: x\r\n{route}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{smuggled}"
        ),
        format!(
            "POST / HTTP/1.1\r\nHost: x\r\n{route}Transfer-Encoding: chunked\r\n\r\nG\r\n{smuggled}"
        ),
        format!(
            "POST / HTTP/1.1\r\nHost: x\r\n{route}Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{smuggled}"
        ),
        format!("GET / HTTP/1.1\r\nHost: x\r\n{route}Bad Name: x\r\n\r\n{smuggled}"),
        format!("GET / HTTP/1.1\r\nHost: x\r\n{route}X-Split: a\rb\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: x\r\n {route}\r\n"),
        "CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: 169.254.169.254:80\r\n\r\n".to_owned(),
        "\0\0\0\0\r\n\r\n".to_owned(),
    ] {
        let mut stream = running.connect().await;
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.shutdown().await.unwrap();
        let answer = String::from_utf8_lossy(&read_all(&mut stream).await).into_owned();
        assert!(!answer.contains("HTTP/1.1 200"), "{head:?} got {answer:?}");
    }
    // A body with both lengths is chunked by the standard; what follows the chunks must not become a request of its own.
    let both = format!(
        "POST / HTTP/1.1\r\nHost: x\r\n{route}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"
    );
    let mut stream = running.connect().await;
    stream.write_all(both.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    read_all(&mut stream).await;
    let seen = seen.lock().unwrap().clone();
    assert!(
        !seen.iter().any(|request| request.contains("/smuggled")),
        "{seen:?}"
    );
    running.stop().await;
}

#[tokio::test]
async fn a_sandbox_that_answers_garbage_resets_or_hangs_up_is_a_bad_gateway() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    for answer in [
        &b"SSH-2.0-OpenSSH_9.2\r\n"[..],
        b"HTTP/1.1 999999 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"",
        b"HTTP/1.1 200",
    ] {
        let port = upstream(move |mut stream| async move {
            read_until(&mut stream, "\r\n\r\n").await;
            let _ = stream.write_all(answer).await;
        })
        .await;
        let got = running.get(port, "/", "").await;
        assert_eq!(status(&got), 502, "{answer:?} gave {got:?}");
        assert!(body(&got).contains("abc"));
    }
    let huge = upstream(|mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n").await;
        while stream
            .write_all(b"X-Filler: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n")
            .await
            .is_ok()
        {}
    })
    .await;
    assert_eq!(status(&running.get(huge, "/", "").await), 502);
    running.stop().await;
}

#[tokio::test]
async fn an_answer_cut_short_is_cut_short_for_the_client_too() {
    let running = Running::start(|config| config.proxy_timeout = Duration::from_millis(300)).await;
    running.know("abc");
    let cut = upstream(|mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
            .await;
    })
    .await;
    assert_eq!(body(&running.get(cut, "/", "").await), "half");
    let stalling = upstream(|mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        let _ = stream
            .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
            .await;
        let mut sink = Vec::new();
        let _ = stream.read_to_end(&mut sink).await;
    })
    .await;
    assert_eq!(body(&running.get(stalling, "/", "").await), "half");
    running.stop().await;
}

#[tokio::test]
async fn a_client_that_never_finishes_its_head_is_hung_up_on() {
    let running = Running::start(|config| config.header_timeout = Duration::from_millis(200)).await;
    let mut stream = running.connect().await;
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        .await
        .unwrap();
    read_all(&mut stream).await;
    wait_for("the connection to be let go", || {
        running.router.metrics().open_connections() == 0
    })
    .await;
    running.stop().await;
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_request_along() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let (gone, mut left) = tokio::sync::mpsc::channel(1);
    let port = upstream(move |mut stream| {
        let gone = gone.clone();
        async move {
            let mut sink = Vec::new();
            let _ = stream.read_to_end(&mut sink).await;
            gone.send(()).await.unwrap();
        }
    })
    .await;
    let mut stream = running.connect().await;
    let request =
        format!("GET / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    wait_for("the request", || {
        running.router.metrics().active_requests() == 1
    })
    .await;
    drop(stream);
    tokio::time::timeout(support::DEADLINE, left.recv())
        .await
        .expect("the sandbox's connection ends")
        .unwrap();
    wait_for("the request to end", || {
        running.router.metrics().active_requests() == 0
    })
    .await;
    running.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_idle_connections_cost_little_and_leave_nothing() {
    // Both ends are in this process; the limit on descriptors decides how many fit.
    let limit = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limit
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .unwrap();
    let most: usize = line
        .split_whitespace()
        .nth(3)
        .unwrap()
        .parse()
        .unwrap_or(usize::MAX);
    let count = (most.saturating_sub(500) / 2).min(10_000);
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let before = open_descriptors();
    let resident_before = resident_kib();
    let mut idle = Vec::with_capacity(count);
    for _ in 0..count {
        idle.push(running.connect().await);
    }
    wait_for("all of them", || {
        running.router.metrics().open_connections() == i64::try_from(count).unwrap()
    })
    .await;
    let per_connection = resident_kib().saturating_sub(resident_before) * 1024 / count as u64;
    assert!(
        per_connection < 32 * 1024,
        "{per_connection} bytes a connection, both ends"
    );
    assert_eq!(
        status(&running.get(echo().await, "/", "").await),
        200,
        "others are served meanwhile"
    );
    drop(idle);
    wait_for("all to go", || {
        running.router.metrics().open_connections() == 0
    })
    .await;
    wait_for("descriptors to be closed", || {
        open_descriptors() <= before + 8
    })
    .await;
    running.stop().await;
}

#[tokio::test]
async fn nothing_leaks_over_a_hundred_failures() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = upstream(|stream| async move { drop(stream) }).await;
    running.get(port, "/", "").await;
    let before = open_descriptors();
    for _ in 0..100 {
        assert_eq!(status(&running.get(port, "/", "").await), 502);
    }
    wait_for("descriptors to be closed", || {
        open_descriptors() <= before + 2
    })
    .await;
    assert_eq!(running.router.metrics().active_requests(), 0);
    running.stop().await;
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
