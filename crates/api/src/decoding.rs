//! Decodes each object of a list separately, so that one that does not fit its Rust type does not make the others fail.
//!
//! The API server may hold objects that do not fit our types: a number beyond `i32` that the schema does not limit, a type that a
//! newer version of Kubernetes changed, an object that is older than its schema. A list that is decoded as a whole fails because
//! of a single such item. Then a tenant who can write one object could stop every client that lists its kind (denial of service).
//!
//! [`Decoded`] is decoded from its own part of the text. A readable object is decoded directly into its type, without further
//! cost. The following applies only to the others:
//!
//! - a time after the maximum of [`Timestamp`] is clamped to it (`9999-12-31T23:59:59Z` is a common value for "never");
//! - otherwise only the object's metadata and conditions are available, with a [`Problem`] that names the field.
//!
//! A `Problem` never contains text from the object, which may be a secret: only the field and the types.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::fmt::{self, Write};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use k8s_openapi::jiff::{Timestamp, civil};
use kube::Resource;
use serde::de::{DeserializeOwned, Deserializer, Error, MapAccess, Visitor};
use serde::forward_to_deserialize_any;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;

/// If more times than this must be clamped, the object counts as unreadable.
const MAX_CLAMPED: usize = 32;
/// The maximum length of a field path in a [`Problem`], in characters. Keys of maps may be long.
const MAX_FIELD: usize = 256;

/// An object that was decoded, or the readable parts of it.
///
/// # Assumptions
/// It is decoded by `serde_json` from text, as in `kube`.
#[derive(Clone, Debug)]
pub enum Decoded<K> {
    Readable(K),
    Unreadable(Box<Unreadable>),
}

/// The readable parts of an object that does not fit its type.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Unreadable {
    /// The metadata without managed fields.
    pub metadata: ObjectMeta,
    /// The readable conditions of its status.
    pub conditions: Vec<Condition>,
    pub problem: Problem,
}

/// Why an object cannot be decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct Problem {
    /// The path of the field, such as `spec.replicas`.
    pub field: String,
    /// The error. It contains no text from the object.
    pub reason: String,
}

impl<K> Decoded<K> {
    /// The object, or its readable parts.
    pub fn into_result(self) -> Result<K, Box<Unreadable>> {
        match self {
            Self::Readable(object) => Ok(object),
            Self::Unreadable(unreadable) => Err(unreadable),
        }
    }

    /// The object, if it was decoded.
    pub fn readable(&self) -> Option<&K> {
        match self {
            Self::Readable(object) => Some(object),
            Self::Unreadable(_) => None,
        }
    }

    /// Applies a function to the decoded object.
    pub fn map<T>(self, change: impl FnOnce(K) -> T) -> Decoded<T> {
        match self {
            Self::Readable(object) => Decoded::Readable(change(object)),
            Self::Unreadable(unreadable) => Decoded::Unreadable(unreadable),
        }
    }
}

impl<K: DeserializeOwned> Decoded<K> {
    /// Decodes the text of one object.
    pub fn from_json(text: &str) -> Self {
        match clamping(text) {
            Ok(object) => Self::Readable(object),
            Err(problem) => Self::Unreadable(Box::new(Unreadable::of(text, problem))),
        }
    }
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Decoded<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_of(deserializer).map(|text| Self::from_json(&text))
    }
}

/// The text of the next value.
pub fn text_of<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Cow<'de, str>, D::Error> {
    let buffered = Cell::new(None);
    let source = Source {
        inner: deserializer,
        buffered: &buffered,
    };
    match <&'de RawValue>::deserialize(source) {
        Ok(text) => Ok(Cow::Borrowed(text.get())),
        Err(error) => buffered.take().map(Cow::Owned).ok_or(error),
    }
}

