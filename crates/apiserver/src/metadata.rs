//! Object metadata before a write: the fields that the server sets, the fields that a client may not change, and validation.

use apimachinery::{field::FieldError, names, status::Status, time};
use jiff::Timestamp;
use rand::Rng;
use serde_json::{Map, Value, json};

use crate::registry::Resource;

/// Length of the random suffix of a generated name.
const GENERATED_SUFFIX: usize = 5;
const ANNOTATION_BYTES: usize = 256 << 10;

/// The metadata of an object, created if missing.
pub fn of(object: &mut Value) -> &mut Map<String, Value> {
    if !object.get("metadata").is_some_and(Value::is_object) {
        object["metadata"] = json!({});
    }
    object["metadata"]
        .as_object_mut()
        .expect("the metadata was created above")
}

/// A string field of the metadata; empty if missing.
pub fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object
        .get("metadata")
        .and_then(|metadata| metadata.get(field))
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// A timestamp in the format of the metadata.
pub fn timestamp(now: Timestamp) -> Value {
    Value::from(apimachinery::time::format(now))
}

/// Generates a name from a prefix in the way of kube-apiserver.
pub fn generate_name(prefix: &str) -> String {
    // No vowels, so that the suffix cannot form a word.
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    let longest_prefix = names::DNS_1123_LABEL_MAX - GENERATED_SUFFIX;
    let mut end = prefix.len().min(longest_prefix);
    while !prefix.is_char_boundary(end) {
        end -= 1;
    }
    let mut random = rand::rng();
    let suffix: String = (0..GENERATED_SUFFIX)
        .map(|_| char::from(ALPHABET[random.random_range(0..ALPHABET.len())]))
        .collect();
    format!("{}{suffix}", &prefix[..end])
}

/// Fills the metadata of a new object. The name must be set already.
pub fn prepare_create(object: &mut Value, resource: &Resource, now: Timestamp) {
    let metadata = of(object);
    for set_by_server in [
        "resourceVersion",
        "selfLink",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
    ] {
        metadata.remove(set_by_server);
    }
    metadata.insert("uid".into(), Value::from(uuid::Uuid::new_v4().to_string()));
    metadata.insert("creationTimestamp".into(), timestamp(now));
    if resource.has_generation {
        metadata.insert("generation".into(), Value::from(1));
    }
    drop_empty(metadata);
}

/// Copies the metadata that a client may not change from the stored object to the new version.
pub fn prepare_update(object: &mut Value, old: &Value) {
    let empty = Map::new();
    let old_metadata = old
        .get("metadata")
        .and_then(Value::as_object)
        .unwrap_or(&empty);
    let metadata = of(object);
    metadata.remove("selfLink");
    for field in ["uid", "creationTimestamp"] {
        let Some(before) = old_metadata.get(field) else {
            continue;
        };
        let is_unchanged = metadata
            .get(field)
            .is_none_or(|value| value.is_null() || value == "" || is_same_time(value, before));
        if is_unchanged {
            metadata.insert(field.into(), before.clone());
        }
    }
    for field in [
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "generateName",
    ] {
        match old_metadata.get(field) {
            Some(value) => metadata.insert(field.into(), value.clone()),
            None => metadata.remove(field),
        };
    }
    if let Some(version) = old_metadata.get("resourceVersion") {
        metadata.insert("resourceVersion".into(), version.clone());
    }
    drop_empty(metadata);
}

/// Whether two strings denote the same time: clients may use other offsets and fractions of a second.
fn is_same_time(left: &Value, right: &Value) -> bool {
    let time = |value: &Value| value.as_str().and_then(|text| time::parse(text).ok());
    time(left).is_some_and(|left| time(right) == Some(left))
}

/// Removes empty maps, lists and strings, and nulls, as Kubernetes does.
fn drop_empty(metadata: &mut Map<String, Value>) {
    metadata.retain(|_, value| match value {
        Value::Null => false,
        Value::Object(map) => !map.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::String(text) => !text.is_empty(),
        _ => true,
    });
}

