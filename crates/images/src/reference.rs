//! Parses image references and expands short names. Pure.

use std::fmt;
use std::net::IpAddr;

use crate::digest::Digest;

/// The default registry for names without a registry, and the host of its API.
const DEFAULT_REGISTRY: &str = "docker.io";
const DEFAULT_REGISTRY_API: &str = "registry-1.docker.io";
/// Other names of the default registry.
const DEFAULT_REGISTRY_ALIASES: [&str; 2] = ["index.docker.io", DEFAULT_REGISTRY_API];
const OFFICIAL: &str = "library";
const DEFAULT_TAG: &str = "latest";
const NAME_BYTES_MAX: usize = 255;
const TAG_BYTES_MAX: usize = 128;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid image name {name:?}: {problem}")]
pub struct InvalidReference {
    name: String,
    problem: &'static str,
}

/// A full image name: registry, repository, and a tag or digest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

impl Reference {
    pub fn parse(name: &str) -> Result<Self, InvalidReference> {
        let invalid = |problem| InvalidReference {
            name: name.to_owned(),
            problem,
        };
        let (rest, digest) = match name.split_once('@') {
            Some((rest, digest)) => {
                let digest = Digest::parse(digest).map_err(|_| {
                    invalid("@ must be followed by sha256: and 64 hexadecimal digits")
                })?;
                (rest, Some(digest))
            }
            None => (name, None),
        };
        let (path, tag) = match rest.rsplit_once(':') {
            Some((path, tag)) if !tag.contains('/') => (path, Some(tag)),
            _ => (rest, None),
        };
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(invalid(
                "a tag consists of up to 128 letters, digits, dots, dashes and underscores",
            ));
        }
        let (registry, repository) = match path.split_once('/') {
            Some((first, rest)) if is_registry(first) => (first, rest.to_owned()),
            _ if path.contains('/') => (DEFAULT_REGISTRY, path.to_owned()),
            _ => (DEFAULT_REGISTRY, format!("{OFFICIAL}/{path}")),
        };
        let registry = if DEFAULT_REGISTRY_ALIASES.contains(&registry) {
            DEFAULT_REGISTRY
        } else {
            registry
        };
        let repository = if registry == DEFAULT_REGISTRY && !repository.contains('/') {
            format!("{OFFICIAL}/{repository}")
        } else {
            repository
        };
        if !is_host(registry) {
            return Err(invalid("the registry must be a host with an optional port"));
        }
        if repository.len() > NAME_BYTES_MAX || !repository.split('/').all(is_component) {
            return Err(invalid(
                "a repository consists of lowercase letters and digits, joined by '.', '_', '-' and '/'",
            ));
        }
        Ok(Self {
            registry: registry.to_owned(),
            repository,
            tag: match (tag, &digest) {
                (Some(tag), _) => Some(tag.to_owned()),
                (None, Some(_)) => None,
                (None, None) => Some(DEFAULT_TAG.to_owned()),
            },
            digest,
        })
    }

    pub fn registry(&self) -> &str {
        &self.registry
    }

    pub fn repository(&self) -> &str {
        &self.repository
    }

    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// The host and port of the registry's API.
    pub fn api_host(&self) -> &str {
        if self.registry == DEFAULT_REGISTRY {
            DEFAULT_REGISTRY_API
        } else {
            &self.registry
        }
    }

    /// The name of the manifest at the registry: the digest if there is one (a tag beside it has no effect), otherwise the tag.
    pub fn manifest_name(&self) -> String {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.to_string(),
            (None, Some(tag)) => tag.clone(),
            (None, None) => DEFAULT_TAG.to_owned(),
        }
    }

    /// The reference with the manifest's digest, as Kubernetes reports it in `imageID`.
    pub fn with_digest(&self, manifest: &Digest) -> String {
        format!("{}/{}@{manifest}", self.registry, self.repository)
    }

    /// Whether the tag is `latest`. Kubernetes then pulls the image on every start unless the pull policy says otherwise.
    pub fn is_latest(&self) -> bool {
        self.digest.is_none() && self.tag.as_deref() == Some(DEFAULT_TAG)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.registry, self.repository)?;
        match (&self.digest, &self.tag) {
            (Some(digest), _) => write!(formatter, "@{digest}"),
            (None, Some(tag)) => write!(formatter, ":{tag}"),
            (None, None) => Ok(()),
        }
    }
}

