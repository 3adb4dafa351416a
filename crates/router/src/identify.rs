//! Which sandbox, port and time limit a request means. Pure: it reads the request's head and decides.
//!
//! The host decides if it belongs to a routed domain, because a browser page chooses headers but not its host; then the
//! path, if path routing is on; then the headers. For these two the host may have to be the router's own.

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use api::addresses::is_a_pods;
use http::uri::Authority;
use http::{HeaderMap, HeaderName, Uri, header};

use crate::answer::Failure;
use crate::config::{Config, OwnNames, positive_seconds};

const SANDBOX_ID: HeaderName = HeaderName::from_static("x-sandbox-id");
const SANDBOX_NAMESPACE: HeaderName = HeaderName::from_static("x-sandbox-namespace");
const SANDBOX_PORT: HeaderName = HeaderName::from_static("x-sandbox-port");
const SANDBOX_POD_IP: HeaderName = HeaderName::from_static("x-sandbox-pod-ip");
const SANDBOX_TIMEOUT: HeaderName = HeaderName::from_static("x-sandbox-timeout");
const E2B_SANDBOX_ID: HeaderName = HeaderName::from_static("e2b-sandbox-id");
const E2B_SANDBOX_PORT: HeaderName = HeaderName::from_static("e2b-sandbox-port");

const DEFAULT_NAMESPACE: &str = "default";
const DEFAULT_PORT: u16 = 8888;

/// A sandbox's namespace and name, joined for looking it up.
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

/// What a request means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub sandbox: SandboxKey,
    pub port: u16,
    pub timeout: Option<Duration>,
    /// How many bytes of the path named the sandbox and do not concern it.
    pub consumed_path: usize,
}

/// Finds the sandbox a request means. `Ok(None)` if it names none at all.
pub fn identify(
    config: &Config,
    uri: &Uri,
    headers: &HeaderMap,
) -> Result<Option<Target>, Failure> {
    // One that is no positive number is as good as none: existing routers take it so.
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

/// The host that a request names, with its port. One that names two, or something else, has two meanings.
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

/// Whether this is a name or an address, and a port if it has one. User information (`localhost@evil`) makes it neither.
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

/// `<namespace>/<id>/<port>/…`, and how long the part before the rest is.
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

/// A host without the port, and without the dot that ends a full name.
fn without_port(host: &str) -> &str {
    let name = host
        .rsplit_once(':')
        .filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit()))
        .map_or(host, |(name, _)| name);
    name.strip_suffix('.').unwrap_or(name)
}

/// The one label before a routed domain, if the host is below one.
fn label_below<'h>(host: &'h str, domains: &[String]) -> Option<&'h str> {
    domains.iter().find_map(|domain| below(host, domain))
}

/// What stands before a domain that the host is below.
fn below<'h>(host: &'h str, domain: &str) -> Option<&'h str> {
    let split = host.len().checked_sub(domain.len() + 1)?;
    let (label, suffix) = (host.get(..split)?, host.get(split..)?);
    let is_below = suffix.strip_prefix('.')?.eq_ignore_ascii_case(domain);
    (is_below && !label.is_empty()).then_some(label)
}

/// Whether a host is an address, a routed domain, or a name that cannot be bought.
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

/// The address a client believes the sandbox to have is only a hint, and is never dialled. One that no sandbox can have
/// is refused, so that a probe for the machine's own or the cloud's services gets the answer it deserves.
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

/// A header's value, which may come once. One that is not text is like one that is wrong.
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