/// Validates the metadata of an object; on an update also against the stored version. `name_problems` validates the name.
pub fn validate(
    object: &Value,
    old: Option<&Value>,
    name_problems: impl FnOnce(&str) -> Vec<String>,
) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let Some(metadata) = object.get("metadata").and_then(Value::as_object) else {
        return vec![FieldError::required("metadata", "")];
    };
    if old.is_none() {
        validate_name(metadata, name_problems, &mut errors);
    }
    validate_labels(metadata, &mut errors);
    validate_annotations(metadata, &mut errors);
    validate_owners(metadata, &mut errors);
    validate_finalizers(metadata, old, &mut errors);
    if let Some(old) = old {
        for field in ["name", "namespace", "uid", "creationTimestamp"] {
            let (before, after) = (text(old, field), text(object, field));
            if before != after {
                errors.push(FieldError::invalid(
                    format!("metadata.{field}"),
                    after,
                    "field is immutable",
                ));
            }
        }
    }
    errors
}

fn validate_name(
    metadata: &Map<String, Value>,
    name_problems: impl FnOnce(&str) -> Vec<String>,
    errors: &mut Vec<FieldError>,
) {
    let name = metadata
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if name.is_empty() {
        errors.push(FieldError::required(
            "metadata.name",
            "name or generateName is required",
        ));
        return;
    }
    errors.extend(
        name_problems(name)
            .into_iter()
            .map(|problem| FieldError::invalid("metadata.name", name, problem)),
    );
}

fn validate_labels(metadata: &Map<String, Value>, errors: &mut Vec<FieldError>) {
    let Some(labels) = metadata.get("labels") else {
        return;
    };
    let Some(labels) = labels.as_object() else {
        errors.push(FieldError::type_invalid(
            "metadata.labels",
            labels.clone(),
            "must be a map",
        ));
        return;
    };
    for (key, value) in labels {
        errors.extend(
            names::qualified_name(key)
                .into_iter()
                .map(|problem| FieldError::invalid("metadata.labels", key.as_str(), problem)),
        );
        match value.as_str() {
            Some(text) => {
                errors.extend(
                    names::label_value(text)
                        .into_iter()
                        .map(|problem| FieldError::invalid("metadata.labels", text, problem)),
                );
            }
            None => errors.push(FieldError::type_invalid(
                "metadata.labels",
                value.clone(),
                "must be a string",
            )),
        }
    }
}

fn validate_annotations(metadata: &Map<String, Value>, errors: &mut Vec<FieldError>) {
    let Some(annotations) = metadata.get("annotations") else {
        return;
    };
    let Some(annotations) = annotations.as_object() else {
        errors.push(FieldError::type_invalid(
            "metadata.annotations",
            annotations.clone(),
            "must be a map",
        ));
        return;
    };
    let mut total = 0;
    for (key, value) in annotations {
        // The prefix of an annotation key may contain capitals.
        let lower = key.to_lowercase();
        errors.extend(
            names::qualified_name(&lower)
                .into_iter()
                .map(|problem| FieldError::invalid("metadata.annotations", key.as_str(), problem)),
        );
        match value.as_str() {
            Some(text) => total += key.len() + text.len(),
            None => errors.push(FieldError::type_invalid(
                "metadata.annotations",
                value.clone(),
                "must be a string",
            )),
        }
    }
    if total > ANNOTATION_BYTES {
        errors.push(FieldError::too_long(
            "metadata.annotations",
            ANNOTATION_BYTES,
        ));
    }
}

fn validate_owners(metadata: &Map<String, Value>, errors: &mut Vec<FieldError>) {
    let Some(owners) = metadata.get("ownerReferences") else {
        return;
    };
    let Some(owners) = owners.as_array() else {
        errors.push(FieldError::type_invalid(
            "metadata.ownerReferences",
            owners.clone(),
            "must be a list",
        ));
        return;
    };
    let mut controllers = Vec::new();
    for (index, owner) in owners.iter().enumerate() {
        let path = format!("metadata.ownerReferences[{index}]");
        for (field, name) in [
            ("apiVersion", "version"),
            ("kind", "kind"),
            ("name", "name"),
            ("uid", "uid"),
        ] {
            if owner
                .get(field)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .is_empty()
            {
                let shown = owner.get(field).cloned().unwrap_or_else(|| Value::from(""));
                errors.push(FieldError::invalid(
                    format!("{path}.{field}"),
                    shown,
                    format!("{name} must not be empty"),
                ));
            }
        }
        if owner.get("controller").and_then(Value::as_bool) == Some(true) {
            controllers.push(owner.clone());
        }
    }
    if controllers.len() > 1 {
        let detail = "Only one reference can have Controller set to true. Found \"true\" in references for several owners";
        errors.push(FieldError::invalid(
            "metadata.ownerReferences",
            Value::from(controllers),
            detail,
        ));
    }
}

