//! A backend that runs commands on this machine, and an API server that knows one pod and proxies all other requests to the
//! kubelet endpoints byte for byte, as kube-apiserver does.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Json, Response};
use bytes::Bytes;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use http::StatusCode;
use http::header::AUTHORIZATION;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use streaming::Settings;
use streaming::kubelet::{
    Access, AttachRequest, Backend, Error, ExecRequest, LogRequest, Target, TargetPod,
    bearer_token, router,
};
use streaming::port_forward::Duplex;
use streaming::remote_command::{Failure, Process};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

const TOKEN: &str = "kubelet-token";

/// A backend with one pod, `web` in `default`, which has the container `main`.
#[derive(Clone)]
pub struct Local {
    /// The addresses behind the pod's ports.
    pub ports: HashMap<u16, SocketAddr>,
    /// The number of running commands.
    pub running: Arc<AtomicUsize>,
    /// The log ends when the sender is dropped.
    pub log: watch::Receiver<Vec<String>>,
}

struct Running(Arc<AtomicUsize>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Local {
    fn spawn(&self, command: &[String]) -> Result<Process, Error> {
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|error| Error::Internal(format!("{:?}: {error}", command[0])))?;
        self.running.fetch_add(1, Ordering::SeqCst);
        let running = Running(Arc::clone(&self.running));
        Ok(Process {
            stdin: child.stdin.take().map(|stdin| Box::new(stdin) as _),
            stdout: child.stdout.take().map(|stdout| Box::new(stdout) as _),
            stderr: child.stderr.take().map(|stderr| Box::new(stderr) as _),
            resize: None,
            exit: async move {
                let _running = running;
                let status = child
                    .wait()
                    .await
                    .map_err(|error| Failure(error.to_string()))?;
                Ok(status.code().unwrap_or(137))
            }
            .boxed(),
        })
    }
}

/// A process that prints each terminal size until its input ends.
fn print_sizes() -> Process {
    let (resize, mut sizes) = mpsc::channel::<streaming::remote_command::TerminalSize>(4);
    let (stdout, mut out) = tokio::io::duplex(1_024);
    let (stdin, mut input) = tokio::io::duplex(1_024);
    let exit = async move {
        let mut ignored = [0; 64];
        loop {
            tokio::select! {
                size = sizes.recv() => match size {
                    Some(size) => {
                        let line = format!("{}x{}\n", size.width, size.height);
                        out.write_all(line.as_bytes()).await.map_err(|error| Failure(error.to_string()))?;
                    }
                    None => return Ok(1),
                },
                read = input.read(&mut ignored) => if matches!(read, Ok(0) | Err(_)) {
                    return Ok(0);
                },
            }
        }
    };
    Process {
        stdin: Some(Box::new(stdin)),
        stdout: Some(Box::new(stdout)),
        stderr: None,
        resize: Some(resize),
        exit: exit.boxed(),
    }
}

impl Backend for Local {
    async fn find(&self, target: &Target) -> Result<(), Error> {
        self.find_pod(&target.pod).await?;
        if target.container == "main" {
            Ok(())
        } else {
            Err(Error::NotFound(format!(
                "container not found ({:?})",
                target.container
            )))
        }
    }

    async fn find_pod(&self, pod: &TargetPod) -> Result<(), Error> {
        if (pod.namespace.as_str(), pod.name.as_str()) == ("default", "web") {
            Ok(())
        } else {
            Err(Error::NotFound("pod does not exist".into()))
        }
    }

    async fn exec(&self, request: ExecRequest) -> Result<Process, Error> {
        if request.command == ["sizes"] {
            return Ok(print_sizes());
        }
        self.spawn(&request.command)
    }

    async fn attach(&self, _request: AttachRequest) -> Result<Process, Error> {
        let script = "echo attached; while read line; do echo \"heard $line\"; done; exit 9";
        self.spawn(&["sh", "-c", script].map(str::to_owned))
    }

    async fn port_forward(&self, _pod: TargetPod, port: u16) -> Result<Box<dyn Duplex>, Error> {
        let refused = || Error::Internal(format!("nothing listens on {port}"));
        let address = self.ports.get(&port).ok_or_else(refused)?;
        let stream = TcpStream::connect(address).await.map_err(|_| refused())?;
        Ok(Box::new(stream))
    }

    async fn logs(
        &self,
        request: LogRequest,
    ) -> Result<BoxStream<'static, std::io::Result<Bytes>>, Error> {
        self.find(&request.target).await?;
        let mut log = self.log.clone();
        let first = log.borrow_and_update().len();
        let tail = request
            .tail_lines
            .map_or(first, |lines| usize::try_from(lines).unwrap());
        let lines = futures::stream::unfold(
            (log, first.saturating_sub(tail)),
            move |(mut log, next)| async move {
                loop {
                    let line = log.borrow().get(next).map(|line| format!("{line}\n"));
                    if let Some(line) = line {
                        return Some((Ok(Bytes::from(line)), (log, next + 1)));
                    }
                    if !request.follow || log.changed().await.is_err() {
                        return None;
                    }
                }
            },
        );
        Ok(lines.boxed())
    }

    async fn pods(&self) -> Result<Vec<Value>, Error> {
        Ok(vec![pod()])
    }
}

fn pod() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web", "namespace": "default", "uid": "1"},
        "spec": {"nodeName": "here", "containers": [{"name": "main", "image": "host", "stdin": true}]},
        "status": {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{
                "name": "main", "image": "host", "imageID": "", "ready": true, "restartCount": 0,
                "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            }],
        },
    })
}

