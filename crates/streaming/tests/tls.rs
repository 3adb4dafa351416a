//! The endpoints over TLS: the client's certificate reaches the authenticator.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use axum::Router;
use axum::extract::Extension;
use axum::routing::get;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use streaming::kubelet::{PeerCertificates, serve};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_util::sync::CancellationToken;

struct Identity {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

fn issue(authority: &CertifiedIssuer<'static, KeyPair>, name: &str) -> Identity {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let certificate = params.signed_by(&key, authority).unwrap();
    Identity {
        certificate: certificate.der().clone(),
        key: PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
    }
}

async fn get_root(address: std::net::SocketAddr, config: ClientConfig) -> std::io::Result<String> {
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("kubelet").unwrap();
    let mut stream = TlsConnector::from(Arc::new(config))
        .connect(name, stream)
        .await?;
    stream
        .write_all(b"GET / HTTP/1.1\r\nHost: kubelet\r\nConnection: close\r\n\r\n")
        .await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

#[tokio::test]
async fn the_clients_certificate_is_in_the_request() {
    let authority = authority();
    let (server, client) = (issue(&authority, "kubelet"), issue(&authority, "apiserver"));
    let mut roots = RootCertStore::empty();
    roots.add(authority.der().clone()).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots.clone()), Arc::clone(&provider))
            .allow_unauthenticated()
            .build()
            .unwrap();
    let tls = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![server.certificate], server.key)
        .unwrap();
    let shows = |Extension(certificates): Extension<PeerCertificates>| async move {
        format!("{:?}", certificates.0)
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let stop = CancellationToken::new();
    let router = Router::new().route("/", get(shows));
    let serving = tokio::spawn(serve(listener, Some(Arc::new(tls)), router, stop.clone()));

    let client_config = || {
        ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots.clone())
    };
    let anonymous = get_root(address, client_config().with_no_client_auth())
        .await
        .unwrap();
    assert!(anonymous.ends_with("\r\n\r\n[]"), "{anonymous}");
    let expected = format!("{:?}", [client.certificate.to_vec()]);
    let with_certificate = client_config()
        .with_client_auth_cert(vec![client.certificate], client.key)
        .unwrap();
    let known = get_root(address, with_certificate).await.unwrap();
    assert!(known.ends_with(&expected), "{known}");

    stop.cancel();
    tokio::time::timeout(std::time::Duration::from_secs(120), serving)
        .await
        .expect("an end")
        .unwrap();
    assert!(TcpStream::connect(address).await.is_err());
}