/// Whether a registry is on this machine, where plain HTTP exposes nothing to the network.
pub fn is_loopback(registry: &str) -> bool {
    let host = host_of(registry);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The host of a registry without its port.
fn host_of(registry: &str) -> &str {
    if let Some(rest) = registry.strip_prefix('[') {
        return rest.split_once(']').map_or(rest, |(host, _)| host);
    }
    registry.rsplit_once(':').map_or(registry, |(host, _)| host)
}

/// The first part of a path is a registry if it cannot be part of a repository name.
fn is_registry(part: &str) -> bool {
    part == "localhost" || part.contains(['.', ':']) || part.bytes().any(|b| b.is_ascii_uppercase())
}

fn is_host(registry: &str) -> bool {
    let (host, port) = match registry.strip_prefix('[').and_then(|r| r.split_once(']')) {
        Some((address, rest)) => {
            if address.parse::<std::net::Ipv6Addr>().is_err() {
                return false;
            }
            (
                "v6",
                rest.strip_prefix(':')
                    .or_else(|| rest.is_empty().then_some("0")),
            )
        }
        None => match registry.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (registry, Some("0")),
        },
    };
    let is_label = |label: &str| {
        !label.is_empty()
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    host.split('.').all(is_label) && port.is_some_and(|port| port.parse::<u16>().is_ok())
}

fn is_tag(tag: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    tag.len() <= TAG_BYTES_MAX
        && tag.bytes().next().is_some_and(is_word)
        && tag.bytes().all(|b| is_word(b) || b == b'.' || b == b'-')
}

/// Lowercase words joined by one dot, one or two underscores, or any number of dashes.
fn is_component(component: &str) -> bool {
    let is_word = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let separators_are_sound = component
        .split(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        .filter(|separator| !separator.is_empty())
        .all(|separator| {
            matches!(separator, "." | "_" | "__") || separator.bytes().all(|b| b == b'-')
        });
    component.bytes().next().is_some_and(is_word)
        && component.bytes().last().is_some_and(is_word)
        && separators_are_sound
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn short_names_mean_what_docker_means_by_them() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        for (name, full) in [
            ("busybox", "docker.io/library/busybox:latest".to_owned()),
            (
                "docker.io/busybox:1",
                "docker.io/library/busybox:1".to_owned(),
            ),
            ("index.docker.io/a/b", "docker.io/a/b:latest".to_owned()),
            ("a/b:v1", "docker.io/a/b:v1".to_owned()),
            ("localhost/a", "localhost/a:latest".to_owned()),
            (
                "127.0.0.1:5000/a/b_c",
                "127.0.0.1:5000/a/b_c:latest".to_owned(),
            ),
            ("[::1]:5000/a", "[::1]:5000/a:latest".to_owned()),
            (
                &format!("registry.example/a:v1@{digest}"),
                format!("registry.example/a@{digest}"),
            ),
        ] {
            assert_eq!(Reference::parse(name).unwrap().to_string(), full, "{name}");
        }
    }

    #[test]
    fn malformed_names_are_refused() {
        for name in [
            "",
            "UPPER",
            "a/B",
            "a//b",
            "-a",
            "a..b",
            "a___b",
            "a:",
            "a:-b",
            "a@sha256:00",
            "a@",
            "registry.example:port/a",
            "registry.example:99999/a",
            "../../etc/passwd",
            "a b",
            "https://registry.example/a",
            "host!.example/a",
        ] {
            assert!(Reference::parse(name).is_err(), "{name}");
        }
    }

    #[test]
    fn plain_http_is_allowed_on_loopback_only() {
        for (registry, loopback) in [
            ("localhost:5000", true),
            ("127.1.2.3:5000", true),
            ("[::1]:5000", true),
            ("localhost.example", false),
            ("10.0.0.1:5000", false),
            ("127.0.0.1.example:5000", false),
        ] {
            assert_eq!(is_loopback(registry), loopback, "{registry}");
        }
    }

    proptest! {
        #[test]
        fn any_text_parses_to_a_stable_name_or_is_refused(name in "[a-zA-Z0-9./:@_\\-\\[\\]]{0,60}") {
            if let Ok(reference) = Reference::parse(&name) {
                let full = reference.to_string();
                prop_assert_eq!(Reference::parse(&full).unwrap().to_string(), full);
                prop_assert!(!reference.repository().split('/').any(|part| part.is_empty() || part == ".."));
            }
        }
    }
}
