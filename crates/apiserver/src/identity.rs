//! The server's certificate authority and the administrator's token. They are created on first start and stored in the data
//! directory.

use std::{
    io::{self, Write},
    net::IpAddr,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use base64::{
    Engine,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::{
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject},
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use saturating_time::SaturatingTime;
use serde_json::json;
use sha2::{Digest, Sha256};

/// Why the identity cannot be loaded or created.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read or written.
    #[error("cannot read or write {path}")]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The I/O error.
        #[source]
        source: io::Error,
    },
    /// The token is too short to be one that this server created. With an empty token, a request with an empty token would be
    /// accepted.
    #[error(
        "{path} does not hold a token of at least {MINIMUM_TOKEN_BYTES} characters: restore it, or remove the directory it is in to start with new keys"
    )]
    WeakToken {
        /// The path of the file.
        path: PathBuf,
    },
    /// Some of the files are missing.
    #[error(
        "{path} is missing, although other keys exist: restore it, or remove the directory to start with new keys"
    )]
    MissingPart {
        /// The path of the missing file.
        path: PathBuf,
    },
    /// A certificate or key cannot be created or parsed.
    #[error("cannot create or read a certificate")]
    Certificate(#[from] rcgen::Error),
    /// TLS cannot be configured.
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
}

/// The certificate authority and the administrator's token.
#[derive(Debug)]
pub struct Identity {
    authority_pem: String,
    authority_key: KeyPair,
    token: String,
}

/// The certificate of a node's kubelet endpoint, as PEM texts.
#[derive(Clone, Debug)]
pub struct NodeCertificate {
    /// The certificate authority; the kubelet requires client certificates of it.
    pub authority_pem: String,
    /// The kubelet's certificate.
    pub certificate_pem: String,
    /// Its key.
    pub key_pem: String,
}

/// The subject of a certificate: a user and their group.
struct Subject<'a> {
    name: &'a str,
    group: Option<&'a str>,
}

const YEARS: i64 = 10;

/// The file that is written last: if it exists, the identity is complete.
const COMPLETE: &str = "ca.crt";

/// Half of the length that the server generates. The signing key of service-account tokens is derived from the token.
const MINIMUM_TOKEN_BYTES: usize = 20;

impl Identity {
    /// Loads the identity from `directory`, or creates one and stores it there.
    pub fn load_or_create(directory: Option<&Path>) -> Result<Self, IdentityError> {
        let Some(directory) = directory else {
            return Self::create();
        };
        let file = |name: &str| directory.join(name);
        if file(COMPLETE).exists() {
            return Self::load(directory);
        }
        let made = Self::create()?;
        std::fs::create_dir_all(directory).map_err(|source| IdentityError::File {
            path: directory.to_owned(),
            source,
        })?;
        let contents = [
            ("ca.key", made.authority_key.serialize_pem()),
            ("admin.token", made.token.clone()),
            (COMPLETE, made.authority_pem.clone()),
        ];
        for (name, text) in contents {
            let path = file(name);
            write_private(&path, text.as_bytes())
                .map_err(|source| IdentityError::File { path, source })?;
        }
        Ok(made)
    }

    fn load(directory: &Path) -> Result<Self, IdentityError> {
        let read = |name: &str| {
            let path = directory.join(name);
            std::fs::read_to_string(&path).map_err(|source| match source.kind() {
                io::ErrorKind::NotFound => IdentityError::MissingPart { path },
                _ => IdentityError::File { path, source },
            })
        };
        let token = read("admin.token")?.trim().to_owned();
        if token.len() < MINIMUM_TOKEN_BYTES {
            let path = directory.join("admin.token");
            return Err(IdentityError::WeakToken { path });
        }
        Ok(Self {
            authority_pem: read(COMPLETE)?,
            authority_key: KeyPair::from_pem(&read("ca.key")?)?,
            token,
        })
    }