/// A deserializer, or its visitor, that also accepts a value that was already read: serde buffers the object of a watch event
/// until the event's type is known.
struct Source<'a, T> {
    inner: T,
    /// The text of the buffered value.
    buffered: &'a Cell<Option<String>>,
}

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Source<'_, D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.inner.deserialize_any(visitor)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let visitor = Source {
            inner: visitor,
            buffered: self.buffered,
        };
        self.inner.deserialize_newtype_struct(name, visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct seq tuple
        tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Source<'_, V> {
    type Value = V::Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.expecting(formatter)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<V::Value, A::Error> {
        self.inner.visit_map(map)
    }

    fn visit_newtype_struct<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> Result<V::Value, D::Error> {
        let value = Value::deserialize(deserializer)?;
        self.buffered.set(Some(value.to_string()));
        Err(D::Error::custom("the value was read already"))
    }
}

/// An object that could not be decoded is serialized as its metadata.
impl<K: Serialize> Serialize for Decoded<K> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Metadata<'a> {
            metadata: &'a ObjectMeta,
        }
        match self {
            Self::Readable(object) => object.serialize(serializer),
            Self::Unreadable(unreadable) => Metadata {
                metadata: &unreadable.metadata,
            }
            .serialize(serializer),
        }
    }
}

impl<K: Resource> Resource for Decoded<K> {
    type DynamicType = K::DynamicType;
    type Scope = K::Scope;

    fn kind(kind: &K::DynamicType) -> Cow<'_, str> {
        K::kind(kind)
    }

    fn group(kind: &K::DynamicType) -> Cow<'_, str> {
        K::group(kind)
    }

    fn version(kind: &K::DynamicType) -> Cow<'_, str> {
        K::version(kind)
    }

    fn plural(kind: &K::DynamicType) -> Cow<'_, str> {
        K::plural(kind)
    }

    fn meta(&self) -> &ObjectMeta {
        match self {
            Self::Readable(object) => object.meta(),
            Self::Unreadable(unreadable) => &unreadable.metadata,
        }
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match self {
            Self::Readable(object) => object.meta_mut(),
            Self::Unreadable(unreadable) => &mut unreadable.metadata,
        }
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.metadata.name.as_deref().unwrap_or_default();
        write!(formatter, "{name:?} cannot be read: {}", self.problem)
    }
}

impl std::error::Error for Unreadable {}

impl Unreadable {
    fn of(text: &str, problem: Problem) -> Self {
        /// The parts that are decoded separately. Other members are skipped, whatever their depth.
        #[derive(Deserialize)]
        struct Parts<'a> {
            #[serde(borrow)]
            metadata: Option<&'a RawValue>,
            #[serde(borrow)]
            status: Option<&'a RawValue>,
        }
        #[derive(Deserialize)]
        struct Status<'a> {
            #[serde(borrow)]
            conditions: Option<Vec<&'a RawValue>>,
        }
        let parts: Option<Parts<'_>> = serde_json::from_str(text).ok();
        let (metadata, status) = parts.map_or((None, None), |parts| (parts.metadata, parts.status));
        let status: Option<Status<'_>> =
            status.and_then(|status| serde_json::from_str(status.get()).ok());
        let conditions = status.and_then(|status| status.conditions);
        let conditions = conditions.unwrap_or_default().into_iter();
        Self {
            metadata: metadata
                .map(|metadata| metadata_of(metadata.get()))
                .unwrap_or_default(),
            conditions: conditions
                .filter_map(|condition| clamping(condition.get()).ok())
                .collect(),
            problem,
        }
    }
}

/// The readable part of an object's metadata.
fn metadata_of(text: &str) -> ObjectMeta {
    if let Ok(metadata) = clamping::<ObjectMeta>(text) {
        return ObjectMeta {
            managed_fields: None,
            ..metadata
        };
    }
    // Decode each field separately: another one may be nested too deep or have another type.
    let fields: HashMap<String, &RawValue> = serde_json::from_str(text).unwrap_or_default();
    ObjectMeta {
        name: field(&fields, "name"),
        namespace: field(&fields, "namespace"),
        uid: field(&fields, "uid"),
        resource_version: field(&fields, "resourceVersion"),
        generation: field(&fields, "generation"),
        labels: field(&fields, "labels"),
        annotations: field(&fields, "annotations"),
        owner_references: field(&fields, "ownerReferences"),
        // That the object is being deleted matters more than the exact time.
        deletion_timestamp: field(&fields, "deletionTimestamp")
            .map(|text: String| Time(text.parse().unwrap_or(Timestamp::MAX))),
        ..ObjectMeta::default()
    }
}

