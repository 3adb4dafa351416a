//! One stored object: its JSON as shared bytes, and the metadata that the server needs without parsing the JSON again.
//!
//! The bytes have a fixed prefix: `{"apiVersion":"…"` comes first, and `metadata.resourceVersion` is the first key of the
//! metadata. So the writer can insert the revision when it sequences the write, and another served version only replaces the
//! first string. This file does not know which kinds exist or what their fields mean.

use std::{collections::BTreeMap, fmt, sync::Arc};

use bytes::Bytes;
use serde::Deserialize;
use serde_json::Value;

/// A position in the history of the whole store; Kubernetes' `resourceVersion`.
pub type Revision = u64;

/// Identifies a kind in the store: `pods`, `sandboxes.agents.x-k8s.io`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ResourceId(Arc<str>);

impl ResourceId {
    /// The id of `resource` in `group`; the core group is empty.
    pub fn new(group: &str, resource: &str) -> Self {
        if group.is_empty() {
            Self(Arc::from(resource))
        } else {
            Self(Arc::from(format!("{resource}.{group}")))
        }
    }

    pub(super) fn from_stored(text: &str) -> Self {
        Self(Arc::from(text))
    }

    /// `resource.group`, or `resource` alone for the core group.
    #[inline]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ResourceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl fmt::Display for ResourceId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Namespace and name of an object; the namespace is empty for cluster-scoped kinds. Ordered as etcd orders its keys.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

impl Key {
    /// Builds a key. Neither part may contain a slash; Kubernetes names never do.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self(Arc::from(format!("{namespace}/{name}")))
    }

    pub(super) fn from_stored(text: &str) -> Self {
        Self(Arc::from(text))
    }

    /// `namespace/name`.
    #[inline]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The namespace, empty for cluster-scoped objects.
    #[inline]
    pub fn namespace(&self) -> &str {
        self.0
            .split_once('/')
            .map_or("", |(namespace, _)| namespace)
    }

    /// The object's name.
    #[inline]
    pub fn name(&self) -> &str {
        self.0.split_once('/').map_or(&self.0, |(_, name)| name)
    }
}

impl std::borrow::Borrow<str> for Key {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// One entry of `metadata.ownerReferences`, with the fields that garbage collection reads.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Owner {
    /// API version the reference names.
    #[serde(default)]
    pub api_version: Box<str>,
    /// Kind the reference names.
    #[serde(default)]
    pub kind: Box<str>,
    /// Name of the owner.
    #[serde(default)]
    pub name: Box<str>,
    /// UID of the owner.
    pub uid: Box<str>,
    /// Whether the owner's foreground deletion waits for this object.
    #[serde(default)]
    pub block_owner_deletion: Option<bool>,
    /// Whether the owner is the managing controller.
    #[serde(default)]
    pub controller: Option<bool>,
}

/// The metadata that the server needs without parsing the object's JSON again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectMetadata {
    /// `metadata.uid`.
    #[serde(default)]
    pub uid: Box<str>,
    /// `metadata.labels`.
    #[serde(default)]
    pub labels: Option<Box<BTreeMap<String, String>>>,
    /// `metadata.ownerReferences`.
    #[serde(default, rename = "ownerReferences")]
    pub owners: Box<[Owner]>,
    /// `metadata.finalizers`.
    #[serde(default)]
    pub finalizers: Box<[Box<str>]>,
    /// `metadata.deletionTimestamp`: present while the object waits for its finalizers or its grace period.
    #[serde(default)]
    pub deletion_timestamp: Option<Box<str>>,
}

#[derive(Deserialize)]
struct Envelope {
    #[serde(rename = "apiVersion")]
    api_version: Box<str>,
    metadata: ObjectMetadata,
}

/// The bytes before the version in an object's JSON.
const VERSION_FIELD: &[u8] = b"\"resourceVersion\":\"";

/// An object to be written, complete but for its revision.
#[derive(Clone, Debug)]
pub struct Draft {
    head: Vec<u8>,
    tail: Vec<u8>,
    api_version_end: u32,
    metadata: ObjectMetadata,
}

