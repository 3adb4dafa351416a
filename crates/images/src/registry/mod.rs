//! A client of the OCI distribution protocol: manifests and blobs, with redirects, ranges and authentication.
//!
//! It returns unverified bytes: the caller checks digests.

mod authorization;
mod destinations;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderValue, LOCATION, RANGE};
use http::{Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_rustls::HttpsConnector;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

use crate::credentials::Credential;
use crate::digest::Digest;
use crate::manifest::{DOCKER_LIST, DOCKER_MANIFEST, OCI_INDEX, OCI_MANIFEST};
use crate::reference::{Reference, is_loopback};
pub use destinations::{Destinations, IsPods, Refused};
use destinations::{Guard, GuardedConnector};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
const MANIFEST_BYTES_MAX: usize = 4 << 20;
const ERROR_BYTES_MAX: usize = 16 << 10;
/// The maximum length of a registry's error message in our own.
const ERROR_TEXT_MAX: usize = 300;
const REDIRECTS_MAX: usize = 5;

#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    #[error("setting up TLS")]
    Tls(#[source] rustls::Error),
    #[error(
        "cannot verify {url}: this machine has no certificate authorities; install the package ca-certificates"
    )]
    NoAuthorities {
        url: String,
        #[source]
        source: hyper_util::client::legacy::Error,
    },
    #[error("cannot reach {url}")]
    Connect {
        url: String,
        #[source]
        source: hyper_util::client::legacy::Error,
    },
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("{0} did not response in time")]
    Timeout(String),
    #[error("{what} is not found at {registry}")]
    NotFound { what: String, registry: String },
    #[error("{registry} denies access to {repository}: {detail}")]
    Denied {
        registry: String,
        repository: String,
        detail: String,
    },
    #[error("{url} answers {status}: {detail}")]
    Status {
        url: String,
        status: StatusCode,
        detail: String,
    },
    #[error("the response of {url} is invalid: {problem}")]
    InvalidResponse { url: String, problem: &'static str },
    #[error("reading the response of {url}")]
    Body {
        url: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error(
        "refusing to connect to {0} without encryption: plain HTTP is allowed only on loopback and for registries configured for it"
    )]
    Plain(String),
}

impl RegistryError {
    /// Whether another credential might be accepted.
    pub fn is_denied(&self) -> bool {
        matches!(self, Self::Denied { .. } | Self::NotFound { .. })
    }

    /// Whether a retry of the same request might succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Connect { .. } | Self::Timeout(_) | Self::Body { .. } => true,
            Self::Status { status, .. } => {
                status.is_server_error() || *status == StatusCode::TOO_MANY_REQUESTS
            }
            _ => false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheme {
    Https,
    Http,
}

impl Scheme {
    fn name(self) -> &'static str {
        match self {
            Self::Https => "https",
            Self::Http => "http",
        }
    }
}

/// The HTTP client and the state that all pulls share.
#[derive(Debug)]
pub struct Registries {
    http: Client<HttpsConnector<GuardedConnector>, Full<Bytes>>,
    guard: Arc<Guard>,
    /// Registries other than loopback that may be reached over plain HTTP.
    plain: Vec<String>,
    schemes: Mutex<HashMap<String, Scheme>>,
    /// Whether the machine has certificate authorities. A minimal installation has none, and still runs images from files.
    has_authorities: bool,
}

impl Registries {
    pub fn new(plain: Vec<String>, destinations: Destinations) -> Result<Self, RegistryError> {
        let guard = Arc::new(Guard::new(destinations));
        let connector = GuardedConnector::new(Arc::clone(&guard));
        let provider = rustls::crypto::ring::default_provider();
        let native = hyper_rustls::HttpsConnectorBuilder::new()
            .with_provider_and_native_roots(provider.clone());
        let has_authorities = native.is_ok();
        let builder = match native {
            Ok(builder) => builder,
            Err(_) => hyper_rustls::HttpsConnectorBuilder::new()
                .with_tls_config(trusting_no_authority(provider)?),
        };
        let https = builder
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        Ok(Self {
            http: Client::builder(TokioExecutor::new()).build(https),
            guard,
            plain,
            schemes: Mutex::default(),
            has_authorities,
        })
    }

    /// Sets the check for pod addresses, from which pulls are refused.
    pub fn keep_from(&self, is_pods: Box<IsPods>) {
        self.guard.keep_from(is_pods);
    }

