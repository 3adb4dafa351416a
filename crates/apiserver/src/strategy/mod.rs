//! The rules of each kind: what the server fills in, what it refuses, and what a write to one part leaves alone.
//!
//! The functions here are over JSON values; those that look at other objects take the [`Api`] and only read from it.

mod core;
pub mod definition;
mod event;
mod label_selector;
mod network;
pub mod ownership;
mod pod;
mod pod_defaults;
mod service;

use apimachinery::{field::FieldError, quantity::Quantity, status::Status, strict, types};
use serde_json::{Map, Value, json};

use crate::{
    operations::{Api, FieldValidation, Part},
    registry::{Resource, Rules},
};

pub use self::core::CLAIM_PROTECTION;

/// Turns an object of the requested version into the one that is stored.
pub fn to_storage(resource: &Resource, object: &mut Value) {
    if resource.rules == Rules::Event && &*resource.group == "events.k8s.io" {
        event::to_core(object);
    }
    object["apiVersion"] = Value::from(&*resource.storage_api_version);
}

/// Turns a stored object into one of the requested version.
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

/// Refuses what kube-apiserver cannot decode into its Go types. An object that was stored before this was checked stays writable:
/// its finalizers must go, its status must be told.
pub fn check_types(
    resource: &Resource,
    object: &mut Value,
    old: Option<&Value>,
) -> Result<(), types::DecodeError> {
    let is_custom = resource.rules == Rules::Custom;
    let decode = |object: &mut Value| match ownership::types_of(resource) {
        // The schema judges the rest.
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

/// What the client is told about an object that cannot be decoded.
pub fn undecodable(kind: &str, version: &str, error: &types::DecodeError) -> Status {
    Status::bad_request(format!(
        "{kind} in version \"{version}\" cannot be handled as a {kind}: {error}"
    ))
}

/// Names the fields that the kind does not have: as warnings, as a refusal, or not at all. Fields of a custom resource that were
/// named are gone from it.
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
        _ => ownership::types_of(resource).map(|types| types::unknown_fields(object, types)),
    }
    .unwrap_or_default();
    match (validation, strict::message(duplicates, &unknown)) {
        (FieldValidation::Strict, Some(message)) => Err(Status::bad_request(message)),
        _ => Ok(strict::problems(duplicates, &unknown)),
    }
}

/// Prunes and defaults.
pub fn settle(resource: &Resource, object: &mut Value) {
    if resource.rules != Rules::Custom
        && let Some(types) = ownership::types_of(resource)
    {
        ownership::prune(object, types);
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

/// What the server does to a new object before anyone sees it.
pub fn prepare_create(api: &Api, resource: &Resource, object: &mut Value) {
    if resource.has_status {
        fields(object).remove("status");
    }
    match resource.rules {
        Rules::Pod => pod::prepare_create(object),
        Rules::Service => service::prepare_create(api, object),
        Rules::Namespace => core::prepare_namespace(object),
        Rules::PersistentVolumeClaim | Rules::PersistentVolume => {
            object["status"] = json!({"phase": "Pending"});
            if resource.rules == Rules::PersistentVolumeClaim {
                core::protect_claim(object);
            }
        }
        Rules::CustomResourceDefinition => definition::prepare_create(api, object),
        _ => {}
    }
    settle(resource, object);
    if resource.rules == Rules::Pod {
        pod::classify(object);
    }
}

/// What a write to `part` may not touch is taken from the stored object.
pub fn prepare_update(api: &Api, resource: &Resource, object: &mut Value, old: &Value, part: Part) {
    match part {
        Part::Main => {
            if resource.has_status {
                carry(object, old, "status");
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
        Rules::Service => service::prepare_update(api, object, old),
        Rules::CustomResourceDefinition if part == Part::Main => {
            definition::prepare_update(api, object, old);
        }
        _ => {}
    }
    settle(resource, object);
}

fn restrict_to_status(resource: &Resource, object: &mut Value, old: &Value) {
    if differs_in_status_alone(object, old) {
        return;
    }
    let status = object.get("status").cloned();
    let labels_and_annotations =
        ["labels", "annotations"].map(|field| object["metadata"].get(field).cloned());
    // It cannot change either, but is not passed over: who names it means no other object of that name.
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

/// Whether a write to the status leaves everything else alone as it should, which most do.
fn differs_in_status_alone(object: &Value, old: &Value) -> bool {
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

fn carry(object: &mut Value, old: &Value, field: &str) {
    match old.get(field) {
        Some(value) => fields(object).insert(field.to_owned(), value.clone()),
        None => fields(object).remove(field),
    };
}

/// What is wrong with an object, and with the step from `old` to it.
pub fn validate(
    api: &Api,
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
        Rules::CustomResourceDefinition => definition::validate(api, object, old),
        Rules::RoleBinding | Rules::ClusterRoleBinding => core::validate_binding(object, old),
        _ => Vec::new(),
    }
}

/// The group of the kind that a refusal names: events are core events, whichever group they come by.
pub fn group_of_kind(resource: &Resource) -> &str {
    if resource.rules == Rules::Event {
        ""
    } else {
        &resource.group
    }
}

/// Refuses an object whose quantities are none. Kubernetes parses them while it reads a body, so that is a bad request.
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

/// What `limits` and `requests` hold.
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

/// A quantity as it is parsed: numbers may be written without quotes.
fn quantity_text(quantity: &Value) -> String {
    match quantity {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The schema first; its rules only run on what the schema allows.
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

/// The fields of an object; made when it has none.
fn fields(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = json!({});
    }
    object.as_object_mut().expect("made above")
}

/// Sets a field of a map that has none, or null.
fn default_field(object: &mut Value, field: &str, value: impl Into<Value>) {
    let fields = fields(object);
    if fields.get(field).is_none_or(Value::is_null) {
        fields.insert(field.to_owned(), value.into());
    }
}

/// Like [`default_field`], and an empty string counts as nothing.
fn default_text(object: &mut Value, field: &str, value: &str) {
    let fields = fields(object);
    if fields
        .get(field)
        .is_none_or(|present| present.is_null() || present == "")
    {
        fields.insert(field.to_owned(), Value::from(value));
    }
}

/// The elements of a list, if it is one.
fn items_mut<'a>(object: &'a mut Value, field: &str) -> impl Iterator<Item = &'a mut Value> {
    object
        .get_mut(field)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

/// The elements of a list, if it is one.
fn items<'a>(object: &'a Value, field: &str) -> &'a [Value] {
    object
        .get(field)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// A text field, empty when missing.
fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object
        .get(field)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// Refuses a change of a field.
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

/// Refuses a value outside a set.
fn one_of(value: &Value, path: &str, allowed: &[&str], errors: &mut Vec<FieldError>) {
    if let Some(text) = value.as_str()
        && !allowed.contains(&text)
    {
        errors.push(FieldError::not_supported(path, text, allowed));
    }
}
