//! Servers on loopback: a scripted router, the real in-sandbox runtime, and a Kubernetes API that forwards ports.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{SinkExt, StreamExt};
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A complete request.
#[derive(Clone, Debug)]
pub struct Received {
    pub method: Method,
    pub target: String,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Received {
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }
}

/// A router with scripted responses.
pub struct ScriptedRouter {
    pub url: String,
    received: Arc<Mutex<Vec<Received>>>,
    _stop: DropGuard,
}

pub type Answer = BoxFuture<'static, Response<Full<Bytes>>>;

impl ScriptedRouter {
    /// `answer` gets the number of the request, from 1, and the request.
    pub async fn start(answer: impl Fn(usize, Received) -> Answer + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let received: Arc<Mutex<Vec<Received>>> = Arc::default();
        let stop = CancellationToken::new();
        let answer = Arc::new(answer);
        let record = Arc::clone(&received);
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (record, answer) = (Arc::clone(&record), Arc::clone(&answer));
                let service = service_fn(move |request: Request<Incoming>| {
                    let (record, answer) = (Arc::clone(&record), Arc::clone(&answer));
                    async move {
                        let (parts, body) = request.into_parts();
                        let request = Received {
                            method: parts.method,
                            target: parts.uri.to_string(),
                            headers: parts.headers,
                            body: body.collect().await.unwrap().to_bytes(),
                        };
                        let number = {
                            let mut record = record.lock().unwrap();
                            record.push(request.clone());
                            record.len()
                        };
                        Ok::<_, Infallible>(answer(number, request).await)
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        }));
        Self {
            url,
            received,
            _stop: stop.drop_guard(),
        }
    }

    /// Responds to every request with the same response.
    pub async fn always(status: u16, body: &'static str) -> Self {
        Self::start(move |_, _| answer(status, body)).await
    }

    pub fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap().clone()
    }
}

pub fn answer(status: u16, body: impl Into<Bytes>) -> Answer {
    let response = Response::builder()
        .status(status)
        .body(Full::new(body.into()))
        .unwrap();
    Box::pin(async move { response })
}

/// The real in-sandbox runtime, with its own directory.
pub struct Runtime {
    pub url: String,
    pub port: u16,
    pub directory: tempfile::TempDir,
    _stop: DropGuard,
}

impl Runtime {
    pub async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let config = sandboxd::Config {
            base_dir: directory.path().to_owned(),
            listen: vec![([127, 0, 0, 1], 0).into()],
            init_listen: None,
            reap_orphans: false,
            ..sandboxd::Config::default()
        };
        let server = sandboxd::Server::bind(config).await.unwrap();
        let address = server.addresses().sdk[0];
        let stop = CancellationToken::new();
        tokio::spawn(server.serve(stop.clone()));
        Self {
            url: format!("http://{address}"),
            port: address.port(),
            directory,
            _stop: stop.drop_guard(),
        }
    }
}

/// A Kubernetes API on a socket: forwards every request to another API, except for port-forwards, which lead to one local
/// port in the wire format of `v4.channel.k8s.io`.
pub struct ApiFront {
    url: String,
    forwarded: Arc<Mutex<Vec<String>>>,
    refuse: Arc<AtomicBool>,
    _stop: DropGuard,
}

