//! The router's configuration with its defaults, and the parsers for the values of flags and environment variables. Pure.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// The router's configuration. [`Config::default`] is that of upstream's router without flags.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub http_listen: ListenAddress,
    /// Used only if `tls` is set.
    pub https_listen: ListenAddress,
    pub metrics_listen: ListenAddress,
    pub health_listen: ListenAddress,
    pub tls: Option<TlsConfig>,
    /// The DNS suffix of Service names, for resolution by DNS.
    pub cluster_domain: String,
    /// The idle timeout of a sandbox: before its response begins, and between chunks of the response.
    pub proxy_timeout: Duration,
    /// The timeout for the head of a sandbox's response, where it is shorter than `proxy_timeout`.
    pub response_header_timeout: Option<Duration>,
    /// How often a failed dial is retried.
    pub dial_retries: u32,
    /// The pause before the first retry of a dial; each further pause is twice as long.
    pub dial_retry_delay: Duration,
    /// The longest pause between two dials.
    pub dial_retry_longest_delay: Duration,
    /// The timeout of one dial.
    pub dial_timeout: Duration,
    /// Larger request bodies are refused; 0 means no limit.
    pub max_request_body_bytes: u64,
    pub access_log: bool,
    /// How long the router still accepts connections after it was asked to stop, while `/readyz` already fails: the time that
    /// load balancers need to notice.
    pub shutdown_delay: Duration,
    /// How long requests in flight may run after that.
    pub shutdown_timeout: Duration,
    /// Domains whose subdomains name sandboxes: `<port>-<sandbox>.<domain>`.
    pub host_domains: Vec<String>,
    /// The host names by which clients may address the router itself.
    pub own_names: OwnNames,
    /// The prefix of routed paths, as in `/sandbox`: `<prefix>/<namespace>/<id>/<port>/…`. Without it no path is routed.
    pub path_prefix: Option<String>,
    /// The only namespace whose sandboxes are watched, if the router may not watch all.
    pub watch_namespace: Option<String>,
    /// Whether this machine's node forwards ports of mirror pods to the router, and prefixes each connection with its namespace.
    pub tunnels: bool,
    pub authorization: AuthorizationMode,
    /// How long a request waits for a sandbox that is unknown or has no address yet.
    pub resolve_wait: Duration,
    /// How long a connection may be idle, or have an incomplete request head: at least this long, and at most twice as long.
    pub header_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            http_listen: ListenAddress::any(8080),
            https_listen: ListenAddress::any(8443),
            metrics_listen: ListenAddress::any(9090),
            health_listen: ListenAddress::any(8081),
            tls: None,
            cluster_domain: "cluster.local".to_owned(),
            proxy_timeout: Duration::from_secs(180),
            response_header_timeout: None,
            dial_retries: 3,
            dial_retry_delay: Duration::from_millis(200),
            dial_retry_longest_delay: Duration::from_millis(800),
            dial_timeout: Duration::from_secs(5),
            max_request_body_bytes: 0,
            access_log: false,
            shutdown_delay: Duration::ZERO,
            shutdown_timeout: Duration::from_secs(30),
            host_domains: Vec::new(),
            own_names: OwnNames::Any,
            path_prefix: None,
            watch_namespace: None,
            tunnels: false,
            authorization: AuthorizationMode::None,
            resolve_wait: Duration::from_secs(2),
            header_timeout: Duration::from_secs(30),
        }
    }
}

/// The address to listen on, or `Off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    Off,
    /// Every address of the machine, IPv4 and IPv6 if available.
    Any(u16),
    At(SocketAddr),
}

impl ListenAddress {
    pub fn any(port: u16) -> Self {
        ListenAddress::Any(port)
    }

    /// Parses Go's notation: `:8080`, `127.0.0.1:8080`, `[::1]:8080`, and empty or `0` to disable.
    pub fn parse(text: &str) -> Option<Self> {
        if text.is_empty() || text == "0" {
            return Some(ListenAddress::Off);
        }
        if let Some(port) = text.strip_prefix(':') {
            return port.parse().ok().map(ListenAddress::Any);
        }
        let address: SocketAddr = match text.strip_prefix("localhost:") {
            Some(port) => SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port.parse().ok()?),
            None => text.parse().ok()?,
        };
        Some(ListenAddress::At(address))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsConfig {
    pub certificate_file: PathBuf,
    pub key_file: PathBuf,
    pub client_ca_file: Option<PathBuf>,
    pub mutual: MutualTls,
}

/// Whether clients must present a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MutualTls {
    #[default]
    Off,
    /// A certificate is requested, and must be valid if the client sends one.
    Optional,
    Required,
}

