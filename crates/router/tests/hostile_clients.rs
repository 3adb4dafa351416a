//! Malicious and faulty clients: each gets a clear error, and leaves no connection or task behind.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use support::{
    Holdings, Running, body, echo, own_address, read_all, read_until, recording, silent, status,
    upstream, wait_for,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Sends the client's bytes, and reads the router's response until it closes the connection.
async fn send(running: &Running, bytes: &[u8]) -> String {
    let mut stream = running.connect().await;
    // A router that refuses early may close before everything is sent.
    let _ = stream.write_all(bytes).await;
    String::from_utf8_lossy(&read_all(&mut stream).await).into_owned()
}

#[tokio::test]
async fn request_smuggling_is_refused_and_nothing_is_forwarded() {
    let running = Running::start(|config| {
        config.header_timeout = Duration::from_millis(100);
        config.proxy_timeout = Duration::from_millis(100);
    })
    .await;
    running.know("abc");
    let (port, seen) = recording().await;
    let route = format!("Host: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n");
    let smuggled = format!("GET /smuggled HTTP/1.1\r\n{route}\r\n");
    let begin = format!("POST / HTTP/1.1\r\n{route}");
    for head in [
        format!("{begin}Content-Length: 5\r\nContent-Length: 44\r\n\r\nhello{smuggled}"),
        format!("{begin}Content-Length: 5, 44\r\n\r\nhello{smuggled}"),
        format!("{begin}Content-Length: +5\r\n\r\nhello{smuggled}"),
        format!("{begin}Content-Length: -1\r\n\r\n{smuggled}"),
        format!("{begin}Content-Length: 0x5\r\n\r\nhello{smuggled}"),
        format!("{begin}Content-Length : 5\r\n\r\nhello{smuggled}"),
        format!("{begin}Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("{begin}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("{begin}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("{begin}Transfer-Encoding: chunked\r\n\r\nG\r\n{smuggled}"),
        format!("{begin}Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{smuggled}"),
        format!("{begin}Transfer-Encoding: chunked\r\n\r\n2\r\nabX\r\n{smuggled}"),
        format!("POST / HTTP/1.0\r\n{route}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{smuggled}"),
        format!("GET / HTTP/1.1\r\n{route}Bad Name: x\r\n\r\n{smuggled}"),
        format!("GET / HTTP/1.1\r\nHost: x\r\n {route}\r\n{smuggled}"),
        format!("GET  / HTTP/1.1\r\n{route}\r\n{smuggled}"),
        format!("GET / HTTP/9.9\r\n{route}\r\n{smuggled}"),
        "CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: 169.254.169.254:80\r\n\r\n".to_owned(),
        "\0\0\0\0\r\n\r\n".to_owned(),
    ] {
        let answer = send(&running, head.as_bytes()).await;
        assert!(!answer.contains("HTTP/1.1 200"), "{head:?} got {answer:?}");
    }
    // A body with both lengths is chunked by the standard; the bytes after the chunks must not become a request.
    for both in [
        "Content-Length: 3\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 3",
    ] {
        send(
            &running,
            format!("{begin}{both}\r\n\r\n0\r\n\r\n{smuggled}").as_bytes(),
        )
        .await;
    }
    let smuggled_in = |request: &String| request.contains("/smuggled");
    assert!(!seen.lock().unwrap().iter().any(smuggled_in), "{seen:?}");
    // The same bytes after a valid request are a valid request, if they arrive in time.
    let in_order = format!("{begin}Content-Length: 5\r\n\r\nhello{smuggled}");
    let deadline = tokio::time::Instant::now() + support::DEADLINE;
    while !seen.lock().unwrap().iter().any(smuggled_in) {
        assert!(tokio::time::Instant::now() < deadline, "{seen:?}");
        send(&running, in_order.as_bytes()).await;
    }
    running.stop().await;
}

#[tokio::test]
async fn connect_requests_are_refused() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let (port, seen) = recording().await;
    let answer = running
        .raw(format!(
            "CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n\r\n"
        ))
        .await;
    assert_eq!(status(&answer), 405, "{answer}");
    assert_eq!(seen.lock().unwrap().len(), 0);
    running.stop().await;
}

#[tokio::test]
async fn line_ends_within_a_header_name_no_sandbox() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let (port, seen) = recording().await;
    let port_line = format!("Connection: close\r\nX-Sandbox-Port: {port}\r\n");
    for head in [
        // A bare carriage return, a continuation line, a NUL.
        format!("GET / HTTP/1.1\r\nHost: x\r\n{port_line}X-Split: a\rX-Sandbox-ID: abc\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: x\r\n{port_line}X-Split: a\r\n X-Sandbox-ID: abc\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: x\r\n{port_line}X-Sandbox-ID: abc\0\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: x\r\n{port_line}X-Sandbox-ID: abc%0d%0aX-A: b\r\n\r\n"),
        // A bare line feed ends a line, so this names two sandboxes.
        format!(
            "GET / HTTP/1.1\r\nHost: x\r\n{port_line}X-Sandbox-ID: other\nX-Sandbox-ID: abc\r\n\r\n"
        ),
    ] {
        let answer = send(&running, head.as_bytes()).await;
        assert_eq!(status(&answer), 400, "{head:?} got {answer:?}");
    }
    assert_eq!(seen.lock().unwrap().len(), 0);
    running.stop().await;
}

