//! The router's rules from the client's side: raw HTTP in, raw HTTP at the sandbox.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::time::{Duration, Instant};

use support::{
    Running, answer, body, echo, next_request, read_until, silent, status, upstream, wait_for,
};
use tokio::io::AsyncWriteExt;

#[tokio::test]
async fn a_request_reaches_its_sandbox_with_the_right_headers() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = echo().await;
    let more = "Authorization: Bearer secret\r\nX-Custom: kept\r\nX-Forwarded-For: 6.6.6.6\r\nX-Sandbox-Pod-IP: 10.9.9.9\r\n";
    let answer = running.get(port, "/a%2Fb/c?q=1&r=%20", more).await;
    assert_eq!(status(&answer), 200);
    let seen = body(&answer).to_ascii_lowercase();
    assert!(
        seen.starts_with("get /a%2fb/c?q=1&r=%20 http/1.1\r\n"),
        "{seen}"
    );
    assert!(
        seen.contains(&format!("host: 127.0.0.1:{port}\r\n")),
        "{seen}"
    );
    assert!(seen.contains("x-forwarded-host: public.example\r\n"));
    assert!(seen.contains("x-forwarded-for: 127.0.0.1\r\n"));
    assert!(seen.contains("x-forwarded-proto: http\r\n"));
    assert!(seen.contains("x-custom: kept\r\n"));
    assert!(
        !seen.contains("authorization") && !seen.contains("secret") && !seen.contains("6.6.6.6")
    );
    assert!(answer.contains("x-upstream: echo"));
    running.stop().await;
}

#[tokio::test]
async fn every_method_and_a_body_pass() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = echo().await;
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"] {
        let answer = running
            .raw(format!(
                "{method} / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\nContent-Length: 5\r\n\r\nhello"
            ))
            .await;
        assert!(body(&answer).starts_with(method), "{answer}");
        assert!(answer.ends_with("\r\n\r\nhello"), "{answer}");
    }
    running.stop().await;
}

#[tokio::test]
async fn refusals_use_upstreams_messages() {
    const ID: &str = "Invalid sandbox ID format.";
    const NAMESPACE: &str = "Invalid namespace format.";
    const PORT: &str = "Invalid port format.";
    const ADDRESS: &str = "Invalid target IP address.";
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let mut table = vec![
        (String::new(), 400, "X-Sandbox-ID header is required."),
        (
            "X-Sandbox-ID: \r\n".into(),
            400,
            "X-Sandbox-ID header is required.",
        ),
        (
            "X-Sandbox-ID: abc\r\nX-Sandbox-Port: 1\r\n".into(),
            502,
            "Could not connect to the backend sandbox: abc",
        ),
        (
            "X-Sandbox-ID: abc\r\nX-Sandbox-ID: other\r\n".into(),
            400,
            "X-Sandbox-ID header must not be repeated.",
        ),
    ];
    for id in [
        "a.b",
        "../etc",
        "a/b",
        "abc.default.svc",
        "ABC",
        "a_b",
        "-a",
    ] {
        table.push((format!("X-Sandbox-ID: {id}\r\n"), 400, ID));
    }
    for (header, values, detail) in [
        (
            "X-Sandbox-Namespace",
            &["a/b", "a.b", "..", "kube-system.svc.evil", "A"][..],
            NAMESPACE,
        ),
        (
            "X-Sandbox-Port",
            &["0", "65536", "-1", "80x", "8080:80", "99999999999"],
            PORT,
        ),
        (
            "X-Sandbox-Pod-IP",
            &[
                "169.254.169.254",
                "127.0.0.1",
                "0.0.0.0",
                "224.0.0.1",
                "::1",
                "::ffff:169.254.169.254",
                "fe80::1",
                "metadata.google.internal",
                "10.0.0.1/8",
            ],
            ADDRESS,
        ),
    ] {
        for value in values {
            let headers = format!("X-Sandbox-ID: abc\r\n{header}: {value}\r\n");
            table.push((headers, 400, detail));
        }
    }
    for (headers, expected, detail) in table {
        let answer = running
            .raw(format!(
                "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n"
            ))
            .await;
        assert_eq!(status(&answer), expected, "{headers}");
        assert!(
            answer
                .to_ascii_lowercase()
                .contains("content-type: application/json")
        );
        assert!(
            body(&answer).contains(&format!("\"detail\":\"{detail}\"")),
            "{answer}"
        );
    }
    running.stop().await;
}

