//! Sets of fields, and their `FieldsV1` encoding.
//!
//! A path element is stored in its encoded form: `f:name` for a field, `k:{…}` for an item by its keys, `v:…` for an item by its
//! value, `i:0` for an item by position.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::go;

/// A set of field paths below a common prefix.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct FieldSet {
    children: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Entry {
    /// Whether the path that ends here is in the set.
    member: bool,
    below: FieldSet,
}

impl Entry {
    fn is_empty(&self) -> bool {
        !self.member && self.below.is_empty()
    }
}

/// The path element of a field.
pub(super) fn field(name: &str) -> String {
    format!("f:{name}")
}

/// The path element of an item that is identified by its value.
pub(super) fn value(item: &Value) -> String {
    format!("v:{item}")
}

/// The path element of an item that is identified by key fields, which must be sorted by name.
pub(super) fn keys(keys: &[(&str, &Value)]) -> String {
    let mut element = String::from("k:{");
    for (position, (name, value)) in keys.iter().enumerate() {
        if position > 0 {
            element.push(',');
        }
        element.push_str(&Value::from(*name).to_string());
        element.push(':');
        element.push_str(&value.to_string());
    }
    element.push('}');
    element
}

/// The name of the field, if the element is a field.
pub(super) fn field_name(element: &str) -> Option<&str> {
    element.strip_prefix("f:")
}

impl FieldSet {
    pub fn is_empty(&self) -> bool {
        self.children.values().all(Entry::is_empty)
    }

    /// Whether the set has no entries at all, not even empty ones.
    pub fn has_no_entries(&self) -> bool {
        self.children.is_empty()
    }

    /// Adds the path of `element` below this prefix.
    pub fn insert(&mut self, element: String) {
        self.children.entry(element).or_default().member = true;
    }

    pub fn contains(&self, element: &str) -> bool {
        self.children.get(element).is_some_and(|entry| entry.member)
    }

    /// Adds a whole set below an element. An empty set adds nothing.
    pub fn insert_below(&mut self, element: String, below: FieldSet) {
        self.put(element, false, below);
    }

    /// Adds an element with the set below it. `member` says whether the element's own path is in the set.
    pub fn put(&mut self, element: String, member: bool, below: FieldSet) {
        if member || !below.children.is_empty() {
            let entry = self.children.entry(element).or_default();
            entry.member |= member;
            entry.below.merge(below);
        }
    }

    /// Adds the paths of another set, and moves its entries instead of copying where possible.
    pub fn merge(&mut self, other: FieldSet) {
        if self.children.is_empty() {
            *self = other;
            return;
        }
        for (element, theirs) in other.children {
            self.put(element, theirs.member, theirs.below);
        }
    }

    pub fn below(&self, element: &str) -> Option<&FieldSet> {
        self.children
            .get(element)
            .map(|entry| &entry.below)
            .filter(|below| !below.is_empty())
    }

    pub fn elements(&self) -> impl Iterator<Item = &str> {
        self.children.keys().map(String::as_str)
    }

    pub fn extend(&mut self, other: &FieldSet) {
        for (element, theirs) in &other.children {
            match self.children.get_mut(element) {
                Some(ours) => {
                    ours.member |= theirs.member;
                    ours.below.extend(&theirs.below);
                }
                None => {
                    self.children.insert(element.clone(), theirs.clone());
                }
            }
        }
    }

    /// The paths in this set that are not in `other`.
    pub fn difference(&self, other: &FieldSet) -> FieldSet {
        let mut difference = self.clone();
        difference.subtract(other);
        difference
    }

    pub fn subtract(&mut self, other: &FieldSet) {
        if other.children.is_empty() {
            return;
        }
        for (element, theirs) in &other.children {
            let Some(ours) = self.children.get_mut(element) else {
                continue;
            };
            ours.member &= !theirs.member;
            ours.below.subtract(&theirs.below);
            if ours.is_empty() {
                self.children.remove(element);
            }
        }
    }

