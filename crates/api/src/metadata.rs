//! Validates the labels and annotations that a claim adds to its pod.
//!
//! A claim must not use domains that have a meaning for Kubernetes or for this system, and must not silently change what the
//! template sets.

use std::collections::BTreeMap;

use crate::labels::ROUTER_APP;
use crate::names::{LabelValue, MetadataKey, NameError};
use crate::sandbox::PodMetadata;

/// Domains that only Kubernetes and this system may use, with all their subdomains.
const RESTRICTED_DOMAINS: [&str; 3] = ["kubernetes.io", "k8s.io", "agents.x-k8s.io"];

/// Keys in those domains that a claim may set nevertheless.
const PERMITTED_KEYS: [&str; 1] = ["cluster-autoscaler.kubernetes.io/safe-to-evict"];

/// Labels or annotations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    Labels,
    Annotations,
}

impl std::fmt::Display for Section {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Labels => "labels",
            Self::Annotations => "annotations",
        })
    }
}

/// Why a claim's additional metadata cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    #[error(
        "spec.additionalPodMetadata.{section}: {key:?} is in the restricted domain {domain}; use a domain of your own"
    )]
    RestrictedDomain {
        section: Section,
        key: String,
        domain: &'static str,
    },
    #[error("spec.additionalPodMetadata.{section}: {key:?} is not a valid key: {cause}")]
    InvalidKey {
        section: Section,
        key: String,
        cause: NameError,
    },
    #[error("spec.additionalPodMetadata.labels: {key:?} has an invalid value: {cause}")]
    InvalidLabelValue { key: String, cause: NameError },
    #[error(
        "spec.additionalPodMetadata.labels: {:?} may not be {:?}: that label is the router's; choose another value", ROUTER_APP.0, ROUTER_APP.1
    )]
    RouterLabel,
    #[error(
        "spec.additionalPodMetadata.{section}: {key:?} is {wanted:?} but the template already sets it to {existing:?}; \
         a claim cannot override the template"
    )]
    Conflict {
        section: Section,
        key: String,
        wanted: String,
        existing: String,
    },
}

/// Validates the metadata that a claim adds, independent of the template.
pub fn validate(additional: &PodMetadata) -> Result<(), MetadataError> {
    for (key, value) in additional.labels.iter().flatten() {
        validate_key(Section::Labels, key)?;
        value
            .parse::<LabelValue>()
            .map_err(|cause| MetadataError::InvalidLabelValue {
                key: key.clone(),
                cause,
            })?;
        if is_router_label(key, value) {
            return Err(MetadataError::RouterLabel);
        }
    }
    for key in additional.annotations.iter().flat_map(BTreeMap::keys) {
        validate_key(Section::Annotations, key)?;
    }
    Ok(())
}

/// Whether a label would make a pod an endpoint of the router's service, or a peer that network policies accept as the router.
pub fn is_router_label(key: &str, value: &str) -> bool {
    (key, value) == ROUTER_APP
}

/// Adds a claim's metadata to the template's. A key that both set must have the same value.
pub fn merge(
    template: &PodMetadata,
    additional: &PodMetadata,
) -> Result<PodMetadata, MetadataError> {
    Ok(PodMetadata {
        labels: merge_section(
            Section::Labels,
            template.labels.as_ref(),
            additional.labels.as_ref(),
        )?,
        annotations: merge_section(
            Section::Annotations,
            template.annotations.as_ref(),
            additional.annotations.as_ref(),
        )?,
    })
}

fn validate_key(section: Section, key: &str) -> Result<(), MetadataError> {
    let parsed: MetadataKey = key.parse().map_err(|cause| MetadataError::InvalidKey {
        section,
        key: key.to_owned(),
        cause,
    })?;
    if PERMITTED_KEYS.contains(&key) {
        return Ok(());
    }
    let restricted = parsed.domain().and_then(|domain| {
        RESTRICTED_DOMAINS
            .into_iter()
            .find(|restricted| domain == *restricted || is_subdomain(domain, restricted))
    });
    match restricted {
        Some(domain) => Err(MetadataError::RestrictedDomain {
            section,
            key: key.to_owned(),
            domain,
        }),
        None => Ok(()),
    }
}

