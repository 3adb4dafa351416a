//! A router in this process, upstream servers with scripted behaviour, and raw HTTP between them.
#![allow(
    dead_code,
    reason = "each test file uses a different part of this module"
)]
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::collections::HashSet;
use std::convert::Infallible;
use std::future::Future;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures::Stream;
use http::{Request, Response};
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use router::{Config, Router};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub const DEADLINE: Duration = Duration::from_secs(60);
/// What has not been released by then counts as leaked; idle connections would close by themselves some time later.
const LEAK_DEADLINE: Duration = Duration::from_secs(30);

/// Serializes tests: other tests of the process must not change the number of sockets and tasks while one is checked for leaks.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

pub struct Running {
    pub router: Router,
    pub address: SocketAddr,
    pub shutdown: CancellationToken,
    serving: JoinHandle<()>,
    _alone: tokio::sync::MutexGuard<'static, ()>,
}

impl Running {
    /// Starts a router with all its tasks. Only one test at a time has one.
    pub async fn start(change: impl FnOnce(&mut Config)) -> Self {
        let alone = ONE_AT_A_TIME.lock().await;
        let mut config = Config {
            resolve_wait: Duration::from_millis(100),
            dial_retries: 0,
            ..Config::default()
        };
        change(&mut config);
        let router = Router::new(config, None).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let (serving, stop) = (router.clone(), shutdown.clone());
        let serving = tokio::spawn(async move { serving.serve(listener, stop).await });
        let running = Self {
            router,
            address,
            shutdown,
            serving,
            _alone: alone,
        };
        let deadline = tokio::time::Instant::now() + DEADLINE;
        loop {
            let answer = running
                .raw("GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                .await;
            if answer.starts_with("HTTP/1.1 200") {
                break;
            }
            // Where the head timeout is short, a busy machine may miss it.
            assert!(tokio::time::Instant::now() < deadline, "{answer:?}");
        }
        wait_for("the first connection to end", || {
            running.router.metrics().open_connections() == 0
        })
        .await;
        running
    }

    /// Makes sandbox `default/<name>` known on loopback.
    pub fn know(&self, name: &str) {
        self.router
            .registry()
            .insert("default", name, vec!["127.0.0.1".parse().unwrap()]);
    }

    /// Moves sandbox `default/<name>` to an address where nothing listens, which ends its connections.
    pub fn move_away(&self, name: &str) {
        self.router
            .registry()
            .insert("default", name, vec!["127.255.0.9".parse().unwrap()]);
    }

    pub async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Sends bytes on a new connection and reads until the router closes it.
    pub async fn raw(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut stream = self.connect().await;
        stream.write_all(bytes.as_ref()).await.unwrap();
        String::from_utf8_lossy(&read_all(&mut stream).await).into_owned()
    }

    /// Sends a GET for `/path` of sandbox `abc` at an upstream's port, with additional header lines.
    pub async fn get(&self, port: u16, path: &str, more: &str) -> String {
        self.raw(format!(
            "GET {path} HTTP/1.1\r\nHost: public.example\r\nConnection: close\r\nX-Sandbox-ID: abc\r\nX-Sandbox-Port: {port}\r\n{more}\r\n"
        ))
        .await
    }

    /// Waits for a request, stops accepting, and only then lets `release` make the sandbox respond.
    pub async fn stop_with_a_request_in_flight(&self, release: &watch::Sender<bool>) {
        let metrics = self.router.metrics();
        wait_for("the request", || metrics.active_requests() == 1).await;
        self.shutdown.cancel();
        wait_for("the port to close", || {
            std::net::TcpStream::connect(self.address).is_err()
        })
        .await;
        release.send(true).unwrap();
    }

    pub async fn stop(self) {
        self.shutdown.cancel();
        tokio::time::timeout(DEADLINE, self.serving)
            .await
            .expect("the router stops")
            .unwrap();
    }
}

pub async fn read_all(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let reading = async {
        let mut buffer = vec![0; 65536];
        loop {
            match stream.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
            }
        }
    };
    tokio::time::timeout(DEADLINE, reading)
        .await
        .expect("the router closes the connection");
    bytes
}

/// Reads until `marker` has arrived.
pub async fn read_until(stream: &mut TcpStream, marker: &str) -> String {
    let mut bytes = Vec::new();
    let reading = async {
        let mut buffer = vec![0; 16384];
        while !String::from_utf8_lossy(&bytes).contains(marker) {
            let count = stream.read(&mut buffer).await.unwrap();
            assert!(
                count > 0,
                "closed after {:?}",
                String::from_utf8_lossy(&bytes)
            );
            bytes.extend_from_slice(&buffer[..count]);
        }
    };
    tokio::time::timeout(DEADLINE, reading)
        .await
        .expect("the marker arrives");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A server that handles every connection with `serve`.
pub async fn upstream<F, Served>(serve: F) -> u16
where
    F: Fn(TcpStream) -> Served + Send + 'static,
    Served: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream));
        }
    });
    port
}

/// A server that reads everything and never responds.
pub async fn silent() -> u16 {
    upstream(|mut stream| async move {
        let mut sink = Vec::new();
        let _ = stream.read_to_end(&mut sink).await;
    })
    .await
}

