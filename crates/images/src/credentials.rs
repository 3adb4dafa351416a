//! Registry credentials from Docker's configuration file, the format of Kubernetes image pull secrets. Pure.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use crate::reference::Reference;

#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    #[error("the registry credentials are not a Docker configuration file in JSON")]
    Malformed(#[source] serde_json::Error),
    #[error("\"auth\" of {0:?} is not the base64 of user:password")]
    Auth(String),
}

/// A credential for a registry.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Credential {
    Password {
        user: String,
        password: String,
    },
    /// A refresh token, exchanged for access tokens at the registry's token server.
    IdentityToken(String),
    /// A bearer token, sent as it is.
    AccessToken(String),
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Password { user, .. } => write!(formatter, "Password({user:?}, …)"),
            Self::IdentityToken(_) => formatter.write_str("IdentityToken(…)"),
            Self::AccessToken(_) => formatter.write_str("AccessToken(…)"),
        }
    }
}

/// Credentials, each with the registry or repository prefix for which it is valid.
#[derive(Debug, Clone, Default)]
pub struct Keyring {
    entries: Vec<(String, Credential)>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    auth: String,
    #[serde(default)]
    username: String,
    #[serde(default)]
    password: String,
    #[serde(default)]
    identitytoken: String,
    #[serde(default)]
    registrytoken: String,
}

impl Keyring {
    /// Adds the content of a `.dockerconfigjson`.
    pub fn add_docker_config(&mut self, json: &[u8]) -> Result<(), CredentialError> {
        #[derive(Deserialize)]
        struct File {
            #[serde(default)]
            auths: BTreeMap<String, Entry>,
        }
        let file: File = serde_json::from_slice(json).map_err(CredentialError::Malformed)?;
        self.add(file.auths)
    }

    /// Adds the content of the older `.dockercfg`.
    pub fn add_legacy_docker_config(&mut self, json: &[u8]) -> Result<(), CredentialError> {
        self.add(serde_json::from_slice(json).map_err(CredentialError::Malformed)?)
    }

    /// Adds a credential for everything at `registry`.
    pub fn add_credential(&mut self, registry: &str, credential: Credential) {
        self.entries.push((normalize(registry), credential));
    }

    fn add(&mut self, entries: BTreeMap<String, Entry>) -> Result<(), CredentialError> {
        for (key, entry) in entries {
            if let Some(credential) = read(&key, entry)? {
                self.entries.push((normalize(&key), credential));
            }
        }
        Ok(())
    }

    /// The credentials that match `reference`, the most specific first.
    pub fn matching(&self, reference: &Reference) -> Vec<Credential> {
        let mut found: Vec<(usize, &Credential)> = self
            .entries
            .iter()
            .filter(|(key, _)| matches(key, reference))
            .map(|(key, credential)| (key.len(), credential))
            .collect();
        found.sort_by_key(|(length, _)| std::cmp::Reverse(*length));
        let mut credentials: Vec<Credential> = Vec::new();
        for (_, credential) in found {
            if !credentials.contains(credential) {
                credentials.push(credential.clone());
            }
        }
        credentials
    }
}

fn read(key: &str, entry: Entry) -> Result<Option<Credential>, CredentialError> {
    if !entry.registrytoken.is_empty() {
        return Ok(Some(Credential::AccessToken(entry.registrytoken)));
    }
    if !entry.identitytoken.is_empty() {
        return Ok(Some(Credential::IdentityToken(entry.identitytoken)));
    }
    if !entry.username.is_empty() {
        return Ok(Some(Credential::Password {
            user: entry.username,
            password: entry.password,
        }));
    }
    if entry.auth.is_empty() {
        return Ok(None);
    }
    let malformed = || CredentialError::Auth(key.to_owned());
    let decoded = STANDARD
        .decode(entry.auth.trim())
        .map_err(|_| malformed())?;
    let text = String::from_utf8(decoded).map_err(|_| malformed())?;
    let (user, password) = text.split_once(':').ok_or_else(malformed)?;
    Ok(Some(Credential::Password {
        user: user.to_owned(),
        password: password.trim_end_matches('\0').to_owned(),
    }))
}

