//! Defaulting. A null in a field that is not nullable becomes the default, or is removed.

use serde_json::{Map, Value};

use super::{Additional, Node};

pub(super) fn apply(value: &mut Value, node: &Node) {
    match value {
        Value::Object(members) => object(members, node),
        Value::Array(items) => {
            let Some(schema) = &node.items else { return };
            for item in items {
                if item.is_null()
                    && !schema.nullable
                    && let Some(default) = &schema.default
                {
                    *item = default.clone();
                }
                apply(item, schema);
            }
        }
        _ => {}
    }
}

fn object(members: &mut Map<String, Value>, node: &Node) {
    for name in &node.defaulted {
        let Some(property) = node.properties.get(name) else {
            continue;
        };
        let Some(default) = &property.default else {
            continue;
        };
        match members.get_mut(name) {
            None => {
                members.insert(name.clone(), default.clone());
            }
            Some(value) if value.is_null() && !property.nullable => *value = default.clone(),
            Some(_) => {}
        }
    }
    let additional = match &node.additional {
        Some(Additional::Schema(schema)) => Some(&**schema),
        _ => None,
    };
    if node.properties.is_empty() && additional.is_none() {
        return;
    }
    let mut has_null_to_drop = false;
    for (name, value) in members.iter_mut() {
        let Some(schema) = node.properties.get(name).or(additional) else {
            continue;
        };
        if value.is_null() && !schema.nullable {
            match &schema.default {
                Some(default) => *value = default.clone(),
                None => has_null_to_drop = true,
            }
        }
        apply(value, schema);
    }
    if has_null_to_drop {
        members.retain(|name, value| {
            let schema = node.properties.get(name).or(additional);
            !value.is_null() || schema.is_none_or(|schema| schema.nullable)
        });
    }
}
