//! Protocols that must pass unchanged: WebSockets, large bodies in bounded memory, HTTP/2 and gRPC.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::convert::Infallible;

use bytes::Bytes;
use futures::{SinkExt, StreamExt};
use http::{Request, Response, Version};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use support::{DEADLINE, Running, echo, grpc, held_back, upstream, wait_for};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

const GIBIBYTE: u64 = 1 << 30;

async fn websocket_echo() -> u16 {
    upstream(|stream| async move {
        let (mut origin, mut site) = (None, None);
        #[expect(clippy::result_large_err, reason = "the signature is the library's")]
        let noting = |request: &http::Request<()>, response| {
            origin = request.headers().get("origin").cloned();
            site = request.headers().get("sec-fetch-site").cloned();
            Ok(response)
        };
        let Ok(mut socket) = tokio_tungstenite::accept_hdr_async(stream, noting).await else {
            return;
        };
        // The page's origin differs from the router's; the sandbox learns this from `Sec-Fetch-Site`.
        if origin.is_some() || site.is_none_or(|site| site != "cross-site") {
            let complaint = Message::text(format!(
                "an Origin header, or no Sec-Fetch-Site: {origin:?}"
            ));
            let _ = socket.send(complaint).await;
        }
        let (sink, stream) = socket.split();
        let _ = stream
            .filter(|message| std::future::ready(!matches!(message, Ok(Message::Close(_)))))
            .forward(sink)
            .await;
    })
    .await
}

/// Opens a WebSocket to the sandbox `abc` as a browser page does: with an `Origin` header.
async fn websocket(running: &Running, port: u16) -> WebSocketStream<TcpStream> {
    let mut request = format!("ws://{}/socket", running.address)
        .into_client_request()
        .unwrap();
    for (name, value) in [
        ("x-sandbox-id", "abc"),
        ("x-sandbox-port", &port.to_string()),
        ("origin", "https://elsewhere.example"),
    ] {
        request.headers_mut().insert(name, value.parse().unwrap());
    }
    let (socket, response) = tokio_tungstenite::client_async(request, running.connect().await)
        .await
        .unwrap();
    assert_eq!(response.status(), 101);
    socket
}

#[tokio::test]
async fn websockets_pass_and_end_with_either_side() {
    let running =
        Running::start(|config| config.proxy_timeout = std::time::Duration::from_secs(5)).await;
    running.know("abc");
    let port = websocket_echo().await;
    let mut socket = websocket(&running, port).await;
    let metrics = std::sync::Arc::clone(running.router.metrics());
    wait_for("the tunnel", || metrics.active_tunnels() == 1).await;
    for message in [
        Message::text("hello"),
        Message::Binary(vec![7; 300_000].into()),
    ] {
        socket.send(message.clone()).await.unwrap();
        assert_eq!(socket.next().await.unwrap().unwrap(), message);
    }
    // Longer than the proxy timeout, which does not apply to tunnels.
    tokio::time::sleep(std::time::Duration::from_secs(6)).await;
    socket.send(Message::text("still here")).await.unwrap();
    assert_eq!(
        socket.next().await.unwrap().unwrap(),
        Message::text("still here")
    );
    drop(socket);
    wait_for("the tunnel to end", || metrics.active_tunnels() == 0).await;
    running.stop().await;
}

#[tokio::test]
async fn a_tunnel_ends_when_its_sandbox_goes_away() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = websocket_echo().await;
    let mut socket = websocket(&running, port).await;
    running
        .router
        .registry()
        .insert("default", "abc", vec!["127.0.0.9".parse().unwrap()]);
    let ended = tokio::time::timeout(DEADLINE, socket.next())
        .await
        .expect("the tunnel ends");
    assert!(!matches!(ended, Some(Ok(_))));
    running.stop().await;
}

#[tokio::test]
async fn a_tunnel_ends_with_the_shutdown_timeout() {
    let running = Running::start(|config| {
        config.shutdown_timeout = std::time::Duration::from_secs(10);
    })
    .await;
    running.know("abc");
    let port = websocket_echo().await;
    let mut socket = websocket(&running, port).await;
    running.shutdown.cancel();
    socket.send(Message::text("meanwhile")).await.unwrap();
    assert_eq!(
        socket.next().await.unwrap().unwrap(),
        Message::text("meanwhile")
    );
    let metrics = std::sync::Arc::clone(running.router.metrics());
    running.stop().await;
    assert!(!matches!(socket.next().await, Some(Ok(_))));
    assert_eq!(metrics.active_tunnels(), 0);
}