/// Removes scheme, API version and trailing slash, and maps all names of the default registry to `docker.io`.
fn normalize(key: &str) -> String {
    let key = key.split_once("://").map_or(key, |(_, rest)| rest);
    let key = key.trim_end_matches('/');
    let key = key
        .strip_suffix("/v1")
        .or_else(|| key.strip_suffix("/v2"))
        .unwrap_or(key);
    match key {
        "index.docker.io" | "registry-1.docker.io" => "docker.io".to_owned(),
        other => other.to_owned(),
    }
}

/// Host names match label by label, where `*` stands for any characters within one label. A path matches all repositories below
/// it.
fn matches(key: &str, reference: &Reference) -> bool {
    let (host, path) = key.split_once('/').unwrap_or((key, ""));
    let (patterns, parts): (Vec<&str>, Vec<&str>) = (
        host.split('.').collect(),
        reference.registry().split('.').collect(),
    );
    let host_matches = patterns.len() == parts.len()
        && patterns
            .iter()
            .zip(&parts)
            .all(|(pattern, part)| part_matches(pattern, part));
    let below = reference.repository().strip_prefix(path);
    host_matches
        && below.is_some_and(|rest| path.is_empty() || rest.is_empty() || rest.starts_with('/'))
}

fn part_matches(pattern: &str, part: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == part,
        Some((before, after)) => {
            part.len() >= before.len() + after.len()
                && part.starts_with(before)
                && part.ends_with(after)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(keyring: &Keyring, image: &str) -> Vec<String> {
        let reference = Reference::parse(image).unwrap();
        let user = |credential: Credential| match credential {
            Credential::Password { user, password } => format!("{user}:{password}"),
            other => format!("{other:?}"),
        };
        keyring.matching(&reference).into_iter().map(user).collect()
    }

    #[test]
    fn credentials_are_found_by_registry_path_and_wildcard() {
        let mut keyring = Keyring::default();
        keyring
            .add_docker_config(
                br#"{"auths": {
                    "https://index.docker.io/v1/": {"auth": "aHViOnNlY3JldA=="},
                    "registry.example": {"username": "all", "password": "p"},
                    "registry.example/team": {"username": "team", "password": "p"},
                    "*.wild.example": {"username": "wild", "password": "p"},
                    "127.0.0.1:5000": {"username": "port", "password": "p"},
                    "empty.example": {}
                }}"#,
            )
            .unwrap();
        assert_eq!(users(&keyring, "busybox"), ["hub:secret"]);
        assert_eq!(users(&keyring, "registry.example/a"), ["all:p"]);
        assert_eq!(
            users(&keyring, "registry.example/team/a"),
            ["team:p", "all:p"]
        );
        assert_eq!(users(&keyring, "registry.example/teamwork"), ["all:p"]);
        assert_eq!(users(&keyring, "a.wild.example/x"), ["wild:p"]);
        assert!(users(&keyring, "a.b.wild.example/x").is_empty());
        assert_eq!(users(&keyring, "127.0.0.1:5000/x"), ["port:p"]);
        assert!(users(&keyring, "127.0.0.1:5001/x").is_empty());
        assert!(users(&keyring, "empty.example/x").is_empty());
    }

    #[test]
    fn the_error_names_a_malformed_credential() {
        let mut keyring = Keyring::default();
        let wrong = br#"{"auths": {"registry.example": {"auth": "!"}}}"#;
        let error = keyring.add_docker_config(wrong).unwrap_err();
        assert!(error.to_string().contains("registry.example"), "{error}");
        assert!(keyring.add_docker_config(b"no JSON").is_err());
    }

    #[test]
    fn secrets_do_not_show_in_debug_output() {
        let credential = Credential::Password {
            user: "u".into(),
            password: "hunter2".into(),
        };
        assert!(!format!("{credential:?}").contains("hunter2"));
    }
}
