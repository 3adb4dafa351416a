//! Determines the sandbox, port and timeout of a request from its head. Pure.
//!
//! The host decides if it is below a routed domain, because a browser page chooses headers but not its host; then the
//! path, if path routing is enabled; then the headers. For path and headers the host may have to be one of the router's own names.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use api::addresses::is_a_pods;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, Uri, header};

use crate::config::{Config, OwnNames, positive_seconds};
use crate::failure::Failure;

const SANDBOX_ID: HeaderName = HeaderName::from_static("x-sandbox-id");
const SANDBOX_NAMESPACE: HeaderName = HeaderName::from_static("x-sandbox-namespace");
const SANDBOX_PORT: HeaderName = HeaderName::from_static("x-sandbox-port");
const SANDBOX_POD_IP: HeaderName = HeaderName::from_static("x-sandbox-pod-ip");
const SANDBOX_TIMEOUT: HeaderName = HeaderName::from_static("x-sandbox-timeout");
const E2B_SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
const E2B_SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

const DEFAULT_NAMESPACE: &str = "default";
const DEFAULT_PORT: u16 = 8888;

/// A sandbox's namespace and name, joined as a lookup key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SandboxKey {
    joined: String,
    slash: usize,
}

impl SandboxKey {
    pub fn new(namespace: &str, name: &str) -> Self {
        let mut joined = String::with_capacity(namespace.len() + name.len() + 1);
        joined.push_str(namespace);
        joined.push('/');
        joined.push_str(name);
        Self {
            slash: namespace.len(),
            joined,
        }
    }

    pub fn namespace(&self) -> &str {
        &self.joined[..self.slash]
    }

    pub fn name(&self) -> &str {
        &self.joined[self.slash + 1..]
    }

    /// `namespace/name`; neither contains a slash.
    pub fn as_str(&self) -> &str {
        &self.joined
    }
}

/// The sandbox, port and timeout that a request names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub sandbox: SandboxKey,
    pub port: u16,
    pub timeout: Option<Duration>,
    /// The length of the path prefix that named the sandbox and is not forwarded.
    pub consumed_path: usize,
}

/// Finds the sandbox that a request names. `Ok(None)` if it names no sandbox at all.
pub fn identify(
    config: &Config,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<Option<Target>, Failure> {
    // An invalid timeout is ignored, as upstream's routers do.
    let timeout = single(headers, &SANDBOX_TIMEOUT, "X-Sandbox-Timeout")?
        .and_then(|text| text.trim().parse().ok())
        .and_then(positive_seconds);
    check_address_hint(headers)?;
    let host = named_host(uri, headers)?.map(without_port);
    if let Some((sandbox, port)) = host
        .and_then(|host| label_below(host, &config.host_domains))
        .map(by_host)
        .transpose()?
    {
        return Ok(Some(Target {
            sandbox,
            port,
            timeout,
            consumed_path: 0,
        }));
    }
    if config.own_names == OwnNames::Local && host.is_some_and(|host| !is_local(host, config)) {
        return Err(Failure::Misdirected);
    }
    if let Some(prefix) = &config.path_prefix
        && let Some(rest) = uri.path().strip_prefix(prefix.as_str())
        && let Some(rest) = rest.strip_prefix('/')
    {
        let (sandbox, port, length) = by_path(rest)?;
        let consumed_path = prefix.len() + 1 + length;
        return Ok(Some(Target {
            sandbox,
            port,
            timeout,
            consumed_path,
        }));
    }
    Ok(by_headers(headers)?.map(|(sandbox, port)| Target {
        sandbox,
        port,
        timeout,
        consumed_path: 0,
    }))
}

/// The host that a request names, with its port. A request that names two hosts is ambiguous, and refused.
fn named_host<'r>(uri: &'r Uri, headers: &'r HeaderMap) -> Result<Option<&'r str>, Failure> {
    let in_target = uri.authority().map(Authority::as_str);
    let in_header = single(headers, &header::HOST, "Host")?;
    let is_one = match (in_target, in_header) {
        (Some(target), Some(header)) => target.eq_ignore_ascii_case(header),
        _ => true,
    };
    let host = in_target.or(in_header);
    if is_one && host.is_none_or(is_host) {
        Ok(host)
    } else {
        Err(Failure::InvalidHost)
    }
}

/// Whether the text is a host name or address with an optional port. User information (`localhost@evil`) is refused.
fn is_host(host: &str) -> bool {
    let is_name_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let (name, port) = match host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        Some((address, port)) => {
            if address.parse::<Ipv6Addr>().is_err() {
                return false;
            }
            (
                None,
                port.strip_prefix(':').or(port.is_empty().then_some("")),
            )
        }
        None => match host.split_once(':') {
            Some((name, port)) => (Some(name), Some(port)),
            None => (Some(host), Some("")),
        },
    };
    name.is_none_or(|name| !name.is_empty() && name.bytes().all(is_name_byte))
        && port.is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()))
}

