//! The labels and annotations of a claimed sandbox's pod: from the template, from the claim, and those that name the owner.

use std::collections::BTreeMap;

use api::conditions::Reason;
use api::metadata;
use api::sandbox::PodMetadata;
use api::{Sandbox, SandboxClaim, labels};
use serde_json::{Map, Value, json};

use super::{ClaimFacts, Effect, Holding, Obstacle};
use crate::blueprint::Blueprint;
use crate::patch;
use crate::version::Version;

type Pairs = BTreeMap<String, String>;

/// Brings the pod metadata of a sandbox in line with template and claim.
pub(super) fn sync(
    claim: &SandboxClaim,
    sandbox: &Sandbox,
    blueprint: Option<&Blueprint<'_>>,
) -> Result<Vec<Effect>, Obstacle> {
    let desired = match blueprint {
        Some(_) => claimed(claim, sandbox, blueprint)?,
        None => with_additions(claim, sandbox),
    };
    let patch =
        patch_of_pod(sandbox, &desired).filter(|_| sandbox.metadata.deletion_timestamp.is_none());
    Ok(patch
        .map(|spec| Effect::SyncMetadata {
            sandbox: Version::of(sandbox),
            patch: json!({ "spec": spec }),
        })
        .into_iter()
        .collect())
}

/// The metadata of a claimed sandbox's pod with what the claim adds to it. Without the template it is unknown which keys came from it
/// and which from the claim, so all existing keys stay.
fn with_additions(claim: &SandboxClaim, sandbox: &Sandbox) -> PodMetadata {
    let mut metadata = sandbox.spec.pod_template.metadata.clone();
    let Some(additional) = &claim.spec.additional_pod_metadata else {
        return metadata;
    };
    for (present, added) in [
        (&mut metadata.labels, &additional.labels),
        (&mut metadata.annotations, &additional.annotations),
    ] {
        for (key, value) in added.iter().flatten() {
            let present = present.get_or_insert_default();
            present.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
    metadata
}

/// The labels and annotations of a claim that its sandbox's pod has with other values, and that cannot be changed because the template is
/// gone that may have set them.
pub(super) fn unchangeable(observed: &ClaimFacts<'_>) -> Vec<String> {
    let (Holding::Owned(sandbox), None) = (observed.holding, observed.template.found()) else {
        return Vec::new();
    };
    let Some(additional) = &observed.claim.spec.additional_pod_metadata else {
        return Vec::new();
    };
    let present = &sandbox.spec.pod_template.metadata;
    [
        (&present.labels, &additional.labels),
        (&present.annotations, &additional.annotations),
    ]
    .into_iter()
    .flat_map(|(present, wanted)| {
        let none = Pairs::new();
        let present = present.clone().unwrap_or(none);
        let wanted = wanted.iter().flatten();
        let differing =
            wanted.filter(move |(key, value)| present.get(*key).is_some_and(|it| it != *value));
        differing.map(|(key, _)| key.clone())
    })
    .collect()
}

/// The metadata that the pod of a claimed sandbox should have: the template's, the owner's labels, and the claim's.
pub(super) fn claimed(
    claim: &SandboxClaim,
    sandbox: &Sandbox,
    blueprint: Option<&Blueprint<'_>>,
) -> Result<PodMetadata, Obstacle> {
    let base = if let Some(blueprint) = blueprint {
        blueprint.pod_metadata(claim_identity(claim))
    } else {
        let mut metadata = sandbox.spec.pod_template.metadata.clone();
        let labels = metadata.labels.get_or_insert_default();
        labels.remove(labels::WARM_POOL_SANDBOX);
        labels.remove(labels::SANDBOX_POD_TEMPLATE_HASH);
        labels.extend(claim_identity(claim));
        metadata
    };
    let none = PodMetadata::default();
    let additional = claim.spec.additional_pod_metadata.as_ref().unwrap_or(&none);
    metadata::merge(&base, additional)
        .map_err(|error| Obstacle::new(Reason::InvalidMetadata, error))
}

/// The patch of a sandbox's spec that gives its pod this metadata, if it has another.
pub(super) fn patch_of_pod(sandbox: &Sandbox, desired: &PodMetadata) -> Option<Value> {
    let current = &sandbox.spec.pod_template.metadata;
    let none = Pairs::new();
    let metadata = metadata_patch(
        (&current.labels, desired.labels.as_ref().unwrap_or(&none)),
        (
            &current.annotations,
            desired.annotations.as_ref().unwrap_or(&none),
        ),
    );
    (!metadata.is_empty()).then(|| json!({ "podTemplate": { "metadata": metadata } }))
}

/// The patch that gives an object exactly these labels and annotations; empty if it has them.
pub(super) fn metadata_patch(
    (current_labels, labels): (&patch::StringMap, &Pairs),
    (current_annotations, annotations): (&patch::StringMap, &Pairs),
) -> Map<String, Value> {
    let changes = [
        ("labels", patch::exact_string_map(current_labels, labels)),
        (
            "annotations",
            patch::exact_string_map(current_annotations, annotations),
        ),
    ];
    changes
        .into_iter()
        .filter_map(|(field, change)| Some((field.to_owned(), change?)))
        .collect()
}

/// The labels of a sandbox and its pod that name the owner.
pub(super) fn claim_identity(claim: &SandboxClaim) -> Pairs {
    Pairs::from([(
        labels::CLAIM_UID.to_owned(),
        claim.metadata.uid.clone().unwrap_or_default(),
    )])
}
