//! Overload by one account, which must not affect other accounts.

use std::{sync::Arc, time::Duration};

use apiserver::{Config, Server};
use bytes::Bytes;
use futures::StreamExt;
use http::{Request, header};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, StreamBody, combinators::BoxBody};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::json;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::create;

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(20);
/// More than the per-account limit of concurrent uploads. They need two connections, because one has at most a thousand streams.
const SLOW_REQUESTS: usize = 1100;

type Sender = hyper::client::conn::http2::SendRequest<BoxBody<Bytes, std::convert::Infallible>>;

/// Opens an HTTP/2 connection to the server at `address`.
async fn connect(server: &Server, address: std::net::SocketAddr) -> Sender {
    let kubeconfig = tempfile::NamedTempFile::new().expect("a file");
    server
        .write_kubeconfig(kubeconfig.path(), "https://localhost")
        .expect("written");
    let text = std::fs::read_to_string(kubeconfig.path()).expect("read");
    let config: serde_json::Value = serde_yaml_ng::from_str(&text).expect("YAML");
    let pem = config["clusters"][0]["cluster"]["certificate-authority-data"].as_str();
    let pem = base64::Engine::decode(
        &base64::engine::general_purpose::STANDARD,
        pem.expect("PEM"),
    );
    let authority: rustls::pki_types::CertificateDer =
        rustls::pki_types::pem::PemObject::from_pem_slice(&pem.expect("base64")).expect("PEM");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(address).await.expect("connected");
    let name = rustls::pki_types::ServerName::try_from("localhost").expect("a name");
    let stream = tokio_rustls::TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await
        .expect("encrypted");
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
            .await
            .expect("HTTP/2");
    tokio::spawn(connection);
    sender
}

async fn token(server: &Server) -> String {
    let target = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let (_, answer) = create(&server.client(), target, &json!({"spec": {}})).await;
    answer["status"]["token"].as_str().expect("a token").into()
}

/// Opens many requests with endless bodies from an account without permissions, then sends a request from another account.
async fn others_are_answered(query: &str) {
    let server = Arc::new(Server::open(Config::in_memory()).await.expect("a server"));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let stop = CancellationToken::new();
    let serving = tokio::spawn({
        let (server, stop) = (server.clone(), stop.clone());
        async move { server.serve(listener, stop).await.expect("served") }
    });
    let weak = token(&server).await;
    let target =
        format!("https://localhost/apis/authorization.k8s.io/v1/selfsubjectaccessreviews{query}");
    let senders = [
        connect(&server, address).await,
        connect(&server, address).await,
    ];
    let slow = (0..SLOW_REQUESTS).map(|number| {
        let first = futures::stream::iter([Ok(Frame::data(Bytes::from_static(b"{")))]);
        let request = Request::post(&target)
            .header(header::AUTHORIZATION, format!("Bearer {weak}"))
            .header(header::CONTENT_TYPE, "application/json")
            .body(BoxBody::new(StreamBody::new(
                first.chain(futures::stream::pending()),
            )))
            .expect("a request");
        let mut sender = senders[number % senders.len()].clone();
        async move {
            sender
                .send_request(request)
                .await
                .map(|answer| answer.status().as_u16())
        }
    });
    let mut slow: futures::stream::FuturesUnordered<_> = slow.collect();
    // The server rejects the requests beyond the limit of the account; then the others are in progress.
    let refused = tokio::time::timeout(RESPONSE_TIMEOUT, slow.next()).await;
    let refused = refused
        .expect("no request was rejected")
        .expect("the stream ended");
    assert_eq!(refused.expect("no response"), 429);

    // Another account with the same permissions, on another connection.
    let (_, made) = create(
        &server.client(),
        "/api/v1/namespaces/default/serviceaccounts",
        &json!({"metadata": {"name": "calm"}}),
    )
    .await;
    assert_eq!(made["metadata"]["name"], "calm");
    let (_, answer) = create(
        &server.client(),
        "/api/v1/namespaces/default/serviceaccounts/calm/token",
        &json!({"spec": {}}),
    )
    .await;
    let calm = answer["status"]["token"].as_str().expect("a token");
    let mut other = connect(&server, address).await;
    let request = Request::get("https://localhost/api")
        .header(header::AUTHORIZATION, format!("Bearer {calm}"))
        .body(BoxBody::new(Empty::new()))
        .expect("a request");
    let answer = tokio::time::timeout(RESPONSE_TIMEOUT, other.send_request(request)).await;
    let answer = answer
        .expect("the response timed out")
        .expect("no response");
    assert_eq!(answer.status(), 200);
    drop(answer.into_body().collect().await);
    drop((slow, senders, other));
    stop.cancel();
    serving.await.expect("serving panicked");
    Arc::into_inner(server)
        .expect("the server is still shared")
        .shutdown()
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_bodies_of_one_account_do_not_block_other_accounts() {
    others_are_answered("").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_parameter_does_not_exempt_a_post_from_the_limits() {
    others_are_answered("?watch=1").await;
}