fn validate_finalizers(
    metadata: &Map<String, Value>,
    old: Option<&Value>,
    errors: &mut Vec<FieldError>,
) {
    let finalizers: Vec<&str> = list_of_text(metadata.get("finalizers"));
    for finalizer in &finalizers {
        errors.extend(
            names::qualified_name(finalizer)
                .into_iter()
                .map(|problem| FieldError::invalid("metadata.finalizers", *finalizer, problem)),
        );
    }
    let Some(old) = old.filter(|old| !text(old, "deletionTimestamp").is_empty()) else {
        return;
    };
    let before = list_of_text(old["metadata"].get("finalizers"));
    let added: Vec<&str> = finalizers
        .into_iter()
        .filter(|finalizer| !before.contains(finalizer))
        .collect();
    if !added.is_empty() {
        let added: Vec<String> = added
            .iter()
            .map(|finalizer| format!("\"{finalizer}\""))
            .collect();
        let detail = format!(
            "no new finalizers can be added if the object is being deleted, found new finalizers []string{{{}}}",
            added.join(", ")
        );
        errors.push(FieldError::forbidden("metadata.finalizers", detail));
    }
}

/// The strings in a list.
pub fn list_of_text(list: Option<&Value>) -> Vec<&str> {
    list.and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// Whether the content changed in a way that increments the generation: anything but the metadata and, if it is a subresource,
/// the status.
pub fn differs_in_content(object: &Value, old: &Value, resource: &Resource) -> bool {
    fn content<'a>(
        value: &'a Value,
        resource: &'a Resource,
    ) -> impl Iterator<Item = (&'a String, &'a Value)> {
        let fields = value.as_object().into_iter().flatten();
        fields.filter(|(name, _)| {
            !matches!(name.as_str(), "apiVersion" | "kind" | "metadata")
                && (name.as_str() != "status" || !resource.has_status)
        })
    }
    // JSON maps are sorted by key, so equal contents iterate in the same order.
    content(object, resource).ne(content(old, resource))
}

/// Increments the generation.
pub fn increment_generation(object: &mut Value) {
    let next = object["metadata"]
        .get("generation")
        .and_then(Value::as_i64)
        .unwrap_or_default()
        + 1;
    of(object).insert("generation".into(), Value::from(next));
}

/// Checks that kind, version, namespace and name of the object match the request path. Missing fields are filled in.
pub fn check_identity(
    object: &mut Value,
    resource: &Resource,
    namespace: &str,
    name: &str,
) -> Result<(), Status> {
    if !object.is_object() {
        return Err(Status::bad_request(
            "the object provided is not a JSON object",
        ));
    }
    let stated = (
        object.get("apiVersion").and_then(Value::as_str),
        object.get("kind").and_then(Value::as_str),
    );
    let (api_version, kind) = (stated.0.unwrap_or_default(), stated.1.unwrap_or_default());
    if api_version.is_empty() || kind.is_empty() {
        if resource.custom.is_some() {
            return Err(Status::bad_request(
                "Object 'Kind' or 'apiVersion' is missing",
            ));
        }
        object["apiVersion"] = Value::from(&*resource.api_version);
        object["kind"] = Value::from(&*resource.kind);
    } else if api_version != &*resource.api_version || kind != &*resource.kind {
        return Err(Status::bad_request(format!(
            "{kind} in version \"{}\" cannot be handled as a {}: the path serves {} in {api}",
            api_version.rsplit('/').next().unwrap_or_default(),
            resource.kind,
            resource.kind,
            api = resource.api_version,
        )));
    }
    let metadata = of(object);
    let stated = metadata
        .get("namespace")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if resource.is_namespaced() {
        if stated.is_empty() {
            metadata.insert("namespace".into(), Value::from(namespace));
        } else if stated != namespace {
            return Err(Status::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
    } else {
        metadata.remove("namespace");
    }
    let stated = metadata
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if !name.is_empty() {
        if stated.is_empty() {
            metadata.insert("name".into(), Value::from(name));
        } else if stated != name {
            return Err(Status::bad_request(format!(
                "the name of the object ({stated}) does not match the name on the URL ({name})"
            )));
        }
    }
    Ok(())
}