#[tokio::test]
async fn namespace_and_port_have_defaults() {
    // A separate address, so that the default port is free there.
    const ADDRESS: &str = "127.88.88.1";
    let listener = tokio::net::TcpListener::bind((ADDRESS, 8888))
        .await
        .unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut pending = Vec::new();
            next_request(&mut stream, &mut pending).await;
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok";
            stream.write_all(answer).await.unwrap();
        }
    });
    let running = Running::start(|_| {}).await;
    let registry = running.router.registry();
    registry.insert("default", "abc", vec![ADDRESS.parse().unwrap()]);
    registry.insert("team", "other", vec![ADDRESS.parse().unwrap()]);
    for (headers, expected) in [
        ("X-Sandbox-ID: abc", 200),
        ("X-Sandbox-ID: abc\r\nX-Sandbox-Namespace: default", 200),
        ("X-Sandbox-ID: abc\r\nX-Sandbox-Port: 8888", 200),
        ("X-Sandbox-ID: other\r\nX-Sandbox-Namespace: team", 200),
        ("X-Sandbox-ID: abc\r\nX-Sandbox-Namespace: team", 502),
        ("X-Sandbox-ID: other", 502),
    ] {
        let answer = running
            .raw(format!(
                "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n\r\n"
            ))
            .await;
        assert_eq!(status(&answer), expected, "{headers}");
    }
    running.stop().await;
}

#[tokio::test]
async fn the_proxy_port_serves_healthz() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let answer = running
        .raw("GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await;
    assert_eq!(
        (status(&answer), body(&answer)),
        (200, r#"{"status":"ok"}"#)
    );
    let through = running.get(echo().await, "/healthz", "").await;
    assert!(
        body(&through).starts_with("GET /healthz"),
        "a sandbox's /healthz goes to the sandbox"
    );
    running.stop().await;
}

#[tokio::test]
async fn connections_are_reused() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let accepted = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counting = std::sync::Arc::clone(&accepted);
    let port = upstream(move |mut stream| {
        counting.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        async move {
            let mut pending = Vec::new();
            while next_request(&mut stream, &mut pending).await.is_some() {
                answer(&mut stream, "ok").await.unwrap();
            }
        }
    })
    .await;
    for _ in 0..20 {
        assert_eq!(body(&running.get(port, "/", "").await), "ok");
    }
    assert_eq!(accepted.load(std::sync::atomic::Ordering::SeqCst), 1);
    running.stop().await;
}

#[tokio::test]
async fn a_dead_idle_connection_is_replaced_without_an_error() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = upstream(|mut stream| async move {
        next_request(&mut stream, &mut Vec::new()).await;
        answer(&mut stream, "ok").await.unwrap();
    })
    .await;
    for _ in 0..20 {
        assert_eq!(status(&running.get(port, "/", "").await), 200);
    }
    running.stop().await;
}

#[tokio::test]
async fn failed_dials_are_retried_before_anything_is_sent() {
    let running = Running::start(|config| config.dial_retries = 3).await;
    running.know("abc");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let router = running.router.clone();
    let opening = async {
        wait_for("a failed dial", || {
            let text = router.render_metrics();
            let mut counts = text
                .lines()
                .filter_map(|line| line.strip_prefix("agent_sandbox_router_failed_dials_total "));
            counts.any(|count| count != "0")
        })
        .await;
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", port))
            .await
            .unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        read_until(&mut stream, "\r\n\r\n").await;
        answer(&mut stream, "late").await.unwrap();
        stream
    };
    let (answer, _stream) = tokio::join!(running.get(port, "/", ""), opening);
    assert_eq!(body(&answer), "late");
    running.stop().await;
}

#[tokio::test]
async fn a_sandbox_that_sends_nothing_meets_the_requests_timeout() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = silent().await;
    let started = Instant::now();
    let answer = running.get(port, "/", "X-Sandbox-Timeout: 0.2\r\n").await;
    assert_eq!(status(&answer), 504);
    assert!(
        body(&answer).contains("X-Sandbox-Timeout"),
        "the body contains a hint"
    );
    assert!(started.elapsed() < Duration::from_secs(20));
    running.stop().await;
    let bounded = Running::start(|config| config.proxy_timeout = Duration::from_millis(200)).await;
    bounded.know("abc");
    assert_eq!(
        status(&bounded.get(port, "/", "X-Sandbox-Timeout: 3600\r\n").await),
        504
    );
    bounded.stop().await;
}

