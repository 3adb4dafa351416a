//! TLS from the client's side: HTTP/2 by ALPN, client certificates, and a certificate that is replaced while serving.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use router::{Config, MutualTls, Router, TlsConfig};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;

struct Issued {
    certificate: rcgen::Certificate,
    key: rcgen::KeyPair,
}

fn self_signed() -> Issued {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(vec!["router.example".to_owned()])
        .unwrap()
        .self_signed(&key)
        .unwrap();
    Issued { certificate, key }
}

fn write(directory: &Path, issued: &Issued) {
    std::fs::write(directory.join("tls.key"), issued.key.serialize_pem()).unwrap();
    std::fs::write(directory.join("tls.crt"), issued.certificate.pem()).unwrap();
}

fn client(trusted: &CertificateDer<'static>, own: Option<&Issued>) -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let config = match own {
        None => builder.with_no_client_auth(),
        Some(own) => {
            let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(own.key.serialize_der()));
            builder
                .with_client_auth_cert(vec![own.certificate.der().clone()], key)
                .unwrap()
        }
    };
    TlsConnector::from(Arc::new(config))
}

async fn healthz(
    address: std::net::SocketAddr,
    connector: &TlsConnector,
) -> std::io::Result<String> {
    let name = ServerName::try_from("router.example").unwrap();
    let mut stream = connector
        .connect(name, TcpStream::connect(address).await?)
        .await?;
    stream
        .write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .await?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

async fn start(
    directory: &Path,
    mutual: MutualTls,
    client_ca: Option<&str>,
) -> (std::net::SocketAddr, CancellationToken) {
    start_with(directory, mutual, client_ca, Config::default()).await
}

async fn start_with(
    directory: &Path,
    mutual: MutualTls,
    client_ca: Option<&str>,
    config: Config,
) -> (std::net::SocketAddr, CancellationToken) {
    let tls = TlsConfig {
        certificate_file: directory.join("tls.crt"),
        key_file: directory.join("tls.key"),
        client_ca_file: client_ca.map(|name| directory.join(name)),
        mutual,
    };
    let router = Router::new(
        Config {
            tls: Some(tls),
            ..config
        },
        None,
    )
    .unwrap();
    router
        .registry()
        .insert("default", "abc", vec!["127.0.0.1".parse().unwrap()]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let shutdown = CancellationToken::new();
    let stop = shutdown.clone();
    tokio::spawn(async move { router.serve_tls(listener, stop).await.unwrap() });
    (address, shutdown)
}

/// A router whose certificate is about to be replaced, and clients that trust only one of the two.
struct Rotation {
    directory: tempfile::TempDir,
    second: Issued,
    trusts_first: TlsConnector,
    trusts_second: TlsConnector,
    address: std::net::SocketAddr,
    shutdown: CancellationToken,
}

impl Rotation {
    async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (first, second) = (self_signed(), self_signed());
        write(directory.path(), &first);
        let (address, shutdown) = start(directory.path(), MutualTls::Off, None).await;
        Self {
            directory,
            trusts_first: client(first.certificate.der(), None),
            trusts_second: client(second.certificate.der(), None),
            second,
            address,
            shutdown,
        }
    }

    async fn serves(&self, client: &TlsConnector) -> bool {
        let answer = healthz(self.address, client).await;
        answer.is_ok_and(|answer| answer.contains("200 OK"))
    }

    /// Replaces the certificate, and waits until the new one is in use.
    async fn finish(self) {
        write(self.directory.path(), &self.second);
        let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
        while !self.serves(&self.trusts_second).await {
            assert!(
                tokio::time::Instant::now() < deadline,
                "the second certificate was never used"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self.shutdown.cancel();
    }
}

#[tokio::test]
async fn a_replaced_certificate_is_used_without_a_restart() {
    let rotation = Rotation::start().await;
    assert!(rotation.serves(&rotation.trusts_first).await);
    assert!(!rotation.serves(&rotation.trusts_second).await);
    rotation.finish().await;
}

#[tokio::test]
async fn client_certificates_are_asked_for_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let (server, known, stranger) = (self_signed(), self_signed(), self_signed());
    write(directory.path(), &server);
    std::fs::write(directory.path().join("ca.crt"), known.certificate.pem()).unwrap();
    let (required, stop_required) =
        start(directory.path(), MutualTls::Required, Some("ca.crt")).await;
    let (optional, stop_optional) =
        start(directory.path(), MutualTls::Optional, Some("ca.crt")).await;
    let trusted = server.certificate.der();
    for (address, own, served) in [
        (required, Some(&known), true),
        (required, None, false),
        (required, Some(&stranger), false),
        (optional, None, true),
        (optional, Some(&stranger), false),
    ] {
        let answer = healthz(address, &client(trusted, own)).await;
        assert_eq!(answer.is_ok_and(|answer| answer.contains("200 OK")), served);
    }
    stop_required.cancel();
    stop_optional.cancel();
}

#[tokio::test]
async fn an_invalid_certificate_leaves_the_previous_one_in_use() {
    let rotation = Rotation::start().await;
    assert!(rotation.serves(&rotation.trusts_first).await);
    std::fs::write(rotation.directory.path().join("tls.crt"), "nonsense").unwrap();
    // Past the interval at which the files are checked.
    let looked_at = tokio::time::Instant::now() + Duration::from_secs(6);
    while tokio::time::Instant::now() < looked_at {
        assert!(rotation.serves(&rotation.trusts_first).await);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    rotation.finish().await;
}

#[tokio::test]
async fn http2_is_negotiated_and_x_forwarded_proto_is_https() {
    use http_body_util::BodyExt;
    let sandbox = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = sandbox.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = sandbox.accept().await.unwrap();
        let mut head = vec![0; 4096];
        let length = stream.read(&mut head).await.unwrap();
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(answer.as_bytes()).await.unwrap();
        stream.write_all(&head[..length]).await.unwrap();
    });
    let directory = tempfile::tempdir().unwrap();
    let server = self_signed();
    write(directory.path(), &server);
    let (address, shutdown) = start(directory.path(), MutualTls::Off, None).await;
    let mut config = (**client(server.certificate.der(), None).config()).clone();
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let stream = TlsConnector::from(Arc::new(config))
        .connect(
            ServerName::try_from("router.example").unwrap(),
            TcpStream::connect(address).await.unwrap(),
        )
        .await
        .unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) = hyper::client::conn::http2::handshake(
        hyper_util::rt::TokioExecutor::new(),
        hyper_util::rt::TokioIo::new(stream),
    )
    .await
    .unwrap();
    tokio::spawn(connection);
    let request = http::Request::builder()
        .uri("https://router.example/page")
        .header("x-sandbox-id", "abc")
        .header("x-sandbox-port", port)
        .body(http_body_util::Empty::<bytes::Bytes>::new())
        .unwrap();
    let response = sender.send_request(request).await.unwrap();
    let seen = response.into_body().collect().await.unwrap().to_bytes();
    let seen = String::from_utf8_lossy(&seen).into_owned();
    assert!(seen.starts_with("GET /page HTTP/1.1\r\n"), "{seen}");
    assert!(seen.contains("x-forwarded-proto: https\r\n"), "{seen}");
    shutdown.cancel();
}

