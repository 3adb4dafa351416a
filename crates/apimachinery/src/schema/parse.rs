//! Parses the JSON of a schema into [`Node`]s, and rejects constructs that CRD schemas do not support.

use regex::RegexBuilder;
use serde_json::{Map, Value};

use super::{Additional, Bound, Checks, ListType, Node, RuleSource, Type, formats};
use crate::field::FieldError;

/// The size limit of a compiled regular expression, so that a schema cannot exhaust the server's memory.
const PATTERN_SIZE_LIMIT: usize = 1 << 20;
const TYPES: [&str; 6] = ["array", "boolean", "integer", "number", "object", "string"];
const FORBIDDEN: [&str; 6] = [
    "$ref",
    "definitions",
    "dependencies",
    "patternProperties",
    "additionalItems",
    "id",
];

pub(super) fn parse(schema: &Value, path: &str, errors: &mut Vec<FieldError>) -> Node {
    let Value::Object(schema) = schema else {
        errors.push(FieldError::required(path, "schemas are required"));
        return Node::default();
    };
    let mut node = Node {
        int_or_string: flag(schema, "x-kubernetes-int-or-string"),
        nullable: flag(schema, "nullable"),
        preserve_unknown: flag(schema, "x-kubernetes-preserve-unknown-fields"),
        embedded_resource: flag(schema, "x-kubernetes-embedded-resource"),
        map_atomic: schema.get("x-kubernetes-map-type").and_then(Value::as_str) == Some("atomic"),
        default: schema
            .get("default")
            .filter(|default| !default.is_null())
            .cloned(),
        ..Node::default()
    };
    parse_type(schema, &mut node, path, errors);
    parse_list_type(schema, &mut node, path, errors);
    for name in FORBIDDEN {
        if schema.contains_key(name) {
            errors.push(FieldError::forbidden(
                format!("{path}.{name}"),
                format!("{name} is not supported"),
            ));
        }
    }
    if flag(schema, "uniqueItems") {
        errors.push(FieldError::forbidden(
            format!("{path}.uniqueItems"),
            "uniqueItems cannot be set to true since the runtime complexity becomes quadratic",
        ));
    }
    parse_structure(schema, &mut node, path, errors);
    parse_rules(schema, &mut node, path, errors);
    let checks = parse_checks(schema, path, errors);
    node.checks = checks.map(Box::new);
    node
}

fn flag(schema: &Map<String, Value>, name: &str) -> bool {
    schema.get(name).and_then(Value::as_bool).unwrap_or(false)
}

fn text<'a>(schema: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    schema
        .get(name)
        .and_then(Value::as_str)
        .filter(|text| !text.is_empty())
}

fn parse_type(
    schema: &Map<String, Value>,
    node: &mut Node,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    let Some(name) = text(schema, "type") else {
        return;
    };
    node.kind = Type::from_name(name);
    if node.kind.is_none() {
        errors.push(FieldError::not_supported(
            format!("{path}.type"),
            name,
            &TYPES,
        ));
    }
}

fn parse_list_type(
    schema: &Map<String, Value>,
    node: &mut Node,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    if let Some(name) = text(schema, "x-kubernetes-list-type") {
        let at = format!("{path}.x-kubernetes-list-type");
        match name {
            "atomic" => node.list_type = Some(ListType::Atomic),
            "set" => node.list_type = Some(ListType::Set),
            "map" => node.list_type = Some(ListType::Map),
            other => errors.push(FieldError::not_supported(
                at.clone(),
                other,
                &["atomic", "set", "map"],
            )),
        }
        if node.kind != Some(Type::Array) {
            let kind = format!("{path}.type");
            match node.kind {
                None => errors.push(FieldError::required(
                    kind,
                    "must be array if x-kubernetes-list-type is specified",
                )),
                Some(other) => errors.push(FieldError::invalid(
                    kind,
                    other.name(),
                    "must be array if x-kubernetes-list-type is specified",
                )),
            }
        }
    }
    let keys = schema
        .get("x-kubernetes-list-map-keys")
        .and_then(Value::as_array);
    node.map_keys = keys
        .map(|keys| {
            keys.iter()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect()
        })
        .unwrap_or_default();
    let at = format!("{path}.x-kubernetes-list-map-keys");
    match node.list_type {
        Some(ListType::Map) if node.map_keys.is_empty() => {
            errors.push(FieldError::required(
                at,
                "must not be empty if x-kubernetes-list-type is map",
            ));
        }
        Some(ListType::Map) => check_map_keys(schema, node, path, errors),
        _ if !node.map_keys.is_empty() => errors.push(FieldError::forbidden(
            at,
            "must not be set if x-kubernetes-list-type is not map",
        )),
        _ => {}
    }
    if let Some(name) = text(schema, "x-kubernetes-map-type")
        && !["atomic", "granular"].contains(&name)
    {
        errors.push(FieldError::not_supported(
            format!("{path}.x-kubernetes-map-type"),
            name,
            &["atomic", "granular"],
        ));
    }
}

/// The keys of a map list must be scalar properties of the items that are required or have a default.
fn check_map_keys(
    schema: &Map<String, Value>,
    node: &Node,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    let items = schema.get("items");
    let properties = items.and_then(|items| items.get("properties"));
    let required = items
        .and_then(|items| items.get("required"))
        .and_then(Value::as_array);
    for (position, key) in node.map_keys.iter().enumerate() {
        let Some(property) = properties.and_then(|properties| properties.get(key)) else {
            errors.push(FieldError::invalid(
                format!("{path}.x-kubernetes-list-map-keys[{position}]"),
                key.as_str(),
                "entries must all be names of item properties",
            ));
            continue;
        };
        if matches!(
            property.get("type").and_then(Value::as_str),
            Some("array" | "object")
        ) {
            errors.push(FieldError::invalid(
                format!("{path}.items.properties[{key}].type"),
                property.get("type").cloned().unwrap_or_default(),
                "must be a scalar type if parent array's x-kubernetes-list-type is map",
            ));
        }
        let is_required = required.is_some_and(|names| names.iter().any(|name| name == key));
        if !is_required && property.get("default").is_none() {
            errors.push(FieldError::required(
                format!("{path}.items.properties[{key}].default"),
                "this property is in x-kubernetes-list-map-keys, so it must have a default or be a required property",
            ));
        }
    }
}

