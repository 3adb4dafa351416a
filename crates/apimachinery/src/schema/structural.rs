//! The rules for structural schemas: every level specifies its type, and value validations define no structure.
//!
//! The checks work on the JSON of the schema and not on the compiled form, because the errors refer to how it is written.

use serde_json::{Map, Value, json};

use crate::field::FieldError;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    Root,
    Item,
    Field,
}

pub(super) fn check(schema: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if let Value::Object(schema) = schema {
        structure(schema, Level::Root, path, errors);
    }
}

fn flag(schema: &Map<String, Value>, name: &str) -> bool {
    schema.get(name).and_then(Value::as_bool).unwrap_or(false)
}

fn type_name(schema: &Map<String, Value>) -> &str {
    schema
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

fn structure(schema: &Map<String, Value>, level: Level, path: &str, errors: &mut Vec<FieldError>) {
    let items = schema.get("items").and_then(Value::as_object);
    if type_name(schema) == "array" && items.is_none() {
        errors.push(FieldError::required(
            format!("{path}.items"),
            "must be specified",
        ));
    }
    if let Some(items) = items {
        structure(items, Level::Item, &format!("{path}.items"), errors);
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    for (name, property) in properties.into_iter().flatten() {
        if let Value::Object(property) = property {
            structure(
                property,
                Level::Field,
                &format!("{path}.properties[{name}]"),
                errors,
            );
        }
    }
    if let Some(additional) = schema.get("additionalProperties") {
        let at = format!("{path}.additionalProperties");
        if level == Level::Root {
            errors.push(FieldError::forbidden(
                at.as_str(),
                "must not be used at the root",
            ));
        }
        if let Value::Object(additional) = additional {
            structure(additional, Level::Field, &at, errors);
        }
    }
    extensions(schema, level, path, errors);
    metadata(schema, level, path, errors);
    value_validation(schema, level, int_or_string_exception(schema), path, errors);
}

fn extensions(schema: &Map<String, Value>, level: Level, path: &str, errors: &mut Vec<FieldError>) {
    let int_or_string = flag(schema, "x-kubernetes-int-or-string");
    let preserve = flag(schema, "x-kubernetes-preserve-unknown-fields");
    let embedded = flag(schema, "x-kubernetes-embedded-resource");
    for (set, name) in [
        (preserve, "x-kubernetes-preserve-unknown-fields"),
        (embedded, "x-kubernetes-embedded-resource"),
    ] {
        if int_or_string && set {
            let detail = "must be false if x-kubernetes-int-or-string is true";
            errors.push(FieldError::invalid(format!("{path}.{name}"), true, detail));
        }
    }
    let at = format!("{path}.type");
    let kind = type_name(schema);
    if embedded && kind != "object" {
        let detail = "must be object if x-kubernetes-embedded-resource is true";
        errors.push(if kind.is_empty() {
            FieldError::required(at.as_str(), detail)
        } else {
            FieldError::invalid(at.as_str(), kind, detail)
        });
    } else if kind.is_empty() && !int_or_string && !preserve {
        let detail = match level {
            Level::Root => "must not be empty at the root",
            Level::Item => "must not be empty for specified array items",
            Level::Field => "must not be empty for specified object fields",
        };
        errors.push(FieldError::required(at.as_str(), detail));
    }
    if embedded && schema.contains_key("additionalProperties") {
        errors.push(FieldError::forbidden(
            format!("{path}.additionalProperties"),
            "must not be used if x-kubernetes-embedded-resource is set",
        ));
    }
    if level == Level::Root && !kind.is_empty() && kind != "object" {
        errors.push(FieldError::invalid(at, kind, "must be object at the root"));
    }
    let without_properties = schema
        .get("properties")
        .and_then(Value::as_object)
        .is_none_or(Map::is_empty);
    if embedded && !preserve && without_properties {
        errors.push(FieldError::required(
            format!("{path}.properties"),
            "must not be empty if x-kubernetes-embedded-resource is true without x-kubernetes-preserve-unknown-fields",
        ));
    }
}

fn metadata(schema: &Map<String, Value>, level: Level, path: &str, errors: &mut Vec<FieldError>) {
    let is_resource = level == Level::Root || flag(schema, "x-kubernetes-embedded-resource");
    let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
        return;
    };
    if !is_resource {
        return;
    }
    let expected = [
        ("kind", "string"),
        ("apiVersion", "string"),
        ("metadata", "object"),
    ];
    for (name, wanted) in expected {
        let Some(Value::Object(property)) = properties.get(name) else {
            continue;
        };
        if type_name(property) != wanted {
            errors.push(FieldError::invalid(
                format!("{path}.properties[{name}].type"),
                type_name(property),
                format!("must be {wanted}"),
            ));
        }
    }
    if level != Level::Root {
        return;
    }
    let Some(Value::Object(metadata)) = properties.get("metadata") else {
        return;
    };
    let permitted = metadata.iter().all(|(name, value)| match name.as_str() {
        "type" | "description" => true,
        "properties" => value.as_object().is_some_and(|names| {
            names
                .keys()
                .all(|name| name == "name" || name == "generateName")
        }),
        _ => false,
    });
    if !permitted {
        errors.push(FieldError::forbidden(
            format!("{path}.properties[metadata]"),
            "must not specify anything other than name and generateName, but metadata is implicitly specified",
        ));
    }
}

/// The two notations of int-or-string in which a value validation may specify types.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Exception {
    None,
    AnyOf,
    FirstAllOf,
}

