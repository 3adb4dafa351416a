//! The options of a new sandbox, and the claim that is built from them. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use api::claim::{ClaimShutdownPolicy, EnvVar, Lifecycle, WarmPoolRef};
use api::sandbox::{PersistentVolumeClaimTemplate, PodMetadata};
use api::template::SandboxTemplateRef;
use api::{SandboxClaim, SandboxClaimSpec, labels};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::error::{ErrorKind, Key};
use crate::options::{check_name, check_namespace};

/// The value of the label that names the creator of a claim.
const CREATED_BY: &str = "agent-sandbox-rust-sdk";
const NAME_PREFIX: &str = "sandbox-claim-";

/// The pools from which a claim by template may be fulfilled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WarmPool {
    /// Any pool of the template.
    #[default]
    Any,
    /// No pool: always a cold start.
    None,
    /// The pool of this name.
    Named(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Source {
    Template { name: String, warm_pool: WarmPool },
    Pool { name: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shutdown {
    At(Timestamp),
    After(Duration),
}

/// Options for creating a sandbox.
///
/// ```
/// use std::time::Duration;
/// use sdk::{CreateOptions, WarmPool};
///
/// let cold = CreateOptions::from_template("python")
///     .warm_pool(WarmPool::None)
///     .env("MODE", "test")
///     .label("team", "search")
///     .shutdown_after(Duration::from_secs(3600));
/// let warm = CreateOptions::from_pool("python-pool").name("my-sandbox");
/// # let _ = (cold, warm);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct CreateOptions {
    source: Source,
    pub(crate) name: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) adopt_existing: bool,
    pub(crate) ready_timeout: Option<Duration>,
    pub(crate) keep_on_failure: bool,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    pod_labels: BTreeMap<String, String>,
    pod_annotations: BTreeMap<String, String>,
    env: Vec<EnvVar>,
    volume_claim_templates: Vec<PersistentVolumeClaimTemplate>,
    shutdown: Option<Shutdown>,
    shutdown_policy: Option<ClaimShutdownPolicy>,
    ttl_after_finished: Option<Duration>,
}

impl CreateOptions {
    /// A sandbox of this template, from any of its warm pools or by a cold start.
    pub fn from_template(name: impl Into<String>) -> Self {
        Self::new(Source::Template {
            name: name.into(),
            warm_pool: WarmPool::Any,
        })
    }

    /// A sandbox of this warm pool.
    pub fn from_pool(name: impl Into<String>) -> Self {
        Self::new(Source::Pool { name: name.into() })
    }

    fn new(source: Source) -> Self {
        Self {
            source,
            name: None,
            namespace: None,
            adopt_existing: false,
            ready_timeout: None,
            keep_on_failure: false,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            pod_labels: BTreeMap::new(),
            pod_annotations: BTreeMap::new(),
            env: Vec::new(),
            volume_claim_templates: Vec::new(),
            shutdown: None,
            shutdown_policy: None,
            ttl_after_finished: None,
        }
    }

    /// The pools from which the sandbox may come. Ignored for a claim by pool, which already names its pool.
    #[must_use]
    pub fn warm_pool(mut self, policy: WarmPool) -> Self {
        if let Source::Template { warm_pool, .. } = &mut self.source {
            *warm_pool = policy;
        }
        self
    }

    /// The claim's name, which is the sandbox's id. The default is `sandbox-claim-` and eight random characters.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The namespace, if not the client's.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// Attach to an existing claim of this name instead of failing.
    #[must_use]
    pub fn adopt_existing(mut self) -> Self {
        self.adopt_existing = true;
        self
    }

    /// The timeout for readiness, if not that of the client's options.
    #[must_use]
    pub fn ready_timeout(mut self, limit: Duration) -> Self {
        self.ready_timeout = Some(limit);
        self
    }

    /// Keep the claim if its sandbox does not become ready, for inspection, instead of deleting it.
    #[must_use]
    pub fn keep_on_failure(mut self) -> Self {
        self.keep_on_failure = true;
        self
    }

    /// A label of the claim.
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// An annotation of the claim.
    #[must_use]
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.insert(key.into(), value.into());
        self
    }

    /// A label of the pod.
    #[must_use]
    pub fn pod_label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.pod_labels.insert(key.into(), value.into());
        self
    }

    /// An annotation of the pod.
    #[must_use]
    pub fn pod_annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.pod_annotations.insert(key.into(), value.into());
        self
    }

    /// An environment variable of the first container. The template must allow it.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push(EnvVar {
            name: name.into(),
            value: value.into(),
            container_name: None,
        });
        self
    }

    /// An environment variable of the named container. The template must allow it.
    #[must_use]
    pub fn container_env(
        mut self,
        container: impl Into<String>,
        name: impl Into<String>,
        value: impl Into<String>,
    ) -> Self {
        self.env.push(EnvVar {
            name: name.into(),
            value: value.into(),
            container_name: Some(container.into()),
        });
        self
    }

    /// A persistent volume for this sandbox, as in `volumeClaimTemplates`. The template must allow it, and mount it by its name.
    #[must_use]
    pub fn volume_claim_template(mut self, template: PersistentVolumeClaimTemplate) -> Self {
        self.volume_claim_templates.push(template);
        self
    }

    /// When the claim expires. It is deleted then, unless [`CreateOptions::shutdown_policy`] sets another policy.
    #[must_use]
    pub fn shutdown_at(mut self, time: Timestamp) -> Self {
        self.shutdown = Some(Shutdown::At(time));
        self
    }

    /// How long after its creation the claim expires.
    #[must_use]
    pub fn shutdown_after(mut self, lifetime: Duration) -> Self {
        self.shutdown = Some(Shutdown::After(lifetime));
        self
    }

    /// What is done with the claim when it expires.
    #[must_use]
    pub fn shutdown_policy(mut self, policy: ClaimShutdownPolicy) -> Self {
        self.shutdown_policy = Some(policy);
        self
    }

    /// How long after its sandbox has finished the claim expires.
    #[must_use]
    pub fn ttl_after_finished(mut self, time: Duration) -> Self {
        self.ttl_after_finished = Some(time);
        self
    }

    pub(crate) fn validate(&self) -> Result<(), ErrorKind> {
        match &self.source {
            Source::Template { name, warm_pool } => {
                check_name("template", name)?;
                if let WarmPool::Named(pool) = warm_pool {
                    check_name("warm_pool", pool)?;
                }
            }
            Source::Pool { name } => check_name("pool", name)?,
        }
        if let Some(name) = &self.name {
            check_name("name", name)?;
        }
        if let Some(namespace) = &self.namespace {
            check_namespace("namespace", namespace)?;
        }
        Ok(())
    }

    /// The claim to create. `trace` is the carrier of the current trace, `now` the time of the request.
    pub(crate) fn claim(
        &self,
        key: &Key,
        trace: &BTreeMap<String, String>,
        now: Timestamp,
    ) -> Result<SandboxClaim, ErrorKind> {
        let mut labels = self.labels.clone();
        labels
            .entry(labels::CREATED_BY.into())
            .or_insert_with(|| CREATED_BY.into());
        let mut annotations = self.annotations.clone();
        annotations.insert(labels::CLIENT_FIRST_REQUESTED_AT.into(), now.to_string());
        if !trace.is_empty() {
            let carrier = serde_json::to_string(trace).unwrap_or_default();
            annotations.insert(labels::TRACE_CONTEXT.into(), carrier);
        }
        Ok(SandboxClaim {
            metadata: ObjectMeta {
                name: Some(key.claim.clone()),
                namespace: Some(key.namespace.clone()),
                labels: Some(labels),
                annotations: Some(annotations),
                ..ObjectMeta::default()
            },
            spec: self.spec(now)?,
            status: None,
        })
    }

    fn spec(&self, now: Timestamp) -> Result<SandboxClaimSpec, ErrorKind> {
        let mut spec = SandboxClaimSpec {
            additional_pod_metadata: self.pod_metadata(),
            env: (!self.env.is_empty()).then(|| self.env.clone()),
            volume_claim_templates: (!self.volume_claim_templates.is_empty())
                .then(|| self.volume_claim_templates.clone()),
            lifecycle: self.lifecycle(now)?,
            ..SandboxClaimSpec::default()
        };
        match &self.source {
            Source::Template { name, warm_pool } => {
                spec.sandbox_template_ref = Some(SandboxTemplateRef { name: name.clone() });
                spec.warmpool = match warm_pool {
                    WarmPool::Any => None,
                    WarmPool::None => Some("none".into()),
                    WarmPool::Named(pool) => Some(pool.clone()),
                };
            }
            Source::Pool { name } => {
                spec.warm_pool_ref = Some(WarmPoolRef { name: name.clone() });
            }
        }
        Ok(spec)
    }

    fn pod_metadata(&self) -> Option<PodMetadata> {
        let section = |pairs: &BTreeMap<String, String>| (!pairs.is_empty()).then(|| pairs.clone());
        let metadata = PodMetadata {
            labels: section(&self.pod_labels),
            annotations: section(&self.pod_annotations),
        };
        (!metadata.is_empty()).then_some(metadata)
    }

    fn lifecycle(&self, now: Timestamp) -> Result<Option<Lifecycle>, ErrorKind> {
        let beyond = |option| ErrorKind::InvalidOption {
            option,
            reason: "is too far in the future".into(),
        };
        let shutdown_time = match self.shutdown {
            None => None,
            Some(Shutdown::At(time)) => Some(time),
            Some(Shutdown::After(lifetime)) => {
                let lifetime =
                    SignedDuration::try_from(lifetime).map_err(|_| beyond("shutdown_after"))?;
                Some(
                    now.checked_add(lifetime)
                        .map_err(|_| beyond("shutdown_after"))?,
                )
            }
        };
        let ttl = self
            .ttl_after_finished
            .map(|time| i32::try_from(time.as_secs()));
        let lifecycle = Lifecycle {
            shutdown_time: shutdown_time.map(Time),
            ttl_seconds_after_finished: ttl
                .transpose()
                .map_err(|_| beyond("ttl_after_finished"))?,
            // The default is to delete: an expired sandbox is usually not needed any more. Retaining the claim must be requested.
            shutdown_policy: self
                .shutdown_policy
                .or_else(|| shutdown_time.map(|_| ClaimShutdownPolicy::Delete)),
        };
        Ok((lifecycle != Lifecycle::default()).then_some(lifecycle))
    }
}

