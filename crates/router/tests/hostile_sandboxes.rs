//! Malicious and faulty sandboxes: their clients get a clear error in time, other requests are not affected, and no connection or
//! task is left behind.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use support::{
    Holdings, Running, answer, body, grpc, read_all, read_until, recording, silent, status,
    upstream,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The idle timeout of a sandbox in tests where others must respond in time: usually longer than a busy machine delays this process.
const IDLE_TIMEOUT: Duration = Duration::from_secs(2);

/// Closes with a reset, as the kernel may for a crashed process.
fn reset(stream: &TcpStream) {
    stream.set_zero_linger().unwrap();
}

/// A sandbox that reads a request's head, sends `answer`, and closes the connection.
async fn respond(answer: &'static [u8]) -> u16 {
    upstream(move |mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        let _ = stream.write_all(answer).await;
    })
    .await
}

/// A sandbox that reads a request's head, sends `answer`, and then nothing until the router closes the connection.
async fn respond_and_stall(answer: &'static [u8]) -> u16 {
    upstream(move |mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        let _ = stream.write_all(answer).await;
        let mut sink = Vec::new();
        let _ = stream.read_to_end(&mut sink).await;
    })
    .await
}

#[tokio::test]
async fn a_garbage_response_a_reset_or_a_closed_connection_is_a_bad_gateway() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    for answer in [
        &b"SSH-2.0-OpenSSH_9.2\r\n"[..],
        b"HTTP/1.1 999999 What\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nBad Name: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX-Split: a\rSet-Cookie: b\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: surprise\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"",
        b"HTTP/1.1 200",
    ] {
        let port = respond(answer).await;
        let before = Holdings::now();
        let got = running.get(port, "/", "").await;
        assert_eq!(status(&got), 502, "{answer:?} gave {got:?}");
        assert!(body(&got).contains("\"detail\"") && body(&got).contains("abc"));
        before.are_all(&running).await;
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
    let resetting = upstream(|mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        reset(&stream);
    })
    .await;
    for port in [huge, resetting] {
        let before = Holdings::now();
        assert_eq!(status(&running.get(port, "/", "").await), 502);
        before.are_all(&running).await;
    }
    running.stop().await;
}

