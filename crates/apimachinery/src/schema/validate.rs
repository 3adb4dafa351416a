//! Validates a value against a schema, with the error messages of kube-apiserver.
//!
//! The path is a linked list on the stack, so validating a valid object allocates nothing.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::{Additional, Bound, Checks, Node, Type, list_type};
use crate::field::{FieldError, Path};
use crate::go;

/// Validates an object without its metadata. Updates use validation ratcheting: errors in unchanged values are not reported, so
/// an object that an older schema accepted can still be changed in other fields.
pub(super) fn validate_resource(
    object: &Value,
    old: Option<&Value>,
    root: &Node,
    errors: &mut Vec<FieldError>,
) {
    let before = errors.len();
    validate(object, old, root, &Path::ROOT, errors);
    lists(object, root, true, &Path::ROOT, errors);
    let found = errors.split_off(before);
    let mut seen = HashSet::new();
    errors.extend(
        found
            .into_iter()
            .filter(|error| seen.insert(error.to_string())),
    );
}

/// Checks that every default in the schema satisfies the schema.
pub(super) fn check_defaults(node: &Node, path: &str) -> Vec<FieldError> {
    let mut errors = Vec::new();
    defaults_below(node, path, &mut errors);
    errors
}

fn defaults_below(node: &Node, path: &str, errors: &mut Vec<FieldError>) {
    if let Some(default) = &node.default {
        let mut found = Vec::new();
        let mut filled = default.clone();
        super::prune::prune_embedded(&mut filled, node);
        if filled != *default {
            errors.push(FieldError::invalid(
                format!("{path}.default"),
                default.clone(),
                "must not have unknown fields",
            ));
        }
        super::default::apply(&mut filled, node);
        validate(&filled, None, node, &Path::ROOT, &mut found);
        errors.extend(found.into_iter().map(|error| {
            let inner = if error.field == "<nil>" {
                String::new()
            } else {
                format!(".{}", error.field)
            };
            FieldError {
                field: format!("{path}.default{inner}"),
                ..error
            }
        }));
    }
    for (name, property) in &node.properties {
        defaults_below(property, &format!("{path}.properties[{name}]"), errors);
    }
    if let Some(items) = &node.items {
        defaults_below(items, &format!("{path}.items"), errors);
    }
    if let Some(additional) = node.additional_schema() {
        defaults_below(additional, &format!("{path}.additionalProperties"), errors);
    }
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_i64() => "integer",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// The path as it appears inside a message, where the root is empty.
fn name(path: &Path<'_>) -> String {
    let text = path.to_string();
    if text == "<nil>" { String::new() } else { text }
}

fn has_type(value: &Value, kind: Type) -> bool {
    match kind {
        Type::Object => value.is_object(),
        Type::Array => value.is_array(),
        Type::String => value.is_string(),
        Type::Boolean => value.is_boolean(),
        Type::Number => value.is_number(),
        Type::Integer => crate::whole_number(value).is_some(),
    }
}

fn validate(
    value: &Value,
    old: Option<&Value>,
    node: &Node,
    path: &Path<'_>,
    errors: &mut Vec<FieldError>,
) {
    if old == Some(value) {
        return;
    }
    check_type(value, node, path, errors);
    if let Some(checks) = &node.checks {
        if !value.is_null() {
            combined(value, checks, path, errors);
        }
        match value {
            Value::String(text) => string(text, checks, path, errors),
            Value::Number(_) => number(value, checks, path, errors),
            Value::Array(items) => count_items(items, checks, path, errors),
            _ => {}
        }
        if let Some(permitted) = &checks.one_of_values {
            one_of_values(value, permitted, path, errors);
        }
    }
    match value {
        Value::Object(members) => object(members, old, node, path, errors),
        Value::Array(items) => {
            if let Some(schema) = &node.items {
                for (position, item) in items.iter().enumerate() {
                    let before = old.and_then(|old| node.old_item(item, position, old));
                    validate(item, before, schema, &path.index(position), errors);
                }
            }
        }
        _ => {}
    }
}

fn check_type(value: &Value, node: &Node, path: &Path<'_>, errors: &mut Vec<FieldError>) {
    let (good, wanted) = if node.int_or_string {
        (
            has_type(value, Type::Integer) || value.is_string(),
            "integer,string",
        )
    } else if let Some(kind) = node.kind {
        (has_type(value, kind), kind.name())
    } else {
        return;
    };
    if good || (value.is_null() && node.nullable) {
        return;
    }
    let actual = type_of(value);
    errors.push(FieldError::type_invalid(
        path,
        actual,
        format!(
            "{} in body must be of type {wanted}: \"{actual}\"",
            name(path)
        ),
    ));
}

fn is_valid(value: &Value, node: &Node, path: &Path<'_>) -> Result<(), Vec<FieldError>> {
    let mut errors = Vec::new();
    validate(value, None, node, path, &mut errors);
    if errors.is_empty() {
        Ok(())
    } else {
        Err(errors)
    }
}

/// As in Kubernetes, errors of composite validations have no field; the path is in the message.
fn composite(path: &Path<'_>, rest: &str) -> FieldError {
    FieldError::invalid(Path::ROOT, "", format!("{} {rest}", go::quote(&name(path))))
}

fn combined(value: &Value, checks: &Checks, path: &Path<'_>, errors: &mut Vec<FieldError>) {
    if !checks.any_of.is_empty() {
        let mut failures = Vec::new();
        let satisfied = checks
            .any_of
            .iter()
            .any(|node| match is_valid(value, node, path) {
                Ok(()) => true,
                Err(found) => {
                    failures.push(found);
                    false
                }
            });
        if !satisfied {
            errors.push(composite(path, "must validate at least one schema (anyOf)"));
            errors.extend(closest(failures));
        }
    }
    if !checks.one_of.is_empty() {
        let results: Vec<_> = checks
            .one_of
            .iter()
            .map(|node| is_valid(value, node, path))
            .collect();
        let valid = results.iter().filter(|result| result.is_ok()).count();
        if valid != 1 {
            let found = match valid {
                0 => "Found none valid".to_owned(),
                several => format!("Found {several} valid alternatives"),
            };
            let message = format!("must validate one and only one schema (oneOf). {found}");
            errors.push(composite(path, &message));
            if valid == 0 {
                errors.extend(closest(
                    results.into_iter().filter_map(Result::err).collect(),
                ));
            }
        }
    }
    if !checks.all_of.is_empty() {
        let mut valid = 0;
        for node in &checks.all_of {
            match is_valid(value, node, path) {
                Ok(()) => valid += 1,
                Err(found) => errors.extend(found),
            }
        }
        if valid != checks.all_of.len() {
            let none = if valid == 0 { ". None validated" } else { "" };
            errors.push(composite(
                path,
                &format!("must validate all the schemas (allOf){none}"),
            ));
        }
    }
    if let Some(not) = &checks.not
        && is_valid(value, not, path).is_ok()
    {
        errors.push(composite(path, "must not validate the schema (not)"));
    }
}

/// The errors of the alternative that came closest to matching, because those are the most useful.
fn closest(failures: Vec<Vec<FieldError>>) -> Vec<FieldError> {
    failures
        .into_iter()
        .min_by_key(Vec::len)
        .unwrap_or_default()
}

fn string(text: &str, checks: &Checks, path: &Path<'_>, errors: &mut Vec<FieldError>) {
    if checks.max_length.is_some() || checks.min_length.is_some() {
        // A string has at most as many characters as bytes, so most strings need not be counted.
        let length = text.chars().count() as u64;
        if let Some(maximum) = checks.max_length.filter(|maximum| length > *maximum) {
            errors.push(FieldError::too_long(
                path,
                usize::try_from(maximum).unwrap_or(usize::MAX),
            ));
        }
        if let Some(minimum) = checks.min_length.filter(|minimum| length < *minimum) {
            let detail = format!(
                "{} in body should be at least {minimum} chars long",
                name(path)
            );
            errors.push(FieldError::invalid(path, text, detail));
        }
    }
    if let Some(pattern) = &checks.pattern
        && !pattern.is_match(text)
    {
        let detail = format!("{} in body should match '{}'", name(path), pattern.as_str());
        errors.push(FieldError::invalid(path, text, detail));
    }
    if let Some(format) = &checks.format
        && !format.accepts(text)
    {
        let detail = format!(
            "{} in body must be of type {}: {}",
            name(path),
            format.name,
            go::quote(text)
        );
        errors.push(FieldError::type_invalid(path, text, detail));
    }
}

fn number(value: &Value, checks: &Checks, path: &Path<'_>, errors: &mut Vec<FieldError>) {
    let Some(float) = value.as_f64() else { return };
    let integer = value.as_i64();
    // Limits are floats in a schema. Messages about integers print them as integers.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "Kubernetes truncates limits to compare integers"
    )]
    let shown = |limit: f64| match integer {
        Some(_) => (limit as i64).to_string(),
        None => go::float(limit),
    };
    if let Some(factor) = checks.multiple_of
        && factor > 0.0
        && (float / factor).fract() != 0.0
    {
        let detail = format!(
            "{} in body should be a multiple of {}",
            name(path),
            shown(factor)
        );
        errors.push(FieldError::invalid(path, value.clone(), detail));
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "Kubernetes truncates limits to compare integers"
    )]
    let compare = |bound: Bound| match integer {
        Some(integer) => Some(integer.cmp(&(bound.value as i64))),
        None => float.partial_cmp(&bound.value),
    };
    let mut complain = |words: &str, or_equal: &str, bound: Bound| {
        let or_equal = if bound.exclusive { "" } else { or_equal };
        let detail = format!(
            "{} in body should be {words} than{or_equal} {}",
            name(path),
            shown(bound.value)
        );
        errors.push(FieldError::invalid(path, value.clone(), detail));
    };
    if let Some(bound) = checks.maximum {
        match compare(bound) {
            Some(std::cmp::Ordering::Greater) => complain("less", " or equal to", bound),
            Some(std::cmp::Ordering::Equal) if bound.exclusive => complain("less", "", bound),
            _ => {}
        }
    }
    if let Some(bound) = checks.minimum {
        match compare(bound) {
            Some(std::cmp::Ordering::Less) => complain("greater", " or equal to", bound),
            Some(std::cmp::Ordering::Equal) if bound.exclusive => complain("greater", "", bound),
            _ => {}
        }
    }
}

