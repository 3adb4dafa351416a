//! The client's options, and their validation before any request.

use std::sync::Arc;
use std::time::Duration;

use api::names::{NamespaceName, ObjectName};
use http::{HeaderMap, Uri};

use crate::error::ErrorKind;
use crate::retry::RetryPolicy;
use crate::trace::Propagator;
use crate::transport::Dialer;

/// The port of the runtime inside a sandbox.
pub const DEFAULT_SERVER_PORT: u16 = 8888;
const MEBIBYTE: u64 = 1024 * 1024;

/// How to reach sandboxes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Connection {
    /// Through a router at a known URL.
    Direct { url: String },
    /// Through a router behind a Gateway, whose address is read from its status.
    Gateway {
        name: String,
        namespace: String,
        scheme: Scheme,
    },
    /// Through a port-forward of the Kubernetes API to a router pod: works wherever `kubectl` works. The router's service is
    /// looked up in `namespace`, or, without one, in the sandbox's namespace and then in the system namespace.
    #[default]
    Tunnel,
    /// As [`Connection::Tunnel`], with the namespace of the router's service given.
    TunnelIn { namespace: String },
    /// Directly to the pod, without a router, for programs inside the cluster.
    InCluster(InClusterAddress),
}

/// How a program inside the cluster addresses a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InClusterAddress {
    /// By the pod's IP address, which is looked up again when the pod stops responding.
    PodIp,
    /// By the DNS name of the sandbox's service, `<sandbox>.<namespace>.svc.<domain>`.
    Service { cluster_domain: String },
}

/// The scheme of a gateway's URL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scheme {
    #[default]
    Http,
    Https,
}

impl Scheme {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Https => "https",
        }
    }
}

/// Options of a [`crate::Client`]. The default reaches sandboxes of the namespace `default` through a tunnel.
///
/// ```
/// use sdk::{Connection, Options};
///
/// let options = Options {
///     namespace: "agents".into(),
///     connection: Connection::Direct { url: "http://127.0.0.1:8080".into() },
///     ..Options::default()
/// };
/// assert_eq!(options.server_port, 8888);
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// The namespace of claims, unless a call names another.
    pub namespace: String,
    pub connection: Connection,
    /// The port of the runtime inside the sandbox.
    pub server_port: u16,
    /// Timeout for a claim to become ready.
    pub sandbox_ready_timeout: Duration,
    /// Timeout for a Gateway to have an address.
    pub gateway_ready_timeout: Duration,
    /// Timeout for establishing a port-forward.
    pub port_forward_ready_timeout: Duration,
    /// Timeout for closing: half for running operations to end, half for deleting the claim.
    pub cleanup_timeout: Duration,
    /// Timeout of a request, including all attempts and the response's body, unless the call sets another.
    pub request_timeout: Duration,
    /// Timeout of one attempt until the response begins.
    pub per_attempt_timeout: Duration,
    /// How requests that may be retried are retried.
    pub retry: RetryPolicy,
    /// The largest file that can be read, in bytes.
    pub max_download_size: u64,
    /// The largest file that can be written, in bytes.
    pub max_upload_size: u64,
    /// How many bytes of a command's standard output, and of its standard error, are returned. The sandbox has its own limit.
    pub max_output_size: u64,
    /// Sent with every request to a sandbox, for example `Authorization` for a router that requires it.
    pub headers: HeaderMap,
    /// Opens connections, if not by TCP. Ignored by tunnels.
    pub dialer: Option<Arc<dyn Dialer>>,
    /// The TLS configuration for HTTPS. The default trusts the machine's certificates.
    pub tls: Option<Arc<rustls::ClientConfig>>,
    /// The prefix of span names.
    pub trace_service_name: String,
    /// Propagates the current trace.
    pub propagator: Option<Arc<dyn Propagator>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            namespace: "default".into(),
            connection: Connection::default(),
            server_port: DEFAULT_SERVER_PORT,
            sandbox_ready_timeout: Duration::from_secs(180),
            gateway_ready_timeout: Duration::from_secs(180),
            port_forward_ready_timeout: Duration::from_secs(30),
            cleanup_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(180),
            per_attempt_timeout: Duration::from_secs(60),
            retry: RetryPolicy::default(),
            max_download_size: 256 * MEBIBYTE,
            max_upload_size: 256 * MEBIBYTE,
            max_output_size: 16 * MEBIBYTE,
            headers: HeaderMap::new(),
            dialer: None,
            tls: None,
            trace_service_name: "sandbox-client".into(),
            propagator: None,
        }
    }
}