fn field<T: DeserializeOwned>(fields: &HashMap<String, &RawValue>, name: &str) -> Option<T> {
    serde_json::from_str(fields.get(name)?.get()).ok()
}

/// Decodes a text. Times beyond the maximum are clamped.
fn clamping<K: DeserializeOwned>(text: &str) -> Result<K, Problem> {
    let error = match serde_json::from_str(text) {
        Ok(object) => return Ok(object),
        Err(error) => error,
    };
    let mut text = Cow::Borrowed(text);
    let mut error = error;
    for _ in 0..MAX_CLAMPED {
        let place = Place::of(&text, &error);
        let Some(clamped) = place.last_string(&text).and_then(clamped_time) else {
            return Err(place.problem(&error));
        };
        text.to_mut()
            .replace_range(place.last.clone(), &format!("\"{clamped}\""));
        match serde_json::from_str(&text) {
            Ok(object) => return Ok(object),
            Err(next) => error = next,
        }
    }
    Err(Place::of(&text, &error).problem(&error))
}

/// The maximum time, if the text is a later time.
fn clamped_time(text: &str) -> Option<Timestamp> {
    if text.parse::<Timestamp>().is_ok() {
        return None;
    }
    let local = if let Some(local) = text.strip_suffix(['Z', 'z']) {
        local
    } else {
        let (local, offset) = text.split_at_checked(text.len().checked_sub(6)?)?;
        offset.starts_with(['+', '-']).then_some(local)?
    };
    let local: civil::DateTime = local.parse().ok()?;
    (local.year() > 9_998).then(last_time)
}

/// The maximum time that can be written with whole seconds.
fn last_time() -> Timestamp {
    Timestamp::from_second(Timestamp::MAX.as_second()).unwrap_or(Timestamp::MAX)
}

/// Decodes a time and clamps a later one to the maximum, so that the object need not be decoded a second time.
pub(crate) fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Time>, D::Error> {
    let Some(text) = Option::<Cow<'de, str>>::deserialize(deserializer)? else {
        return Ok(None);
    };
    match text.parse() {
        Ok(moment) => Ok(Some(Time(moment))),
        Err(error) => clamped_time(&text)
            .map(|last| Some(Time(last)))
            .ok_or_else(|| D::Error::custom(error)),
    }
}

/// The position in a text where decoding failed.
///
/// The path is derived from the offset in the error. A deserializer that tracks the path would slow down every object, or need
/// every type to be compiled a second time.
struct Place {
    path: Vec<Step>,
    /// The range of the last value that was read.
    last: std::ops::Range<usize>,
}

#[derive(Clone, Debug)]
enum Step {
    Member(String),
    Item(usize),
}

impl Place {
    fn of(text: &str, error: &serde_json::Error) -> Self {
        let line = error.line().saturating_sub(1);
        let before = text.split_inclusive('\n').take(line).map(str::len);
        let offset = before.sum::<usize>() + error.column();
        walk(text.as_bytes(), offset.min(text.len()))
    }

    fn last_string<'a>(&self, text: &'a str) -> Option<&'a str> {
        let last = text.get(self.last.clone())?;
        let content = last.strip_prefix('"')?.strip_suffix('"')?;
        (!content.contains('\\')).then_some(content)
    }

    fn problem(&self, error: &serde_json::Error) -> Problem {
        let mut field = String::new();
        for step in &self.path {
            match step {
                Step::Item(index) => {
                    let _ = write!(field, "[{index}]");
                }
                Step::Member(name) => {
                    if !field.is_empty() {
                        field.push('.');
                    }
                    field.push_str(name);
                }
            }
        }
        if field.is_empty() {
            field.push('.');
        }
        if let Some((end, _)) = field.char_indices().nth(MAX_FIELD) {
            field.truncate(end);
            field.push('…');
        }
        Problem {
            field,
            reason: reason(error),
        }
    }
}