#[tokio::test]
async fn a_sandbox_that_stalls_is_a_timeout() {
    let running = Running::start(|config| config.proxy_timeout = Duration::from_millis(200)).await;
    running.know("abc");
    for beginning in [&b""[..], b"HTTP/1.1 200 OK\r\nX-Half: "] {
        let port = respond_and_stall(beginning).await;
        let before = Holdings::now();
        assert_eq!(status(&running.get(port, "/", "").await), 504);
        before.are_all(&running).await;
    }
    // It accepts the connection and reads nothing, so that the sandbox is at fault and not the client, which would send.
    let (refuse, refusing) = tokio::sync::watch::channel(false);
    let deaf = upstream(move |stream| {
        let mut refusing = refusing.clone();
        async move {
            let _ = refusing.wait_for(|over| *over).await;
            drop(stream);
        }
    })
    .await;
    let before = Holdings::now();
    let mut client = running.connect().await;
    let length = 64 * 1024 * 1024;
    let head = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {deaf}\r\nContent-Length: {length}\r\n\r\n"
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let (mut reader, mut writer) = client.into_split();
    let sending = async move {
        let piece = vec![b'x'; 64 * 1024];
        while writer.write_all(&piece).await.is_ok() {}
        // After the response the router reads no more; the response is still to be read.
        std::future::pending::<()>().await;
    };
    let mut answer = Vec::new();
    let reading = async {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = reader.read(&mut buffer).await {
            answer.extend_from_slice(&buffer[..count]);
            if answer.ends_with(b"}") {
                return;
            }
        }
    };
    tokio::select! {
        () = sending => unreachable!("it sends until the connection closes"),
        answered = tokio::time::timeout(support::DEADLINE, reading) => answered.expect("a response arrives"),
    }
    assert_eq!(status(&String::from_utf8_lossy(&answer)), 504);
    refuse.send(true).unwrap();
    drop(reader);
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn informational_responses_do_not_extend_the_timeout() {
    let running = Running::start(|config| config.proxy_timeout = Duration::from_millis(300)).await;
    running.know("abc");
    let port = upstream(|mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        while stream
            .write_all(b"HTTP/1.1 103 Early Hints\r\nX-Soon: very\r\n\r\n")
            .await
            .is_ok()
        {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    let before = Holdings::now();
    assert_eq!(status(&running.get(port, "/", "").await), 504);
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn a_truncated_response_is_truncated_for_the_client() {
    let running = Running::start(|config| config.proxy_timeout = IDLE_TIMEOUT).await;
    running.know("abc");
    let half = b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf";
    let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n";
    let (cut, stalling) = (respond(half).await, respond_and_stall(half).await);
    for port in [cut, stalling] {
        let before = Holdings::now();
        assert_eq!(body(&running.get(port, "/", "").await), "half");
        before.are_all(&running).await;
    }
    // The client has read the first part before the reset, so that the reset cannot overtake it.
    let (is_read, was_read) = tokio::sync::watch::channel(false);
    let resetting = upstream(move |mut stream| {
        let mut was_read = was_read.clone();
        async move {
            read_until(&mut stream, "\r\n\r\n").await;
            let _ = stream.write_all(half).await;
            let _ = was_read.wait_for(|is_read| *is_read).await;
            reset(&stream);
        }
    })
    .await;
    let before = Holdings::now();
    let mut client = running.connect().await;
    let request = format!(
        "GET / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {resetting}\r\n\r\n"
    );
    client.write_all(request.as_bytes()).await.unwrap();
    assert_eq!(body(&read_until(&mut client, "half").await), "half");
    is_read.send(true).unwrap();
    assert_eq!(read_all(&mut client).await, b"");
    drop(client);
    before.are_all(&running).await;
    for port in [respond(chunked).await, respond_and_stall(chunked).await] {
        let before = Holdings::now();
        let answer = running.get(port, "/", "").await;
        assert!(
            answer.contains("half") && !answer.ends_with("0\r\n\r\n"),
            "a body cut short must not look whole: {answer:?}"
        );
        before.are_all(&running).await;
    }
    running.stop().await;
}

/// Bytes that a sandbox sends after its response must not become the response to the next request (response splitting).
#[tokio::test]
async fn an_unsolicited_response_reaches_no_client() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = respond_and_stall(
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfirstHTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\npoisoned",
    )
    .await;
    let before = Holdings::now();
    for _ in 0..5 {
        assert_eq!(body(&running.get(port, "/", "").await), "first");
    }
    before.are_all(&running).await;
    running.stop().await;
}

/// A sandbox cannot set headers for the connection between the router and the client.
#[tokio::test]
async fn hop_by_hop_headers_of_a_response_are_not_forwarded() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = respond(
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: keep-alive, X-Private\r\nX-Private: 1\r\nKeep-Alive: timeout=1\r\nProxy-Authenticate: Basic\r\nUpgrade: h2c\r\nX-Public: 2\r\n\r\nok",
    )
    .await;
    let answer = running.get(port, "/", "").await.to_ascii_lowercase();
    assert!(answer.contains("x-public: 2"), "{answer}");
    for gone in ["x-private", "keep-alive", "proxy-authenticate", "upgrade"] {
        assert!(!answer.contains(gone), "{gone} in {answer}");
    }
    running.stop().await;
}

#[tokio::test]
async fn one_stuck_sandbox_does_not_delay_another() {
    let running = Running::start(|config| config.proxy_timeout = support::DEADLINE).await;
    running.know("abc");
    let stalling = respond_and_stall(b"").await;
    let (healthy, _) = recording().await;
    let before = Holdings::now();
    let mut stuck = Vec::new();
    for _ in 0..100 {
        let mut stream = running.connect().await;
        let request = format!(
            "GET / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {stalling}\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stuck.push(stream);
    }
    support::wait_for("all requests to be stuck", || {
        running.router.metrics().active_requests() == 100
    })
    .await;
    assert_eq!(status(&running.get(healthy, "/", "").await), 200);
    drop(stuck);
    running.move_away("abc");
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn a_hundred_failures_leak_nothing() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = upstream(|stream| async move { drop(stream) }).await;
    running.get(port, "/", "").await;
    let before = Holdings::now();
    for _ in 0..100 {
        assert_eq!(status(&running.get(port, "/", "").await), 502);
    }
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn a_slow_client_slows_the_sandbox_and_fills_no_memory() {
    const LENGTH: u64 = 256 * 1024 * 1024;
    let running = Running::start(|config| config.proxy_timeout = IDLE_TIMEOUT).await;
    running.know("abc");
    let written = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counting = std::sync::Arc::clone(&written);
    let port = upstream(move |mut stream| {
        let counting = std::sync::Arc::clone(&counting);
        async move {
            read_until(&mut stream, "\r\n\r\n").await;
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LENGTH}\r\n\r\n");
            let _ = stream.write_all(head.as_bytes()).await;
            let piece = vec![b'x'; 64 * 1024];
            while stream.write_all(&piece).await.is_ok() {
                counting.fetch_add(piece.len() as u64, std::sync::atomic::Ordering::Relaxed);
            }
        }
    })
    .await;
    let before = Holdings::now();
    let mut client = running.connect().await;
    let request =
        format!("GET / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    read_until(&mut client, "\r\n\r\n").await;
    // Longer than the idle timeout: the client does not read, so the response must continue afterwards.
    tokio::time::sleep(IDLE_TIMEOUT * 3 / 2).await;
    let held = written.load(std::sync::atomic::Ordering::Relaxed);
    assert!(held < LENGTH / 4, "{held} bytes were read from the sandbox");
    let mut buffer = vec![0; 1024 * 1024];
    let mut read = 0;
    while read < LENGTH / 2 {
        let count = client.read(&mut buffer).await.unwrap();
        assert!(count > 0, "the response ended after {read} bytes");
        read += count as u64;
    }
    drop(client);
    running.move_away("abc");
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn a_sandbox_that_closes_during_an_upload_is_a_bad_gateway() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = upstream(|mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        reset(&stream);
    })
    .await;
    let before = Holdings::now();
    let mut client = running.connect().await;
    let head = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\nContent-Length: 10\r\n\r\nhalf"
    );
    client.write_all(head.as_bytes()).await.unwrap();
    let answer = String::from_utf8_lossy(&read_all(&mut client).await).into_owned();
    assert_eq!(status(&answer), 502, "{answer}");
    drop(client);
    before.are_all(&running).await;
    running.stop().await;
}

/// What a sandbox does with a connection after it has read a request.
#[derive(Clone, Copy, Debug)]
enum Manner {
    HangsUp,
    Resets,
}

#[tokio::test]
async fn a_request_that_the_sandbox_read_is_not_sent_again() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    for manner in [Manner::HangsUp, Manner::Resets] {
        let posts = Arc::new(AtomicUsize::new(0));
        let counting = Arc::clone(&posts);
        let port = upstream(move |mut stream| {
            let posts = Arc::clone(&counting);
            async move {
                let mut pending = Vec::new();
                while let Some(request) = support::next_request(&mut stream, &mut pending).await {
                    if request.starts_with(b"POST") {
                        posts.fetch_add(1, Ordering::SeqCst);
                        if matches!(manner, Manner::Resets) {
                            reset(&stream);
                        }
                        return;
                    }
                    answer(&mut stream, "ok").await.unwrap();
                }
            }
        })
        .await;
        let reused = || {
            let text = running.router.render_metrics();
            let line = text
                .lines()
                .find(|line| line.starts_with("agent_sandbox_router_reused_connections_total "));
            line.unwrap()
                .rsplit(' ')
                .next()
                .unwrap()
                .parse::<u64>()
                .unwrap()
        };
        let before = Holdings::now();
        let mut client = running.connect().await;
        let mut ask = async |method: &str, body: &str| {
            let request = format!(
                "{method} / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            client.write_all(request.as_bytes()).await.unwrap();
            let end = if method == "POST" { "}" } else { "ok" };
            status(&read_until(&mut client, end).await)
        };
        assert_eq!(ask("GET", "").await, 200);
        let reused_before = reused();
        assert_eq!(ask("GET", "").await, 200);
        assert_eq!(reused(), reused_before + 1, "the connection is reused");
        assert_eq!(ask("POST", "pay 10").await, 502, "{manner:?}");
        assert_eq!(ask("GET", "").await, 200, "other requests are not delayed");
        assert_eq!(posts.load(Ordering::SeqCst), 1, "{manner:?}");
        drop(client);
        running.move_away("abc");
        before.are_all(&running).await;
        running.know("abc");
    }
    running.stop().await;
}

#[tokio::test]
async fn a_stalled_or_broken_upgrade_is_reported_and_leaks_nothing() {
    let running = Running::start(|config| config.proxy_timeout = IDLE_TIMEOUT).await;
    running.know("abc");
    let resetting = upstream(|mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        reset(&stream);
    })
    .await;
    let upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n";
    for (port, expected) in [
        (respond_and_stall(b"").await, 504),
        (
            respond_and_stall(b"HTTP/1.1 101 Switching Proto").await,
            504,
        ),
        (respond(b"").await, 502),
        (resetting, 502),
    ] {
        let before = Holdings::now();
        let answer = running.get(port, "/", upgrade).await;
        assert_eq!(status(&answer), expected, "{answer}");
        before.are_all(&running).await;
    }
    // It refuses, and stops sending in the middle of the response.
    let refusing =
        respond_and_stall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 10\r\n\r\nhalf").await;
    let before = Holdings::now();
    let answer = running.get(refusing, "/", upgrade).await;
    assert_eq!((status(&answer), body(&answer)), (403, "half"));
    before.are_all(&running).await;
    // It agrees, and closes the connection.
    let agreeing = upstream(|mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        let agreed = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
        let _ = stream.write_all(agreed).await;
        read_until(&mut stream, "break off").await;
        reset(&stream);
    })
    .await;
    let before = Holdings::now();
    let mut client = running.connect().await;
    let request = format!(
        "GET / HTTP/1.1\r\nHost: x\r\n{upgrade}X-Sandbox-ID: abc\r\nX-Sandbox-Port: {agreeing}\r\n\r\n"
    );
    client.write_all(request.as_bytes()).await.unwrap();
    let agreed = read_until(&mut client, "\r\n\r\n").await;
    assert_eq!(status(&agreed), 101, "{agreed}");
    client.write_all(b"break off").await.unwrap();
    assert_eq!(read_all(&mut client).await, b"");
    drop(client);
    before.are_all(&running).await;
    running.stop().await;
}

