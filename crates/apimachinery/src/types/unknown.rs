//! Fields that a type does not have, and values that it cannot hold.

use std::fmt::Write;

use serde_json::Value;

use super::TypeRef;

/// The paths of fields the type does not have, as field validation names them: `spec.containers[0].imagee`.
pub fn unknown_fields(object: &Value, types: TypeRef<'_>) -> Vec<String> {
    let mut unknown = Vec::new();
    visit(object, types, &mut String::new(), &mut unknown);
    unknown.sort_unstable();
    unknown
}

/// Extends the path for the time of a visit.
fn below(path: &mut String, name: &str, visit: impl FnOnce(&mut String)) {
    let length = path.len();
    if length > 0 {
        path.push('.');
    }
    path.push_str(name);
    visit(path);
    path.truncate(length);
}

fn at(path: &mut String, index: usize, visit: impl FnOnce(&mut String)) {
    let length = path.len();
    let _ = write!(path, "[{index}]");
    visit(path);
    path.truncate(length);
}

fn visit(value: &Value, types: TypeRef<'_>, path: &mut String, unknown: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            let closed = types.is_closed();
            for (name, member) in members {
                below(path, name, |path| {
                    if closed && !types.is_named_field(name) {
                        unknown.push(path.clone());
                    } else {
                        visit(member, types.member(name), path, unknown);
                    }
                });
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                at(path, index, |path| visit(item, types.item(), path, unknown));
            }
        }
        _ => {}
    }
}

pub(super) fn mismatches(
    value: &Value,
    types: TypeRef<'_>,
    path: &mut String,
    errors: &mut Vec<String>,
) {
    if value.is_null() {
        return;
    }
    if !types.accepts(value) {
        let kind = match value {
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            _ => "object",
        };
        errors.push(format!(
            "{path}: cannot take a {kind} as {}",
            types.describe()
        ));
        return;
    }
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                below(path, name, |path| {
                    mismatches(member, types.member(name), path, errors);
                });
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                at(path, index, |path| {
                    mismatches(item, types.item(), path, errors);
                });
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::super::type_errors;
    use super::*;
    use serde_json::json;

    #[test]
    fn misspelt_and_misshapen_fields_of_a_pod_are_named() {
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", "labels": {"any": "thing"}, "lables": {}},
            "spec": {"containers": [{"name": "c", "imagee": "i", "ports": [{"containerPort": "eighty"}]}], "replicas": 1}
        });
        let types = TypeRef::builtin("v1", "Pod").unwrap();
        assert_eq!(
            unknown_fields(&pod, types),
            [
                "metadata.lables",
                "spec.containers[0].imagee",
                "spec.replicas"
            ]
        );
        assert_eq!(
            type_errors(&pod, types),
            ["spec.containers[0].ports[0].containerPort: cannot take a string as integer"]
        );
    }
}
