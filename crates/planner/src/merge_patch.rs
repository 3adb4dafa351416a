//! JSON merge patches of string maps.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

type Pairs = BTreeMap<String, String>;

/// What turns `current` into `desired`: changed pairs, and null for each that goes. `None` when they are equal.
pub fn pairs(current: Option<&Pairs>, desired: Option<&Pairs>) -> Option<Value> {
    let empty = Pairs::new();
    let current = current.unwrap_or(&empty);
    let desired = desired.unwrap_or(&empty);
    let changed = desired
        .iter()
        .filter(|(key, value)| current.get(*key) != Some(value))
        .map(|(key, value)| (key.clone(), json!(value)));
    let removed = current
        .keys()
        .filter(|key| !desired.contains_key(*key))
        .map(|key| (key.clone(), Value::Null));
    let patch: Map<String, Value> = changed.chain(removed).collect();
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// Adds `value` under `key` unless there is nothing to add.
pub fn insert(patch: &mut Map<String, Value>, key: &str, value: Option<Value>) {
    if let Some(value) = value {
        patch.insert(key.to_owned(), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_patch_says_what_changed_and_what_goes() {
        let of = |entries: &[(&str, &str)]| -> Pairs {
            entries
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect()
        };
        let current = of(&[("same", "1"), ("changed", "1"), ("gone", "1")]);
        let desired = of(&[("same", "1"), ("changed", "2"), ("new", "1")]);
        assert_eq!(
            pairs(Some(&current), Some(&desired)),
            Some(json!({"changed": "2", "new": "1", "gone": null}))
        );
        assert_eq!(pairs(Some(&current), Some(&current)), None);
        assert_eq!(pairs(None, Some(&Pairs::new())), None);
    }
}
