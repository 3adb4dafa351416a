//! The rules of each kind, one file per kind: defaults, validation, and the fields that a write to one part must not change.
//!
//! A file implements [`Kind`], with the methods in which its kind differs from others. The functions here apply these rules to a
//! write. All of them work on JSON values. Rules that need other objects take a [`Context`] and only read from it.

mod config_map;
mod custom_resource;
pub mod custom_resource_definition;
mod endpoint_slice;
mod endpoints;
mod event;
mod fields;
mod kind;
mod label_selector;
mod lease;
pub mod managed_fields;
mod namespace;
mod network_policy;
mod node;
mod persistent_volume;
pub mod persistent_volume_claim;
pub mod pod;
mod quantities;
mod role;
mod role_binding;
mod runtime_class;
mod secret;
mod service;
mod storage_class;

use apimachinery::{field::FieldError, quantity::Quantity, status::Status, strict, types};
use serde_json::{Map, Value};
use store::Store;

use self::fields::fields;
pub use self::kind::Kind;
use crate::{
    clock::Clock,
    metadata,
    registry::{Resource, Rules},
    target::{FieldValidation, Part},
};

/// What the rules of a kind may read besides the object.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The other objects.
    pub store: &'a Store,
    /// The current time.
    pub clock: &'a Clock,
}

/// The rules of a resource.
pub fn of(resource: &Resource) -> &'static dyn Kind {
    kind::of(resource.rules)
}

/// Converts an object of the requested version to its storage form.
pub fn to_storage(resource: &Resource, object: &mut Value) {
    let kind = of(resource);
    if kind.needs_conversion(resource) {
        kind.convert_to_storage(object);
    }
    object["apiVersion"] = Value::from(&*resource.storage_api_version);
}

/// Converts a stored object to the requested version.
pub fn from_storage(resource: &Resource, object: &mut Value) {
    let kind = of(resource);
    if kind.needs_conversion(resource) {
        kind.convert_from_storage(object);
    }
    object["apiVersion"] = Value::from(&*resource.api_version);
}

/// Rejects an object that kube-apiserver cannot decode into its Go types. An error that the stored object has too is allowed
/// (validation ratcheting): removing its finalizers and updating its status must stay possible.
pub fn check_types(
    resource: &Resource,
    object: &mut Value,
    old: Option<&Value>,
) -> Result<(), types::DecodeError> {
    let kind = of(resource);
    let decoded = kind.decode(resource, object);
    match old {
        Some(old) if decoded.is_err() && kind.decode(resource, &mut old.clone()) == decoded => {
            Ok(())
        }
        _ => decoded,
    }
}

/// The 400 response to an object that cannot be decoded.
pub fn undecodable(kind: &str, version: &str, error: &types::DecodeError) -> Status {
    Status::bad_request(format!(
        "{kind} in version \"{version}\" cannot be handled as a {kind}: {error}"
    ))
}

/// Reports unknown and duplicate fields: as warnings, as an error, or not at all. Unknown fields of a custom resource are removed
/// from the object.
pub fn check_fields(
    resource: &Resource,
    object: &mut Value,
    duplicates: &[String],
    validation: FieldValidation,
) -> Result<Vec<String>, Status> {
    if validation == FieldValidation::Ignore {
        return Ok(Vec::new());
    }
    let unknown = of(resource).unknown_fields(resource, object);
    match (validation, strict::message(duplicates, &unknown)) {
        (FieldValidation::Strict, Some(message)) => Err(Status::bad_request(message)),
        _ => Ok(strict::problems(duplicates, &unknown)),
    }
}

/// Removes unknown fields and sets defaults.
pub fn prune_and_default(resource: &Resource, object: &mut Value) {
    let kind = of(resource);
    kind.prune(resource, object);
    kind.default(resource, object);
}

