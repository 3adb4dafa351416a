//! The rules of persistent volumes.

use apimachinery::field::FieldError;
use serde_json::{Value, json};

use super::{
    Context, Kind,
    fields::{default_text, items, one_of},
    persistent_volume_claim::{ACCESS_MODES, validate_capacity},
    quantities,
};
use crate::{registry::Resource, target::Part};

/// Persistent volumes.
pub struct PersistentVolume;

impl Kind for PersistentVolume {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
    }

    fn prepare_create(&self, _context: &Context<'_>, object: &mut Value) {
        object["status"] = json!({"phase": "Pending"});
    }

    fn validate(
        &self,
        _resource: &Resource,
        object: &Value,
        _old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        validate(object)
    }

    fn quantities<'a>(&self, object: &'a Value) -> Vec<(String, &'a Value)> {
        quantities::of_map(&object["spec"]["capacity"], "spec.capacity")
    }
}

fn default(volume: &mut Value) {
    if volume["spec"].is_object() {
        default_text(&mut volume["spec"], "volumeMode", "Filesystem");
        default_text(
            &mut volume["spec"],
            "persistentVolumeReclaimPolicy",
            "Retain",
        );
    }
    if volume["status"].is_object() {
        default_text(&mut volume["status"], "phase", "Pending");
    }
}

fn validate(volume: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &volume["spec"];
    if items(spec, "accessModes").is_empty() {
        errors.push(FieldError::required("spec.accessModes", ""));
    }
    for mode in items(spec, "accessModes") {
        one_of(mode, "spec.accessModes", ACCESS_MODES, &mut errors);
    }
    match spec.pointer("/capacity/storage") {
        None => errors.push(FieldError::required("spec.capacity", "")),
        Some(storage) => validate_capacity(storage, "spec.capacity[storage]", &mut errors),
    }
    one_of(
        &spec["persistentVolumeReclaimPolicy"],
        "spec.persistentVolumeReclaimPolicy",
        &["Delete", "Recycle", "Retain"],
        &mut errors,
    );
    errors
}
