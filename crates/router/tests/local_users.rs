//! A router that identifies local users by the owner of their socket.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::time::{Duration, SystemTime};

use router::AuthorizationMode;
use router::authorize::scoped_token::{Scope, TokenKey};
use support::{Running, echo, own_address, status};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

const KEY: &[u8] = b"a secret of thirty-two bytes or so";

async fn start(users: Vec<u32>) -> (Running, u16, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let key_file = directory.path().join("key");
    std::fs::write(&key_file, KEY).unwrap();
    let running = Running::start(|config| {
        config.authorization = AuthorizationMode::LocalUsers {
            users,
            key_file: Some(key_file),
        };
        config.tunnels = true;
    })
    .await;
    running.know("abc");
    (running, echo().await, directory)
}

fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[tokio::test]
async fn a_user_whom_the_router_serves_needs_no_token() {
    let (running, port, _directory) = start(vec![own_user()]).await;
    let answer = running.get(port, "/", "").await;
    assert_eq!(status(&answer), 200, "{answer}");
    // The user is looked up at the first request, and applies to all requests of the connection.
    let mut stream = running.connect().await;
    let line = format!("Host: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n");
    for _ in 0..2 {
        let request = format!("GET / HTTP/1.1\r\n{line}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
    }
    let request = format!("GET / HTTP/1.1\r\nConnection: close\r\n{line}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let answers = support::read_all(&mut stream).await;
    let answers = String::from_utf8_lossy(&answers);
    assert_eq!(answers.matches("HTTP/1.1 200").count(), 3, "{answers}");
    running.stop().await;
}

#[tokio::test]
async fn another_local_user_needs_a_token_and_gets_a_hint() {
    let (running, port, _directory) = start(vec![own_user() + 1]).await;
    let answer = running.get(port, "/", "").await;
    assert_eq!(status(&answer), 401, "{answer}");
    for text in [
        "WWW-Authenticate: Bearer",
        "agent-sandbox token",
        "--router-authz",
    ] {
        assert!(
            answer.to_lowercase().contains(&text.to_lowercase()),
            "{answer}"
        );
    }
    let key = TokenKey::parse(KEY).unwrap();
    let hour = Duration::from_secs(3600);
    for (sandbox, ports, minted, expected) in [
        ("abc", [port], SystemTime::now(), 200),
        ("other", [port], SystemTime::now(), 403),
        ("abc", [port ^ 1], SystemTime::now(), 403),
        ("abc", [port], SystemTime::now() - 2 * hour, 401),
    ] {
        let scope = Scope::new("default", sandbox, &ports, minted, hour);
        let line = format!("Authorization: Bearer {}\r\n", key.mint(&scope).unwrap());
        let answer = running.get(port, "/", &line).await;
        assert_eq!(status(&answer), expected, "{sandbox} {ports:?}: {answer}");
    }
    let answer = running
        .get(port, "/", "Authorization: Bearer guessed\r\n")
        .await;
    assert_eq!(status(&answer), 401, "{answer}");
    // The router's own endpoints need no authorization.
    let answer = running
        .raw("GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await;
    assert_eq!(status(&answer), 200, "{answer}");
    running.stop().await;
}

#[tokio::test]
async fn a_proxied_request_is_not_authorized_by_the_proxys_user() {
    let (running, port, _directory) = start(vec![own_user()]).await;
    for line in [
        "X-Forwarded-For: 192.0.2.1\r\n",
        "Forwarded: for=192.0.2.1\r\n",
        "Via: 1.1 proxy\r\n",
    ] {
        let answer = running.get(port, "/", line).await;
        assert_eq!(status(&answer), 401, "{line}: {answer}");
    }
    running.stop().await;
}

/// The node connects as root on behalf of an account that may forward ports in a namespace.
#[tokio::test]
async fn a_forwarded_connection_counts_for_its_own_namespace_only() {
    let (running, port, _directory) = start(vec![own_user()]).await;
    let request = format!(
        "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n\r\n"
    );
    for (namespace, expected) in [
        ("default", 200),
        (api::SYSTEM_NAMESPACE, 200),
        ("another", 401),
    ] {
        let mut bytes = api::proxy_header::encode(namespace);
        bytes.extend(request.as_bytes());
        let answer = running.raw(bytes).await;
        assert_eq!(status(&answer), expected, "{namespace}: {answer}");
    }
    // A connection without a namespace gets no response at all.
    let unnamed = [
        &api::proxy_header::SIGNATURE[..],
        &[0x20, 0, 0, 0],
        request.as_bytes(),
    ];
    assert_eq!(running.raw(unnamed.concat()).await, "");
    running.stop().await;
}

/// A client that connects to the machine's own address has a local socket, as one on loopback has.
#[tokio::test]
async fn a_client_on_another_address_of_this_machine_is_identified() {
    let own = own_address();
    let (running, port, _directory) = start(vec![own_user()]).await;
    let listener = tokio::net::TcpListener::bind((own, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (router, stop) = (running.router.clone(), running.shutdown.clone());
    let serving = tokio::spawn(async move { router.serve(listener, stop).await });
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!(
        "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let answer = String::from_utf8_lossy(&support::read_all(&mut stream).await).into_owned();
    assert_eq!(status(&answer), 200, "{answer}");
    running.stop().await;
    serving.await.unwrap();
}