    fn allows_plain_http(&self, registry: &str) -> bool {
        is_loopback(registry) || self.plain.iter().any(|plain| plain == registry)
    }

    /// The scheme for a registry: HTTPS wherever that works; HTTP only where it is allowed and HTTPS fails.
    async fn scheme(&self, registry: &str) -> Scheme {
        if !self.allows_plain_http(registry) {
            return Scheme::Https;
        }
        let known = self.with_schemes(|schemes| schemes.get(registry).copied());
        if let Some(scheme) = known {
            return scheme;
        }
        let url = format!("https://{registry}/v2/");
        let Ok(request) = Request::get(&url).body(Full::default()) else {
            return Scheme::Http;
        };
        match self.send(&url, request).await {
            Ok(_) => {
                self.remember(registry, Scheme::Https);
                Scheme::Https
            }
            // A server that accepts the connection but answers slowly may be HTTPS: do not downgrade.
            Err(RegistryError::Timeout(_)) => Scheme::Https,
            // Either the server does not speak TLS or no server is listening. The HTTP request that follows will tell.
            Err(_) => Scheme::Http,
        }
    }

    fn with_schemes<T>(&self, work: impl FnOnce(&mut HashMap<String, Scheme>) -> T) -> T {
        work(&mut self.schemes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn remember(&self, registry: &str, scheme: Scheme) {
        self.with_schemes(|schemes| schemes.insert(registry.to_owned(), scheme));
    }

    async fn send(
        &self,
        url: &str,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, RegistryError> {
        match tokio::time::timeout(RESPONSE_TIMEOUT, self.http.request(request)).await {
            Err(_) => Err(RegistryError::Timeout(url.to_owned())),
            Ok(response) => response.map_err(|source| match refusal(&source) {
                Some(refused) => refused.into(),
                None if !self.has_authorities && url.starts_with("https:") => {
                    RegistryError::NoAuthorities {
                        url: url.to_owned(),
                        source,
                    }
                }
                None => RegistryError::Connect {
                    url: url.to_owned(),
                    source,
                },
            }),
        }
    }

    /// Starts a session for one image with one credential.
    pub fn session<'a>(
        &'a self,
        reference: &'a Reference,
        credential: Option<&'a Credential>,
    ) -> Session<'a> {
        Session {
            registries: self,
            reference,
            credential,
            authorization: tokio::sync::Mutex::default(),
        }
    }
}

/// Refuses every certificate: where no authority is known, none can be verified.
fn trusting_no_authority(
    provider: rustls::crypto::CryptoProvider,
) -> Result<rustls::ClientConfig, RegistryError> {
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .map_err(RegistryError::Tls)?
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    Ok(config)
}

/// The body of a blob from some offset on.
#[derive(Debug)]
pub struct Blob {
    pub url: String,
    /// The offset of the body in the blob. A registry may ignore the requested range.
    pub offset: u64,
    pub body: Incoming,
}

/// Requests for one repository.
#[derive(Debug)]
pub struct Session<'a> {
    registries: &'a Registries,
    reference: &'a Reference,
    credential: Option<&'a Credential>,
    authorization: tokio::sync::Mutex<Option<HeaderValue>>,
}