/// Why a JSON value cannot be stored.
#[derive(Debug, thiserror::Error)]
pub enum DraftError {
    /// The value lacks a field that every object has.
    #[error("an object needs apiVersion, kind and metadata")]
    NotAnObject,
    /// The metadata has the wrong shape.
    #[error("the object's metadata is malformed")]
    Metadata(#[source] serde_json::Error),
}

impl Draft {
    /// Serialises `value`; any `metadata.resourceVersion` in it is ignored.
    pub fn new(value: &Value) -> Result<Self, DraftError> {
        let (Some(object), Some(metadata)) = (
            value.as_object(),
            value.get("metadata").and_then(Value::as_object),
        ) else {
            return Err(DraftError::NotAnObject);
        };
        let (Some(api_version), Some(kind)) = (
            value.get("apiVersion").and_then(Value::as_str),
            value.get("kind"),
        ) else {
            return Err(DraftError::NotAnObject);
        };
        let parsed =
            ObjectMetadata::deserialize(&value["metadata"]).map_err(DraftError::Metadata)?;

        let mut head = Vec::with_capacity(128);
        head.extend_from_slice(b"{\"apiVersion\":");
        append_json(&mut head, &Value::from(api_version));
        let api_version_end = u32::try_from(head.len()).unwrap_or(u32::MAX);
        head.extend_from_slice(b",\"kind\":");
        append_json(&mut head, kind);
        head.extend_from_slice(b",\"metadata\":{");
        head.extend_from_slice(VERSION_FIELD);

        let mut tail = Vec::with_capacity(2048);
        tail.push(b'"');
        for (name, field) in metadata
            .iter()
            .filter(|(name, _)| *name != "resourceVersion")
        {
            append_field(&mut tail, name, field);
        }
        tail.push(b'}');
        for (name, field) in object
            .iter()
            .filter(|(name, _)| !matches!(name.as_str(), "apiVersion" | "kind" | "metadata"))
        {
            append_field(&mut tail, name, field);
        }
        tail.push(b'}');
        Ok(Self {
            head,
            tail,
            api_version_end,
            metadata: parsed,
        })
    }

    pub(super) fn sequence(self, key: Key, revision: Revision) -> Object {
        let digits = revision.to_string();
        let mut bytes = Vec::with_capacity(self.head.len() + digits.len() + self.tail.len());
        bytes.extend_from_slice(&self.head);
        bytes.extend_from_slice(digits.as_bytes());
        bytes.extend_from_slice(&self.tail);
        Object {
            key,
            revision,
            bytes: Bytes::from(bytes),
            api_version_end: self.api_version_end,
            metadata: self.metadata,
        }
    }

    /// The object that a dry-run creation returns. It has no `resourceVersion`, because the version is only known after a real
    /// write.
    pub fn preview_of_new(mut self, key: Key) -> Object {
        self.head.truncate(self.head.len() - VERSION_FIELD.len());
        // The tail begins with the closing quote of the version and the comma before the next field.
        let rest = self.tail.get(2..).unwrap_or_default();
        let bytes = [&self.head, rest].concat();
        Object {
            key,
            revision: 0,
            bytes: Bytes::from(bytes),
            api_version_end: self.api_version_end,
            metadata: self.metadata,
        }
    }

    /// The object as it would be stored at `revision`, for a dry run.
    pub fn preview(self, key: Key, revision: Revision) -> Object {
        self.sequence(key, revision)
    }
}

fn append_json(buffer: &mut Vec<u8>, value: &Value) {
    serde_json::to_writer(buffer, value).expect("serializing a JSON value into memory cannot fail");
}

fn append_field(buffer: &mut Vec<u8>, name: &str, value: &Value) {
    buffer.push(b',');
    append_json(buffer, &Value::from(name));
    buffer.push(b':');
    append_json(buffer, value);
}

/// A stored object at one revision.
#[derive(Clone)]
pub struct Object {
    /// Namespace and name.
    pub key: Key,
    /// Revision of the write that created this version.
    pub revision: Revision,
    /// The JSON, resourceVersion included.
    pub bytes: Bytes,
    /// The metadata, parsed.
    pub metadata: ObjectMetadata,
    api_version_end: u32,
}

impl fmt::Debug for Object {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:?}@{}", self.key, self.revision)
    }
}

const PREFIX: &[u8] = b"{\"apiVersion\":";

impl Object {
    pub(super) fn from_stored(
        key: Key,
        revision: Revision,
        bytes: Bytes,
    ) -> Result<Self, serde_json::Error> {
        let envelope: Envelope = serde_json::from_slice(&bytes)?;
        // API versions are plain ASCII without escapes, so the quoted length is the length plus two quotes.
        let api_version_end =
            u32::try_from(PREFIX.len() + envelope.api_version.len() + 2).unwrap_or(u32::MAX);
        Ok(Self {
            key,
            revision,
            bytes,
            metadata: envelope.metadata,
            api_version_end,
        })
    }