fn count_items(items: &[Value], checks: &Checks, path: &Path<'_>, errors: &mut Vec<FieldError>) {
    let size = items.len() as u64;
    if let Some(minimum) = checks.min_items.filter(|minimum| size < *minimum) {
        let detail = format!(
            "{} in body should have at least {minimum} items",
            name(path)
        );
        errors.push(FieldError::invalid(path, size, detail));
    }
    if let Some(maximum) = checks.max_items.filter(|maximum| size > *maximum) {
        errors.push(FieldError::too_many(
            path,
            items.len(),
            usize::try_from(maximum).unwrap_or(usize::MAX),
        ));
    }
}

fn one_of_values(
    value: &Value,
    permitted: &[Value],
    path: &Path<'_>,
    errors: &mut Vec<FieldError>,
) {
    let is_permitted = permitted.iter().any(|allowed| match (allowed, value) {
        (Value::Number(allowed), Value::Number(value)) => {
            allowed == value || allowed.as_f64() == value.as_f64()
        }
        _ => allowed == value,
    });
    if is_permitted {
        return;
    }
    let shown: Vec<String> = permitted
        .iter()
        .map(|allowed| match allowed {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        })
        .collect();
    errors.push(FieldError::not_supported(path, value.clone(), &shown));
}

fn object(
    members: &Map<String, Value>,
    old: Option<&Value>,
    node: &Node,
    path: &Path<'_>,
    errors: &mut Vec<FieldError>,
) {
    if let Some(checks) = &node.checks {
        let size = members.len() as u64;
        if let Some(minimum) = checks.min_properties.filter(|minimum| size < *minimum) {
            let detail = format!(
                "{} in body should have at least {minimum} properties",
                name(path)
            );
            errors.push(FieldError::invalid(path, size, detail));
        }
        if let Some(maximum) = checks.max_properties.filter(|maximum| size > *maximum) {
            errors.push(FieldError::too_many(
                path,
                members.len(),
                usize::try_from(maximum).unwrap_or(usize::MAX),
            ));
        }
    }
    if !node.properties.is_empty() || matches!(node.additional, Some(Additional::Schema(_))) {
        for (key, member) in members {
            if let Some(schema) = node.member(key) {
                let before = old.and_then(|old| old.get(key));
                validate(member, before, schema, &path.child(key), errors);
            }
        }
    }
    if let Some(checks) = &node.checks {
        for required in &checks.required {
            if !members.contains_key(required) {
                errors.push(FieldError::required(path.child(required), ""));
            }
        }
    }
}

