//! The kubelet's streaming API over this node's pods: logs, exec, attach and port-forward.
//!
//! The `streaming` crate implements the wire protocols, the container runtime the operations. This module connects the two, and
//! controls access: a client needs a certificate of the configured authority or a token that the API server accepts, and then the
//! permission of the API server.
//!
//! ```text
//! API server ──TLS──► access (authentication, authorization) ──► backend (which pod) ──► process (streams) ──► the container's agent
//! ```

mod access;
mod backend;
mod process;

use std::net::SocketAddr;
use std::sync::Arc;

use kube::Client;
use rustls::RootCertStore;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::runtime::Runtime;
use access::ApiAuthority;
use backend::PodBackend;

/// The endpoint of the streaming API and its credentials.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Port 0 picks a free one.
    pub address: SocketAddr,
    /// The certificate authority of client certificates.
    pub authority_pem: String,
    pub certificate_pem: String,
    pub key_pem: String,
    /// The services of this machine that mirror pods may represent: a port-forward to a port whose host port names one is connected to
    /// it. Any other host port of a mirror pod is refused. Otherwise every user who may create pods could reach every port of the
    /// machine (confused deputy). A connection starts with a header that names its namespace ([`api::proxy_header`]).
    pub host_services: Vec<SocketAddr>,
}

#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    #[error("listening on {address} for logs, exec and port-forward")]
    Listen {
        address: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error("reading the certificate of the streaming API")]
    Pem(#[source] rustls::pki_types::pem::Error),
    #[error("using the certificate of the streaming API")]
    Tls(#[source] rustls::Error),
    #[error("trusting the authority of the streaming API")]
    Authority(#[source] rustls::server::VerifierBuilderError),
}

/// The streaming API, bound but not yet served.
#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    host_services: Vec<SocketAddr>,
    pub address: SocketAddr,
}

/// Binds the endpoint's address, so that the node can publish it before it serves.
pub async fn listen(endpoint: &Endpoint) -> Result<Listening, KubeletError> {
    let failed = |source| KubeletError::Listen {
        address: endpoint.address,
        source,
    };
    let tls = tls(endpoint)?;
    let listener = TcpListener::bind(endpoint.address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok(Listening {
        listener,
        tls,
        host_services: endpoint.host_services.clone(),
        address,
    })
}

impl Listening {
    /// Serves until `shutdown`.
    pub async fn serve<R: Runtime>(
        self,
        runtime: Arc<R>,
        client: Client,
        node_name: String,
        shutdown: CancellationToken,
    ) {
        let backend = PodBackend {
            runtime,
            client: client.clone(),
            node_name: node_name.clone(),
            host_services: self.host_services,
            shutdown: shutdown.clone(),
        };
        let authority = ApiAuthority { client, node_name };
        let router = streaming::kubelet::router(backend, authority, streaming::Settings::default());
        streaming::kubelet::serve(self.listener, Some(self.tls), router, shutdown).await;
    }
}

fn tls(endpoint: &Endpoint) -> Result<Arc<ServerConfig>, KubeletError> {
    let certificates = |pem: &str| -> Result<Vec<CertificateDer<'static>>, KubeletError> {
        CertificateDer::pem_slice_iter(pem.as_bytes())
            .collect::<Result<_, _>>()
            .map_err(KubeletError::Pem)
    };
    let key =
        PrivateKeyDer::from_pem_slice(endpoint.key_pem.as_bytes()).map_err(KubeletError::Pem)?;
    let mut roots = RootCertStore::empty();
    for authority in certificates(&endpoint.authority_pem)? {
        roots.add(authority).map_err(KubeletError::Tls)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    // Client certificates are optional, because a client may use a token instead. A request with neither is refused later.
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .map_err(KubeletError::Authority)?;
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(KubeletError::Tls)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates(&endpoint.certificate_pem)?, key)
        .map_err(KubeletError::Tls)?;
    Ok(Arc::new(config))
}