    pub fn intersection(&self, other: &FieldSet) -> FieldSet {
        let mut shared = FieldSet::default();
        for (element, ours) in &self.children {
            let Some(theirs) = other.children.get(element) else {
                continue;
            };
            let entry = Entry {
                member: ours.member && theirs.member,
                below: ours.below.intersection(&theirs.below),
            };
            if !entry.is_empty() {
                shared.children.insert(element.clone(), entry);
            }
        }
        shared
    }

    /// Removes a field path and everything below it.
    pub fn remove_prefix(&mut self, path: &[&str]) {
        match path {
            [] => {}
            [last] => {
                self.children.remove(&field(last));
            }
            [first, rest @ ..] => {
                let element = field(first);
                if let Some(entry) = self.children.get_mut(&element) {
                    entry.below.remove_prefix(rest);
                    if entry.is_empty() {
                        self.children.remove(&element);
                    }
                }
            }
        }
    }

    /// Removes exactly this path of elements and keeps the paths below it.
    pub fn remove_exact(&mut self, path: &[&str]) {
        let [element, rest @ ..] = path else { return };
        if let Some(entry) = self.children.get_mut(*element) {
            if rest.is_empty() {
                entry.member = false;
            } else {
                entry.below.remove_exact(rest);
            }
            if entry.is_empty() {
                self.children.remove(*element);
            }
        }
    }

    /// All paths in the set, in the format of error messages: `.spec.containers[name="x"].image`. Paths that end at a level
    /// precede those that continue below it, in the order of Kubernetes.
    pub fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.collect_paths("", &mut paths);
        paths
    }

    fn collect_paths(&self, prefix: &str, paths: &mut Vec<String>) {
        let path = |element: &str| format!("{prefix}{}", print(element));
        let members = self.children.iter().filter(|(_, entry)| entry.member);
        paths.extend(members.map(|(element, _)| path(element)));
        for (element, entry) in &self.children {
            if !entry.below.is_empty() {
                entry.below.collect_paths(&path(element), paths);
            }
        }
    }

    /// Decodes `FieldsV1`. Returns `None` if it contains an unknown kind of element.
    pub fn decode(fields: &Value) -> Option<Self> {
        let Value::Object(members) = fields else {
            return None;
        };
        let mut set = FieldSet::default();
        for (element, below) in members {
            if element == "." {
                // The entry for "." is handled by the caller.
                continue;
            }
            if !["f:", "k:", "v:", "i:"]
                .iter()
                .any(|prefix| element.starts_with(prefix))
            {
                return None;
            }
            let nested = below.as_object()?;
            let entry = Entry {
                member: nested.is_empty() || nested.contains_key("."),
                below: FieldSet::decode(below)?,
            };
            set.children.insert(element.clone(), entry);
        }
        Some(set)
    }

    /// Encodes as `FieldsV1`.
    pub fn encode(self) -> Value {
        let mut members = Map::new();
        self.add_to(&mut members);
        Value::Object(members)
    }

    /// Adds these paths to an encoded set, in place.
    pub fn add_to(self, encoded: &mut Map<String, Value>) {
        for (element, entry) in self.children {
            if entry.is_empty() {
                continue;
            }
            let present = encoded.entry(element).or_insert(Value::Null);
            let was_member = is_member(present);
            let mut below = match present.take() {
                Value::Object(below) => below,
                _ => Map::new(),
            };
            below.remove(MEMBER);
            entry.below.add_to(&mut below);
            mark(&mut below, was_member || entry.member);
            *present = Value::Object(below);
        }
    }

    /// Removes these paths from an encoded set, in place.
    pub fn take_from(&self, encoded: &mut Map<String, Value>) {
        for (element, entry) in &self.children {
            let Some(present) = encoded.get_mut(element) else {
                continue;
            };
            let stays_member = is_member(present) && !entry.member;
            let Value::Object(below) = present else {
                continue;
            };
            below.remove(MEMBER);
            entry.below.take_from(below);
            if !stays_member && below.is_empty() {
                encoded.remove(element);
            } else {
                mark(below, stays_member);
            }
        }
    }
}

/// The key that marks a path in an encoded set as a member although it has others below it.
const MEMBER: &str = ".";