/// Checks list types and embedded resources. These checks follow the structure only, not nested value validations.
fn lists(value: &Value, node: &Node, is_root: bool, path: &Path<'_>, errors: &mut Vec<FieldError>) {
    match value {
        Value::Array(items) => {
            list_type::check(items, node, path, errors);
            if let Some(schema) = &node.items {
                for (position, item) in items.iter().enumerate() {
                    lists(item, schema, false, &path.index(position), errors);
                }
            }
        }
        Value::Object(members) => {
            if node.embedded_resource && !is_root {
                embedded(members, path, errors);
            }
            for (key, member) in members {
                if let Some(property) = node.properties.get(key) {
                    lists(member, property, false, &path.child(key), errors);
                } else if let Some(schema) = node.additional_schema() {
                    lists(member, schema, false, &path.key(key), errors);
                }
            }
        }
        _ => {}
    }
}

fn embedded(members: &Map<String, Value>, path: &Path<'_>, errors: &mut Vec<FieldError>) {
    for field in ["apiVersion", "kind"] {
        match members.get(field) {
            Some(Value::String(text)) if !text.is_empty() => {}
            None | Some(Value::Null | Value::String(_)) => {
                errors.push(FieldError::required(path.child(field), "must not be empty"));
            }
            Some(other) => errors.push(FieldError::invalid(
                path.child(field),
                other.clone(),
                "must be a string",
            )),
        }
    }
}