impl Session<'_> {
    /// Fetches a manifest by tag or digest. Returns its bytes and its media type.
    pub async fn manifest(&self, name: &str) -> Result<(Bytes, String), RegistryError> {
        let accept = [OCI_INDEX, OCI_MANIFEST, DOCKER_LIST, DOCKER_MANIFEST].join(", ");
        let headers = [(ACCEPT, accept)];
        let (url, response) = self.get(&format!("manifests/{name}"), &headers).await?;
        let media_type = response
            .headers()
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
            .to_owned();
        let bytes = read(&url, response.into_body(), MANIFEST_BYTES_MAX).await?;
        Ok((bytes, media_type))
    }

    /// Fetches a blob from `offset` on.
    pub async fn blob(&self, digest: &Digest, offset: u64) -> Result<Blob, RegistryError> {
        let headers = [(RANGE, format!("bytes={offset}-"))];
        let headers = if offset == 0 {
            &headers[..0]
        } else {
            &headers[..]
        };
        let (url, response) = self.get(&format!("blobs/{digest}"), headers).await?;
        let partial = response.status() == StatusCode::PARTIAL_CONTENT;
        Ok(Blob {
            url,
            offset: if partial { offset } else { 0 },
            body: response.into_body(),
        })
    }

    /// Fetches a whole small blob.
    pub async fn small_blob(&self, digest: &Digest) -> Result<Bytes, RegistryError> {
        let (url, response) = self.get(&format!("blobs/{digest}"), &[]).await?;
        read(&url, response.into_body(), MANIFEST_BYTES_MAX).await
    }

    async fn get(
        &self,
        path: &str,
        headers: &[(http::HeaderName, String)],
    ) -> Result<(String, Response<Incoming>), RegistryError> {
        let host = self.reference.api_host();
        let scheme = self.registries.scheme(host).await;
        let url = format!(
            "{}://{host}/v2/{}/{path}",
            scheme.name(),
            self.reference.repository()
        );
        let known = self.authorization.lock().await.clone();
        let response = self.follow(&url, headers, known.as_ref()).await?;
        // A TLS server answers a plain request with 400. It may have started just now, so do not remember HTTP in that case.
        if scheme == Scheme::Http && response.1.status() != StatusCode::BAD_REQUEST {
            self.registries.remember(host, scheme);
        }
        if response.1.status() != StatusCode::UNAUTHORIZED {
            return self.check(path, response).await;
        }
        let challenges = authorization::challenges(response.1.headers());
        let detail = self.error_text(response.0, response.1).await;
        let Some(granted) = self.authorize(&challenges).await? else {
            return Err(self.denied(detail));
        };
        // The registry has just refused this authorization and would refuse it again.
        if known.as_ref() == Some(&granted) {
            return Err(self.denied(detail));
        }
        *self.authorization.lock().await = Some(granted.clone());
        let response = self.follow(&url, headers, Some(&granted)).await?;
        self.check(path, response).await
    }

    fn denied(&self, detail: String) -> RegistryError {
        RegistryError::Denied {
            registry: self.reference.registry().to_owned(),
            repository: self.reference.repository().to_owned(),
            detail,
        }
    }

    async fn check(
        &self,
        path: &str,
        (url, response): (String, Response<Incoming>),
    ) -> Result<(String, Response<Incoming>), RegistryError> {
        match response.status() {
            status if status.is_success() => Ok((url, response)),
            StatusCode::NOT_FOUND => Err(RegistryError::NotFound {
                what: format!(
                    "{} of {}",
                    path.replacen('/', " ", 1)
                        .replacen("manifests", "manifest", 1)
                        .replacen("blobs", "blob", 1),
                    self.reference.repository()
                ),
                registry: self.reference.registry().to_owned(),
            }),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
                Err(self.denied(self.error_text(url, response).await))
            }
            status => Err(RegistryError::Status {
                detail: self.error_text(url.clone(), response).await,
                url,
                status,
            }),
        }
    }

    /// The error message of the image's own registry, on one line. For other servers, to which the registry has redirected, only
    /// the status is shown: the user who named the image must not read their responses (SSRF).
    async fn error_text(&self, url: String, response: Response<Incoming>) -> String {
        let status = response.status();
        let is_own =
            host_and_scheme(&url).is_some_and(|(_, host)| host == self.reference.api_host());
        if !is_own {
            return status.to_string();
        }
        let Ok(bytes) = read("", response.into_body(), ERROR_BYTES_MAX).await else {
            return status.to_string();
        };
        match error_message(&bytes) {
            Some(message) => format!("{message} ({status})"),
            None => status.to_string(),
        }
    }

    /// Sends a request and follows redirects. The authorization is never sent to another host.
    async fn follow(
        &self,
        url: &str,
        headers: &[(http::HeaderName, String)],
        authorization: Option<&HeaderValue>,
    ) -> Result<(String, Response<Incoming>), RegistryError> {
        let mut url = url.to_owned();
        let mut authorization = authorization;
        for _ in 0..REDIRECTS_MAX {
            let mut request = Request::get(&url);
            for (name, value) in headers {
                request = request.header(name, value);
            }
            if let Some(value) = authorization {
                request = request.header(AUTHORIZATION, value);
            }
            let request =
                request
                    .body(Full::default())
                    .map_err(|_| RegistryError::InvalidResponse {
                        url: url.clone(),
                        problem: "it is not a valid URL",
                    })?;
            let response = self.registries.send(&url, request).await?;
            if !response.status().is_redirection() || !response.headers().contains_key(LOCATION) {
                return Ok((url, response));
            }
            let next = self.redirected(&url, response.headers().get(LOCATION))?;
            let same_host = host_and_scheme(&url) == host_and_scheme(&next);
            authorization = authorization.filter(|_| same_host);
            url = next;
        }
        Err(RegistryError::InvalidResponse {
            url,
            problem: "too many redirects",
        })
    }

    fn redirected(
        &self,
        from: &str,
        location: Option<&HeaderValue>,
    ) -> Result<String, RegistryError> {
        let wrong = || RegistryError::InvalidResponse {
            url: from.to_owned(),
            problem: "a redirect has no valid location",
        };
        let location = location
            .and_then(|value| value.to_str().ok())
            .ok_or_else(wrong)?;
        let next = if location.starts_with('/') {
            let (scheme, host) = host_and_scheme(from).ok_or_else(wrong)?;
            format!("{scheme}://{host}{location}")
        } else {
            location.to_owned()
        };
        match host_and_scheme(&next) {
            Some((scheme, _)) if scheme == "https" => Ok(next),
            Some((scheme, host))
                if scheme == "http" && self.registries.allows_plain_http(&host) =>
            {
                Ok(next)
            }
            Some(_) => Err(RegistryError::Plain(next)),
            None => Err(wrong()),
        }
    }
}