fn parse_structure(
    schema: &Map<String, Value>,
    node: &mut Node,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    if let Some(Value::Object(properties)) = schema.get("properties") {
        for (name, property) in properties {
            let child = parse(property, &format!("{path}.properties[{name}]"), errors);
            if child.default.is_some() {
                node.defaulted.push(name.clone());
            }
            node.properties.insert(name.clone(), child);
        }
    }
    match schema.get("additionalProperties") {
        Some(Value::Bool(allowed)) => node.additional = Some(Additional::Any(*allowed)),
        Some(additional @ Value::Object(_)) => {
            let child = parse(additional, &format!("{path}.additionalProperties"), errors);
            node.additional = Some(Additional::Schema(Box::new(child)));
        }
        _ => {}
    }
    if node.additional.is_some() && !node.properties.is_empty() {
        errors.push(FieldError::forbidden(
            format!("{path}.additionalProperties"),
            "additionalProperties and properties are mutual exclusive",
        ));
    }
    if let Some(Additional::Any(false)) = node.additional {
        errors.push(FieldError::forbidden(
            format!("{path}.additionalProperties"),
            "additionalProperties cannot be set to false",
        ));
    }
    match schema.get("items") {
        Some(items @ Value::Object(_)) => {
            node.items = Some(Box::new(parse(items, &format!("{path}.items"), errors)));
        }
        Some(Value::Array(_)) => errors.push(FieldError::forbidden(
            format!("{path}.items"),
            "items must be a schema object and not an array",
        )),
        _ => {}
    }
}

fn parse_rules(
    schema: &Map<String, Value>,
    node: &mut Node,
    path: &str,
    errors: &mut Vec<FieldError>,
) {
    let Some(rules) = schema.get("x-kubernetes-validations") else {
        return;
    };
    let at = format!("{path}.x-kubernetes-validations");
    match serde_json::from_value::<Vec<RuleSource>>(rules.clone()) {
        Ok(rules) => node.rules = rules,
        Err(error) => errors.push(FieldError::invalid(at, rules.clone(), error.to_string())),
    }
}

fn count(
    schema: &Map<String, Value>,
    name: &str,
    path: &str,
    errors: &mut Vec<FieldError>,
) -> Option<u64> {
    let value = schema.get(name)?;
    if let Some(count) = value.as_u64() {
        return Some(count);
    }
    let detail = "must be greater than or equal to 0";
    errors.push(FieldError::invalid(
        format!("{path}.{name}"),
        value.clone(),
        detail,
    ));
    None
}

fn bound(schema: &Map<String, Value>, name: &str, exclusive: &str) -> Option<Bound> {
    Some(Bound {
        value: schema.get(name)?.as_f64()?,
        exclusive: flag(schema, exclusive),
    })
}

fn parse_checks(
    schema: &Map<String, Value>,
    path: &str,
    errors: &mut Vec<FieldError>,
) -> Option<Checks> {
    const NAMES: [&str; 17] = [
        "required",
        "enum",
        "minimum",
        "maximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
    ];
    if !NAMES.iter().any(|name| schema.contains_key(*name)) {
        return None;
    }
    let list = |name: &str| schema.get(name).and_then(Value::as_array);
    let nested = |name: &str, errors: &mut Vec<FieldError>| -> Vec<Node> {
        let alternatives = list(name).map(Vec::as_slice).unwrap_or_default();
        let parse_one = |(position, alternative)| {
            parse(alternative, &format!("{path}.{name}[{position}]"), errors)
        };
        alternatives.iter().enumerate().map(parse_one).collect()
    };
    let (all_of, any_of, one_of) = (
        nested("allOf", errors),
        nested("anyOf", errors),
        nested("oneOf", errors),
    );
    let pattern = text(schema, "pattern").and_then(|pattern| {
        match RegexBuilder::new(pattern)
            .size_limit(PATTERN_SIZE_LIMIT)
            .build()
        {
            Ok(regex) => Some(regex),
            Err(error) => {
                errors.push(FieldError::invalid(
                    format!("{path}.pattern"),
                    pattern,
                    format!("must be a valid regular expression, but isn't: {error}"),
                ));
                None
            }
        }
    });
    let required = list("required")
        .map(|names| {
            names
                .iter()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect()
        })
        .unwrap_or_default();
    Some(Checks {
        required,
        one_of_values: list("enum").cloned(),
        minimum: bound(schema, "minimum", "exclusiveMinimum"),
        maximum: bound(schema, "maximum", "exclusiveMaximum"),
        multiple_of: schema.get("multipleOf").and_then(Value::as_f64),
        min_length: count(schema, "minLength", path, errors),
        max_length: count(schema, "maxLength", path, errors),
        pattern,
        format: text(schema, "format").and_then(formats::Format::from_name),
        min_items: count(schema, "minItems", path, errors),
        max_items: count(schema, "maxItems", path, errors),
        min_properties: count(schema, "minProperties", path, errors),
        max_properties: count(schema, "maxProperties", path, errors),
        all_of,
        any_of,
        one_of,
        not: schema
            .get("not")
            .map(|not| parse(not, &format!("{path}.not"), errors)),
    })
}