/// A server that responds with `done` once it is released.
pub async fn held_back() -> (u16, watch::Sender<bool>) {
    let (release, released) = watch::channel(false);
    let port = upstream(move |mut stream| {
        let mut released = released.clone();
        async move {
            read_until(&mut stream, "\r\n\r\n").await;
            released.wait_for(|released| *released).await.unwrap();
            answer(&mut stream, "done").await.unwrap();
        }
    })
    .await;
    (port, release)
}

/// An HTTP/2 server that responds to each call with the frames from `frames`.
pub async fn grpc<F, Framing, Frames>(frames: F) -> u16
where
    F: Fn(Request<Incoming>) -> Framing + Clone + Send + 'static,
    Framing: Future<Output = Frames> + Send + 'static,
    Frames: Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + 'static,
{
    upstream(move |stream| {
        let frames = frames.clone();
        async move {
            let service = service_fn(move |request| {
                let framing = frames(request);
                async move {
                    Response::builder()
                        .header("content-type", "application/grpc")
                        .body(StreamBody::new(framing.await))
                }
            });
            let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        }
    })
    .await
}

/// Sends a 200 response with a body.
pub async fn answer(stream: &mut TcpStream, body: &str) -> std::io::Result<()> {
    let length = body.len();
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(answer.as_bytes()).await
}

/// A server that responds to each request with the request itself, head and body, and keeps the connection open.
pub async fn echo() -> u16 {
    upstream(|mut stream| async move {
        let mut pending = Vec::new();
        while let Some(request) = next_request(&mut stream, &mut pending).await {
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nX-Upstream: echo\r\n\r\n",
                request.len()
            );
            if stream.write_all(head.as_bytes()).await.is_err()
                || stream.write_all(&request).await.is_err()
            {
                return;
            }
        }
    })
    .await
}

/// A server that responds to each request with `ok`, and records the requests.
pub async fn recording() -> (u16, Arc<Mutex<Vec<String>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noting = Arc::clone(&seen);
    let port = upstream(move |mut stream| {
        let noting = Arc::clone(&noting);
        async move {
            let mut pending = Vec::new();
            while let Some(request) = next_request(&mut stream, &mut pending).await {
                let request = String::from_utf8_lossy(&request).into_owned();
                noting.lock().unwrap().push(request);
                if answer(&mut stream, "ok").await.is_err() {
                    return;
                }
            }
        }
    })
    .await;
    (port, seen)
}

/// An address of this machine that is not loopback, which clients may name. Finding it sends no packet.
pub fn own_address() -> IpAddr {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket
        .connect("198.51.100.1:9")
        .expect("this test needs a network interface besides loopback");
    socket.local_addr().unwrap().ip()
}

/// Reads one request, with a content length or without a body.
pub async fn next_request(stream: &mut TcpStream, pending: &mut Vec<u8>) -> Option<Vec<u8>> {
    let mut buffer = vec![0; 65536];
    loop {
        if let Some(end) = pending.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&pending[..end]).to_ascii_lowercase();
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: ")?.parse().ok())
                .unwrap_or(0);
            if pending.len() >= end + 4 + length {
                return Some(pending.drain(..end + 4 + length).collect());
            }
        }
        match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(count) => pending.extend_from_slice(&buffer[..count]),
        }
    }
}

pub fn status(answer: &str) -> u16 {
    answer
        .split(' ')
        .nth(1)
        .unwrap_or_else(|| panic!("no status in {answer:?}"))
        .parse()
        .unwrap()
}

pub fn body(answer: &str) -> &str {
    answer.split_once("\r\n\r\n").map_or("", |(_, body)| body)
}

pub async fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, waiting)
        .await
        .unwrap_or_else(|_| panic!("waited too long for {what}"));
}

/// The number of open network sockets of this process. Other descriptors, and a Unix socket for signals, belong to runtimes,
/// which the test harness creates at any time.
fn open_sockets() -> usize {
    let unix = std::fs::read_to_string("/proc/net/unix").unwrap();
    let unix: HashSet<String> = unix
        .lines()
        .filter_map(|line| line.split_whitespace().nth(6))
        .map(|inode| format!("socket:[{inode}]"))
        .collect();
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .map(|target| target.to_string_lossy().into_owned())
        .filter(|target| target.starts_with("socket:") && !unix.contains(target))
        .count()
}

/// The resources that the process holds, to detect leaks of a test.
#[derive(Clone, Copy, Debug)]
pub struct Holdings {
    sockets: usize,
    tasks: usize,
}

impl Holdings {
    pub fn now() -> Self {
        Self {
            sockets: open_sockets(),
            tasks: tokio::runtime::Handle::current()
                .metrics()
                .num_alive_tasks(),
        }
    }

    /// Waits until no request or connection is left, and no more sockets and tasks than at the time of `now`.
    pub async fn are_all(self, running: &Running) {
        let metrics = running.router.metrics();
        let are_given_back = || {
            let now = Holdings::now();
            now.sockets <= self.sockets
                && now.tasks <= self.tasks
                && (metrics.active_requests(), metrics.active_tunnels()) == (0, 0)
                && metrics.open_connections() == 0
        };
        let deadline = tokio::time::Instant::now() + LEAK_DEADLINE;
        while !are_given_back() {
            assert!(
                tokio::time::Instant::now() < deadline,
                "{self:?} became {:?}",
                Holdings::now()
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}
