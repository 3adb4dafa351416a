//! JSON merge patches (RFC 7396) that carry only what changes.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value};

/// The merge patch from `before` to `after`, field by field at the top level, or `None` if they are equal. Removed fields become null. A
/// changed field is included whole; keys that only its old value has become null, because a merge would keep them.
pub fn difference<T: Serialize>(before: &T, after: &T) -> Result<Option<Value>, serde_json::Error> {
    let before = serde_json::to_value(before)?;
    let after = serde_json::to_value(after)?;
    Ok(between(&before, &after))
}

fn between(before: &Value, after: &Value) -> Option<Value> {
    if before == after {
        return None;
    }
    let (Value::Object(before), Value::Object(after)) = (before, after) else {
        return Some(after.clone());
    };
    let mut patch = Map::new();
    for key in before.keys().filter(|key| !after.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    for (key, value) in after {
        let change = match before.get(key) {
            Some(old) => between(old, value),
            None => Some(value.clone()),
        };
        if let Some(change) = change {
            patch.insert(key.clone(), change);
        }
    }
    Some(Value::Object(patch))
}

/// A map of strings as the API has it: absent when empty.
pub type StringMap = Option<BTreeMap<String, String>>;

/// The merge patch that adds every pair of `wanted` to `current` and removes the keys in `unwanted`, or `None` if nothing changes.
pub fn string_map<'a>(
    current: &StringMap,
    wanted: &BTreeMap<String, String>,
    unwanted: impl IntoIterator<Item = &'a str>,
) -> Option<Value> {
    let held = |key: &str| current.as_ref().and_then(|current| current.get(key));
    let mut patch = Map::new();
    for key in unwanted {
        if held(key).is_some() && !wanted.contains_key(key) {
            patch.insert(key.to_owned(), Value::Null);
        }
    }
    for (key, value) in wanted {
        if held(key) != Some(value) {
            patch.insert(key.clone(), Value::from(value.as_str()));
        }
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// The merge patch from `current` to `wanted`, or `None` if they are equal.
pub fn exact_string_map(current: &StringMap, wanted: &BTreeMap<String, String>) -> Option<Value> {
    let keys = current.iter().flat_map(BTreeMap::keys).map(String::as_str);
    string_map(current, wanted, keys)
}

#[cfg(test)]
pub(crate) mod tests {
    use apimachinery::patch::merge::apply;
    use proptest::prelude::*;
    use serde::de::DeserializeOwned;
    use serde_json::json;

    use super::*;

    /// An object after a JSON merge patch.
    pub(crate) fn patched<K: Serialize + DeserializeOwned>(object: &K, patch: &Value) -> K {
        let mut value = serde_json::to_value(object).unwrap();
        apply(&mut value, patch.clone());
        serde_json::from_value(value).unwrap()
    }

    fn json_value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            any::<bool>().prop_map(Value::from),
            "[ab]{0,2}".prop_map(Value::from)
        ];
        leaf.prop_recursive(3, 16, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                prop::collection::btree_map("[abc]", inner, 0..3)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn merging_the_difference_gives_the_new_value(before in json_value(), after in json_value()) {
            let patch = difference(&before, &after).unwrap();
            let merged = patch.map_or(before.clone(), |patch| patched(&before, &patch));
            prop_assert_eq!(merged, after);
        }
    }

    #[test]
    fn a_difference_carries_nothing_that_stayed() {
        let before = json!({"replicas": 1, "podIPs": ["10.0.0.1"], "service": "x"});
        let after = json!({"replicas": 1, "podIPs": ["10.0.0.2"]});
        let patch = difference(&before, &after).unwrap();
        assert_eq!(
            patch,
            Some(json!({"podIPs": ["10.0.0.2"], "service": null}))
        );
        assert_eq!(difference(&after, &after).unwrap(), None);
    }

    #[test]
    fn foreign_keys_of_a_map_are_left_unless_it_must_be_exact() {
        let pairs = |text: &str| -> BTreeMap<String, String> {
            text.split(',')
                .filter_map(|pair| pair.split_once('='))
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect()
        };
        let current = Some(pairs("a=1,b=2,foreign=x"));
        assert_eq!(
            string_map(&current, &pairs("a=1,c=3"), ["b", "absent"]),
            Some(json!({"b": null, "c": "3"}))
        );
        assert_eq!(string_map(&current, &pairs("a=1"), []), None);
        assert_eq!(
            exact_string_map(&current, &pairs("a=1")),
            Some(json!({"b": null, "foreign": null}))
        );
        assert_eq!(exact_string_map(&None, &BTreeMap::new()), None);
    }
}
