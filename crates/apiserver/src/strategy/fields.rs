//! Reads, defaults and checks single fields of JSON objects.

use apimachinery::field::FieldError;
use serde_json::{Map, Value, json};

/// The fields of an object. A value that is not an object is replaced by an empty one.
pub fn fields(object: &mut Value) -> &mut Map<String, Value> {
    if !object.is_object() {
        *object = json!({});
    }
    object
        .as_object_mut()
        .expect("the object was created above")
}

/// Sets a field that is missing or null.
pub fn default_field(object: &mut Value, field: &str, value: impl Into<Value>) {
    let fields = fields(object);
    if fields.get(field).is_none_or(Value::is_null) {
        fields.insert(field.to_owned(), value.into());
    }
}

/// Like [`default_field`], but also replaces an empty string.
pub fn default_text(object: &mut Value, field: &str, value: &str) {
    let fields = fields(object);
    if fields
        .get(field)
        .is_none_or(|present| present.is_null() || present == "")
    {
        fields.insert(field.to_owned(), Value::from(value));
    }
}

/// The elements of a list; empty if the field is not a list.
pub fn items_mut<'a>(object: &'a mut Value, field: &str) -> impl Iterator<Item = &'a mut Value> {
    object
        .get_mut(field)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

/// The elements of a list; empty if the field is not a list.
pub fn items<'a>(object: &'a Value, field: &str) -> &'a [Value] {
    object
        .get(field)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

/// A string field; empty if missing.
pub fn text<'a>(object: &'a Value, field: &str) -> &'a str {
    object
        .get(field)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// Rejects a change of an immutable field.
pub fn immutable(
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
pub fn one_of(value: &Value, path: &str, allowed: &[&str], errors: &mut Vec<FieldError>) {
    if let Some(text) = value.as_str()
        && !allowed.contains(&text)
    {
        errors.push(FieldError::not_supported(path, text, allowed));
    }
}

/// A scalar field of an object as text, by its path with dots.
pub fn scalar(object: &Value, path: &str) -> Option<String> {
    let found = path
        .trim_start_matches('.')
        .split('.')
        .try_fold(object, |value, segment| value.get(segment));
    match found {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Bool(flag)) => Some(flag.to_string()),
        Some(Value::Number(number)) => Some(number.to_string()),
        _ => None,
    }
}