#[tokio::test]
async fn a_refused_upgrade_returns_the_sandboxs_response() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = echo().await;
    let answer = running
        .raw(format!(
            "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\nContent-Length: 0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        ))
        .await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(
        answer.to_ascii_lowercase().contains("upgrade: websocket"),
        "the sandbox received the upgrade request: {answer}"
    );
    running.stop().await;
}

/// A server that counts the bytes of a POST, and sends a gibibyte on GET.
async fn bulk() -> u16 {
    upstream(|stream| async move {
        let service = service_fn(|request: Request<Incoming>| async move {
            if request.method() == http::Method::POST {
                let mut body = request.into_body();
                let mut total = 0u64;
                while let Some(frame) = body.frame().await {
                    total += frame.unwrap().data_ref().map_or(0, Bytes::len) as u64;
                }
                return Ok::<_, Infallible>(Response::new(
                    Full::new(Bytes::from(total.to_string())).boxed(),
                ));
            }
            let piece = Bytes::from(vec![b'x'; 64 * 1024]);
            let pieces = usize::try_from(GIBIBYTE).unwrap() / piece.len();
            let frames = futures::stream::iter(std::iter::repeat_n(piece, pieces))
                .map(|piece| Ok(Frame::data(piece)));
            Ok(Response::new(BodyExt::boxed(StreamBody::new(frames))))
        });
        let _ = hyper::server::conn::http1::Builder::new()
            .serve_connection(TokioIo::new(stream), service)
            .await;
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gibibyte_each_way_passes_in_bounded_memory() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = bulk().await;
    let route =
        format!("Host: x\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n");
    let mut download = running.connect().await;
    download
        .write_all(format!("GET / HTTP/1.1\r\n{route}\r\n").as_bytes())
        .await
        .unwrap();
    let mut buffer = vec![0; 256 * 1024];
    let mut total = 0u64;
    loop {
        match download.read(&mut buffer).await.unwrap() {
            0 => break,
            count => total += count as u64,
        }
    }
    assert!(total > GIBIBYTE, "{total}");
    let mut upload = running.connect().await;
    upload
        .write_all(
            format!("POST / HTTP/1.1\r\n{route}Content-Length: {GIBIBYTE}\r\n\r\n").as_bytes(),
        )
        .await
        .unwrap();
    let piece = vec![b'y'; 256 * 1024];
    for _ in 0..GIBIBYTE / piece.len() as u64 {
        upload.write_all(&piece).await.unwrap();
    }
    let answer = String::from_utf8_lossy(&support::read_all(&mut upload).await).into_owned();
    assert!(answer.ends_with(&GIBIBYTE.to_string()), "{answer}");
    // The peak of this whole process, including the test's client and server.
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    let peak_kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(peak_kib < 64 * 1024, "{peak_kib} KiB at the peak");
    running.stop().await;
}

async fn http2_client(running: &Running) -> hyper::client::conn::http2::SendRequest<Full<Bytes>> {
    let stream = running.connect().await;
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .unwrap();
    tokio::spawn(connection);
    sender
}

#[tokio::test]
async fn http2_with_prior_knowledge_reaches_a_sandbox_that_speaks_http1() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = echo().await;
    let mut sender = http2_client(&running).await;
    for number in 0..5 {
        let request = Request::builder()
            .uri(format!("http://public.example/number/{number}"))
            .header("x-sandbox-id", "abc")
            .header("x-sandbox-port", port)
            .body(Full::new(Bytes::new()))
            .unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), response.version()),
            (200, Version::HTTP_2)
        );
        let seen = response.into_body().collect().await.unwrap().to_bytes();
        let seen = String::from_utf8_lossy(&seen).into_owned();
        assert!(
            seen.starts_with(&format!("GET /number/{number} HTTP/1.1\r\n")),
            "{seen}"
        );
        assert!(seen.contains("x-forwarded-host: public.example"), "{seen}");
    }
    running.stop().await;
}

#[tokio::test]
async fn http2_requests_in_flight_finish_before_the_router_stops() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let (port, release) = held_back().await;
    let mut sender = http2_client(&running).await;
    let request = Request::builder()
        .uri("http://public.example/")
        .header("x-sandbox-id", "abc")
        .header("x-sandbox-port", port)
        .body(Full::new(Bytes::new()))
        .unwrap();
    let stopping = running.stop_with_a_request_in_flight(&release);
    let (response, ()) = tokio::join!(sender.send_request(request), stopping);
    let answer = response.unwrap().into_body().collect().await.unwrap();
    assert_eq!(answer.to_bytes(), "done");
    running.stop().await;
}

#[tokio::test]
async fn a_grpc_call_passes_with_its_trailers() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let port = grpc(|request| async move {
        assert_eq!(request.version(), Version::HTTP_2);
        assert_eq!(request.headers()["te"], "trailers");
        let path = request.uri().path().to_owned();
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", "0".parse().unwrap());
        trailers.insert("x-path", path.parse().unwrap());
        futures::stream::iter([Ok(Frame::data(body)), Ok(Frame::trailers(trailers))])
    })
    .await;
    let mut sender = http2_client(&running).await;
    for _ in 0..3 {
        let request = Request::builder()
            .method("POST")
            .uri("http://public.example/process.v1.ProcessService/Execute")
            .header("content-type", "application/grpc+proto")
            .header("te", "trailers")
            .header("x-sandbox-id", "abc")
            .header("x-sandbox-port", port)
            .body(Full::new(Bytes::from_static(b"\0\0\0\0\x02hi")))
            .unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let collected = response.into_body().collect().await.unwrap();
        assert_eq!(collected.trailers().unwrap()["grpc-status"], "0");
        assert_eq!(
            collected.trailers().unwrap()["x-path"],
            "/process.v1.ProcessService/Execute"
        );
        assert_eq!(collected.to_bytes(), &b"\0\0\0\0\x02hi"[..]);
    }
    running.stop().await;
}
