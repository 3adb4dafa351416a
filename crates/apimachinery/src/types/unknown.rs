//! Finds fields that a type does not have.

use std::fmt::Write;

use serde_json::Value;

use super::TypeRef;

/// The paths of fields that the type does not have, in the format of field validation: `spec.containers[0].imagee`.
pub fn unknown_fields(object: &Value, types: TypeRef<'_>) -> Vec<String> {
    let mut unknown = Vec::new();
    visit(object, types, &mut String::new(), &mut unknown);
    unknown.sort_unstable();
    unknown
}

/// Extends the path during a visit.
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn misspelt_fields_of_a_pod_are_named() {
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
    }
}