/// Initializes a new object before admission and validation.
pub fn prepare_create(context: &Context<'_>, resource: &Resource, object: &mut Value) {
    if resource.has_status {
        fields(object).remove("status");
    }
    let kind = of(resource);
    kind.prepare_create(context, object);
    prune_and_default(resource, object);
    kind.complete_create(object);
}

/// Copies the fields that a write to `part` may not change from the stored object.
pub fn prepare_update(
    context: &Context<'_>,
    resource: &Resource,
    object: &mut Value,
    old: &Value,
    part: Part,
) {
    match part {
        Part::Main if resource.has_status => copy_field(object, old, "status"),
        Part::Status => restrict_to_status(resource, object, old),
        Part::Main | Part::EphemeralContainers | Part::Finalize => {}
    }
    of(resource).prepare_update(context, object, old, part);
    prune_and_default(resource, object);
}

fn restrict_to_status(resource: &Resource, object: &mut Value, old: &Value) {
    if differs_only_in_status(object, old) {
        return;
    }
    let status = object.get("status").cloned();
    let labels_and_annotations =
        ["labels", "annotations"].map(|field| object["metadata"].get(field).cloned());
    // The UID cannot change either, but must not be ignored: a client that sets it means exactly that object, not another of the
    // same name.
    let kept =
        ["managedFields", "uid"].map(|field| (field, object["metadata"].get(field).cloned()));
    let mut restricted = old.clone();
    match status {
        Some(status) => fields(&mut restricted).insert("status".into(), status),
        None => fields(&mut restricted).remove("status"),
    };
    if resource.rules != Rules::Custom {
        for (field, value) in ["labels", "annotations"]
            .into_iter()
            .zip(labels_and_annotations)
        {
            if let Some(value) = value {
                restricted["metadata"][field] = value;
            }
        }
    }
    for (field, value) in kept {
        if let Some(value) = value {
            restricted["metadata"][field] = value;
        }
    }
    *object = restricted;
}

/// Whether only the status differs, as in most writes to the status.
fn differs_only_in_status(object: &Value, old: &Value) -> bool {
    let (Some(object), Some(old)) = (object.as_object(), old.as_object()) else {
        return false;
    };
    let rest = |fields: &'_ Map<String, Value>| {
        let status = usize::from(fields.contains_key("status"));
        fields.len() - status
    };
    rest(object) == rest(old)
        && old
            .iter()
            .all(|(name, value)| name == "status" || object.get(name) == Some(value))
}

fn copy_field(object: &mut Value, old: &Value, field: &str) {
    match old.get(field) {
        Some(value) => fields(object).insert(field.to_owned(), value.clone()),
        None => fields(object).remove(field),
    };
}

/// Validates an object with its metadata and, on an update, the change from `old`.
pub fn validate(
    resource: &Resource,
    object: &Value,
    old: Option<&Value>,
    part: Part,
) -> Vec<FieldError> {
    let kind = of(resource);
    let mut errors = metadata::validate(object, old, |name| kind.name_problems(name));
    errors.extend(kind.validate(resource, object, old, part));
    errors
}

/// Increments the generation if the desired state changed.
pub fn increment_generation_on_change(resource: &Resource, object: &mut Value, old: &Value) {
    if resource.has_generation
        && metadata::differs_in_content(object, old, resource)
        && !of(resource).keeps_generation(object, old)
    {
        metadata::increment_generation(object);
    }
}

/// Rejects invalid quantities. Kubernetes parses them while it decodes a body, so the error is 400 Bad Request.
pub fn check_quantities(resource: &Resource, object: &Value) -> Result<(), Status> {
    for (field, quantity) in of(resource).quantities(object) {
        let text = quantities::text_of(quantity);
        if let Err(error) = text.parse::<Quantity>() {
            return Err(Status::bad_request(format!(
                "{kind} in version \"{version}\" cannot be handled as a {kind}: {field}: {error}",
                kind = resource.kind,
                version = resource.version,
            )));
        }
    }
    Ok(())
}