#[tokio::test]
async fn idle_clients_are_disconnected() {
    let directory = tempfile::tempdir().unwrap();
    let server = self_signed();
    write(directory.path(), &server);
    let config = Config {
        header_timeout: Duration::from_secs(2),
        ..Config::default()
    };
    let (address, shutdown) = start_with(directory.path(), MutualTls::Off, None, config).await;
    let until_hung_up = |mut stream: Box<dyn tokio::io::AsyncRead + Send + Unpin>| async move {
        let mut sink = Vec::new();
        let reading = stream.read_to_end(&mut sink);
        tokio::time::timeout(Duration::from_secs(30), reading)
            .await
            .expect("the router closes the connection")
    };
    let no_handshake = TcpStream::connect(address).await.unwrap();
    let _ = until_hung_up(Box::new(no_handshake)).await;
    for protocols in [vec![], vec![b"h2".to_vec()], vec![b"http/1.1".to_vec()]] {
        let mut config = (**client(server.certificate.der(), None).config()).clone();
        config.alpn_protocols = protocols;
        let connector = TlsConnector::from(Arc::new(config));
        // On a busy machine a handshake may miss the timeout.
        let mut attempts = 0;
        let silent = loop {
            let name = ServerName::try_from("router.example").unwrap();
            let stream = TcpStream::connect(address).await.unwrap();
            attempts += 1;
            match connector.connect(name, stream).await {
                Ok(silent) => break silent,
                Err(error) => assert!(attempts < 20, "no handshake in {attempts}: {error}"),
            }
        };
        let _ = until_hung_up(Box::new(silent)).await;
    }
    shutdown.cancel();
}
