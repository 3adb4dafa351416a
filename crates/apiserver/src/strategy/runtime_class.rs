//! The rules of runtime classes.

use apimachinery::{field::FieldError, names};
use serde_json::Value;

use super::{
    Kind,
    fields::{immutable, text},
};
use crate::{registry::Resource, target::Part};

/// Runtime classes.
pub struct RuntimeClass;

impl Kind for RuntimeClass {
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

fn validate(class: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    match text(class, "handler") {
        "" => errors.push(FieldError::required("handler", "")),
        handler => errors.extend(
            names::dns_1123_label(handler)
                .into_iter()
                .map(|problem| FieldError::invalid("handler", handler, problem)),
        ),
    }
    immutable(class, old, "/handler", "handler", &mut errors);
    errors
}
