//! Pruning: removes fields that the schema does not describe, and reports them on request. In integer fields, `1.0` becomes `1`
//! as in kube-apiserver, whose JSON encoder writes whole floats this way: typed clients cannot decode `1.0` into an integer.
//!
//! `apiVersion`, `kind` and `metadata` of a resource, including embedded resources, are never pruned, because every schema
//! describes them implicitly.

use serde_json::Value;

use super::{Additional, Node, Type};
use crate::field::Path;

type Unknown<'a> = Option<&'a mut Vec<String>>;

pub(super) fn prune(object: &mut Value, root: &Node, mut unknown: Unknown<'_>) {
    if root.preserve_unknown {
        preserve(object, root, true, &Path::ROOT, &mut unknown);
    } else {
        prune_value(object, Some(root), true, &Path::ROOT, &mut unknown);
    }
}

/// Prunes a value inside an object.
pub(super) fn prune_embedded(value: &mut Value, node: &Node) {
    prune_node(value, Some(node), &Path::ROOT, &mut None);
}

fn is_implicit(name: &str) -> bool {
    matches!(name, "apiVersion" | "kind" | "metadata")
}

fn prune_node(value: &mut Value, node: Option<&Node>, path: &Path<'_>, unknown: &mut Unknown<'_>) {
    match node {
        Some(node) if node.preserve_unknown => {
            preserve(value, node, node.embedded_resource, path, unknown);
        }
        Some(node) => prune_value(value, Some(node), node.embedded_resource, path, unknown),
        None => prune_value(value, None, false, path, unknown),
    }
}

fn prune_value(
    value: &mut Value,
    node: Option<&Node>,
    is_resource: bool,
    path: &Path<'_>,
    unknown: &mut Unknown<'_>,
) {
    match value {
        Value::Object(members) => members.retain(|name, member| {
            if is_resource && is_implicit(name) {
                return true;
            }
            let described = node.and_then(|node| node.properties.get(name));
            let additional = node.and_then(|node| node.additional.as_ref());
            match (described, additional) {
                (Some(property), _) => {
                    prune_node(member, Some(property), &path.child(name), unknown);
                }
                (None, Some(Additional::Schema(schema))) => {
                    prune_node(member, Some(schema), &path.child(name), unknown);
                }
                (None, Some(Additional::Any(_))) => {
                    prune_node(member, None, &path.child(name), unknown);
                }
                (None, None) => {
                    if let Some(unknown) = unknown {
                        unknown.push(path.child(name).to_string());
                    }
                    return false;
                }
            }
            true
        }),
        Value::Array(items) => {
            let schema = node.and_then(|node| node.items.as_deref());
            for (position, item) in items.iter_mut().enumerate() {
                prune_node(item, schema, &path.index(position), unknown);
            }
        }
        Value::Number(_) => write_whole_floats_as_integers(value, node),
        _ => {}
    }
}

fn write_whole_floats_as_integers(value: &mut Value, node: Option<&Node>) {
    let is_integer =
        node.is_some_and(|node| node.int_or_string || node.kind == Some(Type::Integer));
    if is_integer
        && value.is_f64()
        && let Some(integer) = crate::whole_number(value)
    {
        *value = Value::from(integer);
    }
}

/// Below `x-kubernetes-preserve-unknown-fields`, only the members that the schema describes are pruned.
fn preserve(
    value: &mut Value,
    node: &Node,
    is_resource: bool,
    path: &Path<'_>,
    unknown: &mut Unknown<'_>,
) {
    match value {
        Value::Object(members) => {
            for (name, member) in members.iter_mut() {
                if is_resource && is_implicit(name) {
                    continue;
                }
                if let Some(schema) = node.member(name) {
                    prune_node(member, Some(schema), &path.child(name), unknown);
                }
            }
        }
        Value::Array(items) => {
            if let Some(schema) = &node.items {
                for (position, item) in items.iter_mut().enumerate() {
                    preserve(
                        item,
                        schema,
                        schema.embedded_resource,
                        &path.index(position),
                        unknown,
                    );
                }
            }
        }
        _ => {}
    }
}