fn int_or_string_exception(schema: &Map<String, Value>) -> Exception {
    let either = json!([{"type": "integer"}, {"type": "string"}]);
    if schema.get("anyOf") == Some(&either) {
        return Exception::AnyOf;
    }
    let first = schema
        .get("allOf")
        .and_then(|all| all.get(0))
        .and_then(|first| first.get("anyOf"));
    if first == Some(&either) {
        Exception::FirstAllOf
    } else {
        Exception::None
    }
}

fn value_validation(
    schema: &Map<String, Value>,
    level: Level,
    exception: Exception,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    for name in ["anyOf", "allOf", "oneOf"] {
        if name == "anyOf" && exception == Exception::AnyOf {
            continue;
        }
        let alternatives = schema.get(name).and_then(Value::as_array);
        for (position, alternative) in alternatives.into_iter().flatten().enumerate() {
            let inner = if name == "allOf" && position == 0 && exception == Exception::FirstAllOf {
                Exception::AnyOf
            } else {
                Exception::None
            };
            nested(
                alternative,
                level,
                inner,
                &format!("{path}.{name}[{position}]"),
                errors,
            );
        }
    }
    if let Some(not) = schema.get("not") {
        nested(not, level, Exception::None, &format!("{path}.not"), errors);
    }
}

fn nested(
    value: &Value,
    level: Level,
    exception: Exception,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    const FORBIDDEN: [(&str, &str); 12] = [
        ("type", "must be empty to be structural"),
        ("additionalProperties", "must be undefined to be structural"),
        ("default", "must be undefined to be structural"),
        ("title", "must be empty to be structural"),
        ("description", "must be empty to be structural"),
        ("nullable", "must be false to be structural"),
        (
            "x-kubernetes-preserve-unknown-fields",
            "must be false to be structural",
        ),
        (
            "x-kubernetes-embedded-resource",
            "must be false to be structural",
        ),
        (
            "x-kubernetes-int-or-string",
            "must be false to be structural",
        ),
        (
            "x-kubernetes-list-map-keys",
            "must be empty to be structural",
        ),
        (
            "x-kubernetes-list-type",
            "must be undefined to be structural",
        ),
        (
            "x-kubernetes-map-type",
            "must be undefined to be structural",
        ),
    ];
    let Value::Object(schema) = value else { return };
    value_validation(schema, level, exception, path, errors);
    if let Some(items) = schema.get("items") {
        nested(
            items,
            level,
            Exception::None,
            &format!("{path}.items"),
            errors,
        );
    }
    let properties = schema.get("properties").and_then(Value::as_object);
    for (name, property) in properties.into_iter().flatten() {
        let at = format!("{path}.properties[{name}]");
        nested(property, Level::Field, Exception::None, &at, errors);
        if name == "metadata" {
            errors.push(FieldError::forbidden(
                at,
                "must not be specified in a nested context",
            ));
        }
    }
    for (name, detail) in FORBIDDEN {
        let set = match schema.get(name) {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::String(text)) => !text.is_empty(),
            Some(Value::Array(items)) => !items.is_empty(),
            Some(_) => true,
        };
        if set {
            errors.push(FieldError::forbidden(format!("{path}.{name}"), detail));
        }
    }
    let rules = schema
        .get("x-kubernetes-validations")
        .and_then(Value::as_array);
    if rules.is_some_and(|rules| !rules.is_empty()) {
        errors.push(FieldError::forbidden(
            format!("{path}.x-kubernetes-validations"),
            "must be empty to be structural",
        ));
    }
}
