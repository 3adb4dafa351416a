//! The rules of config maps, and those that secrets share: the maximum size, and `immutable: true`.

use apimachinery::{field::FieldError, names};
use serde_json::Value;

use super::Kind;
use crate::{registry::Resource, target::Part};

/// The maximum size of the data of a config map or a secret.
pub const MAXIMUM_BYTES: usize = 1 << 20;

/// Config maps.
pub struct ConfigMap;

impl Kind for ConfigMap {
    fn validate(
        &self,
        _resource: &Resource,
        object: &Value,
        old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        validate(object, old)
    }
}

fn validate(map: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut total = 0;
    for field in ["data", "binaryData"] {
        for (key, value) in map
            .get(field)
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            let path = format!("{field}[{key}]");
            errors.extend(
                names::config_key(key)
                    .into_iter()
                    .map(|problem| FieldError::invalid(&path, key.as_str(), problem)),
            );
            total += value.as_str().map_or(0, str::len);
            if field == "binaryData"
                && map
                    .pointer("/data")
                    .is_some_and(|data| data.get(key).is_some())
            {
                errors.push(FieldError::invalid(
                    &path,
                    key.as_str(),
                    "duplicate of key present in data",
                ));
            }
            if !value.is_string() {
                errors.push(FieldError::type_invalid(
                    path,
                    value.clone(),
                    "must be a string",
                ));
            }
        }
    }
    if total > MAXIMUM_BYTES {
        errors.push(FieldError::too_long("", MAXIMUM_BYTES));
    }
    validate_immutable_data(map, old, &["/data", "/binaryData"], &mut errors);
    errors
}

/// Validates `immutable: true`, which cannot be removed and makes the data immutable.
pub fn validate_immutable_data(
    object: &Value,
    old: Option<&Value>,
    data: &[&str],
    errors: &mut Vec<FieldError>,
) {
    let Some(old) = old.filter(|old| old["immutable"] == true) else {
        return;
    };
    if object["immutable"] != true {
        errors.push(FieldError::forbidden(
            "immutable",
            "field is immutable when `immutable` is set",
        ));
    }
    for pointer in data {
        if object.pointer(pointer) != old.pointer(pointer) {
            errors.push(FieldError::forbidden(
                &pointer[1..],
                "field is immutable when `immutable` is set",
            ));
        }
    }
}