/// The API server, the kubelet endpoints and an echo server, on free ports of this machine.
pub struct Cluster {
    pub api: SocketAddr,
    pub kubelet: SocketAddr,
    pub backend: Local,
    pub log: watch::Sender<Vec<String>>,
    /// The port of a server that echoes each connection and closes it when the client does.
    pub echo_port: u16,
    servers: Vec<tokio::task::JoinHandle<()>>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for server in &self.servers {
            server.abort();
        }
    }
}

impl Cluster {
    pub async fn start() -> Self {
        let (echo, echo_server) = echo_server().await;
        let (log, log_receiver) = watch::channel(vec!["one".to_owned(), "two".to_owned()]);
        let backend = Local {
            ports: HashMap::from([(80, echo)]),
            running: Arc::default(),
            log: log_receiver,
        };
        let authenticator = |request: &http::request::Parts| match bearer_token(request) {
            Some(TOKEN) => Access::Allowed,
            Some(_) => Access::Forbidden("a stranger".into()),
            None => Access::Unauthenticated,
        };
        let settings = Settings {
            drain: Duration::from_millis(200),
            // Older clients drop messages that arrive while they still create streams. On a busy machine that takes longer.
            settle: Duration::from_millis(500),
            ..Settings::default()
        };
        let endpoints = router(backend.clone(), authenticator, settings);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let kubelet = listener.local_addr().unwrap();
        let serving =
            streaming::kubelet::serve(listener, None, endpoints, CancellationToken::new());
        let kubelet_server = tokio::spawn(serving);
        let (api, api_server) =
            serve(Router::new().fallback(api_request).with_state(kubelet)).await;
        Self {
            api,
            kubelet,
            backend,
            log,
            echo_port: 80,
            servers: vec![echo_server, kubelet_server, api_server],
        }
    }

    /// Waits until exactly `count` commands are running.
    pub async fn wait_for_commands(&self, count: usize) {
        let reached = async {
            while self.backend.running.load(Ordering::SeqCst) != count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(120), reached)
            .await
            .expect("the number of running commands");
    }
}

async fn serve(router: Router) -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (address, server)
}

async fn echo_server() -> (SocketAddr, tokio::task::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let (mut read, mut write) = stream.split();
                let _ = tokio::io::copy(&mut read, &mut write).await;
            });
        }
    });
    (address, server)
}

/// The part of the Kubernetes API that kubectl and kube-rs need to find the pod.
async fn api_request(State(kubelet): State<SocketAddr>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
    match segments[..] {
        ["api"] => Json(json!({"kind": "APIVersions", "versions": ["v1"]})).into_response(),
        ["apis"] => {
            Json(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})).into_response()
        }
        ["api", "v1"] => Json(json!({
            "kind": "APIResourceList", "groupVersion": "v1",
            "resources": [{
                "name": "pods", "singularName": "pod", "namespaced": true, "kind": "Pod",
                "verbs": ["get", "list"], "shortNames": ["po"], "categories": ["all"],
            }],
        }))
        .into_response(),
        ["api", "v1", "namespaces", "default", "pods", "web"] => Json(pod()).into_response(),
        ["api", "v1", "namespaces", namespace, "pods", pod, verb] => {
            let query = request.uri().query().unwrap_or_default();
            let target = kubelet_path(namespace, pod, verb, query);
            proxy(kubelet, target, request).await
        }
        _ => {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404});
            (StatusCode::NOT_FOUND, Json(status)).into_response()
        }
    }
}

/// The request path that kube-apiserver uses at the kubelet.
fn kubelet_path(namespace: &str, pod: &str, verb: &str, query: &str) -> String {
    let mut container = "main";
    let mut passed = Vec::new();
    for pair in query.split('&') {
        match pair.split_once('=') {
            Some(("container", name)) => container = name,
            Some(("stdin", "true")) => passed.push("input=1"),
            Some(("stdout", "true")) => passed.push("output=1"),
            Some(("stderr", "true")) => passed.push("error=1"),
            Some(("tty", "true")) => passed.push("tty=1"),
            _ => passed.push(pair),
        }
    }
    let query = passed.join("&").replace("ports=", "port=");
    match verb {
        "portforward" => format!("/portForward/{namespace}/{pod}?{query}"),
        "log" => format!("/containerLogs/{namespace}/{pod}/{container}?{query}"),
        _ => format!("/{verb}/{namespace}/{pod}/{container}?{query}"),
    }
}

async fn proxy(kubelet: SocketAddr, target: String, mut request: Request) -> Response {
    let client_upgrade = hyper::upgrade::on(&mut request);
    let stream = TcpStream::connect(kubelet).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection.with_upgrades());
    let mut onward = http::Request::builder()
        .method(request.method())
        .uri(target);
    for (name, value) in request.headers() {
        onward = onward.header(name, value);
    }
    let bearer = format!("Bearer {TOKEN}");
    let onward = onward
        .header(AUTHORIZATION, bearer)
        .body(Body::empty())
        .unwrap();
    let mut response = sender.send_request(onward).await.unwrap();
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let kubelet_upgrade = hyper::upgrade::on(&mut response);
        tokio::spawn(async move {
            let (Ok(client), Ok(kubelet)) = tokio::join!(client_upgrade, kubelet_upgrade) else {
                return;
            };
            let _ = copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(kubelet)).await;
        });
    }
    let (parts, body) = response.into_parts();
    Response::from_parts(parts, Body::new(body))
}