impl Options {
    pub(crate) fn validate(&self) -> Result<(), ErrorKind> {
        check_namespace("namespace", &self.namespace)?;
        match &self.connection {
            Connection::Direct { url } => check_url(url)?,
            Connection::Gateway {
                name, namespace, ..
            } => {
                check_name("connection.name", name)?;
                check_namespace("connection.namespace", namespace)?;
            }
            Connection::TunnelIn { namespace } => {
                check_namespace("connection.namespace", namespace)?;
            }
            Connection::InCluster(InClusterAddress::Service { cluster_domain }) => {
                check_name("connection.cluster_domain", cluster_domain)?;
            }
            Connection::Tunnel | Connection::InCluster(InClusterAddress::PodIp) => {}
        }
        let durations = [
            ("sandbox_ready_timeout", self.sandbox_ready_timeout),
            ("gateway_ready_timeout", self.gateway_ready_timeout),
            (
                "port_forward_ready_timeout",
                self.port_forward_ready_timeout,
            ),
            ("cleanup_timeout", self.cleanup_timeout),
            ("request_timeout", self.request_timeout),
            ("per_attempt_timeout", self.per_attempt_timeout),
        ];
        if let Some((option, _)) = durations.iter().find(|(_, value)| value.is_zero()) {
            return Err(invalid(option, "must be positive"));
        }
        let numbers = [
            ("server_port", u64::from(self.server_port)),
            ("retry.max_attempts", u64::from(self.retry.max_attempts)),
            ("max_download_size", self.max_download_size),
            ("max_upload_size", self.max_upload_size),
            ("max_output_size", self.max_output_size),
        ];
        match numbers.iter().find(|(_, value)| *value == 0) {
            Some((option, _)) => Err(invalid(option, "must be positive")),
            None => Ok(()),
        }
    }
}

fn invalid(option: &'static str, reason: impl Into<String>) -> ErrorKind {
    ErrorKind::InvalidOption {
        option,
        reason: reason.into(),
    }
}

pub(crate) fn check_name(option: &'static str, name: &str) -> Result<(), ErrorKind> {
    name.parse::<ObjectName>()
        .map(drop)
        .map_err(|error| invalid(option, error.to_string()))
}

pub(crate) fn check_namespace(option: &'static str, name: &str) -> Result<(), ErrorKind> {
    name.parse::<NamespaceName>()
        .map(drop)
        .map_err(|error| invalid(option, error.to_string()))
}

fn check_url(url: &str) -> Result<(), ErrorKind> {
    let option = "connection.url";
    let uri: Uri = url
        .parse()
        .map_err(|error: http::uri::InvalidUri| invalid(option, error.to_string()))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(invalid(option, "must begin with http:// or https://"));
    }
    if uri.host().is_none_or(str::is_empty) {
        return Err(invalid(option, "must name a host"));
    }
    if uri.query().is_some() {
        return Err(invalid(option, "must not have a query"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn direct(url: &str) -> Options {
        Options {
            connection: Connection::Direct { url: url.into() },
            ..Options::default()
        }
    }

    #[test]
    fn the_defaults_are_valid() {
        assert!(Options::default().validate().is_ok());
        assert!(
            direct("https://router.example:8443/prefix/")
                .validate()
                .is_ok()
        );
    }

    #[test]
    fn a_url_needs_a_scheme_and_a_host() {
        for url in [
            "",
            "router:8080",
            "ftp://router",
            "/path",
            "http://",
            "http://a?b=c",
        ] {
            let error = direct(url).validate().unwrap_err().to_string();
            assert!(error.contains("connection.url"), "{url}: {error}");
        }
    }

    #[test]
    fn invalid_options_are_refused_by_name() {
        let cases: [(&str, Options); 5] = [
            (
                "namespace",
                Options {
                    namespace: "Not.Valid".into(),
                    ..Options::default()
                },
            ),
            (
                "connection.namespace",
                Options {
                    connection: Connection::TunnelIn {
                        namespace: String::new(),
                    },
                    ..Options::default()
                },
            ),
            (
                "request_timeout",
                Options {
                    request_timeout: Duration::ZERO,
                    ..Options::default()
                },
            ),
            (
                "max_upload_size",
                Options {
                    max_upload_size: 0,
                    ..Options::default()
                },
            ),
            (
                "server_port",
                Options {
                    server_port: 0,
                    ..Options::default()
                },
            ),
        ];
        for (option, options) in cases {
            let error = options.validate().unwrap_err().to_string();
            assert!(error.contains(option), "{option}: {error}");
        }
    }
}
