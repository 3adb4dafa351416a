//! Which volume claim templates a claim may bring beside its template's.

use std::collections::BTreeSet;

use api::sandbox::PersistentVolumeClaimTemplate;
use api::template::VolumeClaimTemplatesPolicy;

/// Why a claim's volume claim templates are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VolumeClaimsError {
    #[error(
        "spec.volumeClaimTemplates: not allowed by the template policy \
         (the template's volumeClaimTemplatesPolicy is Disallowed)"
    )]
    Disallowed,
    #[error("spec.volumeClaimTemplates[{index}]: metadata.name must be set")]
    Unnamed { index: usize },
    #[error(
        "spec.volumeClaimTemplates: {name:?} occurs more than once; give each volume claim template a name of its own"
    )]
    Duplicate { name: String },
    #[error(
        "spec.volumeClaimTemplates of the template: {name:?} occurs more than once; give each volume claim template a name of its own"
    )]
    DuplicateInTemplate { name: String },
    #[error(
        "spec.volumeClaimTemplates: {name:?} is already in the template, and the template policy does not allow overrides \
         (the template's volumeClaimTemplatesPolicy is Allowed, not Overrides)"
    )]
    Override { name: String },
}

/// The template's volume claim templates with the claim's, as far as the policy lets it.
pub fn merge(
    policy: VolumeClaimTemplatesPolicy,
    template: Option<&[PersistentVolumeClaimTemplate]>,
    claim: Option<&[PersistentVolumeClaimTemplate]>,
) -> Result<Option<Vec<PersistentVolumeClaimTemplate>>, VolumeClaimsError> {
    if let Some(name) = duplicate(template.unwrap_or_default()) {
        return Err(VolumeClaimsError::DuplicateInTemplate { name });
    }
    let brought = claim.unwrap_or_default();
    if brought.is_empty() {
        return Ok(template.map(<[_]>::to_vec));
    }
    if policy == VolumeClaimTemplatesPolicy::Disallowed {
        return Err(VolumeClaimsError::Disallowed);
    }
    let mut merged = template.unwrap_or_default().to_vec();
    let mut seen = Vec::new();
    for (index, addition) in brought.iter().enumerate() {
        let name = addition
            .metadata
            .name
            .as_deref()
            .filter(|name| !name.is_empty())
            .ok_or(VolumeClaimsError::Unnamed { index })?;
        if seen.contains(&name) {
            return Err(VolumeClaimsError::Duplicate {
                name: name.to_owned(),
            });
        }
        seen.push(name);
        let existing = merged
            .iter_mut()
            .find(|existing| existing.metadata.name.as_deref() == Some(name));
        match existing {
            None => merged.push(addition.clone()),
            Some(existing) if policy == VolumeClaimTemplatesPolicy::Overrides => {
                *existing = addition.clone();
            }
            Some(_) => {
                return Err(VolumeClaimsError::Override {
                    name: name.to_owned(),
                });
            }
        }
    }
    Ok(Some(merged))
}

/// The first name that occurs twice.
fn duplicate(templates: &[PersistentVolumeClaimTemplate]) -> Option<String> {
    let mut seen = BTreeSet::new();
    let mut names = templates
        .iter()
        .filter_map(|template| template.metadata.name.as_deref());
    names.find(|name| !seen.insert(*name)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use VolumeClaimTemplatesPolicy::{Allowed, Disallowed, Overrides};

    use super::*;

    fn volume(name: &str, class: &str) -> PersistentVolumeClaimTemplate {
        let mut volume = PersistentVolumeClaimTemplate::default();
        volume.metadata.name = Some(name.into());
        volume.spec.storage_class_name = Some(class.into());
        volume
    }

    #[test]
    fn each_policy_lets_in_what_it_says() {
        let template = [volume("data", "slow")];
        let new = [volume("cache", "fast")];
        let same = [volume("data", "fast")];
        let both = vec![volume("data", "slow"), volume("cache", "fast")];
        let replaced = vec![volume("data", "fast")];
        let overridden = VolumeClaimsError::Override {
            name: "data".into(),
        };
        let table = [
            (Disallowed, &new, Err(VolumeClaimsError::Disallowed)),
            (Allowed, &new, Ok(Some(both.clone()))),
            (Allowed, &same, Err(overridden)),
            (Overrides, &new, Ok(Some(both))),
            (Overrides, &same, Ok(Some(replaced))),
        ];
        for (policy, claim, expected) in table {
            assert_eq!(
                merge(policy, Some(&template), Some(claim)),
                expected,
                "{policy:?}"
            );
        }
    }

    #[test]
    fn a_claim_that_brings_none_gets_the_templates_under_any_policy() {
        let template = [volume("data", "slow")];
        for claim in [None, Some([].as_slice())] {
            assert_eq!(
                merge(Disallowed, Some(&template), claim),
                Ok(Some(template.to_vec()))
            );
        }
        assert_eq!(merge(Disallowed, None, None), Ok(None));
    }

    #[test]
    fn names_must_be_set_and_differ() {
        let unnamed = [PersistentVolumeClaimTemplate::default()];
        assert_eq!(
            merge(Allowed, None, Some(&unnamed)),
            Err(VolumeClaimsError::Unnamed { index: 0 })
        );
        let twice = [volume("a", "x"), volume("a", "y")];
        assert_eq!(
            merge(Overrides, None, Some(&twice)),
            Err(VolumeClaimsError::Duplicate { name: "a".into() })
        );
        for claim in [None, Some([volume("b", "x")].as_slice())] {
            assert_eq!(
                merge(Overrides, Some(&twice), claim),
                Err(VolumeClaimsError::DuplicateInTemplate { name: "a".into() })
            );
        }
    }
}
