//! The kubelet's streaming API over this node's pods: logs, exec, attach and port-forward.
//!
//! The wire protocols are the `streaming` crate's; what a container can do is the runtime's. This module joins the two, and decides
//! who may ask: nobody comes in without a certificate of the authority or a token that the API server vouches for, and then the
//! API server is asked whether they may.
//!
//! ```text
//! API server ──TLS──► access (who, and may they) ──► backend (which pod) ──► process (streams) ──► the container's agent
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

/// Where the streaming API listens, and as whom.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Port 0 picks a free one.
    pub address: SocketAddr,
    /// Clients with a certificate of this authority are who their certificate says.
    pub authority_pem: String,
    pub certificate_pem: String,
    pub key_pem: String,
    /// What mirror pods may stand for: services of this machine, reached by forwarding the port that names them as its host port.
    /// Anything else that a mirror pod names is refused, or whoever may create pods could reach every port of the machine. A connection
    /// begins with a header that says which namespace it is for ([`api::proxy_header`]).
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

/// The streaming API, listening but not yet answering.
#[derive(Debug)]
pub struct Listening {
    listener: TcpListener,
    tls: Arc<ServerConfig>,
    host_services: Vec<SocketAddr>,
    pub address: SocketAddr,
}

/// Binds the endpoint's address, so that the node can say where it is before it serves.
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
    // A client may come with a token instead; one with neither is turned away by the request's check.
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
