//! Field types of a resource, tracking of field managers (`managedFields`), server-side apply, and pruning of unknown fields.

use apimachinery::{
    apply::{self, Writer},
    types::TypeRef,
};
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    registry::{Resource, Rules},
    target::{Part, WriteOptions},
};

/// The types of a resource's fields; `None` for a CustomResourceDefinition without a schema.
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

/// The fields that a write to `part` ignores.
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

/// Records which fields a write changed, in `managedFields`.
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

/// The result of a server-side apply.
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

/// Removes fields that a closed type does not have, like decoding into a Go struct does.
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

/// An object without the times in `managedFields`. A change of these times alone does not count as a change.
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