/// The host names under which the router accepts requests that name the sandbox by header or path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnNames {
    Any,
    /// IP addresses, routed domains, and names that cannot be registered on the internet: `localhost`, single labels, Service names.
    /// For a router that serves one machine: a page whose domain resolves to this machine (DNS rebinding) would be same-origin with
    /// the router, and could send it any header.
    Local,
}

/// Which clients may use a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorizationMode {
    /// Every client that reaches the router.
    None,
    /// Clients with a bearer token that passes a Kubernetes TokenReview.
    TokenReview {
        audiences: Vec<String>,
        cache: ReviewCache,
    },
    /// Clients with a signed token for the sandbox and the port.
    ScopedToken { key_file: PathBuf },
    /// These users of this machine, identified by the owner of the client's socket; other clients with a signed token, or with the
    /// token of an account that may create `pods/portforward` for the sandbox's pod. For a router that serves one machine.
    LocalUsers {
        users: Vec<u32>,
        /// The key that verifies signed tokens.
        key_file: Option<PathBuf>,
    },
}

/// The lifetime and size of the cache of token reviews.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReviewCache {
    /// How long a token that passed its review counts as valid.
    pub lifetime: Duration,
    pub size: usize,
}

impl Default for ReviewCache {
    fn default() -> Self {
        Self {
            lifetime: Duration::from_secs(10),
            size: 20_000,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("--{flag} has the value {value:?}, which is not {expected}")]
    Value {
        flag: &'static str,
        value: String,
        expected: &'static str,
    },
    #[error("--{flag} is required {when}")]
    Needed {
        flag: &'static str,
        when: &'static str,
    },
}

/// The default prefix of routed paths.
pub const DEFAULT_PATH_PREFIX: &str = "/sandbox";

/// Parses a path prefix; a trailing slash is removed.
pub fn parse_path_prefix(text: &str) -> Option<String> {
    let prefix = text.strip_suffix('/').unwrap_or(text);
    let is_segment = |segment: &str| {
        !segment.is_empty()
            && segment
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte))
    };
    let segments = prefix.strip_prefix('/')?;
    segments
        .split('/')
        .all(is_segment)
        .then(|| prefix.to_owned())
}

/// Parses a duration in Go's notation (`1m30s`, `500ms`), or a plain number of seconds. Rejects zero and negative values.
pub fn parse_duration(text: &str) -> Option<Duration> {
    if let Ok(seconds) = text.parse::<f64>() {
        return positive_seconds(seconds);
    }
    let mut total = 0.0;
    let mut rest = text;
    while !rest.is_empty() {
        let digits =
            rest.find(|character: char| !character.is_ascii_digit() && character != '.')?;
        let (number, tail) = rest.split_at(digits);
        let unit_length = tail
            .find(|character: char| character.is_ascii_digit())
            .unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_length);
        let factor = match unit {
            "h" => 3600.0,
            "m" => 60.0,
            "s" => 1.0,
            "ms" => 1e-3,
            "us" | "µs" => 1e-6,
            "ns" => 1e-9,
            _ => return None,
        };
        total += number.parse::<f64>().ok()? * factor;
        rest = tail;
    }
    positive_seconds(total)
}

/// Converts a number of seconds that is finite, positive and at most a year.
pub fn positive_seconds(seconds: f64) -> Option<Duration> {
    const LONGEST: f64 = 366.0 * 24.0 * 3600.0;
    (seconds.is_finite() && seconds > 0.0).then(|| Duration::from_secs_f64(seconds.min(LONGEST)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed_as_in_go() {
        let table = [
            ("180s", Some(180_000)),
            ("1m30s", Some(90_000)),
            ("500ms", Some(500)),
            ("1.5s", Some(1500)),
            ("2h", Some(7_200_000)),
            ("30", Some(30_000)),
            ("", None),
            ("0s", None),
            ("-5s", None),
            ("5 s", None),
            ("5x", None),
            ("s", None),
        ];
        for (text, milliseconds) in table {
            assert_eq!(
                parse_duration(text),
                milliseconds.map(Duration::from_millis),
                "{text}"
            );
        }
    }

    #[test]
    fn listen_addresses_are_parsed_as_in_go() {
        assert_eq!(
            ListenAddress::parse(":8080"),
            Some(ListenAddress::Any(8080))
        );
        assert_eq!(ListenAddress::parse("0"), Some(ListenAddress::Off));
        assert_eq!(ListenAddress::parse(""), Some(ListenAddress::Off));
        assert_eq!(
            ListenAddress::parse("127.0.0.1:1"),
            Some(ListenAddress::At("127.0.0.1:1".parse().unwrap()))
        );
        assert_eq!(
            ListenAddress::parse("localhost:1"),
            Some(ListenAddress::At("127.0.0.1:1".parse().unwrap()))
        );
        assert_eq!(ListenAddress::parse("nonsense"), None);
        assert_eq!(ListenAddress::parse(":70000"), None);
    }
}
