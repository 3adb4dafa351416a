//! The rules of each kind: defaults, validation, and the fields that a write to one part must not change.
//!
//! The functions work on JSON values. Functions that need other objects take a [`Context`] and only read
//! from it.

mod core;
pub mod definition;
mod event;
mod label_selector;
pub mod managed_fields;
mod network;
mod pod;
mod pod_defaults;
mod service;
mod storage_class;

use apimachinery::{field::FieldError, quantity::Quantity, status::Status, strict, types};
use serde_json::{Map, Value, json};
use store::Store;

use crate::{
    clock::Clock,
    registry::{Resource, Rules},
    target::{FieldValidation, Part},
};

pub use self::core::CLAIM_PROTECTION;

/// What the rules of a kind may read besides the object.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The other objects.
    pub store: &'a Store,
    /// The current time.
    pub clock: &'a Clock,
}

/// Converts an object of the requested version to its storage form.
pub fn to_storage(resource: &Resource, object: &mut Value) {
    if resource.rules == Rules::Event && &*resource.group == "events.k8s.io" {
        event::to_core(object);
    }
    object["apiVersion"] = Value::from(&*resource.storage_api_version);
}

/// Converts a stored object to the requested version.
pub fn from_storage(resource: &Resource, object: &mut Value) {
    if needs_conversion(resource) {
        event::from_core(object);
    }
    object["apiVersion"] = Value::from(&*resource.api_version);
}

/// Whether a stored object differs from the requested version in more than its `apiVersion`.
pub fn needs_conversion(resource: &Resource) -> bool {
    resource.rules == Rules::Event && &*resource.group == "events.k8s.io"
}

