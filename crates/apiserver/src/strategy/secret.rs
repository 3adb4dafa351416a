//! The rules of secrets.

use apimachinery::{field::FieldError, names};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use super::{
    Kind,
    config_map::{MAXIMUM_BYTES, validate_immutable_data},
    fields::{default_field, default_text, fields, immutable},
};
use crate::{registry::Resource, target::Part};

/// Secrets.
pub struct Secret;

impl Kind for Secret {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
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

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["metadata.name", "metadata.namespace", "type"]
    }
}

fn default(secret: &mut Value) {
    default_text(secret, "type", "Opaque");
    let Some(Value::Object(plain)) = fields(secret).remove("stringData") else {
        return;
    };
    for (key, value) in plain {
        let encoded = STANDARD.encode(value.as_str().unwrap_or_default());
        default_field(secret, "data", json!({}));
        secret["data"][key] = Value::from(encoded);
    }
}

fn validate(secret: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut total = 0;
    for (key, value) in secret
        .get("data")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        errors.extend(
            names::config_key(key)
                .into_iter()
                .map(|problem| FieldError::invalid(format!("data[{key}]"), key.as_str(), problem)),
        );
        match value.as_str().map(|text| STANDARD.decode(text)) {
            Some(Ok(bytes)) => total += bytes.len(),
            _ if value.is_null() => {}
            _ => errors.push(FieldError::invalid(
                format!("data[{key}]"),
                "<secret contents redacted>",
                "must be base64",
            )),
        }
    }
    if total > MAXIMUM_BYTES {
        errors.push(FieldError::too_long("data", MAXIMUM_BYTES));
    }
    immutable(secret, old, "/type", "type", &mut errors);
    validate_immutable_data(secret, old, &["/data"], &mut errors);
    errors
}