fn is_subdomain(domain: &str, parent: &str) -> bool {
    domain
        .strip_suffix(parent)
        .is_some_and(|prefix| prefix.ends_with('.'))
}

type Pairs = BTreeMap<String, String>;

fn merge_section(
    section: Section,
    template: Option<&Pairs>,
    additional: Option<&Pairs>,
) -> Result<Option<Pairs>, MetadataError> {
    let Some(additional) = additional else {
        return Ok(template.cloned());
    };
    let mut merged = template.cloned().unwrap_or_default();
    for (key, wanted) in additional {
        match merged.get(key) {
            Some(existing) if existing != wanted => {
                return Err(MetadataError::Conflict {
                    section,
                    key: key.clone(),
                    wanted: wanted.clone(),
                    existing: existing.clone(),
                });
            }
            Some(_) => {}
            None => {
                merged.insert(key.clone(), wanted.clone());
            }
        }
    }
    Ok(Some(merged))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(entries: &[(&str, &str)]) -> Pairs {
        entries
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn labels(entries: &[(&str, &str)]) -> PodMetadata {
        PodMetadata {
            labels: Some(pairs(entries)),
            annotations: None,
        }
    }

    fn annotations(entries: &[(&str, &str)]) -> PodMetadata {
        PodMetadata {
            labels: None,
            annotations: Some(pairs(entries)),
        }
    }

    #[test]
    fn a_claim_cannot_pass_its_pod_off_as_the_router() {
        let labelled = |value: &str| PodMetadata {
            labels: Some(BTreeMap::from([("app".to_owned(), value.to_owned())])),
            annotations: None,
        };
        assert_eq!(
            validate(&labelled("sandbox-router")),
            Err(MetadataError::RouterLabel)
        );
        assert_eq!(validate(&labelled("sandbox-router-2")), Ok(()));
    }

    #[test]
    fn restricted_domains_and_their_subdomains_are_refused() {
        for key in [
            "kubernetes.io/x",
            "app.kubernetes.io/name",
            "k8s.io/x",
            "agents.x-k8s.io/claim-uid",
            "extensions.agents.x-k8s.io/x",
        ] {
            let error = validate(&labels(&[(key, "v")])).unwrap_err();
            assert!(error.to_string().contains(key), "{error}");
            assert!(
                matches!(error, MetadataError::RestrictedDomain { .. }),
                "{key}"
            );
            assert!(validate(&annotations(&[(key, "v")])).is_err(), "{key}");
        }
    }

    #[test]
    fn domains_that_only_look_alike_are_allowed() {
        for key in [
            "team",
            "example.com/kubernetes.io",
            "notk8s.io/x",
            "mykubernetes.io/x",
        ] {
            assert_eq!(validate(&labels(&[(key, "v")])), Ok(()), "{key}");
        }
        let safe_to_evict = "cluster-autoscaler.kubernetes.io/safe-to-evict";
        assert_eq!(validate(&annotations(&[(safe_to_evict, "false")])), Ok(()));
    }

    #[test]
    fn label_values_are_checked_and_annotation_values_are_free() {
        let error = validate(&labels(&[("team", "not valid")])).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("spec.additionalPodMetadata.labels: \"team\"")
        );
        assert_eq!(
            validate(&annotations(&[("team", "not valid, but fine")])),
            Ok(())
        );
        assert!(validate(&labels(&[("bad key", "v")])).is_err());
    }

    #[test]
    fn a_claim_adds_but_never_overrides() {
        let template = labels(&[("app", "demo")]);
        let merged = merge(&template, &labels(&[("app", "demo"), ("team", "ml")])).unwrap();
        assert_eq!(merged, labels(&[("app", "demo"), ("team", "ml")]));
        assert_eq!(merge(&template, &PodMetadata::default()).unwrap(), template);

        let error = merge(&template, &labels(&[("app", "other")])).unwrap_err();
        assert!(
            error.to_string().contains("already sets it to \"demo\""),
            "{error}"
        );
    }
}