#[tokio::test]
async fn bodies_beyond_the_limit_are_refused() {
    let running = Running::start(|config| config.max_request_body_bytes = 10).await;
    running.know("abc");
    let port = echo().await;
    let head = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n"
    );
    let declared = running
        .raw(format!("{head}Content-Length: 11\r\n\r\n12345678901"))
        .await;
    assert_eq!(status(&declared), 413);
    let streamed = running
        .raw(format!(
            "{head}Transfer-Encoding: chunked\r\n\r\nb\r\n12345678901\r\n0\r\n\r\n"
        ))
        .await;
    assert_eq!(status(&streamed), 413);
    let allowed = running
        .raw(format!("{head}Content-Length: 10\r\n\r\n1234567890"))
        .await;
    assert_eq!(status(&allowed), 200);
    running.stop().await;
}

#[tokio::test]
async fn expect_continue_is_answered_once_the_sandbox_is_connected() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = echo().await;
    let mut stream = running.connect().await;
    let head = format!(
        "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 100-continue\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\nContent-Length: 5\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    assert!(
        read_until(&mut stream, "\r\n\r\n")
            .await
            .starts_with("HTTP/1.1 100 ")
    );
    stream.write_all(b"hello").await.unwrap();
    let answer = String::from_utf8_lossy(&support::read_all(&mut stream).await).into_owned();
    assert!(answer.ends_with("\r\n\r\nhello"), "{answer}");
    // A request without a sandbox is refused before its body is requested.
    let refused = running.raw(head.replace("abc", "not.a.name")).await;
    assert!(!refused.contains("100 Continue"), "{refused}");
    running.stop().await;
}

#[tokio::test]
async fn server_sent_events_pass_immediately() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let (sender, receiver) = tokio::sync::watch::channel(0);
    let port = upstream(move |mut stream| {
        let mut receiver = receiver.clone();
        async move {
            read_until(&mut stream, "\r\n\r\n").await;
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n").await.unwrap();
            while receiver.changed().await.is_ok() {
                let event = format!("data: {}\n\n", *receiver.borrow());
                stream.write_all(format!("{:x}\r\n{event}\r\n", event.len()).as_bytes()).await.unwrap();
            }
            stream.write_all(b"0\r\n\r\n").await.unwrap();
        }
    })
    .await;
    let mut stream = running.connect().await;
    let request = format!(
        "GET /events HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    read_until(&mut stream, "text/event-stream").await;
    for number in 1..=3 {
        sender.send(number).unwrap();
        read_until(&mut stream, &format!("data: {number}\n\n")).await;
    }
    drop(sender);
    support::read_all(&mut stream).await;
    running.stop().await;
}

#[tokio::test]
async fn the_environment_sets_the_proxy_timeout() {
    use clap::Parser;
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: router::Args,
    }
    let configured = |seconds: &'static str| {
        let line = Line::try_parse_from(["router"]).unwrap();
        let variable = move |name: &str| (name == "PROXY_TIMEOUT_SECONDS").then(|| seconds.into());
        line.args.into_config(variable).unwrap().proxy_timeout
    };
    assert_eq!(configured("soon"), Duration::from_secs(180));
    let running = Running::start(|config| config.proxy_timeout = configured("0.2")).await;
    running.know("abc");
    let port = silent().await;
    assert_eq!(status(&running.get(port, "/", "").await), 504);
    running.stop().await;
}

#[tokio::test]
async fn trailers_of_a_request_pass() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = upstream(|mut stream| async move {
        let seen = read_until(&mut stream, "x-checksum: 42\r\n\r\n").await;
        answer(&mut stream, &seen).await.unwrap();
    })
    .await;
    let answer = running
        .raw(format!(
            "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\nTransfer-Encoding: chunked\r\nTrailer: x-checksum\r\n\r\n2\r\nok\r\n0\r\nx-checksum: 42\r\n\r\n"
        ))
        .await;
    assert_eq!(status(&answer), 200, "{answer}");
    running.stop().await;
}