/// Whether the path of an encoded entry is in the set: it has the "." key, or has nothing below it.
fn is_member(encoded: &Value) -> bool {
    encoded
        .as_object()
        .is_some_and(|below| below.is_empty() || below.contains_key(MEMBER))
}

fn mark(below: &mut Map<String, Value>, member: bool) {
    if member && !below.is_empty() {
        below.insert(MEMBER.to_owned(), Value::Object(Map::new()));
    }
}

fn print(element: &str) -> String {
    let shown = |value: &Value| match value {
        Value::String(text) => go::quote(text),
        other => other.to_string(),
    };
    let (kind, rest) = element.split_at(2.min(element.len()));
    match kind {
        "f:" => format!(".{rest}"),
        "k:" => match serde_json::from_str::<Map<String, Value>>(rest) {
            Ok(keys) => {
                let keys: Vec<String> = keys
                    .iter()
                    .map(|(name, value)| format!("{name}={}", shown(value)))
                    .collect();
                format!("[{}]", keys.join(","))
            }
            Err(_) => format!("[{rest}]"),
        },
        "v:" => match serde_json::from_str::<Value>(rest) {
            Ok(value) => format!("[={}]", shown(&value)),
            Err(_) => format!("[={rest}]"),
        },
        _ => format!("[{rest}]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn fields_v1_round_trips() {
        let encoded = json!({
            "f:metadata": {"f:labels": {".": {}, "f:app": {}}},
            "f:spec": {"f:containers": {"k:{\"name\":\"x\"}": {".": {}, "f:image": {}}}, "f:finalizers": {"v:\"a\"": {}}}
        });
        let set = FieldSet::decode(&encoded).unwrap();
        assert_eq!(set.clone().encode(), encoded);
        assert_eq!(
            set.paths(),
            [
                ".metadata.labels",
                ".metadata.labels.app",
                ".spec.containers[name=\"x\"]",
                ".spec.containers[name=\"x\"].image",
                ".spec.finalizers[=\"a\"]"
            ]
        );
        assert!(FieldSet::decode(&json!({"x": {}})).is_none());
    }

    #[test]
    fn operations_on_encoded_sets_match_those_on_decoded_sets() {
        let sets = [
            json!({}),
            json!({"f:a": {}}),
            json!({"f:a": {".": {}, "f:b": {}}, "f:c": {}}),
            json!({"f:a": {"f:b": {}, "f:d": {".": {}, "f:e": {}}}}),
            json!({"f:a": {"f:d": {}}, "f:c": {"k:{\"name\":\"x\"}": {".": {}, "f:image": {}}}}),
            json!({"f:a": {".": {}, "f:d": {"f:e": {}}}, "f:c": {"k:{\"name\":\"x\"}": {}}}),
        ];
        for left in &sets {
            for right in &sets {
                let decoded = |set| FieldSet::decode(set).unwrap();
                let mut union = decoded(left);
                union.extend(&decoded(right));
                let mut added = left.as_object().unwrap().clone();
                decoded(right).add_to(&mut added);
                assert_eq!(Value::Object(added), union.encode(), "{left} and {right}");

                let difference = decoded(left).difference(&decoded(right));
                let mut taken = left.as_object().unwrap().clone();
                decoded(right).take_from(&mut taken);
                assert_eq!(
                    Value::Object(taken),
                    difference.encode(),
                    "{left} less {right}"
                );
            }
        }
    }

    #[test]
    fn set_operations_work_on_exact_paths() {
        let left = FieldSet::decode(&json!({"f:a": {".": {}, "f:b": {}}, "f:c": {}})).unwrap();
        let right = FieldSet::decode(&json!({"f:a": {}, "f:c": {}})).unwrap();
        assert_eq!(
            left.difference(&right).encode(),
            json!({"f:a": {"f:b": {}}})
        );
        assert_eq!(
            left.intersection(&right).encode(),
            json!({"f:a": {}, "f:c": {}})
        );
        let mut union = left.clone();
        union.extend(&right);
        assert_eq!(union, left);
    }
}
