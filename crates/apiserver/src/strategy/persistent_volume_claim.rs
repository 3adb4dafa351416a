//! The rules of persistent volume claims: the default class, the protection of claims in use, and which fields may change.

use apimachinery::{field::FieldError, quantity::Quantity};
use serde_json::{Value, json};

use super::{
    Context, Kind,
    fields::{default_text, fields, items, one_of},
    quantities, storage_class,
};
use crate::{registry::Resource, target::Part};

/// The finalizer that protects a volume claim while pods use it.
pub const CLAIM_PROTECTION: &str = "kubernetes.io/pvc-protection";

/// The access modes of volumes and claims.
pub const ACCESS_MODES: &[&str] = &[
    "ReadOnlyMany",
    "ReadWriteMany",
    "ReadWriteOnce",
    "ReadWriteOncePod",
];

/// The annotation with which a claim named its class before the field existed.
const CLASS_ANNOTATION: &str = "volume.beta.kubernetes.io/storage-class";

/// Persistent volume claims.
pub struct PersistentVolumeClaim;

impl Kind for PersistentVolumeClaim {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
    }

    fn prepare_create(&self, context: &Context<'_>, object: &mut Value) {
        object["status"] = json!({"phase": "Pending"});
        protect(object);
        default_class(context, object);
    }

    fn validate(
        &self,
        _resource: &Resource,
        object: &Value,
        old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        validate(object, old)
    }

    fn quantities<'a>(&self, object: &'a Value) -> Vec<(String, &'a Value)> {
        quantities::of_resources(&object["spec"]["resources"], "spec.resources")
    }
}

fn default(claim: &mut Value) {
    if claim["spec"].is_object() {
        default_text(&mut claim["spec"], "volumeMode", "Filesystem");
    }
    if claim["status"].is_object() {
        default_text(&mut claim["status"], "phase", "Pending");
    }
}

/// Adds the finalizer that protects a claim in use.
fn protect(claim: &mut Value) {
    let metadata = fields(&mut claim["metadata"]);
    let finalizers = metadata.entry("finalizers").or_insert_with(|| json!([]));
    if let Value::Array(finalizers) = finalizers
        && !finalizers.iter().any(|found| found == CLAIM_PROTECTION)
    {
        finalizers.push(Value::from(CLAIM_PROTECTION));
    }
}

/// Sets the default class of a new claim without a class, as the admission plugin DefaultStorageClass does. An empty class means
/// a volume that an administrator created, and stays.
fn default_class(context: &Context<'_>, claim: &mut Value) {
    let has_class = !claim["spec"]["storageClassName"].is_null();
    if has_class || claim["metadata"]["annotations"][CLASS_ANNOTATION].is_string() {
        return;
    }
    if let Some(name) = storage_class::default_class(context) {
        claim["spec"]["storageClassName"] = Value::from(name);
    }
}

fn validate(claim: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &claim["spec"];
    if items(spec, "accessModes").is_empty() {
        errors.push(FieldError::required(
            "spec.accessModes",
            "at least 1 access mode is required",
        ));
    }
    for mode in items(spec, "accessModes") {
        one_of(mode, "spec.accessModes", ACCESS_MODES, &mut errors);
    }
    match spec.pointer("/resources/requests/storage") {
        None => errors.push(FieldError::required("spec.resources[storage]", "")),
        Some(storage) => validate_capacity(storage, "spec.resources[storage]", &mut errors),
    }
    let Some(old) = old else { return errors };
    let mut allowed = spec.clone();
    for field in ["resources", "volumeAttributesClassName"] {
        match old["spec"].get(field) {
            Some(value) => allowed[field] = value.clone(),
            None => drop(fields(&mut allowed).remove(field)),
        }
    }
    // The binder sets these fields once.
    for field in ["volumeName", "storageClassName"] {
        if old["spec"].get(field).is_none_or(|value| value == "") {
            match old["spec"].get(field) {
                Some(value) => allowed[field] = value.clone(),
                None => drop(fields(&mut allowed).remove(field)),
            }
        }
    }
    if allowed != old["spec"] {
        let detail = "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";
        errors.push(FieldError::forbidden("spec", detail));
    }
    errors
}

/// Rejects a capacity that is not positive.
pub fn validate_capacity(quantity: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let written = quantities::text_of(quantity);
    let parsed = written.parse::<Quantity>();
    if parsed.is_ok_and(|parsed| parsed.sign() <= 0) {
        let detail = "must be greater than zero";
        errors.push(FieldError::invalid(path, written, detail));
    }
}