fn by_headers(headers: &HeaderMap) -> Result<Option<(SandboxKey, u16)>, Failure> {
    let namespace = single(headers, &SANDBOX_NAMESPACE, "X-Sandbox-Namespace")?;
    if let Some(name) =
        single(headers, &SANDBOX_ID, "X-Sandbox-ID")?.filter(|name| !name.is_empty())
    {
        let port = single(headers, &SANDBOX_PORT, "X-Sandbox-Port")?;
        return Ok(Some((
            key(namespace.unwrap_or(DEFAULT_NAMESPACE), name)?,
            port_or_default(port)?,
        )));
    }
    if let Some(identifier) =
        single(headers, &E2B_SANDBOX_ID, "e2b-sandbox-id")?.filter(|name| !name.is_empty())
    {
        let (in_name, name) = split_namespace(identifier);
        let port = single(headers, &E2B_SANDBOX_PORT, "e2b-sandbox-port")?;
        return Ok(Some((
            key(in_name.or(namespace).unwrap_or(DEFAULT_NAMESPACE), name)?,
            port_or_default(port)?,
        )));
    }
    Ok(None)
}

/// `<port>-<sandbox>` or `<port>-<namespace>--<sandbox>`.
fn by_host(label: &str) -> Result<(SandboxKey, u16), Failure> {
    let (port, identifier) = label.split_once('-').ok_or(Failure::InvalidSandbox)?;
    let (namespace, name) = split_namespace(identifier);
    Ok((
        key(namespace.unwrap_or(DEFAULT_NAMESPACE), name)?,
        parse_port(port)?,
    ))
}

/// Parses `<namespace>/<id>/<port>/…`; also returns the length of the consumed part.
fn by_path(path: &str) -> Result<(SandboxKey, u16, usize), Failure> {
    let mut rest = path.splitn(4, '/');
    let namespace = rest.next().ok_or(Failure::InvalidNamespace)?;
    let name = rest.next().ok_or(Failure::InvalidSandbox)?;
    let port = rest.next().ok_or(Failure::InvalidPort)?;
    let consumed = namespace.len() + 1 + name.len() + 1 + port.len();
    Ok((key(namespace, name)?, parse_port(port)?, consumed))
}

fn split_namespace(identifier: &str) -> (Option<&str>, &str) {
    identifier
        .split_once("--")
        .map_or((None, identifier), |(namespace, name)| {
            (Some(namespace), name)
        })
}

/// The host without its port and without the trailing dot of a fully qualified name.
fn without_port(host: &str) -> &str {
    let name = host
        .rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()))
        .map_or(host, |(name, _)| name);
    name.strip_suffix('.').unwrap_or(name)
}

/// The label before a routed domain, if the host is directly below one.
fn label_below<'h>(host: &'h str, domains: &[String]) -> Option<&'h str> {
    domains.iter().find_map(|domain| below(host, domain))
}

/// The part of the host before `domain`, if the host is below it.
fn below<'h>(host: &'h str, domain: &str) -> Option<&'h str> {
    let split = host.len().checked_sub(domain.len() + 1)?;
    let (label, suffix) = (host.get(..split)?, host.get(split..)?);
    let is_below = suffix.strip_prefix('.')?.eq_ignore_ascii_case(domain);
    (is_below && !label.is_empty()).then_some(label)
}

/// Whether a host is an address, a routed domain, or a name that cannot be registered on the internet.
fn is_local(host: &str, config: &Config) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    !host.contains('.')
        || address.parse::<IpAddr>().is_ok()
        || ["localhost", "svc"]
            .iter()
            .any(|domain| below(host, domain).is_some())
        || below(host, &config.cluster_domain).is_some_and(|name| below(name, "svc").is_some())
        || config
            .host_domains
            .iter()
            .any(|domain| host.eq_ignore_ascii_case(domain))
}

fn key(namespace: &str, name: &str) -> Result<SandboxKey, Failure> {
    if !is_label(namespace, 63) {
        return Err(Failure::InvalidNamespace);
    }
    // Longer than a DNS label, as Kubernetes allows for names, but without dots: the name becomes one label of a host.
    if !is_label(name, 253) {
        return Err(Failure::InvalidSandbox);
    }
    Ok(SandboxKey::new(namespace, name))
}

fn is_label(text: &str, longest: usize) -> bool {
    let bytes = text.as_bytes();
    let edge = |byte: Option<&u8>| {
        byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
    };
    bytes.len() <= longest
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-')
}

fn port_or_default(text: Option<&str>) -> Result<u16, Failure> {
    text.map_or(Ok(DEFAULT_PORT), parse_port)
}

fn parse_port(text: &str) -> Result<u16, Failure> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let port = if digits { text.parse().ok() } else { None };
    port.filter(|port| *port != 0).ok_or(Failure::InvalidPort)
}

/// Checks the client's `X-Sandbox-Pod-IP`. It is only a hint and never dialled. An address that no sandbox can have
/// is refused, so that a probe for local or cloud-metadata services (SSRF) gets a clear error.
fn check_address_hint(headers: &HeaderMap) -> Result<(), Failure> {
    let Some(text) =
        single(headers, &SANDBOX_POD_IP, "X-Sandbox-Pod-IP")?.filter(|text| !text.is_empty())
    else {
        return Ok(());
    };
    let address: IpAddr = text.trim().parse().map_err(|_| Failure::InvalidAddress)?;
    if is_a_pods(address) {
        Ok(())
    } else {
        Err(Failure::InvalidAddress)
    }
}

/// The value of a header that must be unique. A value that is not text is an invalid value.
fn single<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
    spelled: &'static str,
) -> Result<Option<&'h str>, Failure> {
    let mut values = headers.get_all(name).iter();
    let Some(first) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(Failure::Repeated(spelled));
    }
    Ok(Some(first.to_str().unwrap_or("\u{0}")))
}

#[cfg(test)]
#[path = "identify_tests.rs"]
mod tests;