/// An HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = length[1..].to_vec();
    bytes.extend_from_slice(&[kind, flags, 0, 0, 0, stream]);
    bytes.extend_from_slice(payload);
    bytes
}

/// A `GET /` in HTTP/2 with arbitrary header bytes.
fn http2_request(headers: &[(&str, &str)]) -> Vec<u8> {
    http2_request_to("x", headers)
}

/// The same with an arbitrary authority.
fn http2_request_to(authority: &str, headers: &[(&str, &str)]) -> Vec<u8> {
    // From the static table: GET, http, `/`; then `:authority` and the headers as literals.
    let mut block = vec![0x82, 0x86, 0x84, 0x01];
    block.push(u8::try_from(authority.len()).unwrap());
    block.extend_from_slice(authority.as_bytes());
    for (name, value) in headers {
        block.push(0);
        for text in [name, value] {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    let (settings, headers) = (4, 1);
    let ends_stream_and_headers = 0x5;
    [
        HTTP2_PREFACE.to_vec(),
        frame(settings, 0, 0, &[]),
        frame(headers, ends_stream_and_headers, 1, &block),
    ]
    .concat()
}

/// Sends a request and reads until a frame of its stream has arrived, or the connection ends. Returns the frame's type.
async fn http2_outcome(running: &Running, request: &[u8]) -> Option<u8> {
    let mut stream = running.connect().await;
    stream.write_all(request).await.unwrap();
    loop {
        let mut head = [0; 9];
        let reading = tokio::time::timeout(support::DEADLINE, stream.read_exact(&mut head));
        reading.await.expect("a frame arrives").ok()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut payload).await.ok()?;
        let goaway = 7;
        if head[8] == 1 || head[3] == goaway {
            return Some(head[3]);
        }
    }
}

#[tokio::test]
async fn http2_headers_inject_no_lines_or_lengths_into_http1() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let (port, seen) = recording().await;
    let port = port.to_string();
    let (headers_frame, reset, goaway) = (1, 3, 7);
    for hostile in [
        ("x-split", "a\r\nx-sandbox-id: abc"),
        ("x-split", "a\r\n\r\nGET /smuggled HTTP/1.1"),
        ("x-split", "a\nb"),
        ("x-split: a\r\nx-more", "b"),
        ("X-Upper", "b"),
        ("transfer-encoding", "chunked"),
        ("connection", "keep-alive"),
        ("content-length", "5"),
    ] {
        let headers = [("x-sandbox-id", "abc"), ("x-sandbox-port", &port), hostile];
        let outcome = http2_outcome(&running, &http2_request(&headers)).await;
        assert!(
            outcome.is_none_or(|kind| kind == reset || kind == goaway),
            "{hostile:?} got a frame of kind {outcome:?}"
        );
    }
    assert_eq!(seen.lock().unwrap().len(), 0, "{seen:?}");
    let honest = [
        ("x-sandbox-id", "abc"),
        ("x-sandbox-port", &port),
        ("x-a", "b"),
    ];
    let outcome = http2_outcome(&running, &http2_request(&honest)).await;
    assert_eq!(outcome, Some(headers_frame));
    assert_eq!(seen.lock().unwrap().len(), 1);
    running.stop().await;
}