/// Rejects an object that kube-apiserver cannot decode into its Go types. An error that the stored object has too is allowed
/// (validation ratcheting): removing its finalizers and updating its status must stay possible.
pub fn check_types(
    resource: &Resource,
    object: &mut Value,
    old: Option<&Value>,
) -> Result<(), types::DecodeError> {
    let is_custom = resource.rules == Rules::Custom;
    let decode = |object: &mut Value| match managed_fields::types_of(resource) {
        // The schema validates the rest.
        _ if is_custom => match object.get_mut("metadata") {
            Some(metadata) => types::decode(metadata, types::TypeRef::object_meta()),
            None => Ok(()),
        },
        Some(types) => types::decode(object, types),
        None => Ok(()),
    };
    let decoded = decode(object);
    match old {
        Some(old) if decoded.is_err() && decode(&mut old.clone()) == decoded => Ok(()),
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
    let unknown = match (resource.rules, &resource.custom) {
        (Rules::Custom, Some(custom)) => {
            let schema = custom.schema.as_ref();
            schema.map(|schema| schema.prune_reporting(object))
        }
        _ => managed_fields::types_of(resource).map(|types| types::unknown_fields(object, types)),
    }
    .unwrap_or_default();
    match (validation, strict::message(duplicates, &unknown)) {
        (FieldValidation::Strict, Some(message)) => Err(Status::bad_request(message)),
        _ => Ok(strict::problems(duplicates, &unknown)),
    }
}

/// Removes unknown fields and sets defaults.
pub fn prune_and_default(resource: &Resource, object: &mut Value) {
    if resource.rules != Rules::Custom
        && let Some(types) = managed_fields::types_of(resource)
    {
        managed_fields::prune(object, types);
    }
    match resource.rules {
        Rules::Custom => {
            if let Some(schema) = resource
                .custom
                .as_ref()
                .and_then(|custom| custom.schema.as_ref())
            {
                schema.prune(object);
                schema.default(object);
            }
        }
        Rules::Pod => pod_defaults::apply(object),
        Rules::Service => service::default(object),
        Rules::Namespace => core::default_namespace(object),
        Rules::Secret => core::default_secret(object),
        Rules::PersistentVolumeClaim => core::default_claim(object),
        Rules::PersistentVolume => core::default_volume(object),
        Rules::StorageClass => core::default_storage_class(object),
        Rules::EndpointSlice => network::default_slice(object),
        Rules::Endpoints => network::default_endpoints(object),
        Rules::NetworkPolicy => network::default_policy(object),
        Rules::CustomResourceDefinition => definition::default(object),
        Rules::RoleBinding | Rules::ClusterRoleBinding => core::default_binding(object),
        _ => {}
    }
}

/// Initializes a new object before admission and validation.
pub fn prepare_create(context: &Context<'_>, resource: &Resource, object: &mut Value) {
    if resource.has_status {
        fields(object).remove("status");
    }
    match resource.rules {
        Rules::Pod => pod::prepare_create(object),
        Rules::Service => service::prepare_create(context, object),
        Rules::Namespace => core::prepare_namespace(object),
        Rules::PersistentVolumeClaim | Rules::PersistentVolume => {
            object["status"] = json!({"phase": "Pending"});
            if resource.rules == Rules::PersistentVolumeClaim {
                core::protect_claim(object);
                storage_class::default_of_claim(context, object);
            }
        }
        Rules::CustomResourceDefinition => definition::prepare_create(context, object),
        _ => {}
    }
    prune_and_default(resource, object);
    if resource.rules == Rules::Pod {
        pod::classify(object);
    }
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
        Part::Main => {
            if resource.has_status {
                copy_field(object, old, "status");
            }
            if resource.rules == Rules::Namespace {
                let finalizers = old
                    .pointer("/spec/finalizers")
                    .cloned()
                    .unwrap_or_else(|| json!([]));
                object["spec"]["finalizers"] = finalizers;
            }
        }
        Part::Status => restrict_to_status(resource, object, old),
        Part::EphemeralContainers => pod::restrict_to_ephemeral_containers(object, old),
        Part::Finalize => {}
    }
    match resource.rules {
        Rules::Service => service::prepare_update(context, object, old),
        Rules::CustomResourceDefinition if part == Part::Main => {
            definition::prepare_update(context, object, old);
        }
        _ => {}
    }
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

/// Validates an object and, on an update, the change from `old`.
pub fn validate(
    context: &Context<'_>,
    resource: &Resource,
    object: &Value,
    old: Option<&Value>,
    part: Part,
) -> Vec<FieldError> {
    match resource.rules {
        Rules::Custom => validate_custom(resource, object, old),
        Rules::Pod => pod::validate(object, old, part),
        Rules::Service => service::validate(object, old),
        Rules::Secret => core::validate_secret(object, old),
        Rules::ConfigMap => core::validate_config_map(object, old),
        Rules::PersistentVolumeClaim => core::validate_claim(object, old),
        Rules::PersistentVolume => core::validate_volume(object),
        Rules::StorageClass => core::validate_storage_class(object, old),
        Rules::RuntimeClass => core::validate_runtime_class(object, old),
        Rules::Lease => core::validate_lease(object),
        Rules::Event => event::validate(object, old),
        Rules::EndpointSlice => network::validate_slice(object, old),
        Rules::NetworkPolicy => network::validate_policy(object, old),
        Rules::CustomResourceDefinition => definition::validate(context, object, old),
        Rules::RoleBinding | Rules::ClusterRoleBinding => core::validate_binding(object, old),
        _ => Vec::new(),
    }
}

/// The group of the kind in an error: events are always core events.
pub fn group_of_kind(resource: &Resource) -> &str {
    if resource.rules == Rules::Event {
        ""
    } else {
        &resource.group
    }
}

/// Rejects invalid quantities. Kubernetes parses them while it decodes a body, so the error is 400 Bad Request.
pub fn check_quantities(resource: &Resource, object: &Value) -> Result<(), Status> {
    let written: Vec<(String, &Value)> = match resource.rules {
        Rules::Pod => pod::quantities(object),
        Rules::PersistentVolumeClaim => {
            quantities_of(&object["spec"]["resources"], "spec.resources")
        }
        Rules::PersistentVolume => quantities_in(&object["spec"]["capacity"], "spec.capacity"),
        _ => return Ok(()),
    };
    for (field, quantity) in written {
        let text = quantity_text(quantity);
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

/// The quantities in `limits` and `requests`.
fn quantities_of<'a>(resources: &'a Value, path: &str) -> Vec<(String, &'a Value)> {
    ["limits", "requests"]
        .into_iter()
        .flat_map(|kind| quantities_in(&resources[kind], &format!("{path}.{kind}")))
        .collect()
}

fn quantities_in<'a>(map: &'a Value, path: &str) -> Vec<(String, &'a Value)> {
    let entries = map.as_object().into_iter().flatten();
    entries
        .map(|(name, quantity)| (format!("{path}[{name}]"), quantity))
        .collect()
}

/// The text of a quantity, which may also be a JSON number.
fn quantity_text(quantity: &Value) -> String {
    match quantity {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Validates a custom resource against its schema. Validation rules (CEL) run only if the schema matches.
fn validate_custom(resource: &Resource, object: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let custom = resource.custom.as_ref();
    let Some(schema) = custom.and_then(|custom| custom.schema.as_ref()) else {
        return Vec::new();
    };
    let errors = match old {
        Some(old) => schema.validate_update(object, old),
        None => schema.validate(object),
    };
    if errors.is_empty() {
        schema.validate_rules(object, old)
    } else {
        errors
    }
}

/// The fields of an object. A value that is not an object is replaced by an empty one.
fn fields(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = json!({});
    }
    object
        .as_object_mut()
        .expect("the object was created above")
}

/// Sets a field that is missing or null.
fn default_field(object: &mut Value, field: &str, value: impl Into<Value>) {
    let fields = fields(object);
    if fields.get(field).is_none_or(Value::is_null) {
        fields.insert(field.to_owned(), value.into());
    }
}

/// Like [`default_field`], but also replaces an empty string.
fn default_text(object: &mut Value, field: &str, value: &str) {
    let fields = fields(object);
    if fields
        .get(field)
        .is_none_or(|present| present.is_null() || present == "")
    {
        fields.insert(field.to_owned(), Value::from(value));
    }
}

/// The elements of a list; empty if the field is not a list.
fn items_mut<'a>(object: &'a mut Value, field: &str) -> impl Iterator<Item = &'a mut Value> {
    object
        .get_mut(field)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

/// The elements of a list; empty if the field is not a list.
fn items<'a>(object: &'a Value, field: &str) -> &'a [Value] {
    object
        .get(field)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// A string field; empty if missing.
fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object
        .get(field)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// Rejects a change of an immutable field.
fn immutable(
    object: &Value,
    old: Option<&Value>,
    pointer: &str,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    let Some(old) = old else { return };
    if object.pointer(pointer) != old.pointer(pointer) {
        errors.push(FieldError::invalid(
            path,
            object.pointer(pointer).cloned().unwrap_or_default(),
            "field is immutable",
        ));
    }
}

/// Rejects a value that is not in a set.
fn one_of(value: &Value, path: &str, allowed: &[&str], errors: &mut Vec<FieldError>) {
    if let Some(text) = value.as_str()
        && !allowed.contains(&text)
    {
        errors.push(FieldError::not_supported(path, text, allowed));
    }
}
