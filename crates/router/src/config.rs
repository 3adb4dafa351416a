//! What the router can be told, with its defaults, and how the words of flags and environment become values. Pure.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// How the router behaves. [`Config::default`] is upstream's router with no flags.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub http_listen: ListenAddress,
    /// Used only with `tls`.
    pub https_listen: ListenAddress,
    pub metrics_listen: ListenAddress,
    pub health_listen: ListenAddress,
    pub tls: Option<TlsConfig>,
    /// The suffix of services' names, for resolution by DNS.
    pub cluster_domain: String,
    /// How long a sandbox may be silent: before its answer begins, and between pieces of it.
    pub proxy_timeout: Duration,
    /// How long the head of a sandbox's answer may take, where that is less than it may be silent.
    pub response_header_timeout: Option<Duration>,
    /// How often a failed dial is repeated.
    pub dial_retries: u32,
    /// The pause before the first repeated dial; each next one is twice as long.
    pub dial_retry_delay: Duration,
    /// The longest of these pauses.
    pub dial_retry_longest_delay: Duration,
    /// How long one dial may take.
    pub dial_timeout: Duration,
    /// Larger request bodies are refused; 0 means no limit.
    pub max_request_body_bytes: u64,
    pub access_log: bool,
    /// How long connections are still taken once the router is told to stop, while `/readyz` already says no: what load balancers
    /// need to notice.
    pub shutdown_delay: Duration,
    /// What requests in flight get after that.
    pub shutdown_timeout: Duration,
    /// Domains whose subdomains name sandboxes: `<port>-<sandbox>.<domain>`.
    pub host_domains: Vec<String>,
    /// By which names the router itself may be called.
    pub own_names: OwnNames,
    /// Below which `<prefix>/<namespace>/<id>/<port>/…` is routed, as `/sandbox`; nothing is without one.
    pub path_prefix: Option<String>,
    /// The one namespace whose sandboxes are watched, where not all may be.
    pub watch_namespace: Option<String>,
    /// Whether the node of this machine forwards ports of mirror pods here, and says of each connection which namespace it is for.
    pub tunnels: bool,
    pub authorization: AuthorizationMode,
    /// How long a sandbox that is not known, or has no address yet, is waited for.
    pub resolve_wait: Duration,
    /// How long a connection may be without a request, or with one whose head is not complete: at least this, and at most twice.
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

/// Where to listen, or that one should not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    Off,
    /// Every address of the machine, of both families as far as it has them.
    Any(u16),
    At(SocketAddr),
}

impl ListenAddress {
    pub fn any(port: u16) -> Self {
        ListenAddress::Any(port)
    }

    /// Go's spelling: `:8080`, `127.0.0.1:8080`, `[::1]:8080`, and empty or `0` for nowhere.
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

/// Whether clients show a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MutualTls {
    #[default]
    Off,
    /// A certificate is asked for, and must be valid if it comes.
    Optional,
    Required,
}

/// By which names a router may be called by whoever names the sandbox elsewhere than in the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnNames {
    Any,
    /// Addresses, routed domains, and names that nobody can have on the internet: `localhost`, single labels, names of services. For a router
    /// that serves one machine. There a page whose own name comes to mean this machine is, to a browser, of the router's site, and
    /// may send it any header (DNS rebinding).
    Local,
}

/// Who may use a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuthorizationMode {
    /// Whoever reaches the router.
    None,
    /// Whoever has a bearer token that the Kubernetes API vouches for.
    TokenReview {
        audiences: Vec<String>,
        cache: ReviewCache,
    },
    /// Whoever has a signed token that names the sandbox and the port.
    ScopedToken { key_file: PathBuf },
    /// These users of this machine, by their connections; others by a signed token or by that of an account which may forward ports
    /// of the sandbox's pod. For a router that serves one machine.
    LocalUsers {
        users: Vec<u32>,
        /// The key of signed tokens.
        key_file: Option<PathBuf>,
    },
}

/// How long and how many reviews of tokens are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReviewCache {
    /// How long a token that passed counts as valid.
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
    #[error("--{flag} is needed {when}")]
    Needed {
        flag: &'static str,
        when: &'static str,
    },
}

/// The prefix of routed paths, unless a flag names another.
pub const DEFAULT_PATH_PREFIX: &str = "/sandbox";

/// A prefix of paths, without the slash at its end.
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

/// A duration in Go's spelling (`1m30s`, `500ms`), or a plain number of seconds. Zero and less are refused.
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

/// A number of seconds that is a time: finite, above zero, and no longer than a year.
pub fn positive_seconds(seconds: f64) -> Option<Duration> {
    const LONGEST: f64 = 366.0 * 24.0 * 3600.0;
    (seconds.is_finite() && seconds > 0.0).then(|| Duration::from_secs_f64(seconds.min(LONGEST)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_follow_gos_spelling() {
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
    fn listen_addresses_follow_gos_spelling() {
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
