//! Graceful shutdown: requests in flight finish, and load balancers learn early to send no more requests.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod support;

use std::time::Duration;

use router::{Config, ListenAddress};
use support::{Running, body, held_back, silent, status, wait_for};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

#[tokio::test]
async fn requests_in_flight_finish_before_the_router_stops() {
    let running = Running::start(|_| {}).await;
    running.know("abc");
    let (port, release) = held_back().await;
    let asking = running.get(port, "/", "");
    let stopping = running.stop_with_a_request_in_flight(&release);
    let (answer, ()) = tokio::join!(asking, stopping);
    assert_eq!(body(&answer), "done");
    running.stop().await;
}

#[tokio::test]
async fn a_request_that_outlasts_the_shutdown_is_aborted() {
    let running =
        Running::start(|config| config.shutdown_timeout = Duration::from_millis(100)).await;
    running.know("abc");
    let port = silent().await;
    let metrics = std::sync::Arc::clone(running.router.metrics());
    let mut stream = running.connect().await;
    let request =
        format!("GET / HTTP/1.1\r\nHost: x\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    wait_for("the request", || metrics.active_requests() == 1).await;
    running.stop().await;
    assert_eq!(support::read_all(&mut stream).await.len(), 0);
    assert_eq!(
        (metrics.active_requests(), metrics.open_connections()),
        (0, 0)
    );
}

/// Requests `/readyz` on a port of this machine; `None` if nothing listens there.
async fn readiness(port: u16) -> Option<u16> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    let request = b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    stream.write_all(request).await.ok()?;
    let answer = support::read_all(&mut stream).await;
    (!answer.is_empty()).then(|| status(&String::from_utf8_lossy(&answer)))
}

#[tokio::test]
async fn a_stopping_router_serves_during_the_shutdown_delay() {
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let held = [free(), free()];
    let [proxy, health] = held
        .each_ref()
        .map(|listener| listener.local_addr().unwrap());
    drop(held);
    let config = Config {
        http_listen: ListenAddress::At(proxy),
        health_listen: ListenAddress::At(health),
        metrics_listen: ListenAddress::Off,
        shutdown_delay: Duration::from_secs(15),
        ..Config::default()
    };
    let stop = CancellationToken::new();
    let running = tokio::spawn(router::run(config, None, stop.clone()));
    let until = async |wanted: Option<u16>| {
        let waiting = async {
            while readiness(health.port()).await != wanted {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(support::DEADLINE, waiting)
            .await
            .unwrap_or_else(|_| panic!("readiness never was {wanted:?}"));
    };
    until(Some(200)).await;
    stop.cancel();
    until(Some(503)).await;
    assert_eq!(
        readiness(proxy.port()).await,
        Some(503),
        "connections are still accepted"
    );
    tokio::time::timeout(support::DEADLINE, running)
        .await
        .expect("the router stops")
        .unwrap()
        .unwrap();
    assert_eq!(readiness(proxy.port()).await, None);
}
