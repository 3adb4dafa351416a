//! `metadata.managedFields`: which manager owns which fields.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::field_set::FieldSet;

/// If more managers than this have updated an object, the oldest are merged into one entry.
const MAX_UPDATE_MANAGERS: usize = 10;
const OLD_UPDATES: &str = "ancient-changes";

/// The `managedFields` entries of an object.
pub(super) fn entries_of(object: &Value) -> Option<&Vec<Value>> {
    object.get("metadata")?.get("managedFields")?.as_array()
}

/// Whether there are so many update managers that some must be merged.
pub(super) fn exceeds_manager_limit(entries: &[Value]) -> bool {
    let updates = entries
        .iter()
        .filter(|entry| entry["operation"] == Operation::Update.name());
    updates.count() > MAX_UPDATE_MANAGERS
}

/// Sorts entries in the order of Kubernetes: appliers first, then by time.
pub(super) fn sort(entries: &mut [Value]) {
    fn rank(entry: &Value) -> [Option<&str>; 5] {
        let text = |name: &str| entry.get(name).and_then(Value::as_str);
        [
            text("operation"),
            text("time"),
            text("manager"),
            text("apiVersion"),
            text("subresource"),
        ]
    }
    entries.sort_by(|left, right| rank(left).cmp(&rank(right)));
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    Apply,
    Update,
}

impl Operation {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Apply => "Apply",
            Self::Update => "Update",
        }
    }
}

/// The identity of a manager. An applier is one manager for all API versions; updaters are distinguished by version.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Manager {
    pub operation: Operation,
    pub name: String,
    pub subresource: String,
    /// Empty for appliers.
    pub api_version: String,
}

#[derive(Debug, Clone)]
pub(super) struct Managed {
    pub api_version: String,
    pub fields: FieldSet,
    pub time: Option<String>,
}

/// All managers of an object and their fields.
#[derive(Debug, Clone, Default)]
pub(super) struct Managers(pub BTreeMap<Manager, Managed>);

impl Managers {
    /// The managers of an object. Entries that cannot be decoded count as absent.
    pub fn of(object: &Value) -> Self {
        entries_of(object)
            .and_then(|entries| Self::decode(entries))
            .unwrap_or_default()
    }

    pub fn decode(entries: &[Value]) -> Option<Self> {
        let mut managers = BTreeMap::new();
        for entry in entries {
            let text = |name: &str| entry.get(name).and_then(Value::as_str).unwrap_or_default();
            let operation = match text("operation") {
                "Apply" => Operation::Apply,
                "Update" => Operation::Update,
                _ => return None,
            };
            let api_version = text("apiVersion");
            if api_version.is_empty() || text("fieldsType") != "FieldsV1" {
                return None;
            }
            let manager = Manager {
                operation,
                name: text("manager").to_owned(),
                subresource: text("subresource").to_owned(),
                api_version: if operation == Operation::Apply {
                    String::new()
                } else {
                    api_version.to_owned()
                },
            };
            let fields = match entry.get("fieldsV1") {
                Some(fields) => FieldSet::decode(fields)?,
                None => FieldSet::default(),
            };
            let owned = Managed {
                api_version: api_version.to_owned(),
                fields,
                time: entry.get("time").and_then(Value::as_str).map(str::to_owned),
            };
            managers.insert(manager, owned);
        }
        Some(Self(managers))
    }

    /// The entries in the order of Kubernetes.
    pub fn encode(self) -> Value {
        let encode = |(manager, managed)| Manager::encode(manager, managed);
        let mut entries: Vec<Value> = self.0.into_iter().map(encode).collect();
        sort(&mut entries);
        Value::Array(entries)
    }

    /// Merges the oldest update entries while there are too many.
    pub fn cap(&mut self) {
        loop {
            let mut updates: Vec<(Option<String>, Manager)> = self
                .0
                .iter()
                .filter(|(manager, _)| manager.operation == Operation::Update)
                .map(|(manager, managed)| (managed.time.clone(), manager.clone()))
                .collect();
            if updates.len() <= MAX_UPDATE_MANAGERS {
                return;
            }
            updates.sort();
            // Merge the two oldest entries of the same version.
            let pair = updates
                .iter()
                .enumerate()
                .find_map(|(position, (_, first))| {
                    let later = &updates[position + 1..];
                    let second = later
                        .iter()
                        .find(|(_, second)| second.api_version == first.api_version)?;
                    Some((first.clone(), second.1.clone()))
                });
            let Some((first, second)) = pair else { return };
            let (Some(mut oldest), Some(newer)) = (self.0.remove(&first), self.0.remove(&second))
            else {
                return;
            };
            oldest.fields.extend(&newer.fields);
            oldest.time = newer.time;
            let bucket = Manager {
                operation: Operation::Update,
                name: OLD_UPDATES.to_owned(),
                subresource: String::new(),
                api_version: first.api_version,
            };
            if let Some(existing) = self.0.remove(&bucket) {
                oldest.fields.extend(&existing.fields);
            }
            self.0.insert(bucket, oldest);
        }
    }
}

impl Manager {
    /// The manager's entry.
    pub fn encode(self, managed: Managed) -> Value {
        let mut entry = Map::new();
        entry.insert("apiVersion".to_owned(), Value::String(managed.api_version));
        entry.insert("fieldsType".to_owned(), json!("FieldsV1"));
        entry.insert("fieldsV1".to_owned(), managed.fields.encode());
        entry.insert("manager".to_owned(), Value::String(self.name));
        entry.insert("operation".to_owned(), json!(self.operation.name()));
        if !self.subresource.is_empty() {
            entry.insert("subresource".to_owned(), Value::String(self.subresource));
        }
        if let Some(time) = managed.time {
            entry.insert("time".to_owned(), Value::String(time));
        }
        Value::Object(entry)
    }

    /// The manager's name in a conflict message.
    pub fn describe(&self, managed: &Managed) -> String {
        let mut text = crate::go::quote(&self.name);
        if !self.subresource.is_empty() {
            text.push_str(" with subresource ");
            text.push_str(&crate::go::quote(&self.subresource));
        }
        if self.operation == Operation::Update {
            text.push_str(" using ");
            text.push_str(&managed.api_version);
        }
        text
    }
}
