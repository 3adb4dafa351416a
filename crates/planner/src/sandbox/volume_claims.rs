//! The volume claims of a sandbox: one per template, created or adopted, never deleted here. Garbage collection deletes them with the Sandbox.

use std::collections::{BTreeMap, BTreeSet};

use api::labels;
use api::sandbox::PersistentVolumeClaimTemplate;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, PodSpec, Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::json;

use super::{Effect, Problem, SandboxFacts, SandboxPlan, Settings, current_pod};
use crate::owner::{Named, Ownership, controller_reference, ownership, with_controller};
use crate::patch;
use crate::version::Version;

/// How long the name of an object may be.
const NAME_MAX: usize = 253;
const KIND: &str = "persistent volume claim";

/// The name of the claim that a template makes for a sandbox.
pub fn claim_name(template: &str, sandbox: &str) -> String {
    format!("{template}-{sandbox}")
}

pub(super) fn plan(observed: &SandboxFacts, settings: &Settings<'_>, plan: &mut SandboxPlan) {
    let mut names = BTreeSet::new();
    for (index, template) in templates(observed).enumerate() {
        let Some(template_name) = template
            .metadata
            .name
            .as_deref()
            .filter(|name| !name.is_empty())
        else {
            plan.problems.push(Problem::UnnamedVolumeClaim { index });
            continue;
        };
        if !names.insert(template_name) {
            let name = template_name.to_owned();
            plan.problems
                .push(Problem::DuplicateVolumeClaim { index, name });
            continue;
        }
        let name = claim_name(template_name, observed.name());
        if name.len() > NAME_MAX {
            let length = name.len();
            plan.problems
                .push(Problem::VolumeClaimNameTooLong { name, length });
            continue;
        }
        let existing = observed
            .volume_claims
            .iter()
            .find(|claim| claim.metadata.name.as_ref() == Some(&name));
        match existing {
            None => plan.effects.push(create(observed, index, name)),
            Some(claim) => keep(observed, settings, claim, name, plan),
        }
    }
}

fn create(observed: &SandboxFacts, index: usize, name: String) -> Effect {
    let template = &observed
        .sandbox
        .spec
        .volume_claim_templates
        .as_deref()
        .unwrap_or_default()[index];
    let mut claim_labels = template.metadata.labels.clone().unwrap_or_default();
    claim_labels.extend(identity(observed));
    Effect::CreateVolumeClaim(Box::new(PersistentVolumeClaim {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: observed.sandbox.metadata.namespace.clone(),
            labels: Some(claim_labels),
            annotations: template.metadata.annotations.clone(),
            owner_references: Some(vec![controller_reference(observed.sandbox.as_ref())]),
            ..ObjectMeta::default()
        },
        spec: Some(template.spec.clone()),
        status: None,
    }))
}

/// Takes an existing claim, or refuses to use it.
fn keep(
    observed: &SandboxFacts,
    settings: &Settings<'_>,
    claim: &PersistentVolumeClaim,
    name: String,
    plan: &mut SandboxPlan,
) {
    let metadata = &claim.metadata;
    if observed.is_leaving(metadata) {
        // An existing pod keeps its volume until it ends; a new pod would wait for a claim that is being deleted.
        let has_pod = current_pod(observed).is_some_and(|pod| observed.owns(&pod.metadata));
        if !has_pod && !observed.sandbox.spec.suspension().is_requested() {
            plan.problems.push(Problem::Leaving { kind: KIND, name });
        }
        return;
    }
    let version = Version::of_metadata(metadata);
    // The watch selects claims by this label; without it every pass would try to create the claim again.
    let label = patch::string_map(&metadata.labels, &identity(observed), []);
    match ownership(metadata, observed.uid()) {
        Ownership::Others(owner) => plan.problems.push(Problem::OwnedByOther {
            kind: KIND,
            name,
            controller: Named(owner).to_string(),
        }),
        Ownership::Unowned if !settings.adoption.allows(metadata) => {
            plan.problems
                .push(Problem::NotAdoptable { kind: KIND, name });
        }
        Ownership::Unowned => {
            let owners = with_controller(metadata, controller_reference(observed.sandbox.as_ref()));
            let mut patch = json!({ "metadata": { "ownerReferences": owners } });
            if let Some(label) = label {
                patch["metadata"]["labels"] = label;
            }
            plan.effects.push(Effect::AdoptVolumeClaim {
                name,
                version,
                patch,
            });
        }
        Ownership::Ours => {
            if let Some(label) = label {
                plan.effects.push(Effect::LabelVolumeClaim {
                    name,
                    version,
                    patch: json!({ "metadata": { "labels": label } }),
                });
            }
        }
    }
}

fn templates(observed: &SandboxFacts) -> impl Iterator<Item = &PersistentVolumeClaimTemplate> {
    let templates = &observed.sandbox.spec.volume_claim_templates;
    templates.iter().flatten()
}

fn identity(observed: &SandboxFacts) -> BTreeMap<String, String> {
    BTreeMap::from([(labels::SANDBOX_NAME_HASH.to_owned(), observed.name_hash())])
}

/// Lets a pod mount the sandbox's claims by their templates' names. A volume of the pod spec that has a template's name is
/// replaced.
pub(super) fn merge_volumes(observed: &SandboxFacts, spec: &mut PodSpec) {
    for template in templates(observed) {
        let Some(name) = &template.metadata.name else {
            continue;
        };
        let volume = Volume {
            name: name.clone(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: claim_name(name, observed.name()),
                read_only: None,
            }),
            ..Volume::default()
        };
        let volumes = spec.volumes.get_or_insert_default();
        match volumes.iter_mut().find(|existing| existing.name == *name) {
            Some(existing) => *existing = volume,
            None => volumes.push(volume),
        }
    }
}