fn host_and_scheme(url: &str) -> Option<(String, String)> {
    let uri: Uri = url.parse().ok()?;
    Some((
        uri.scheme_str()?.to_owned(),
        uri.authority()?.as_str().to_owned(),
    ))
}

async fn read(url: &str, body: Incoming, limit: usize) -> Result<Bytes, RegistryError> {
    let reading = Limited::new(body, limit).collect();
    match tokio::time::timeout(RESPONSE_TIMEOUT, reading).await {
        Err(_) => Err(RegistryError::Timeout(url.to_owned())),
        Ok(Ok(collected)) => Ok(collected.to_bytes()),
        Ok(Err(source)) => Err(RegistryError::Body {
            url: url.to_owned(),
            source,
        }),
    }
}

/// The [`Refused`] error in the cause chain, if there is one.
fn refusal(error: &hyper_util::client::legacy::Error) -> Option<Refused> {
    error_chain::causes(error).find_map(|cause| cause.downcast_ref::<Refused>().cloned())
}

/// The error message in a registry's response, truncated and without control characters, which a terminal would interpret.
fn error_message(bytes: &[u8]) -> Option<String> {
    let parsed: serde_json::Value = serde_json::from_slice(bytes).ok()?;
    let message = parsed["errors"][0]["message"].as_str()?;
    let shown = message.chars().filter(|character| !character.is_control());
    let shown: String = shown.take(ERROR_TEXT_MAX).collect();
    Some(shown).filter(|shown| !shown.is_empty())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// Answers each request over plain HTTP, and closes connections that start with a TLS handshake.
    async fn serve_plain_http(listener: TcpListener, status: &'static str) {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) if !head.is_empty() || byte.is_ascii_uppercase() => head.push(byte),
                    _ => break,
                }
            }
            let response =
                format!("HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}");
            let _ = stream.write_all(response.as_bytes()).await;
        }
    }

    async fn ask(registries: &Registries, host: &str) -> Result<(), RegistryError> {
        let reference = Reference::parse(&format!("{host}/test/image:v1")).unwrap();
        let session = registries.session(&reference, None);
        session.manifest("v1").await.map(drop)
    }

    fn known(registries: &Registries, host: &str) -> Option<Scheme> {
        registries.with_schemes(|schemes| schemes.get(host).copied())
    }

    #[tokio::test]
    async fn the_scheme_of_a_registry_is_cached_once_it_has_answered() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let host = address.to_string();
        drop(listener);
        let registries = Registries::new(Vec::new(), Destinations::Any).unwrap();
        let down = ask(&registries, &host).await.unwrap_err();
        assert!(matches!(down, RegistryError::Connect { .. }), "{down}");
        assert_eq!(
            known(&registries, &host),
            None,
            "no server has answered yet"
        );

        let listener = TcpListener::bind(address).await.unwrap();
        let refusing = tokio::spawn(serve_plain_http(listener, "400 Bad Request"));
        ask(&registries, &host).await.unwrap_err();
        assert_eq!(
            known(&registries, &host),
            None,
            "the server may require TLS"
        );
        refusing.abort();
        let _ = refusing.await;

        let listener = TcpListener::bind(address).await.unwrap();
        let serving = tokio::spawn(serve_plain_http(listener, "200 OK"));
        ask(&registries, &host).await.unwrap();
        assert_eq!(known(&registries, &host), Some(Scheme::Http));
        serving.abort();
    }
}
