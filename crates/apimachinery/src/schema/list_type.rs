//! Uniqueness in lists of type `set` (whole items) and `map` (key fields).

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::{ListType, Node};
use crate::field::{FieldError, Path};

pub(super) fn check(items: &[Value], node: &Node, path: &Path<'_>, errors: &mut Vec<FieldError>) {
    match node.list_type {
        Some(ListType::Set) => {
            for position in repeated(items.iter().map(identity)) {
                errors.push(FieldError::duplicate(
                    path.index(position),
                    items[position].clone(),
                ));
            }
        }
        Some(ListType::Map) => map(items, node, path, errors),
        _ => {}
    }
}

fn map(items: &[Value], node: &Node, path: &Path<'_>, errors: &mut Vec<FieldError>) {
    if let Some(position) = items
        .iter()
        .position(|item| !item.is_object() && !item.is_null())
    {
        errors.push(FieldError::invalid(
            path.index(position),
            items[position].clone(),
            "must be an object for an array of list-type map",
        ));
        return;
    }
    if items.len() <= 1 {
        return;
    }
    // For lists this short, comparing pairs of items is faster than hashing.
    if let [first, second] = items {
        if same_keys(first, second, &node.map_keys) {
            errors.push(FieldError::duplicate(
                path.index(1),
                keys_of(second, &node.map_keys),
            ));
        }
        return;
    }
    let identities = items
        .iter()
        .map(|item| identity(&keys_of(item, &node.map_keys)));
    for position in repeated(identities) {
        errors.push(FieldError::duplicate(
            path.index(position),
            keys_of(&items[position], &node.map_keys),
        ));
    }
}

fn same_keys(left: &Value, right: &Value, keys: &[String]) -> bool {
    keys.iter().all(|key| left.get(key) == right.get(key))
}

fn keys_of(item: &Value, keys: &[String]) -> Value {
    let present = keys
        .iter()
        .filter_map(|key| Some((key.clone(), item.get(key)?.clone())));
    Value::Object(present.collect::<Map<_, _>>())
}

/// A canonical text of a value: equal for equal values, because map members are sorted.
fn identity(value: &Value) -> String {
    match value {
        Value::Object(members) => {
            let mut parts: Vec<String> = members
                .iter()
                .map(|(key, value)| format!("{}:{}", Value::from(key.as_str()), identity(value)))
                .collect();
            parts.sort_unstable();
            format!("{{{}}}", parts.join(","))
        }
        other => other.to_string(),
    }
}

/// The positions at which a value occurs for the second time. Further occurrences are not reported.
fn repeated(identities: impl Iterator<Item = String>) -> Vec<usize> {
    let mut seen: HashMap<String, u32> = HashMap::new();
    let mut positions = Vec::new();
    for (position, identity) in identities.enumerate() {
        let times = seen.entry(identity).or_default();
        *times += 1;
        if *times == 2 {
            positions.push(position);
        }
    }
    positions
}
