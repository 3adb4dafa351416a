//! Labels and annotations that a pod takes from its sandbox.
//!
//! Two annotations of the pod list the keys that were copied from the template. So a key that is removed from the template is also
//! removed from the pod, and keys of other writers are never touched.

use std::collections::{BTreeMap, BTreeSet};

use api::labels;
use api::metadata::is_router_label;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value};

use super::SandboxFacts;
use crate::patch;

type Pairs = BTreeMap<String, String>;

/// The annotations that list copied keys. They are never copied from a template themselves.
const TRACKING: [&str; 2] = [labels::PROPAGATED_LABELS, labels::PROPAGATED_ANNOTATIONS];

/// What a pod's metadata must hold.
pub(super) struct Wanted {
    pub labels: Pairs,
    pub annotations: Pairs,
}

/// The labels and annotations that a sandbox's pod must have.
pub(super) fn wanted(observed: &SandboxFacts) -> Wanted {
    let template = &observed.sandbox.spec.pod_template.metadata;
    let mut pod_labels = template.labels.clone().unwrap_or_default();
    // With the router's label, the pod would receive requests and tokens that are meant for the router.
    pod_labels.retain(|key, value| !is_router_label(key, value));
    let mut annotations = template.annotations.clone().unwrap_or_default();
    for key in TRACKING.into_iter().chain([labels::FREEZE]) {
        annotations.remove(key);
    }
    let tracked = [
        (labels::PROPAGATED_LABELS, joined(&pod_labels)),
        (labels::PROPAGATED_ANNOTATIONS, joined(&annotations)),
    ];
    for (key, keys) in tracked {
        if !keys.is_empty() {
            annotations.insert(key.to_owned(), keys);
        }
    }
    if let Some(context) = trace_context(observed) {
        annotations
            .entry(labels::TRACE_CONTEXT.to_owned())
            .or_insert(context);
    }
    pod_labels.insert(labels::SANDBOX_NAME_HASH.to_owned(), observed.name_hash());
    Wanted {
        labels: pod_labels,
        annotations,
    }
}

/// Whether the pod's node is asked to freeze the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freeze {
    Asked,
    NotAsked,
}

/// The patch that sets the wanted labels and annotations of a pod, and removes those that the template no longer has.
pub(super) fn drift(
    observed: &SandboxFacts,
    metadata: &ObjectMeta,
    freeze: Freeze,
) -> Option<Map<String, Value>> {
    let mut wanted = wanted(observed);
    if freeze == Freeze::Asked {
        let annotations = &mut wanted.annotations;
        annotations.insert(labels::FREEZE.to_owned(), "true".to_owned());
    }
    let dropped_labels = tracked(metadata, labels::PROPAGATED_LABELS);
    let mut dropped_annotations = tracked(metadata, labels::PROPAGATED_ANNOTATIONS);
    dropped_annotations.extend(TRACKING);
    dropped_annotations.insert(labels::FREEZE);
    let mut patch = Map::new();
    if let Some(change) = patch::string_map(&metadata.labels, &wanted.labels, dropped_labels) {
        patch.insert("labels".to_owned(), change);
    }
    if let Some(change) = patch::string_map(
        &metadata.annotations,
        &wanted.annotations,
        dropped_annotations,
    ) {
        patch.insert("annotations".to_owned(), change);
    }
    (!patch.is_empty()).then_some(patch)
}

fn joined(pairs: &Pairs) -> String {
    pairs
        .keys()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(",")
}

fn tracked<'a>(metadata: &'a ObjectMeta, annotation: &str) -> BTreeSet<&'a str> {
    metadata
        .annotations
        .as_ref()
        .and_then(|annotations| annotations.get(annotation))
        .map(|keys| keys.split(',').filter(|key| !key.is_empty()).collect())
        .unwrap_or_default()
}

fn trace_context(observed: &SandboxFacts) -> Option<String> {
    let annotations = observed.sandbox.metadata.annotations.as_ref()?;
    annotations.get(labels::TRACE_CONTEXT).cloned()
}
