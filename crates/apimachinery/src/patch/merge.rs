//! JSON merge patch (RFC 7386) as Kubernetes applies it: objects merge, null removes, anything else replaces.

use serde_json::{Map, Value};

/// Applies `patch` to `target` in place.
pub fn apply(target: &mut Value, patch: Value) {
    match (target, patch) {
        (Value::Object(target), Value::Object(patch)) => merge_objects(target, patch),
        (target, Value::Object(patch)) => {
            let mut fresh = Map::new();
            merge_objects(&mut fresh, patch);
            *target = Value::Object(fresh);
        }
        (target, patch) => *target = patch,
    }
}

fn merge_objects(target: &mut Map<String, Value>, patch: Map<String, Value>) {
    for (key, value) in patch {
        match value {
            Value::Null => {
                target.remove(&key);
            }
            Value::Object(nested) => {
                let existing = target.entry(key).or_insert(Value::Null);
                apply(existing, Value::Object(nested));
            }
            other => {
                target.insert(key, other);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_examples_of_the_rfc_hold() {
        let cases = [
            (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
            (
                json!({"a": "b"}),
                json!({"b": "c"}),
                json!({"a": "b", "b": "c"}),
            ),
            (json!({"a": "b"}), json!({"a": null}), json!({})),
            (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
            (
                json!({"a": {"b": "c"}}),
                json!({"a": {"b": "d", "c": null}}),
                json!({"a": {"b": "d"}}),
            ),
            (
                json!({"a": [{"b": "c"}]}),
                json!({"a": [1]}),
                json!({"a": [1]}),
            ),
            (
                json!({"e": null}),
                json!({"a": 1}),
                json!({"e": null, "a": 1}),
            ),
            (
                json!({}),
                json!({"a": {"bb": {"ccc": null}}}),
                json!({"a": {"bb": {}}}),
            ),
            (
                json!([1, 2]),
                json!({"a": "b", "c": null}),
                json!({"a": "b"}),
            ),
        ];
        for (mut target, patch, expected) in cases {
            apply(&mut target, patch);
            assert_eq!(target, expected);
        }
    }
}
