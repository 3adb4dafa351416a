//! The image of a container: whether to pull it, with which credentials, and the events and reasons to report.

use std::sync::Arc;
use std::time::Instant;

use images::{Image, Images, Keyring, PullError, Reference};
use k8s_openapi::api::core::v1::{Container, Pod, Secret, ServiceAccount};
use kube::{Api, Client};

use crate::awaited_objects::Awaited;
use crate::config::Config;
use crate::pod_lifecycle::WaitingReason;
use crate::runtime::ImageSource;
use crate::volumes::service_account;
use api::errors::chain;
use event_recorder::{EventSink, Severity};

/// The name of the built-in image.
const HOST: &str = "host";

/// When an image is pulled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PullPolicy {
    Always,
    IfNotPresent,
    Never,
}

impl PullPolicy {
    fn of(container: &Container, name: &Reference) -> Self {
        match container.image_pull_policy.as_deref() {
            Some("Always") => Self::Always,
            Some("Never") => Self::Never,
            Some("IfNotPresent") => Self::IfNotPresent,
            // A mutable tag is resolved every time.
            _ if name.is_latest() => Self::Always,
            _ => Self::IfNotPresent,
        }
    }
}

/// Finds and pulls images for pods.
pub struct PodImages {
    pub images: Arc<Images>,
    pub client: Client,
    pub events: EventSink,
}

impl std::fmt::Debug for PodImages {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("PodImages")
            .field("images", &self.images)
            .finish_non_exhaustive()
    }
}

/// An image's name after aliases, which are by repository, in full or its last part.
fn resolve_alias<'a>(image: &'a str, config: &'a Config) -> &'a str {
    let repository = repository(image);
    let short = repository.rsplit('/').next().unwrap_or(repository);
    let aliases = &config.image_aliases;
    aliases
        .get(repository)
        .or_else(|| aliases.get(short))
        .map_or(image, String::as_str)
}

/// An image reference without its tag and digest.
fn repository(image: &str) -> &str {
    let image = image.split_once('@').map_or(image, |(name, _)| name);
    match image.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => name,
        _ => image,
    }
}

/// Why a container's image is not available.
#[derive(Debug)]
pub struct ImageRefusal {
    pub reason: WaitingReason,
    pub message: String,
    /// The objects that the credentials come from. If they change, the same pull may succeed.
    pub awaits: Option<Awaited>,
}

impl ImageRefusal {
    fn new(reason: WaitingReason, message: String) -> Self {
        Self {
            reason,
            message,
            awaits: None,
        }
    }
}

/// Why a pull failed.
#[derive(Debug, thiserror::Error)]
enum PullFailure {
    #[error("reading pull secret {secret}")]
    ReadSecret {
        secret: String,
        #[source]
        source: kube::Error,
    },
    #[error("pull secret {secret}")]
    Credentials {
        secret: String,
        #[source]
        source: images::CredentialError,
    },
    #[error("reading service account {account}")]
    ReadAccount {
        account: String,
        #[source]
        source: kube::Error,
    },
    #[error(transparent)]
    Pull(#[from] Arc<PullError>),
}

impl PodImages {
    /// Makes the container's image available, according to its pull policy.
    pub async fn ensure(
        &self,
        pod: &Pod,
        container: &Container,
        config: &Config,
    ) -> Result<ImageSource, ImageRefusal> {
        let record = |severity, reason: &str, note: String| {
            let container = Some(container.name.as_str());
            self.events
                .tell_doing("Pull", pod, container, severity, reason, note);
        };
        let asked = container.image.as_deref().unwrap_or_default();
        let wanted = resolve_alias(asked, config);
        if wanted != asked {
            let note = format!("Image \"{asked}\" is run as \"{wanted}\"");
            record(Severity::Normal, "ImageAliased", note);
        }
        if repository(wanted) == HOST {
            return Ok(ImageSource::Host);
        }
        let name = Reference::parse(wanted).map_err(|error| {
            ImageRefusal::new(WaitingReason::InvalidImageName, error.to_string())
        })?;
        let present = self.images.find(&name);
        let image = match (PullPolicy::of(container, &name), present) {
            (PullPolicy::Never, None) => {
                let message = format!(
                    "Container image \"{wanted}\" is not present with pull policy of Never"
                );
                return Err(ImageRefusal::new(WaitingReason::ErrImageNeverPull, message));
            }
            (PullPolicy::IfNotPresent | PullPolicy::Never, Some(image)) => {
                let note = format!("Container image \"{wanted}\" already present on machine");
                record(Severity::Normal, "Pulled", note);
                image
            }
            _ => {
                record(
                    Severity::Normal,
                    "Pulling",
                    format!("Pulling image \"{wanted}\""),
                );
                let begun = Instant::now();
                let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
                let mut looked_at = Awaited::in_namespace(namespace);
                let pulled = self.pull(pod, &name, &mut looked_at).await;
                let image = pulled.map_err(|failure| {
                    let message = chain(&failure);
                    let note = format!("Failed to pull image \"{wanted}\": {message}");
                    record(Severity::Warning, "Failed", note);
                    ImageRefusal {
                        awaits: Some(looked_at),
                        ..ImageRefusal::new(WaitingReason::ErrImagePull, message)
                    }
                })?;
                let took = begun.elapsed().as_millis();
                let note = format!("Successfully pulled image \"{wanted}\" in {took}ms");
                record(Severity::Normal, "Pulled", note);
                image
            }
        };
        Ok(ImageSource::Stored {
            image: Arc::new(image),
            name,
        })
    }