/// The error messages of serde that contain types but no text of the object. All others may quote the object.
const PLAIN: [&str; 8] = [
    "invalid type: ",
    "invalid value: ",
    "invalid length ",
    "missing field ",
    "duplicate field ",
    "unknown variant ",
    "number out of range",
    "recursion limit exceeded",
];

/// The error message without the position, which is useless without the text, and without text from the object.
fn reason(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let message = match message.rfind(" at line ") {
        Some(end) => &message[..end],
        None => &message,
    };
    if !PLAIN.iter().any(|plain| message.starts_with(plain)) {
        return "its text cannot be parsed".to_owned();
    }
    let quote = ["string \"", "character `", "unknown variant `"]
        .iter()
        .filter_map(|prefix| message.find(prefix).map(|at| at + prefix.len() - 2))
        .min();
    match (quote, message.rfind(", expected ")) {
        (Some(start), Some(end)) if start <= end => {
            format!("{}{}", &message[..start], &message[end..])
        }
        (Some(start), _) => message[..start].to_owned(),
        (None, _) => message.to_owned(),
    }
}

/// Walks through a text that is valid JSON up to an offset. Returns the path of the next value at that offset, or of the last one
/// that was read if none follows.
fn walk(text: &[u8], offset: usize) -> Place {
    /// An open object or array.
    enum Open {
        Object { member: Option<String> },
        Array { index: usize },
    }
    let mut open: Vec<(Open, usize)> = Vec::new();
    let (mut last, mut last_path) = (0..0, Vec::new());
    let path = |open: &[(Open, usize)]| -> Vec<Step> {
        open.iter()
            .filter_map(|(container, _)| match container {
                Open::Object { member } => member.clone().map(Step::Member),
                Open::Array { index } => Some(Step::Item(*index)),
            })
            .collect()
    };
    let mut at = 0;
    let mut value_is_next = true;
    while at < offset {
        let start = at;
        match text[at] {
            b'{' => {
                open.push((Open::Object { member: None }, start));
                value_is_next = false;
                at += 1;
                continue;
            }
            b'[' => {
                open.push((Open::Array { index: 0 }, start));
                value_is_next = true;
                at += 1;
                continue;
            }
            b'}' | b']' => {
                at += 1;
                let Some((_, start)) = open.pop() else { break };
                (last, last_path) = (start..at, path(&open));
            }
            b':' => {
                value_is_next = true;
                at += 1;
                continue;
            }
            b',' => {
                at += 1;
                match open.last_mut() {
                    Some((Open::Array { index }, _)) => {
                        *index += 1;
                        value_is_next = true;
                    }
                    Some((Open::Object { member }, _)) => *member = None,
                    None => {}
                }
                continue;
            }
            b'"' => {
                at = end_of_string(text, at);
                let is_name = !value_is_next;
                if let (true, Some((Open::Object { member }, _))) = (is_name, open.last_mut()) {
                    let name = std::str::from_utf8(&text[start..at]).unwrap_or("\"\"");
                    *member = Some(serde_json::from_str(name).unwrap_or_default());
                    continue;
                }
                (last, last_path) = (start..at, path(&open));
            }
            byte if byte.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            _ => {
                let rest = &text[at..];
                let ends = |byte: &u8| b",]}".contains(byte) || byte.is_ascii_whitespace();
                at += rest.iter().position(ends).unwrap_or(rest.len());
                (last, last_path) = (start..at, path(&open));
            }
        }
        value_is_next = false;
    }
    if value_is_next {
        last_path = path(&open);
        last = offset..offset;
    }
    Place {
        path: last_path,
        last,
    }
}

/// The end of the string that starts here.
fn end_of_string(text: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(&byte) = text.get(at) {
        match byte {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

#[cfg(test)]
#[path = "decoding_tests.rs"]
mod tests;
