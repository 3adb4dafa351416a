//! Checks that value validations (`allOf`, `anyOf`, `oneOf`, `not`) refer only to fields that the structural schema defines.

use serde_json::{Map, Value};

use crate::field::FieldError;

pub(super) fn check(schema: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let Value::Object(schema) = schema else {
        return;
    };
    for nested in ["allOf", "anyOf", "oneOf"] {
        let alternatives = schema.get(nested).and_then(Value::as_array);
        for (position, alternative) in alternatives.into_iter().flatten().enumerate() {
            covered(
                alternative,
                Some(schema),
                &format!("{path}.{nested}[{position}]"),
                path,
                errors,
            );
        }
    }
    if let Some(not) = schema.get("not") {
        covered(not, Some(schema), &format!("{path}.not"), path, errors);
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    for (name, property) in properties.into_iter().flatten() {
        check(property, &format!("{path}.properties[{name}]"), errors);
    }
    for name in ["items", "additionalProperties"] {
        if let Some(child) = schema.get(name) {
            check(child, &format!("{path}.{name}"), errors);
        }
    }
}

fn covered(
    validation: &Value,
    structure: Option<&Map<String, Value>>,
    validation_path: &str,
    structure_path: &str,
    errors: &mut Vec<FieldError>,
) {
    let Value::Object(validation) = validation else {
        return;
    };
    let Some(structure) = structure else {
        errors.push(FieldError::required(
            structure_path,
            format!("because it is defined in {validation_path}"),
        ));
        return;
    };
    for nested in ["allOf", "anyOf", "oneOf"] {
        let alternatives = validation.get(nested).and_then(Value::as_array);
        for (position, alternative) in alternatives.into_iter().flatten().enumerate() {
            let at = format!("{validation_path}.{nested}[{position}]");
            covered(alternative, Some(structure), &at, structure_path, errors);
        }
    }
    if let Some(not) = validation.get("not") {
        covered(
            not,
            Some(structure),
            &format!("{validation_path}.not"),
            structure_path,
            errors,
        );
    }
    let properties = validation.get("properties").and_then(Value::as_object);
    for (name, property) in properties.into_iter().flatten() {
        let described = structure
            .get("properties")
            .and_then(|properties| properties.get(name));
        covered(
            property,
            described.and_then(Value::as_object),
            &format!("{validation_path}.properties[{name}]"),
            &format!("{structure_path}.properties[{name}]"),
            errors,
        );
    }
    if let Some(items) = validation.get("items") {
        covered(
            items,
            structure.get("items").and_then(Value::as_object),
            &format!("{validation_path}.items"),
            &format!("{structure_path}.items"),
            errors,
        );
    }
}