#[tokio::test]
async fn trailers_pass() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = upstream(|mut stream| async move {
        read_until(&mut stream, "\r\n\r\n").await;
        let answer = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: x-checksum\r\n\r\n2\r\nok\r\n0\r\nx-checksum: 42\r\n\r\n";
        stream.write_all(answer.as_bytes()).await.unwrap();
    })
    .await;
    let answer = running.get(port, "/", "TE: trailers\r\n").await;
    assert!(answer.contains("x-checksum: 42\r\n"), "{answer}");
    running.stop().await;
}

#[tokio::test]
async fn hosts_and_paths_are_routed_if_configured() {
    let running = Running::start(|config| {
        config.host_domains = vec!["sandbox.example".into()];
        config.path_prefix = Some("/sandbox".to_owned());
    })
    .await;
    running.know("abc");
    let port = echo().await;
    let by_host = running
        .raw(format!("GET /page HTTP/1.1\r\nHost: {port}-default--abc.sandbox.example\r\nConnection: close\r\n\r\n"))
        .await;
    assert!(body(&by_host).starts_with("GET /page "), "{by_host}");
    let by_path = running
        .raw(format!("GET /sandbox/default/abc/{port}/page?x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
        .await;
    assert!(body(&by_path).starts_with("GET /page?x "), "{by_path}");
    running.stop().await;
}

#[tokio::test]
async fn scoped_tokens_permit_only_their_sandbox() {
    use router::authorize::scoped_token::{Scope, TokenKey};
    let directory = tempfile::tempdir().unwrap();
    let key_file = directory.path().join("key");
    std::fs::write(&key_file, "0123456789abcdef0123456789abcdef").unwrap();
    let running = Running::start(|config| {
        config.authorization = router::AuthorizationMode::ScopedToken {
            key_file: key_file.clone(),
        };
    })
    .await;
    running.know("abc");
    running.know("other");
    let port = echo().await;
    let key = TokenKey::parse(&std::fs::read(&key_file).unwrap()).unwrap();
    let now = std::time::SystemTime::now();
    let mint = |name: &str, port: u16| {
        key.mint(&Scope::new(
            "default",
            name,
            &[port],
            now,
            Duration::from_secs(60),
        ))
        .unwrap()
    };
    let anonymous = running.get(port, "/", "").await;
    assert_eq!(status(&anonymous), 401);
    assert!(
        anonymous
            .to_ascii_lowercase()
            .contains("www-authenticate: bearer")
    );
    let bearer = |token: String| format!("Authorization: Bearer {token}\r\n");
    assert_eq!(
        status(&running.get(port, "/", &bearer(mint("other", port))).await),
        403
    );
    assert_eq!(
        status(&running.get(port, "/", &bearer(mint("abc", port ^ 1))).await),
        403
    );
    assert_eq!(
        status(&running.get(port, "/", &bearer("nonsense".into())).await),
        401
    );
    let allowed = running.get(port, "/", &bearer(mint("abc", port))).await;
    assert_eq!(status(&allowed), 200);
    let stranger = TokenKey::parse(b"ffffffffffffffffffffffffffffffff").unwrap();
    let forged = Scope::new("default", "abc", &[port], now, Duration::from_secs(60));
    let forged = bearer(stranger.mint(&forged).unwrap());
    assert_eq!(status(&running.get(port, "/", &forged).await), 401);
    let elsewhere = Scope::new("team", "abc", &[port], now, Duration::from_secs(60));
    let elsewhere = bearer(key.mint(&elsewhere).unwrap());
    assert_eq!(status(&running.get(port, "/", &elsewhere).await), 403);
    let long_ago = now - Duration::from_secs(120);
    let expired = Scope::new("default", "abc", &[port], long_ago, Duration::from_secs(60));
    let expired = running
        .get(port, "/", &bearer(key.mint(&expired).unwrap()))
        .await;
    assert_eq!(status(&expired), 401);
    assert!(body(&expired).contains("expired"), "{expired}");
    let in_its_own_header = running
        .get(
            port,
            "/",
            &format!("X-Sandbox-Token: {}\r\n", mint("abc", port)),
        )
        .await;
    assert_eq!(status(&in_its_own_header), 200);
    assert!(!in_its_own_header.contains("x-sandbox-token"));
    let cookie = running
        .get(
            port,
            "/",
            &format!("Cookie: a=1; sandbox_token={}\r\n", mint("abc", port)),
        )
        .await;
    assert_eq!(status(&cookie), 200);
    assert!(
        !cookie.contains("sandbox_token"),
        "the token is not forwarded to the sandbox"
    );
    running.stop().await;
}