#[tokio::test]
async fn oversized_heads_are_refused() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let before = Holdings::now();
    let filler = "a".repeat(200 * 1024);
    let many = "X-Filler: a\r\n".repeat(500);
    for head in [
        format!("GET / HTTP/1.1\r\nHost: x\r\nX-Filler: {filler}\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nHost: x\r\n{many}\r\n"),
    ] {
        let answer = send(&running, head.as_bytes()).await;
        assert_eq!(status(&answer), 431, "{answer}");
    }
    let long = format!("GET /{filler} HTTP/1.1\r\nHost: x\r\n\r\n");
    let answer = send(&running, long.as_bytes()).await;
    assert!([414, 431].contains(&status(&answer)), "{answer}");
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn idle_clients_are_disconnected() {
    let running = Running::start(|config| config.header_timeout = Duration::from_millis(150)).await;
    running.know("abc");
    let before = Holdings::now();
    let settings = frame(4, 0, 0, &[]);
    for beginning in [
        &b""[..],
        b"P",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"PRI * HTTP/2.0\r\n",
        HTTP2_PREFACE,
        &[HTTP2_PREFACE, &settings].concat(),
    ] {
        let mut stream = running.connect().await;
        stream.write_all(beginning).await.unwrap();
        read_all(&mut stream).await;
    }
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn a_slowly_sent_head_gets_no_extra_time() {
    let running = Running::start(|config| config.header_timeout = Duration::from_millis(200)).await;
    let before = Holdings::now();
    let mut stream = running.connect().await;
    stream
        .write_all(b"GET / HTTP/1.1\r\nX-Slow: ")
        .await
        .unwrap();
    let trickling = async {
        loop {
            tokio::time::sleep(Duration::from_millis(20)).await;
            if stream.write_all(b"a").await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(support::DEADLINE, trickling)
        .await
        .expect("the router closes the connection");
    drop(stream);
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn a_stalled_request_body_is_the_clients_timeout() {
    let running = Running::start(|config| config.proxy_timeout = Duration::from_millis(200)).await;
    running.know("abc");
    let port = silent().await;
    let before = Holdings::now();
    let mut stream = running.connect().await;
    let request = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\nContent-Length: 10\r\n\r\nhalf"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let answer = String::from_utf8_lossy(&read_all(&mut stream).await).into_owned();
    assert_eq!(status(&answer), 408, "{answer}");
    assert!(body(&answer).contains("did not arrive in time"), "{answer}");
    drop(stream);
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn a_client_that_disconnects_cancels_its_request() {
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
    let before = Holdings::now();
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
    before.are_all(&running).await;
    running.stop().await;
}

/// Two sandboxes of two tenants listen on the same port of this machine's two addresses. A client cannot reach the other one
/// by naming its address.
#[tokio::test]
async fn a_clients_address_hint_is_never_dialled() {
    let running = Running::start(|_| {}).await;
    let (own, seen_by_own) = recording().await;
    running.know("abc");
    let victim = tokio::net::TcpListener::bind((own_address(), own))
        .await
        .unwrap();
    running
        .router
        .registry()
        .insert("tenant", "victim", vec![own_address()]);
    let hints = [
        format!("X-Sandbox-Pod-IP: {}\r\n", own_address()),
        format!("X-Forwarded-For: {0}\r\nX-Real-IP: {0}\r\n", own_address()),
        format!(
            "X-Sandbox-Pod-IP: {}\r\nConnection: X-Sandbox-ID\r\n",
            own_address()
        ),
    ];
    for hint in &hints {
        assert_eq!(status(&running.get(own, "/", hint).await), 200, "{hint}");
    }
    assert_eq!(seen_by_own.lock().unwrap().len(), hints.len());
    running.move_away("abc");
    for hint in &hints {
        assert_eq!(status(&running.get(own, "/", hint).await), 502, "{hint}");
    }
    let dialled = tokio::time::timeout(Duration::from_millis(100), victim.accept()).await;
    assert!(dialled.is_err(), "the victim was dialled");
    running.stop().await;
}

#[tokio::test]
async fn tcp_keepalive_is_enabled_on_both_sides() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = silent().await;
    let mut client = running.connect().await;
    let request =
        format!("GET / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    wait_for("the request", || {
        running.router.metrics().active_requests() == 1
    })
    .await;
    // The kernel lists the active timer of each connection; 02 is the keep-alive timer.
    let is_watched = |local: Option<u16>, remote: Option<u16>| {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let port_of = |address: &str| u16::from_str_radix(&address[9..], 16).unwrap();
        table.lines().skip(1).any(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let is_established = fields[3] == "01";
            is_established
                && local.is_none_or(|port| port_of(fields[1]) == port)
                && remote.is_none_or(|port| port_of(fields[2]) == port)
                && fields[5].starts_with("02:")
        })
    };
    wait_for("keep-alive on the client's connection", || {
        is_watched(Some(running.address.port()), None)
    })
    .await;
    wait_for("keep-alive on the sandbox's connection", || {
        is_watched(None, Some(port))
    })
    .await;
    drop(client);
    running.stop().await;
}

/// Opens connections, prints a line, and closes them when its standard input ends.
const HOLD_CONNECTIONS: &str = "
import resource, select, socket, sys
address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held = []
while len(held) < count:
    # As many at a time as the queue of a listener takes for sure.
    batch = [socket.socket() for _ in range(min(100, count - len(held)))]
    for one in batch:
        one.setblocking(False)
        one.connect_ex((address, port))
    for one in batch:
        connecting = select.poll()
        connecting.register(one, select.POLLOUT)
        connecting.poll()
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    held += batch
print('held', flush=True)
sys.stdin.read()
";

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_idle_connections_cost_little_and_leak_nothing() {
    const COUNT: i64 = 10_000;
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
    assert!(
        limit.maximum.is_none_or(|most| most > 11_000),
        "this test needs a limit of at least 11,000 open files (ulimit -Hn)"
    );
    let running = Running::start(|config| config.header_timeout = support::DEADLINE * 4).await;
    running.know("abc");
    let port = echo().await;
    let before = Holdings::now();
    let resident_before = resident_kib();
    // The clients are in another process, so that neither process reaches its limit of file descriptors.
    let mut clients = Command::new("python3")
        .args(["-c", HOLD_CONNECTIONS])
        .args(["127.0.0.1", &running.address.port().to_string()])
        .arg(COUNT.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(clients.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "held\n");
    wait_for("all connections", || {
        running.router.metrics().open_connections() == COUNT
    })
    .await;
    let each = resident_kib().saturating_sub(resident_before) * 1024 / COUNT.unsigned_abs();
    assert!(each < 16 * 1024, "{each} bytes a connection");
    assert_eq!(
        status(&running.get(port, "/", "").await),
        200,
        "other clients are served meanwhile"
    );
    clients.stdin.take().unwrap().flush().unwrap();
    clients.wait().unwrap();
    running.move_away("abc");
    drop(stdout);
    before.are_all(&running).await;
    running.stop().await;
}

#[tokio::test]
async fn an_unknown_expect_header_is_ignored() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let (port, seen) = recording().await;
    let mut stream = running.connect().await;
    let request = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: miracles\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\nContent-Length: 5\r\n\r\nhello"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let answer = read_until(&mut stream, "ok").await;
    assert_eq!(status(&answer), 200);
    assert!(
        !seen.lock().unwrap()[0]
            .to_ascii_lowercase()
            .contains("expect")
    );
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

/// Requests with an ambiguous host, which two servers would read differently.
#[tokio::test]
async fn ambiguous_requests_are_refused_and_nothing_is_forwarded() {
    let running = Running::start(|config| {
        config.host_domains = vec!["localhost".to_owned()];
    })
    .await;
    running.know("abc");
    let (port, seen) = recording().await;
    let close = "Connection: close\r\n";
    let named = format!("{close}X-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n");
    let by_host = format!("{port}-abc.localhost");
    let mut passed = Vec::new();
    let both = "Content-Length: 3\r\nTransfer-Encoding: chunked";
    let both_reversed = "Transfer-Encoding: chunked\r\nContent-Length: 3";
    for (attack, head) in [
        (
            "CL+TE",
            format!("POST / HTTP/1.1\r\nHost: x\r\n{named}{both}\r\n\r\n0\r\n\r\n"),
        ),
        (
            "TE+CL",
            format!("POST / HTTP/1.1\r\nHost: x\r\n{named}{both_reversed}\r\n\r\n0\r\n\r\n"),
        ),
        (
            "bare LF after the request line",
            format!("GET / HTTP/1.1\nHost: x\r\n{named}\r\n"),
        ),
        (
            "bare LF after a header",
            format!(
                "GET / HTTP/1.1\r\nHost: x\r\n{close}X-Sandbox-Port: {port}\r\nX-A: b\nX-Sandbox-ID: abc\r\n\r\n"
            ),
        ),
        (
            "bare LF at the end",
            format!("GET / HTTP/1.1\r\nHost: x\r\n{named}\n"),
        ),
        (
            "two hosts",
            format!("GET / HTTP/1.1\r\nHost: x\r\nHost: x\r\n{named}\r\n"),
        ),
        (
            "two hosts, one of a sandbox",
            format!("GET / HTTP/1.1\r\nHost: x\r\nHost: {by_host}\r\n{close}\r\n"),
        ),
        (
            "a target and a host that differ",
            format!("GET http://{by_host}/ HTTP/1.1\r\nHost: x\r\n{close}\r\n"),
        ),
        (
            "user information in the host",
            format!("GET / HTTP/1.1\r\nHost: localhost@evil.example\r\n{named}\r\n"),
        ),
        (
            "user information before localhost",
            format!("GET / HTTP/1.1\r\nHost: evil.example@localhost\r\n{named}\r\n"),
        ),
        (
            "user information in the target",
            format!(
                "GET http://localhost@evil.example/ HTTP/1.1\r\nHost: evil.example\r\n{named}\r\n"
            ),
        ),
        (
            "an invalid host",
            format!("GET / HTTP/1.1\r\nHost: a b\r\n{named}\r\n"),
        ),
        (
            "a path as host",
            format!("GET / HTTP/1.1\r\nHost: localhost/evil\r\n{named}\r\n"),
        ),
        (
            "an invalid port",
            format!("GET / HTTP/1.1\r\nHost: localhost:evil\r\n{named}\r\n"),
        ),
        ("no host", format!("GET / HTTP/1.1\r\n{named}\r\n")),
    ] {
        let answer = send(&running, head.as_bytes()).await;
        if status(&answer) != 400 || !seen.lock().unwrap().is_empty() {
            passed.push((attack, answer));
        }
        seen.lock().unwrap().clear();
    }
    assert!(passed.is_empty(), "{passed:#?}");
    // The second of two pipelined requests is checked as strictly as the first.
    let first = format!(
        "GET /first HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n\r\n"
    );
    let second = format!("GET /second HTTP/1.1\r\nHost: x\r\n{named}\n");
    send(&running, format!("{first}{second}").as_bytes()).await;
    let second = |request: &String| request.contains("/second");
    assert!(!seen.lock().unwrap().iter().any(second), "{seen:?}");
    running.stop().await;
}

#[tokio::test]
async fn http2_requests_with_two_hosts_or_user_information_are_refused() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let (port, seen) = recording().await;
    let port = port.to_string();
    let mut passed = Vec::new();
    let named = [("x-sandbox-id", "abc"), ("x-sandbox-port", port.as_str())];
    for (attack, authority, hosts) in [
        ("a host beside another authority", "x", &["y"][..]),
        ("two hosts", "x", &["x", "x"]),
        (
            "user information in the authority",
            "localhost@evil.example",
            &[],
        ),
        (
            "user information in the host",
            "x",
            &["localhost@evil.example"],
        ),
        ("an invalid authority", "a b", &[]),
    ] {
        let hosts = hosts.iter().map(|host| ("host", *host));
        let headers: Vec<_> = named.into_iter().chain(hosts).collect();
        http2_outcome(&running, &http2_request_to(authority, &headers)).await;
        if !seen.lock().unwrap().is_empty() {
            passed.push(attack);
        }
        seen.lock().unwrap().clear();
    }
    assert!(passed.is_empty(), "forwarded: {passed:?}");
    let same: Vec<_> = named.into_iter().chain([("host", "x")]).collect();
    http2_outcome(&running, &http2_request_to("x", &same)).await;
    assert_eq!(
        seen.lock().unwrap().len(),
        1,
        "a host that equals the authority is accepted"
    );
    running.stop().await;
}
