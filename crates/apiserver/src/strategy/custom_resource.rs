//! The rules of custom resources: those of their schema.

use apimachinery::{
    field::FieldError,
    schema::Schema,
    types::{DecodeError, TypeRef},
};
use serde_json::Value;

use super::Kind;
use crate::{registry::Resource, target::Part};

/// The kinds of CustomResourceDefinitions.
pub struct CustomResource;

impl Kind for CustomResource {
    /// The schema validates everything but the metadata.
    fn decode(&self, _resource: &Resource, object: &mut Value) -> Result<(), DecodeError> {
        match object.get_mut("metadata") {
            Some(metadata) => apimachinery::types::decode(metadata, TypeRef::object_meta()),
            None => Ok(()),
        }
    }

    fn unknown_fields(&self, resource: &Resource, object: &mut Value) -> Vec<String> {
        schema(resource)
            .map(|schema| schema.prune_reporting(object))
            .unwrap_or_default()
    }

    fn prune(&self, resource: &Resource, object: &mut Value) {
        if let Some(schema) = schema(resource) {
            schema.prune(object);
        }
    }

    fn default(&self, resource: &Resource, object: &mut Value) {
        if let Some(schema) = schema(resource) {
            schema.default(object);
        }
    }

    fn validate(
        &self,
        resource: &Resource,
        object: &Value,
        old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        validate(resource, object, old)
    }
}

fn schema(resource: &Resource) -> Option<&Schema> {
    resource.custom.as_ref()?.schema.as_ref()
}

/// Validates a custom resource against its schema. Validation rules (CEL) run only if the schema matches.
fn validate(resource: &Resource, object: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let Some(schema) = schema(resource) else {
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