    async fn pull(
        &self,
        pod: &Pod,
        name: &Reference,
        looked_at: &mut Awaited,
    ) -> Result<Image, PullFailure> {
        let keyring = self.keyring(pod, looked_at).await?;
        let credentials = keyring.matching(name);
        Ok(self.images.pull(name, credentials).await?)
    }

    /// The credentials of the pod's pull secrets, or of its service account's if the pod names none.
    async fn keyring(&self, pod: &Pod, looked_at: &mut Awaited) -> Result<Keyring, PullFailure> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let spec = pod.spec.as_ref();
        let own: Vec<String> = spec
            .and_then(|spec| spec.image_pull_secrets.as_ref())
            .into_iter()
            .flatten()
            .map(|secret| secret.name.clone())
            .collect();
        let names = if own.is_empty() {
            let account = service_account(pod);
            self.account_secrets(namespace, account, looked_at).await?
        } else {
            own
        };
        let secrets = Api::<Secret>::namespaced(self.client.clone(), namespace);
        let mut keyring = Keyring::default();
        for name in names {
            let found = secrets.get_opt(&name).await;
            let secret = found.map_err(|source| PullFailure::ReadSecret {
                secret: format!("{namespace}/{name}"),
                source,
            })?;
            looked_at.secret(&name, secret.as_ref());
            // As a kubelet, ignores a missing pull secret.
            let Some(secret) = secret else { continue };
            add_secret(&mut keyring, &secret).map_err(|source| PullFailure::Credentials {
                secret: format!("{namespace}/{name}"),
                source,
            })?;
        }
        Ok(keyring)
    }

    async fn account_secrets(
        &self,
        namespace: &str,
        name: &str,
        looked_at: &mut Awaited,
    ) -> Result<Vec<String>, PullFailure> {
        let accounts = Api::<ServiceAccount>::namespaced(self.client.clone(), namespace);
        let found = accounts.get_opt(name).await;
        let account = found.map_err(|source| PullFailure::ReadAccount {
            account: format!("{namespace}/{name}"),
            source,
        })?;
        looked_at.service_account(name, account.as_ref());
        Ok(account
            .and_then(|account| account.image_pull_secrets)
            .into_iter()
            .flatten()
            .map(|secret| secret.name)
            .collect())
    }
}

fn add_secret(keyring: &mut Keyring, secret: &Secret) -> Result<(), images::CredentialError> {
    let data = |key: &str| {
        let bytes = secret.data.as_ref()?.get(key)?;
        Some(bytes.0.as_slice())
    };
    match secret.type_.as_deref() {
        Some("kubernetes.io/dockerconfigjson") => {
            keyring.add_docker_config(data(".dockerconfigjson").unwrap_or(b"{}"))
        }
        Some("kubernetes.io/dockercfg") => {
            keyring.add_legacy_docker_config(data(".dockercfg").unwrap_or(b"{}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_reference_loses_its_tag_and_digest_but_not_its_registry_port() {
        for (image, name) in [
            ("host", "host"),
            ("host:latest", "host"),
            ("registry.example:5000/a/b", "registry.example:5000/a/b"),
            ("registry.example:5000/a/b:v1", "registry.example:5000/a/b"),
            ("a/b@sha256:00", "a/b"),
        ] {
            assert_eq!(repository(image), name);
        }
    }

    #[test]
    fn an_alias_stands_for_a_repository_whatever_its_registry_and_tag() {
        let mut config = Config::new("/nowhere");
        config
            .image_aliases
            .insert("python-runtime".to_owned(), "host".to_owned());
        assert_eq!(
            resolve_alias("registry.example/x/python-runtime:v1", &config),
            "host"
        );
        assert_eq!(
            resolve_alias("registry.example/other:v1", &config),
            "registry.example/other:v1"
        );
    }

    #[test]
    fn only_latest_is_pulled_every_time_unless_told_otherwise() {
        let digest = format!("a@sha256:{}", "0".repeat(64));
        for (policy, image, expected) in [
            (None, "a", PullPolicy::Always),
            (None, "a:latest", PullPolicy::Always),
            (None, "a:v1", PullPolicy::IfNotPresent),
            (None, digest.as_str(), PullPolicy::IfNotPresent),
            (Some("Never"), "a", PullPolicy::Never),
            (Some("Always"), "a:v1", PullPolicy::Always),
            (Some("IfNotPresent"), "a", PullPolicy::IfNotPresent),
        ] {
            let container: Container =
                serde_json::from_value(json!({"name": "c", "imagePullPolicy": policy})).unwrap();
            let name = Reference::parse(image).unwrap();
            assert_eq!(
                PullPolicy::of(&container, &name),
                expected,
                "{policy:?} {image}"
            );
        }
    }
}