    fn create() -> Result<Self, IdentityError> {
        let authority_key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "agent-sandbox-ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![
            KeyUsagePurpose::KeyCertSign,
            KeyUsagePurpose::CrlSign,
            KeyUsagePurpose::DigitalSignature,
        ];
        set_validity(&mut params);
        let authority_pem = params.self_signed(&authority_key)?.pem();
        let token = URL_SAFE_NO_PAD.encode(rand::random::<[u8; 32]>());
        Ok(Self {
            authority_pem,
            authority_key,
            token,
        })
    }

    /// Issues a server certificate for `names`, with its key.
    pub fn server_certificate(
        &self,
        names: &[String],
    ) -> Result<(CertificateDer<'static>, PrivateKeyDer<'static>), IdentityError> {
        let subject = Subject {
            name: "agent-sandbox-apiserver",
            group: None,
        };
        self.certificate(&subject, names, ExtendedKeyUsagePurpose::ServerAuth)
    }

    fn certificate(
        &self,
        subject: &Subject<'_>,
        names: &[String],
        usage: ExtendedKeyUsagePurpose,
    ) -> Result<(CertificateDer<'static>, PrivateKeyDer<'static>), IdentityError> {
        let (certificate, key) = self.signed(subject, names, usage)?;
        Ok((
            certificate.der().clone(),
            PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der())),
        ))
    }

    fn signed(
        &self,
        subject: &Subject<'_>,
        names: &[String],
        usage: ExtendedKeyUsagePurpose,
    ) -> Result<(rcgen::Certificate, KeyPair), IdentityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(names.to_vec())?;
        params
            .distinguished_name
            .push(DnType::CommonName, subject.name);
        if let Some(group) = subject.group {
            params
                .distinguished_name
                .push(DnType::OrganizationName, group);
        }
        params.extended_key_usages = vec![usage];
        set_validity(&mut params);
        let issuer = Issuer::from_ca_cert_pem(&self.authority_pem, &self.authority_key)?;
        Ok((params.signed_by(&key, &issuer)?, key))
    }

    /// A secret that only this server and its administrator know.
    pub fn secret(&self) -> &str {
        &self.token
    }

    /// The TLS configuration for connections to nodes: trusts the server's own authority and has a client certificate of it.
    pub fn dialer(&self) -> Result<Arc<rustls::ClientConfig>, IdentityError> {
        // A kubelet asks the server whether the holder of this certificate may use its API, and the server must allow it.
        let subject = Subject {
            name: "kube-apiserver-kubelet-client",
            group: Some("system:masters"),
        };
        let (certificate, key) =
            self.certificate(&subject, &[], ExtendedKeyUsagePurpose::ClientAuth)?;
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.authority()?)?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![certificate], key)?;
        Ok(Arc::new(config))
    }

    /// Accepts connections with a client certificate of this authority, and connections without a client certificate.
    pub fn client_verifier(
        &self,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>, IdentityError> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.authority()?)?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
                .allow_unauthenticated()
                .build();
        verifier.map_err(|error| rustls::Error::General(error.to_string()).into())
    }

    fn authority(&self) -> Result<CertificateDer<'static>, IdentityError> {
        CertificateDer::from_pem_slice(self.authority_pem.as_bytes())
            .map_err(|_| rcgen::Error::CouldNotParseCertificate.into())
    }

    /// Issues a serving certificate for a node's kubelet endpoint, with the authority by which the kubelet verifies the API
    /// server.
    pub fn node_certificate(
        &self,
        node: &str,
        names: &[String],
    ) -> Result<NodeCertificate, IdentityError> {
        let names: Vec<String> = std::iter::once(node.to_owned())
            .chain(names.iter().cloned())
            .collect();
        let subject = Subject {
            name: &format!("system:node:{node}"),
            group: Some("system:nodes"),
        };
        let (certificate, key) =
            self.signed(&subject, &names, ExtendedKeyUsagePurpose::ServerAuth)?;
        Ok(NodeCertificate {
            authority_pem: self.authority_pem.clone(),
            certificate_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
        })
    }

    /// Whether `token` is the administrator's token.
    pub fn is_admin_token(&self, token: &str) -> bool {
        // Compares digests, so that the duration of the comparison reveals nothing about the token (timing attack).
        !token.is_empty()
            && Sha256::digest(token.as_bytes()) == Sha256::digest(self.token.as_bytes())
    }

    /// The certificate of the authority.
    pub fn authority_pem(&self) -> &str {
        &self.authority_pem
    }

    /// A kubeconfig for the administrator.
    pub fn kubeconfig(&self, server_url: &str) -> String {
        const NAME: &str = "agent-sandbox";
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": NAME, "cluster": {"server": server_url, "certificate-authority-data": STANDARD.encode(&self.authority_pem)}}],
            "users": [{"name": NAME, "user": {"token": self.token}}],
            "contexts": [{"name": NAME, "context": {"cluster": NAME, "user": NAME, "namespace": "default"}}],
            "current-context": NAME,
        });
        serde_yaml_ng::to_string(&config).unwrap_or_default()
    }
}

fn set_validity(params: &mut CertificateParams) {
    // The clocks of virtual machines jump. One hour of slack keeps a fresh certificate valid.
    let now = std::time::SystemTime::now();
    let validity = Duration::from_secs(u64::try_from(YEARS * 365 * 86_400).unwrap_or_default());
    params.not_before = now.earlier_by(Duration::from_secs(3600)).into();
    params.not_after = now.later_by(validity).into();
}

/// The names in the certificate of a listener at `address`.
pub fn names_for(address: IpAddr, extra: &[String]) -> Vec<String> {
    let mut names: Vec<String> = [
        "localhost",
        "127.0.0.1",
        "::1",
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
    ]
    .map(ToOwned::to_owned)
    .to_vec();
    if !address.is_unspecified() {
        names.push(address.to_string());
    }
    names.extend(extra.iter().cloned());
    names.sort();
    names.dedup();
    names
}

/// Replaces a file atomically. Only its owner can read it.
pub fn write_private(path: &Path, contents: &[u8]) -> io::Result<()> {
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let temporary = directory.join(format!(".{name}.{}", std::process::id()));
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| {
            file.write_all(contents)?;
            file.sync_all()?;
            std::fs::rename(&temporary, path)
        });
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}
