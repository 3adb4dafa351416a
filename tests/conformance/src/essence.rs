//! What of an answer is compared.
//!
//! Identifiers become the order of their first appearance, and versions whether they changed; times go. Of a refusal the code,
//! the reason and the fields count, not its words. A null and an empty object say nothing, so they are as if absent.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::scenario::Step;

const TIME: &str = "<time>";
/// The year in which scenarios write the times that they compare.
const WRITTEN_YEAR: &str = "2026-01-01T";

/// Remembers what a scenario has seen.
#[derive(Debug)]
pub struct Essence {
    namespace: String,
    managed_fields: bool,
    identifiers: HashMap<String, usize>,
    versions: HashMap<String, String>,
}

impl Essence {
    pub fn new(namespace: &str, managed_fields: bool) -> Self {
        Self {
            namespace: namespace.to_owned(),
            managed_fields,
            identifiers: HashMap::new(),
            versions: HashMap::new(),
        }
    }

    pub fn of(&mut self, mut answer: Value, step: &Step) -> Value {
        if let Some(first) = step.first
            && let Some(events) = answer.as_array_mut()
        {
            events.truncate(first);
        }
        if step.names
            && let Some(items) = answer.get_mut("items").and_then(Value::as_array_mut)
        {
            for item in items {
                *item = item["metadata"]["name"].take();
            }
        }
        for pointer in &step.ignore {
            remove(&mut answer, pointer);
        }
        self.value(answer)
    }

    fn value(&mut self, value: Value) -> Value {
        match value {
            Value::Object(object) => self.object(object),
            Value::Array(items) => items.into_iter().map(|item| self.value(item)).collect(),
            Value::String(text) => Value::String(self.text(&text)),
            other => other,
        }
    }

    fn object(&mut self, mut object: Map<String, Value>) -> Value {
        self.metadata(&mut object);
        if object.get("kind").and_then(Value::as_str) == Some("Status") {
            refusal(&mut object);
        }
        // Discovery: an order without meaning, and a hash of what is stored.
        object.remove("storageVersionHash");
        if let Some(verbs) = object.get_mut("verbs").and_then(Value::as_array_mut) {
            verbs.sort_by_key(ToString::to_string);
        }
        if let Some(columns) = object
            .get_mut("columnDefinitions")
            .and_then(Value::as_array_mut)
        {
            for column in columns {
                column["description"].take();
            }
        }
        let cells = object.get_mut("cells").and_then(Value::as_array_mut);
        for cell in cells.into_iter().flatten() {
            if cell.as_str().is_some_and(is_age) {
                *cell = Value::from("<age>");
            }
        }
        object
            .into_iter()
            .map(|(key, value)| {
                let value = match key.as_str() {
                    "fieldsV1" => self.field_set(value),
                    _ => self.value(value),
                };
                (self.text(&key), value)
            })
            .filter(|(_, value)| {
                !value.is_null() && value.as_object().is_none_or(|object| !object.is_empty())
            })
            .collect()
    }

    /// In a set of fields an empty object is a member.
    fn field_set(&mut self, value: Value) -> Value {
        match value {
            Value::Object(object) => object
                .into_iter()
                .map(|(key, value)| (self.text(&key), self.field_set(value)))
                .collect(),
            other => other,
        }
    }

    /// Of the metadata of an object or a list: versions, made-up names, field owners.
    fn metadata(&mut self, object: &mut Map<String, Value>) {
        let is_one = !object.contains_key("items") && !object.contains_key("rows");
        let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
            return;
        };
        if !self.managed_fields {
            metadata.remove("managedFields");
        }
        if metadata
            .get("continue")
            .is_some_and(|token| token.as_str().is_some_and(|token| !token.is_empty()))
        {
            metadata.insert("continue".to_owned(), Value::from("<continue>"));
        }
        if let Some(prefix) = metadata.get("generateName").and_then(Value::as_str) {
            let made = metadata.get("name").and_then(Value::as_str);
            if made.is_some_and(|name| name.len() > prefix.len() && name.starts_with(prefix)) {
                let shown = format!("{prefix}<generated>");
                metadata.insert("name".to_owned(), Value::from(shown));
            }
        }
        let Some(version) = metadata.get("resourceVersion").and_then(Value::as_str) else {
            return;
        };
        let version = version.to_owned();
        let shown = match metadata.get("uid").and_then(Value::as_str) {
            Some(uid) if is_one => {
                let before = self.versions.insert(uid.to_owned(), version.clone());
                match before {
                    None => "<version>",
                    Some(before) if before == version => "<same version>",
                    Some(_) => "<new version>",
                }
            }
            _ => "<version>",
        };
        metadata.insert("resourceVersion".to_owned(), Value::from(shown));
    }

    fn text(&mut self, text: &str) -> String {
        if is_time(text) && !text.starts_with(WRITTEN_YEAR) {
            return TIME.to_owned();
        }
        let mut shown = text.replace(&self.namespace, "<namespace>");
        while let Some(at) = identifier_in(&shown) {
            let identifier = shown[at..at + IDENTIFIER_LENGTH].to_owned();
            let next = self.identifiers.len() + 1;
            let number = *self.identifiers.entry(identifier).or_insert(next);
            shown.replace_range(at..at + IDENTIFIER_LENGTH, &format!("<uid {number}>"));
        }
        shown
    }
}