    /// Parses the JSON.
    pub fn value(&self) -> Value {
        serde_json::from_slice(&self.bytes).expect("the store holds only valid JSON")
    }

    /// The stored apiVersion, read without parsing.
    #[inline]
    pub fn api_version(&self) -> &str {
        let end = self.api_version_end as usize;
        std::str::from_utf8(&self.bytes[PREFIX.len() + 1..end - 1]).unwrap_or_default()
    }

    /// Appends the JSON to `buffer`, with `apiVersion` set to `api_version`.
    pub fn write_as(&self, api_version: &str, buffer: &mut Vec<u8>) {
        if self.api_version() == api_version {
            buffer.extend_from_slice(&self.bytes);
            return;
        }
        buffer.extend_from_slice(PREFIX);
        append_json(buffer, &Value::from(api_version));
        buffer.extend_from_slice(&self.bytes[self.api_version_end as usize..]);
    }

    /// The JSON with `apiVersion` set to `api_version`. Copies only if that differs from the stored version.
    pub fn bytes_as(&self, api_version: &str) -> Bytes {
        if self.api_version() == api_version {
            return self.bytes.clone();
        }
        let mut buffer = Vec::with_capacity(self.bytes.len() + api_version.len());
        self.write_as(api_version, &mut buffer);
        Bytes::from(buffer)
    }

    /// Appends the JSON to `buffer`, in `api_version` and as if written at `revision`. A watcher sees this when an object leaves
    /// its selection.
    pub fn write_at(&self, api_version: &str, revision: Revision, buffer: &mut Vec<u8>) {
        const FIELD: &[u8] = b"\"metadata\":{\"resourceVersion\":\"";
        let start = buffer.len();
        self.write_as(api_version, buffer);
        // Only apiVersion and kind precede the metadata, and neither can contain a quote.
        let Some(at) = buffer[start..]
            .windows(FIELD.len())
            .position(|window| window == FIELD)
        else {
            return;
        };
        let from = start + at + FIELD.len();
        let digits = buffer[from..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        buffer.splice(from..from + digits, revision.to_string().into_bytes());
    }

    /// Whether the object is being deleted.
    #[inline]
    pub fn is_deleting(&self) -> bool {
        self.metadata.deletion_timestamp.is_some()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_sequenced_draft_has_its_revision_and_every_field() {
        let value = json!({"kind": "Pod", "apiVersion": "v1", "Zed": 1, "spec": {"a": [1, 2]},
            "metadata": {"name": "x", "resourceVersion": "3", "labels": {"a": "b"}, "uid": "u"}});
        let object = Draft::new(&value).unwrap().sequence(Key::new("n", "x"), 42);
        let mut expected = value;
        expected["metadata"]["resourceVersion"] = json!("42");
        assert_eq!(object.value(), expected);
        assert_eq!(object.metadata.labels.as_ref().unwrap()["a"], "b");
        let reread = Object::from_stored(object.key.clone(), 42, object.bytes.clone()).unwrap();
        assert_eq!(reread.api_version(), "v1");
        assert_eq!(reread.metadata, object.metadata);
    }

    #[test]
    fn another_served_version_changes_only_the_api_version() {
        let value = json!({"kind": "Sandbox", "apiVersion": "a.io/v1", "metadata": {"name": "x"}, "spec": {"apiVersion": "a.io/v1"}});
        let object = Draft::new(&value).unwrap().sequence(Key::new("", "x"), 1);
        let other: Value = serde_json::from_slice(&object.bytes_as("a.io/v1alpha1")).unwrap();
        assert_eq!(other["apiVersion"], "a.io/v1alpha1");
        assert_eq!(other["spec"]["apiVersion"], "a.io/v1");
    }

    #[test]
    fn a_value_without_valid_metadata_is_refused() {
        assert!(matches!(
            Draft::new(&json!([])),
            Err(DraftError::NotAnObject)
        ));
        let labels_of_numbers =
            json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": {"a": 1}}});
        assert!(matches!(
            Draft::new(&labels_of_numbers),
            Err(DraftError::Metadata(_))
        ));
    }
}
