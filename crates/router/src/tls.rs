//! TLS for clients: reloads the certificate when its file changes, and verifies client certificates if configured.

use std::fs::File;
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig};
use tokio_util::sync::CancellationToken;

use crate::config::{MutualTls, TlsConfig};

/// How often the files are checked. Rotated secrets are mounted minutes before the old ones expire.
const RELOAD_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{path} holds no {expected}")]
    Missing {
        path: PathBuf,
        expected: &'static str,
    },
    #[error("the certificate and key are not usable")]
    Certificate(#[source] rustls::Error),
    #[error("the client CA is not usable")]
    ClientCa(#[source] rustls::server::VerifierBuilderError),
}

/// The current TLS configuration, which [`TlsMaterial::keep_fresh`] replaces.
#[derive(Debug)]
pub struct TlsMaterial {
    config: TlsConfig,
    current: ArcSwap<ServerConfig>,
}

impl TlsMaterial {
    pub fn load(config: TlsConfig) -> Result<Self, TlsError> {
        let current = ArcSwap::from_pointee(server_config(&config)?);
        Ok(Self { config, current })
    }

    pub fn current(&self) -> Arc<ServerConfig> {
        self.current.load_full()
    }

    /// Reloads the files whenever one has changed. Unusable files are logged, and the last usable configuration stays in use.
    pub async fn keep_fresh(&self, stop: CancellationToken) {
        let mut seen = self.stamps();
        let mut ticks = tokio::time::interval(RELOAD_INTERVAL);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            let stamps = self.stamps();
            if stamps == seen {
                continue;
            }
            match server_config(&self.config) {
                Ok(config) => {
                    self.current.store(Arc::new(config));
                    seen = stamps;
                    tracing::info!("the certificate was reloaded");
                }
                Err(error) => {
                    tracing::warn!(%error, "the changed certificate is not usable; the previous one stays in use until the files are corrected");
                }
            }
        }
    }

    fn stamps(&self) -> Vec<Option<SystemTime>> {
        let files = [
            Some(&self.config.certificate_file),
            Some(&self.config.key_file),
            self.config.client_ca_file.as_ref(),
        ];
        files
            .into_iter()
            .flatten()
            .map(|path| {
                std::fs::metadata(path)
                    .and_then(|file| file.modified())
                    .ok()
            })
            .collect()
    }
}

fn server_config(config: &TlsConfig) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Certificate)?;
    let builder = match (config.mutual, &config.client_ca_file) {
        (MutualTls::Optional | MutualTls::Required, Some(authority)) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(authority)? {
                roots.add(certificate).map_err(TlsError::Certificate)?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            let verifier = if config.mutual == MutualTls::Optional {
                verifier.allow_unauthenticated()
            } else {
                verifier
            };
            builder.with_client_cert_verifier(verifier.build().map_err(TlsError::ClientCa)?)
        }
        _ => builder.with_no_client_auth(),
    };
    let mut server = builder
        .with_single_cert(
            certificates(&config.certificate_file)?,
            private_key(&config.key_file)?,
        )
        .map_err(TlsError::Certificate)?;
    server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(server)
}

fn open(path: &Path) -> Result<BufReader<File>, TlsError> {
    File::open(path)
        .map(BufReader::new)
        .map_err(|source| TlsError::Read {
            path: path.to_owned(),
            source,
        })
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found = rustls_pemfile::certs(&mut open(path)?).collect::<Result<Vec<_>, _>>();
    let found = found.map_err(|source| TlsError::Read {
        path: path.to_owned(),
        source,
    })?;
    if found.is_empty() {
        return Err(TlsError::Missing {
            path: path.to_owned(),
            expected: "certificate",
        });
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let found = rustls_pemfile::private_key(&mut open(path)?);
    let found = found.map_err(|source| TlsError::Read {
        path: path.to_owned(),
        source,
    })?;
    found.ok_or_else(|| TlsError::Missing {
        path: path.to_owned(),
        expected: "private key",
    })
}