/// Of a refusal the words go, and what only one server says twice or says of itself.
fn refusal(status: &mut Map<String, Value>) {
    status.remove("message");
    let Some(details) = status.get_mut("details").and_then(Value::as_object_mut) else {
        return;
    };
    let Some(causes) = details.get_mut("causes").and_then(Value::as_array_mut) else {
        return;
    };
    let mut seen: Vec<Value> = Vec::new();
    for mut cause in causes.drain(..) {
        cause["message"].take();
        // A remark that further rules were not looked at.
        let is_remark = cause["field"] == "<nil>";
        if !is_remark && !seen.contains(&cause) {
            seen.push(cause);
        }
    }
    *causes = seen;
    if causes.is_empty() {
        details.remove("causes");
    }
}

fn remove(value: &mut Value, pointer: &str) {
    if pointer.is_empty() {
        *value = Value::Null;
        return;
    }
    let Some((parent, key)) = pointer.rsplit_once('/') else {
        return;
    };
    if let Some(parent) = value.pointer_mut(parent).and_then(Value::as_object_mut) {
        parent.remove(key);
    }
}

fn is_time(text: &str) -> bool {
    let bytes = text.as_bytes();
    bytes.len() >= 20
        && bytes[4] == b'-'
        && bytes[7] == b'-'
        && bytes[10] == b'T'
        && bytes.ends_with(b"Z")
        && bytes[..4].iter().all(u8::is_ascii_digit)
}

/// How long ago something young was made, as tables show it.
fn is_age(text: &str) -> bool {
    let seconds = text.strip_suffix('s');
    seconds.is_some_and(|seconds| seconds.parse::<u8>().is_ok())
}

const IDENTIFIER_LENGTH: usize = 36;
const DASHES: [usize; 4] = [8, 13, 18, 23];

/// Where a UID begins in a text; one of zeros is written by a scenario and stays.
fn identifier_in(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    bytes.windows(IDENTIFIER_LENGTH).position(|window| {
        let is_shaped = window.iter().enumerate().all(|(index, byte)| {
            if DASHES.contains(&index) {
                *byte == b'-'
            } else {
                byte.is_ascii_hexdigit()
            }
        });
        is_shaped && !window.starts_with(b"00000000")
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plain() -> Step {
        serde_json::from_value(json!({"request": "GET /"})).unwrap()
    }

    #[test]
    fn the_age_of_what_a_table_shows_does_not_count() {
        let table = |age: &str| json!({"kind": "Table", "rows": [{"cells": ["us", 1, age]}]});
        let mut essence = Essence::new("space-7", false);
        let shown = essence.value(table("0s"));
        assert_eq!(
            shown,
            json!({"kind": "Table", "rows": [{"cells": ["us", 1, "<age>"]}]})
        );
        assert_eq!(essence.value(table("12s")), shown);
    }

    #[test]
    fn identifiers_versions_and_times_are_made_comparable() {
        let mut essence = Essence::new("space-7", false);
        let object = |version: &str| {
            json!({"kind": "ConfigMap", "metadata": {
                "uid": "42e97a77-2f5c-4651-8c17-275151b3b983", "resourceVersion": version, "namespace": "space-7",
                "creationTimestamp": "2026-11-16T00:00:00Z", "managedFields": [1], "labels": null,
            }})
        };
        let first = essence.of(object("7"), &plain());
        assert_eq!(
            first,
            json!({"kind": "ConfigMap", "metadata": {
                "uid": "<uid 1>", "resourceVersion": "<version>", "namespace": "<namespace>", "creationTimestamp": "<time>",
            }})
        );
        let again = essence.of(object("7"), &plain());
        assert_eq!(again["metadata"]["resourceVersion"], "<same version>");
        let changed = essence.of(object("9"), &plain());
        assert_eq!(changed["metadata"]["resourceVersion"], "<new version>");
    }

    #[test]
    fn a_refusal_counts_by_its_code_reason_and_fields() {
        let mut essence = Essence::new("space", false);
        let refused = json!({"kind": "Status", "code": 422, "reason": "Invalid", "message": "words", "details": {"causes": [
            {"field": "spec", "reason": "FieldValueInvalid", "message": "more words"},
            {"field": "spec", "reason": "FieldValueInvalid", "message": "other words"},
            {"field": "<nil>", "reason": "FieldValueInvalid", "message": "a remark"},
        ]}});
        assert_eq!(
            essence.of(refused, &plain()),
            json!({"kind": "Status", "code": 422, "reason": "Invalid", "details": {"causes": [{"field": "spec", "reason": "FieldValueInvalid"}]}})
        );
    }
}