impl ApiFront {
    pub async fn start(inner: kube::Client, target: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        let forwarded: Arc<Mutex<Vec<String>>> = Arc::default();
        let refuse = Arc::new(AtomicBool::new(false));
        let front = (inner, Arc::clone(&forwarded), Arc::clone(&refuse));
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let front = front.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let (inner, forwarded, refuse) = front.clone();
                    async move {
                        let path = request.uri().path().to_owned();
                        let Some(pod) = path.strip_suffix("/portforward") else {
                            return pass_on(&inner, request).await;
                        };
                        if refuse.load(Ordering::Relaxed) {
                            let refusal = Response::builder()
                                .status(500)
                                .body(kube::client::Body::empty());
                            return Ok(refusal.unwrap());
                        }
                        let parts: Vec<_> = pod.split('/').collect();
                        let query = request.uri().query().unwrap_or_default();
                        let port = query.split("ports=").nth(1).unwrap().parse().unwrap();
                        forwarded
                            .lock()
                            .unwrap()
                            .push(format!("{}/{}:{port}", parts[4], parts[6]));
                        Ok(port_forward(request, port, target))
                    }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(connection.with_upgrades());
            }
        }));
        Self {
            url,
            forwarded,
            refuse,
            _stop: stop.drop_guard(),
        }
    }

    pub fn client(&self) -> kube::Client {
        kube::Client::try_from(kube::Config::new(self.url.parse().unwrap())).unwrap()
    }

    /// The pods and ports of all port-forwards, in order.
    pub fn forwarded(&self) -> Vec<String> {
        self.forwarded.lock().unwrap().clone()
    }

    pub fn refuse_forwarding(&self) {
        self.refuse.store(true, Ordering::Relaxed);
    }
}

async fn pass_on(
    inner: &kube::Client,
    request: Request<Incoming>,
) -> Result<Response<kube::client::Body>, kube::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes().to_vec();
    inner
        .send(Request::from_parts(parts, kube::client::Body::from(body)))
        .await
}

fn port_forward(
    mut request: Request<Incoming>,
    port: u16,
    target: u16,
) -> Response<kube::client::Body> {
    let key = request.headers()["sec-websocket-key"].as_bytes().to_vec();
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        let upgraded = TokioIo::new(upgrade.await.unwrap());
        let socket = WebSocketStream::from_raw_socket(upgraded, Role::Server, None).await;
        let (mut sink, mut frames) = socket.split();
        for channel in [0, 1] {
            let [low, high] = port.to_le_bytes();
            sink.send(Message::binary(vec![channel, low, high]))
                .await
                .unwrap();
        }
        let stream = tokio::net::TcpStream::connect(("127.0.0.1", target))
            .await
            .unwrap();
        let (mut reader, mut writer) = stream.into_split();
        let outward = async {
            let mut buffer = vec![0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut buffer).await {
                let mut frame = vec![0];
                frame.extend_from_slice(&buffer[..count]);
                if sink.send(Message::binary(frame)).await.is_err() {
                    return;
                }
            }
        };
        let inward = async {
            while let Some(Ok(frame)) = frames.next().await {
                if let Message::Binary(bytes) = frame
                    && writer.write_all(&bytes[1..]).await.is_err()
                {
                    return;
                }
            }
        };
        tokio::join!(outward, inward);
    });
    Response::builder()
        .status(101)
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-accept", derive_accept_key(&key))
        .header("sec-websocket-protocol", "v4.channel.k8s.io")
        .body(kube::client::Body::empty())
        .unwrap()
}

/// TLS in front of a local port, with a certificate that no client trusts by default.
pub struct TlsFront {
    pub url: String,
    certificate: rustls::pki_types::CertificateDer<'static>,
    _stop: DropGuard,
}

impl TlsFront {
    pub async fn start(target: u16) -> Self {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let certificate = made.cert.der().clone();
        let key =
            rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let config = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], key)
            .unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let stop = CancellationToken::new();
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    // A client that does not trust the certificate closes the connection here.
                    let Ok(mut secured) = acceptor.accept(stream).await else {
                        return;
                    };
                    let mut plain = tokio::net::TcpStream::connect(("127.0.0.1", target))
                        .await
                        .unwrap();
                    let _ = tokio::io::copy_bidirectional(&mut secured, &mut plain).await;
                });
            }
        }));
        Self {
            url: format!("https://localhost:{port}"),
            certificate,
            _stop: stop.drop_guard(),
        }
    }

    /// A configuration that trusts this server.
    pub fn trust(&self) -> Arc<rustls::ClientConfig> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        let config = rustls::ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        Arc::new(config)
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}
