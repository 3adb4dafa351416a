//! Which types an object's fields have, who manages them, and which fields no type has.

use apimachinery::{
    apply::{self, Writer},
    types::TypeRef,
};
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    operations::{Part, WriteOptions},
    registry::{Resource, Rules},
};

/// The types of a resource's fields; none for a definition without a schema.
pub fn types_of(resource: &Resource) -> Option<TypeRef<'_>> {
    match resource.rules {
        Rules::Custom => {
            let custom = resource.custom.as_ref();
            custom
                .and_then(|custom| custom.schema.as_ref())
                .map(TypeRef::custom)
        }
        _ => TypeRef::builtin(&resource.api_version, &resource.kind),
    }
}

/// The fields that a write to `part` leaves alone, whatever the request says.
fn ignored(resource: &Resource, part: Part) -> &'static [&'static [&'static str]] {
    match part {
        Part::Main if resource.has_status => &[&["status"]],
        Part::EphemeralContainers => &[&["status"]],
        Part::Status if resource.rules == Rules::Custom => &[&["spec"], &["metadata"]],
        Part::Status => &[&["spec"]],
        Part::Main | Part::Finalize => &[],
    }
}

fn writer<'a>(
    resource: &'a Resource,
    types: TypeRef<'a>,
    options: &'a WriteOptions,
    part: Part,
    now: Timestamp,
) -> Writer<'a> {
    Writer {
        manager: &options.field_manager,
        api_version: &resource.api_version,
        subresource: part.subresource(),
        types,
        ignored: ignored(resource, part),
        now,
    }
}

/// Records who changed what.
pub fn track(
    resource: &Resource,
    object: &mut Value,
    old: Option<&Value>,
    options: &WriteOptions,
    part: Part,
    now: Timestamp,
) {
    if let Some(types) = types_of(resource) {
        apply::track_update(old, object, &writer(resource, types, options, part, now));
    }
}

/// The result of applying a configuration.
pub fn apply(
    resource: &Resource,
    live: Option<&Value>,
    configuration: &Value,
    options: &WriteOptions,
    part: Part,
    force: bool,
    now: Timestamp,
) -> Result<Value, apimachinery::status::Status> {
    let types = types_of(resource).ok_or_else(|| {
        apimachinery::status::Status::unsupported_media_type(&[
            "application/json-patch+json",
            "application/merge-patch+json",
        ])
    })?;
    apply::apply(
        live,
        configuration,
        &writer(resource, types, options, part, now),
        force,
    )
}

/// Removes what a closed type does not have, as decoding into a struct does.
pub fn prune(value: &mut Value, types: TypeRef<'_>) {
    match value {
        Value::Object(members) => {
            if types.is_closed() {
                members.retain(|name, _| types.is_named_field(name));
            }
            for (name, member) in members {
                prune(member, types.member(name));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| prune(item, types.item())),
        _ => {}
    }
}

/// An object without the times of its managed fields, which alone make no difference.
pub fn without_times(object: &Value) -> Value {
    let mut object = object.clone();
    let entries = object
        .pointer_mut("/metadata/managedFields")
        .and_then(Value::as_array_mut);
    for entry in entries.into_iter().flatten() {
        if let Some(fields) = entry.as_object_mut() {
            fields.remove("time");
        }
    }
    object
}