/// A name for a claim: `sandbox-claim-` and eight random characters.
pub(crate) fn random_name() -> String {
    let random = uuid::Uuid::new_v4().simple().to_string();
    format!("{NAME_PREFIX}{}", &random[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        Key {
            namespace: "team".into(),
            claim: "c".into(),
        }
    }

    fn json(options: &CreateOptions) -> serde_json::Value {
        let now = "2026-11-15T12:00:00Z".parse().unwrap();
        let claim = options.claim(&key(), &BTreeMap::new(), now).unwrap();
        serde_json::to_value(claim).unwrap()
    }

    #[test]
    fn a_claim_by_pool_names_no_template() {
        let claim = json(&CreateOptions::from_pool("fast").warm_pool(WarmPool::None));
        assert_eq!(
            claim["spec"],
            serde_json::json!({"warmPoolRef": {"name": "fast"}})
        );
        assert_eq!(
            claim["metadata"]["labels"]["agents.x-k8s.io/created-by"],
            "agent-sandbox-rust-sdk"
        );
        assert_eq!(
            claim["metadata"]["annotations"],
            serde_json::json!({"agents.x-k8s.io/client-first-requested-at": "2026-11-15T12:00:00Z"})
        );
    }

    #[test]
    fn a_claim_by_template_contains_every_option() {
        let options = CreateOptions::from_template("python")
            .warm_pool(WarmPool::Named("p".into()))
            .label("team", "search")
            .pod_label("app", "x")
            .pod_annotation("example.com/note", "y")
            .env("A", "1")
            .container_env("sidecar", "B", "2")
            .volume_claim_template(
                serde_json::from_value(serde_json::json!({
                    "metadata": {"name": "work"},
                    "spec": {"resources": {"requests": {"storage": "1Gi"}}},
                }))
                .unwrap(),
            )
            .shutdown_after(Duration::from_secs(60))
            .ttl_after_finished(Duration::from_secs(5));
        let claim = json(&options);
        assert_eq!(
            claim["spec"],
            serde_json::json!({
                "sandboxTemplateRef": {"name": "python"},
                "warmpool": "p",
                "additionalPodMetadata": {"labels": {"app": "x"}, "annotations": {"example.com/note": "y"}},
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2", "containerName": "sidecar"}],
                "volumeClaimTemplates": [{"metadata": {"name": "work"}, "spec": {"resources": {"requests": {"storage": "1Gi"}}}}],
                "lifecycle": {"shutdownTime": "2026-11-15T12:01:00Z", "ttlSecondsAfterFinished": 5, "shutdownPolicy": "Delete"},
            })
        );
        assert_eq!(claim["metadata"]["labels"]["team"], "search");
    }

    #[test]
    fn the_trace_goes_into_the_annotation() {
        let trace = BTreeMap::from([("traceparent".to_owned(), "00-a-b-01".to_owned())]);
        let claim = CreateOptions::from_template("t")
            .claim(&key(), &trace, Timestamp::UNIX_EPOCH)
            .unwrap();
        assert_eq!(
            claim.metadata.annotations.unwrap()["opentelemetry.io/trace-context"],
            r#"{"traceparent":"00-a-b-01"}"#
        );
    }

    #[test]
    fn names_are_checked_before_they_are_sent() {
        assert!(CreateOptions::from_template("Bad Name").validate().is_err());
        assert!(
            CreateOptions::from_pool("p")
                .name("a/b")
                .validate()
                .is_err()
        );
        assert!(
            CreateOptions::from_pool("p")
                .namespace("a.b")
                .validate()
                .is_err()
        );
        assert!(CreateOptions::from_pool("p").validate().is_ok());
        let forever = CreateOptions::from_pool("p").shutdown_after(Duration::MAX);
        assert!(
            forever
                .claim(&key(), &BTreeMap::new(), Timestamp::UNIX_EPOCH)
                .is_err()
        );
    }

    #[test]
    fn random_names_are_valid_and_differ() {
        let (one, other) = (random_name(), random_name());
        assert_ne!(one, other);
        assert_eq!(one.len(), NAME_PREFIX.len() + 8);
        assert!(one.parse::<api::names::ObjectName>().is_ok());
    }
}
