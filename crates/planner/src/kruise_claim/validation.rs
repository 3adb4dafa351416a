//! Validation of a claim's fields beyond its schema.

use api::conditions::Reason;
use api::kruise::SandboxClaim;
use api::names::{LabelValue, MetadataKey, NameError};

/// Domains in which labels and annotations mean something to this system.
const OWN_DOMAINS: [&str; 2] = ["agents.x-k8s.io", api::KRUISE_GROUP];

/// Why a claim is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("spec.{field}: {key:?} is not a valid key: {cause}")]
    Key {
        field: &'static str,
        key: String,
        cause: NameError,
    },
    #[error("spec.{field}: {key:?} is in the restricted domain {domain}; use a domain of your own")]
    Domain {
        field: &'static str,
        key: String,
        domain: &'static str,
    },
    #[error("spec.labels: {key:?} has an invalid value: {cause}")]
    LabelValue { key: String, cause: NameError },
    #[error(
        "spec.envVars: {name:?} cannot be in an environment; names have no '=' and are not empty, and there is no NUL anywhere"
    )]
    Variable { name: String },
}

impl Invalid {
    pub(super) fn reason(&self) -> Reason {
        match self {
            Self::Variable { .. } => Reason::InvalidConfiguration,
            _ => Reason::InvalidMetadata,
        }
    }
}

/// Checks the labels, annotations and variables that a claim sets on its sandboxes.
pub fn validate(claim: &SandboxClaim) -> Result<(), Invalid> {
    for (key, value) in claim.spec.labels.iter().flatten() {
        validate_key("labels", key)?;
        value
            .parse::<LabelValue>()
            .map_err(|cause| Invalid::LabelValue {
                key: key.clone(),
                cause,
            })?;
    }
    for (key, _) in claim.spec.annotations.iter().flatten() {
        validate_key("annotations", key)?;
    }
    for (name, value) in claim.spec.env_vars.iter().flatten() {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(Invalid::Variable { name: name.clone() });
        }
    }
    Ok(())
}

fn validate_key(field: &'static str, key: &str) -> Result<(), Invalid> {
    let parsed: MetadataKey = key.parse().map_err(|cause| Invalid::Key {
        field,
        key: key.to_owned(),
        cause,
    })?;
    let owned = parsed.domain().and_then(|domain| {
        OWN_DOMAINS.into_iter().find(|own| {
            domain
                .strip_suffix(own)
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        })
    });
    owned.map_or(Ok(()), |domain| {
        Err(Invalid::Domain {
            field,
            key: key.to_owned(),
            domain,
        })
    })
}