/// A sandbox that begins a response to each gRPC call and then sends nothing.
async fn grpc_that_stalls() -> u16 {
    grpc(|_| async {
        let half = Ok(Frame::data(Bytes::from_static(b"half")));
        futures::stream::iter([half]).chain(futures::stream::pending())
    })
    .await
}

#[tokio::test]
async fn a_stalled_or_broken_grpc_call_ends() {
    let running = Running::start(|config| config.proxy_timeout = IDLE_TIMEOUT).await;
    running.know("abc");
    let silent = silent().await;
    let resetting = upstream(|mut stream| async move {
        let mut preface = [0; 24];
        let _ = stream.read_exact(&mut preface).await;
        reset(&stream);
    })
    .await;
    let stalling = grpc_that_stalls().await;
    let before = Holdings::now();
    let stream = running.connect().await;
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    let connection = tokio::spawn(connection);
    let call = |port: u16| {
        Request::builder()
            .method("POST")
            .uri("http://public.example/process.v1.ProcessService/Start")
            .header("content-type", "application/grpc")
            .header("x-sandbox-id", "abc")
            .header("x-sandbox-port", port)
            .body(Full::new(Bytes::from_static(b"\0\0\0\0\0")))
            .unwrap()
    };
    for (port, expected) in [(silent, 504), (resetting, 502)] {
        let response = sender.send_request(call(port)).await.unwrap();
        assert_eq!(response.status(), expected);
    }
    let response = sender.send_request(call(stalling)).await.unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(first, "half");
    let end = tokio::time::timeout(support::DEADLINE, body.frame())
        .await
        .expect("the response ends");
    assert!(
        end.unwrap().is_err(),
        "a truncated response must not look complete"
    );
    drop((body, sender));
    connection.abort();
    running.move_away("abc");
    before.are_all(&running).await;
    running.stop().await;
}
