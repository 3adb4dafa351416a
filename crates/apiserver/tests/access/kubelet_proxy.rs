//! Logs and port-forward through the server to a node.

use std::sync::Arc;

use apiserver::Server;
use base64::{Engine, engine::general_purpose::STANDARD};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api,
    api::{LogParams, Patch, PatchParams, PostParams},
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

use crate::{parsed, served::Served, support::code};

/// A root store with one certificate authority.
fn roots(authority_pem: &[u8]) -> rustls::RootCertStore {
    let authority = CertificateDer::from_pem_slice(authority_pem).expect("a certificate");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(authority).expect("added");
    roots
}

/// A kubelet endpoint that answers logs, and echoes every upgraded connection.
async fn kubelet(server: &Server) -> u16 {
    let made = server
        .issue_node_certificate("node-1", &["127.0.0.1".to_owned()])
        .expect("a certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients = rustls::server::WebPkiClientVerifier::builder_with_provider(
        Arc::new(roots(made.authority_pem.as_bytes())),
        provider.clone(),
    )
    .build()
    .expect("a verifier");
    let config = rustls::ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_client_cert_verifier(clients)
        .with_single_cert(
            vec![
                CertificateDer::from_pem_slice(made.certificate_pem.as_bytes())
                    .expect("a certificate"),
            ],
            PrivateKeyDer::from_pem_slice(made.key_pem.as_bytes()).expect("a key"),
        )
        .expect("a server");
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(acceptor.clone(), stream));
        }
    });
    port
}

async fn answer(acceptor: tokio_rustls::TlsAcceptor, stream: TcpStream) {
    let Ok(mut stream) = acceptor.accept(stream).await else {
        return;
    };
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        request.push(stream.read_u8().await.expect("a request"));
    }
    let request = String::from_utf8(request).expect("text").to_lowercase();
    if request.contains("authorization") {
        stream
            .write_all(b"HTTP/1.1 500 Leak\r\ncontent-length: 0\r\n\r\n")
            .await
            .expect("written");
    } else if request.starts_with("get /containerlogs/default/p/main") {
        stream
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
            .await
            .expect("written");
    } else {
        stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: SPDY/3.1\r\n\r\n").await.expect("written");
        let (mut reader, mut writer) = tokio::io::split(stream);
        let _ = tokio::io::copy(&mut reader, &mut writer).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_and_upgrades_reach_the_node_without_the_clients_credentials() {
    let served = Served::start().await;
    let admin = served.server.client();
    let kubeconfig = tempfile::NamedTempFile::new().unwrap();
    served
        .server
        .write_kubeconfig(kubeconfig.path(), &served.url)
        .unwrap();
    let text = std::fs::read_to_string(kubeconfig.path()).unwrap();
    let config: Value = serde_yaml_ng::from_str(&text).unwrap();
    let token = config["users"][0]["user"]["token"]
        .as_str()
        .unwrap()
        .to_owned();
    let authority = config["clusters"][0]["cluster"]["certificate-authority-data"].as_str();
    let authority = STANDARD.decode(authority.unwrap()).unwrap();

    let pods: Api<Pod> = Api::default_namespaced(served.connect(&token));
    let pod = parsed(
        json!({"metadata": {"name": "p"}, "spec": {"nodeName": "node-1", "containers": [{"name": "main", "image": "host"}]}}),
    );
    pods.create(&PostParams::default(), &pod).await.unwrap();
    assert_eq!(
        code(pods.logs("p", &LogParams::default()).await),
        404,
        "the node does not exist"
    );
    let nodes: Api<Node> = Api::all(admin.clone());
    nodes
        .create(
            &PostParams::default(),
            &parsed(json!({"metadata": {"name": "node-1"}})),
        )
        .await
        .unwrap();
    let port = kubelet(&served.server).await;
    let status = json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}], "daemonEndpoints": {"kubeletEndpoint": {"Port": port}}}});
    nodes
        .patch_status("node-1", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    assert_eq!(
        pods.logs("p", &LogParams::default()).await.unwrap(),
        "hello"
    );

    let mut stream = upgraded(&served, &authority, &token).await;
    stream.write_all(b"ping").await.unwrap();
    let mut echoed = [0; 4];
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"ping");
    drop((stream, nodes, pods, admin));
    served.end().await;
}

/// Opens a port-forward in the way of kubectl.
async fn upgraded(
    served: &Served,
    authority_pem: &[u8],
    token: &str,
) -> impl AsyncReadExt + AsyncWriteExt + Unpin {
    let address = served.url.trim_start_matches("https://").to_owned();
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(
        rustls::crypto::ring::default_provider(),
    ))
    .with_safe_default_protocol_versions()
    .expect("versions")
    .with_root_certificates(roots(authority_pem))
    .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = TcpStream::connect(&address).await.expect("connected");
    let name = rustls::pki_types::ServerName::try_from("localhost").expect("a name");
    let mut stream = connector.connect(name, stream).await.expect("encrypted");
    let request = format!(
        "POST /api/v1/namespaces/default/pods/p/portforward HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\nconnection: Upgrade\r\nupgrade: SPDY/3.1\r\ncontent-length: 0\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.expect("written");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("no response"));
    }
    let head = String::from_utf8(head).expect("text");
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    stream
}
