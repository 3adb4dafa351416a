//! The headless service of a sandbox. `spec.service` has three states: true creates it, false deletes it, and unset leaves
//! an existing one alone, so that sandboxes older than the field keep theirs.

use std::collections::BTreeMap;

use api::labels;
use k8s_openapi::api::core::v1::{Service, ServiceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value, json};

use super::{Effect, Problem, SandboxFacts, SandboxPlan, Settings};
use crate::owner::{Named, Ownership, controller_reference, ownership, with_controller};
use crate::patch;
use crate::version::Version;

const KIND: &str = "service";
const HEADLESS: &str = "None";

pub(super) fn plan(observed: &SandboxFacts, settings: &Settings<'_>, plan: &mut SandboxPlan) {
    let wish = observed.sandbox.spec.service;
    let Some(service) = &observed.service else {
        if wish == Some(true) {
            plan.effects.push(create(observed));
        }
        return;
    };
    if wish == Some(false) {
        delete_owned(observed, plan);
        return;
    }
    let metadata = &service.metadata;
    // A terminating service is neither repaired nor adopted; once it is gone, a new one is created.
    if observed.is_leaving(metadata) {
        return;
    }
    match ownership(metadata, observed.uid()) {
        Ownership::Others(owner) => plan.problems.push(Problem::OwnedByOther {
            kind: KIND,
            name: observed.name().to_owned(),
            controller: Named(owner).to_string(),
        }),
        Ownership::Ours => {
            if let Some(patch) = drift(observed, service) {
                plan.effects.push(Effect::UpdateService {
                    name: observed.name().to_owned(),
                    version: Version::of_metadata(metadata),
                    patch,
                });
            }
        }
        Ownership::Unowned if wish == Some(true) => adopt(observed, settings, service, plan),
        Ownership::Unowned => {}
    }
}

/// Deletes the service if it is the sandbox's.
pub(super) fn delete_owned(observed: &SandboxFacts, plan: &mut SandboxPlan) {
    let Some(service) = &observed.service else {
        return;
    };
    let metadata = &service.metadata;
    if observed.owns(metadata) && metadata.deletion_timestamp.is_none() {
        plan.effects.push(Effect::DeleteService {
            name: observed.name().to_owned(),
            uid: metadata.uid.clone(),
        });
    }
}

/// Whether the sandbox needs its service to be ready.
pub(super) fn is_required(observed: &SandboxFacts, exists: bool) -> bool {
    observed.sandbox.spec.service.unwrap_or(exists)
}

fn create(observed: &SandboxFacts) -> Effect {
    let identity = identity(observed);
    Effect::CreateService(Box::new(Service {
        metadata: ObjectMeta {
            name: observed.sandbox.metadata.name.clone(),
            namespace: observed.sandbox.metadata.namespace.clone(),
            labels: Some(identity.clone()),
            owner_references: Some(vec![controller_reference(observed.sandbox.as_ref())]),
            ..ObjectMeta::default()
        },
        spec: Some(ServiceSpec {
            cluster_ip: Some(HEADLESS.to_owned()),
            selector: Some(identity),
            ..ServiceSpec::default()
        }),
        status: None,
    }))
}

fn adopt(
    observed: &SandboxFacts,
    settings: &Settings<'_>,
    service: &Service,
    plan: &mut SandboxPlan,
) {
    let name = observed.name().to_owned();
    // The cluster IP of a service cannot be removed.
    let cluster_ip = service
        .spec
        .as_ref()
        .and_then(|spec| spec.cluster_ip.as_deref())
        .unwrap_or_default();
    if !cluster_ip.is_empty() && cluster_ip != HEADLESS {
        let cluster_ip = cluster_ip.to_owned();
        plan.problems
            .push(Problem::NotHeadless { name, cluster_ip });
        return;
    }
    if !settings.adoption.allows(&service.metadata) {
        plan.problems
            .push(Problem::NotAdoptable { kind: KIND, name });
        return;
    }
    let mut patch = drift(observed, service).unwrap_or_else(|| json!({ "metadata": {} }));
    let owners = with_controller(
        &service.metadata,
        controller_reference(observed.sandbox.as_ref()),
    );
    patch["metadata"]["ownerReferences"] = json!(owners);
    plan.effects.push(Effect::AdoptService {
        name,
        version: Version::of_metadata(&service.metadata),
        patch,
    });
}

/// The patch that restores the name label and the selector. The selector must be exactly ours, or it selects no pod.
fn drift(observed: &SandboxFacts, service: &Service) -> Option<Value> {
    let identity = identity(observed);
    let selector = service.spec.as_ref().and_then(|spec| spec.selector.clone());
    let mut patch = Map::new();
    if let Some(labels) = patch::string_map(&service.metadata.labels, &identity, []) {
        patch.insert("metadata".to_owned(), json!({ "labels": labels }));
    }
    if let Some(selector) = patch::exact_string_map(&selector, &identity) {
        patch.insert("spec".to_owned(), json!({ "selector": selector }));
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

fn identity(observed: &SandboxFacts) -> BTreeMap<String, String> {
    BTreeMap::from([(labels::SANDBOX_NAME_HASH.to_owned(), observed.name_hash())])
}
