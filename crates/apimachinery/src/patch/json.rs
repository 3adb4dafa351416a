//! JSON Patch (RFC 6902) with the extension of Kubernetes that negative array indices count from the end.
//!
//! The error texts are those of the library that kube-apiserver uses, because users see them. The number of operations, the bytes
//! that `copy` may add and the nesting depth are limited, so that a small patch cannot create a huge object.

use serde::Deserialize;
use serde_json::Value;

use crate::nesting::{MOST_LEVELS, measure};
use crate::status::Status;
use crate::strict;

/// kube-apiserver's limit for the operations of one patch.
pub const MAX_OPERATIONS: usize = 10_000;
/// kube-apiserver's limit for the total size that `copy` may add.
pub const MAX_COPIED_BYTES: usize = 3 * 1024 * 1024;
/// The limit for the values that the operations of one patch may visit or shift: each of ten thousand operations can move a large
/// subtree.
const MAX_VISITED_VALUES: usize = 20_000_000;
/// The number of list items whose shift costs as much as one visited value.
const SHIFTED_AT_ONCE: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("error decoding patch: {0}")]
    Malformed(#[source] serde_json::Error),
    #[error("The allowed maximum operations in a JSON patch is {MAX_OPERATIONS}, got {0}")]
    TooManyOperations(usize),
    #[error("{operation} operation does not apply: doc is missing path: {}: missing value", crate::go::quote(.path))]
    MissingPath {
        operation: &'static str,
        path: String,
    },
    #[error("{operation} operation does not apply: doc is missing key: {path}: missing value")]
    MissingKey {
        operation: &'static str,
        path: String,
    },
    #[error("Unable to access invalid index: {0}: invalid index referenced")]
    InvalidIndex(String),
    #[error("testing value {0} failed: test failed")]
    TestFailed(String),
    #[error("Unexpected kind: {0}")]
    UnknownOperation(String),
    #[error(
        "Unable to copy, accumulated size increase of copy exceeds the limit {MAX_COPIED_BYTES}"
    )]
    CopiesTooLarge,
    #[error("the operations of the patch visit more than {MAX_VISITED_VALUES} values")]
    TooMuchWork,
    #[error("{path}: an object cannot have more than {MOST_LEVELS} levels of maps and lists")]
    TooDeep { path: String },
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        match error {
            Error::Malformed(_) => Status::bad_request(error.to_string()),
            Error::TooManyOperations(_) => Status::request_entity_too_large(error),
            _ => Status::unprocessable(error.to_string()),
        }
    }
}

#[derive(Debug, Clone, Deserialize)]
struct Operation {
    op: String,
    path: String,
    #[serde(default)]
    from: String,
    #[serde(default)]
    value: Value,
}

/// A decoded patch that can be applied to any number of objects (a retried write applies it again).
#[derive(Debug, Clone)]
pub struct JsonPatch {
    operations: Vec<Operation>,
}

impl JsonPatch {
    pub fn from_value(patch: Value) -> Result<Self, Error> {
        let operations: Vec<Operation> = serde_json::from_value(patch).map_err(Error::Malformed)?;
        if operations.len() > MAX_OPERATIONS {
            return Err(Error::TooManyOperations(operations.len()));
        }
        Ok(Self { operations })
    }

    pub fn from_slice(patch: &[u8]) -> Result<Self, Error> {
        Self::from_value(strict::decode(patch).map_err(Error::Malformed)?.value)
    }

    /// Applies all operations. Returns the new object, or the error of the first operation that fails.
    pub fn apply(&self, object: &Value) -> Result<Value, Error> {
        let mut document = object.clone();
        let mut spent = Spent::default();
        for operation in &self.operations {
            run(&mut document, operation, &mut spent)?;
        }
        Ok(document)
    }
}

/// The cost of the operations so far.
#[derive(Default)]
struct Spent {
    copied_bytes: usize,
    visited_values: usize,
}

impl Spent {
    fn copy(&mut self, bytes: usize) -> Result<(), Error> {
        self.copied_bytes += bytes;
        if self.copied_bytes > MAX_COPIED_BYTES {
            return Err(Error::CopiesTooLarge);
        }
        Ok(())
    }

    fn visit(&mut self, values: usize) -> Result<(), Error> {
        self.visited_values += values;
        if self.visited_values > MAX_VISITED_VALUES {
            return Err(Error::TooMuchWork);
        }
        Ok(())
    }
}

fn run(document: &mut Value, operation: &Operation, spent: &mut Spent) -> Result<(), Error> {
    let path = operation.path.as_str();
    match operation.op.as_str() {
        "add" => add(document, path, operation.value.clone(), "add", spent),
        "remove" => remove(document, path, "remove", spent).map(drop),
        "replace" => replace(document, path, operation.value.clone(), spent),
        "move" => {
            let value = remove(document, &operation.from, "move", spent)?;
            add(document, path, value, "move", spent)
        }
        "copy" => {
            let value = find(document, &operation.from, "copy")?.clone();
            spent.copy(value.to_string().len())?;
            add(document, path, value, "copy", spent)
        }
        "test" => test(document, path, &operation.value),
        other => Err(Error::UnknownOperation(other.to_owned())),
    }
}

/// Splits a pointer into the pointer to its parent and its last, unescaped token.
fn split(path: &str) -> Option<(&str, String)> {
    let (parent, last) = path.rsplit_once('/')?;
    (path.starts_with('/')).then(|| (parent, unescape(last)))
}

fn unescape(token: &str) -> String {
    if token.contains('~') {
        token.replace("~1", "/").replace("~0", "~")
    } else {
        token.to_owned()
    }
}

/// An index into an array of `length` items. Negative indices count from the end.
fn index(token: &str, length: usize) -> Result<usize, Error> {
    let invalid = || Error::InvalidIndex(token.to_owned());
    let number: i64 = token.parse().map_err(|_| invalid())?;
    let length = i64::try_from(length).map_err(|_| invalid())?;
    let position = if number < 0 { number + length } else { number };
    if position < 0 || position >= length {
        return Err(invalid());
    }
    usize::try_from(position).map_err(|_| invalid())
}

fn step<'a>(value: &'a mut Value, token: &str) -> Option<&'a mut Value> {
    match value {
        Value::Object(members) => members.get_mut(token),
        Value::Array(items) => {
            let position = index(token, items.len()).ok()?;
            items.get_mut(position)
        }
        _ => None,
    }
}

fn container<'a>(
    document: &'a mut Value,
    path: &str,
    operation: &'static str,
) -> Result<(&'a mut Value, String), Error> {
    let missing = || Error::MissingPath {
        operation,
        path: path.to_owned(),
    };
    let (parent, last) = split(path).ok_or_else(missing)?;
    let mut current = document;
    for token in parent.split('/').skip(1) {
        current = step(current, &unescape(token)).ok_or_else(missing)?;
    }
    if current.is_object() || current.is_array() {
        Ok((current, last))
    } else {
        Err(missing())
    }
}

fn find<'a>(
    document: &'a mut Value,
    path: &str,
    operation: &'static str,
) -> Result<&'a Value, Error> {
    if path.is_empty() {
        return Ok(document);
    }
    let (parent, last) = container(document, path, operation)?;
    step(parent, &last)
        .map(|value| &*value)
        .ok_or_else(|| Error::MissingKey {
            operation,
            path: path.to_owned(),
        })
}

fn add(
    document: &mut Value,
    path: &str,
    value: Value,
    operation: &'static str,
    spent: &mut Spent,
) -> Result<(), Error> {
    check_levels(path, &value, spent)?;
    if path.is_empty() {
        *document = value;
        return Ok(());
    }
    let (parent, last) = container(document, path, operation)?;
    match parent {
        Value::Array(items) if last == "-" => items.push(value),
        Value::Array(items) => {
            // An index equal to the length inserts at the end, and so does -1.
            let position = index(&last, items.len() + 1)?;
            spent.visit((items.len() - position) / SHIFTED_AT_ONCE)?;
            items.insert(position, value);
        }
        Value::Object(members) => {
            members.insert(last, value);
        }
        _ => {}
    }
    Ok(())
}

fn remove(
    document: &mut Value,
    path: &str,
    operation: &'static str,
    spent: &mut Spent,
) -> Result<Value, Error> {
    let missing = || Error::MissingKey {
        operation,
        path: path.to_owned(),
    };
    let (parent, last) = container(document, path, operation)?;
    match parent {
        Value::Array(items) => {
            let position = index(&last, items.len())?;
            spent.visit((items.len() - position) / SHIFTED_AT_ONCE)?;
            Ok(items.remove(position))
        }
        Value::Object(members) => members.remove(&last).ok_or_else(missing),
        _ => Err(missing()),
    }
}

/// Refuses a value that would make the document too deep: `copy` and `move` could double the depth with each operation.
fn check_levels(path: &str, value: &Value, spent: &mut Spent) -> Result<(), Error> {
    let (levels, values) = measure(value);
    spent.visit(values)?;
    if path.matches('/').count() + levels > MOST_LEVELS {
        let path = path.to_owned();
        return Err(Error::TooDeep { path });
    }
    Ok(())
}

fn replace(document: &mut Value, path: &str, value: Value, spent: &mut Spent) -> Result<(), Error> {
    check_levels(path, &value, spent)?;
    if path.is_empty() {
        *document = value;
        return Ok(());
    }
    let (parent, last) = container(document, path, "replace")?;
    let slot = step(parent, &last).ok_or_else(|| Error::MissingKey {
        operation: "replace",
        path: path.to_owned(),
    })?;
    *slot = value;
    Ok(())
}

fn test(document: &mut Value, path: &str, expected: &Value) -> Result<(), Error> {
    let actual = match find(document, path, "test") {
        Ok(value) => value,
        // A missing field equals null, as in the Go library.
        Err(Error::MissingKey { .. }) => &Value::Null,
        Err(error) => return Err(error),
    };
    if equal(actual, expected) {
        Ok(())
    } else {
        Err(Error::TestFailed(path.to_owned()))
    }
}

/// Equality of JSON values, where 1 and 1.0 are the same number.
fn equal(left: &Value, right: &Value) -> bool {
    match (left, right) {
        (Value::Number(left), Value::Number(right)) => {
            left == right || left.as_f64() == right.as_f64()
        }
        (Value::Array(left), Value::Array(right)) => {
            left.len() == right.len() && left.iter().zip(right).all(|(l, r)| equal(l, r))
        }
        (Value::Object(left), Value::Object(right)) => {
            left.len() == right.len()
                && left
                    .iter()
                    .all(|(key, l)| right.get(key).is_some_and(|r| equal(l, r)))
        }
        _ => left == right,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_patch_cannot_move_a_large_subtree_thousands_of_times() {
        let object = json!({"a": vec![0; 50_000]});
        let back_and_forth = [
            json!({"op": "move", "from": "/a", "path": "/b"}),
            json!({"op": "move", "from": "/b", "path": "/a"}),
        ];
        let patch: Vec<Value> = back_and_forth.into_iter().cycle().take(10_000).collect();
        let patch = JsonPatch::from_value(Value::Array(patch)).unwrap();
        assert!(matches!(patch.apply(&object), Err(Error::TooMuchWork)));
    }

    fn patched(object: &Value, patch: Value) -> Result<Value, String> {
        JsonPatch::from_value(patch)
            .and_then(|patch| patch.apply(object))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn a_patch_cannot_nest_without_end() {
        let mut operations = vec![json!({"op": "add", "path": "/z", "value": {"a": {}}})];
        let mut deepest = "/z/a".to_owned();
        for _ in 0..7 {
            operations.push(json!({"op": "copy", "from": "/z", "path": format!("{deepest}/a")}));
            deepest = format!("{deepest}/a{}", deepest.trim_start_matches("/z"));
        }
        let error = patched(&json!({}), Value::Array(operations)).unwrap_err();
        assert!(
            error.contains("cannot have more than 120 levels"),
            "{error}"
        );
    }

    #[test]
    fn operations_follow_rfc_6902() {
        let object = json!({"a": {"b": [1, 2, 3]}, "x~y/z": 1});
        let cases = [
            (
                json!([{"op": "add", "path": "/a/c", "value": 1}]),
                json!({"a": {"b": [1, 2, 3], "c": 1}, "x~y/z": 1}),
            ),
            (
                json!([{"op": "add", "path": "/a/b/-", "value": 4}]),
                json!({"a": {"b": [1, 2, 3, 4]}, "x~y/z": 1}),
            ),
            (
                json!([{"op": "add", "path": "/a/b/0", "value": 0}]),
                json!({"a": {"b": [0, 1, 2, 3]}, "x~y/z": 1}),
            ),
            (
                json!([{"op": "remove", "path": "/a/b/-1"}]),
                json!({"a": {"b": [1, 2]}, "x~y/z": 1}),
            ),
            (
                json!([{"op": "remove", "path": "/x~0y~1z"}]),
                json!({"a": {"b": [1, 2, 3]}}),
            ),
            (
                json!([{"op": "replace", "path": "/a/b/1", "value": 9}]),
                json!({"a": {"b": [1, 9, 3]}, "x~y/z": 1}),
            ),
            (
                json!([{"op": "move", "from": "/a/b", "path": "/b"}]),
                json!({"a": {}, "b": [1, 2, 3], "x~y/z": 1}),
            ),
            (
                json!([{"op": "copy", "from": "/a/b/0", "path": "/c"}]),
                json!({"a": {"b": [1, 2, 3]}, "c": 1, "x~y/z": 1}),
            ),
            (
                json!([{"op": "test", "path": "/a/b/0", "value": 1.0}, {"op": "replace", "path": "", "value": 7}]),
                json!(7),
            ),
        ];
        for (patch, expected) in cases {
            assert_eq!(
                patched(&object, patch.clone()).unwrap(),
                expected,
                "{patch}"
            );
        }
    }

    #[test]
    fn failed_patches_return_the_reason() {
        let object = json!({"a": [1]});
        let cases = [
            (
                json!([{"op": "remove", "path": "/b"}]),
                "remove operation does not apply: doc is missing key: /b: missing value",
            ),
            (
                json!([{"op": "add", "path": "/b/c", "value": 1}]),
                "add operation does not apply: doc is missing path: \"/b/c\": missing value",
            ),
            (
                json!([{"op": "test", "path": "/a", "value": 2}]),
                "testing value /a failed: test failed",
            ),
            (
                json!([{"op": "replace", "path": "/z", "value": 2}]),
                "replace operation does not apply: doc is missing key: /z: missing value",
            ),
            (
                json!([{"op": "add", "path": "/a/7", "value": 2}]),
                "Unable to access invalid index: 7: invalid index referenced",
            ),
            (
                json!([{"op": "jump", "path": "/a"}]),
                "Unexpected kind: jump",
            ),
        ];
        for (patch, expected) in cases {
            assert_eq!(patched(&object, patch).unwrap_err(), expected);
        }
    }

    #[test]
    fn copies_cannot_grow_an_object_without_bound() {
        let object = json!({"a": "x".repeat(1024 * 1024)});
        let operations: Vec<Value> = (0..10)
            .map(|i| json!({"op": "copy", "from": "/a", "path": format!("/b{i}")}))
            .collect();
        assert!(
            patched(&object, Value::Array(operations))
                .unwrap_err()
                .contains("exceeds the limit")
        );
        let many = vec![json!({"op": "test", "path": "/a", "value": 1}); MAX_OPERATIONS + 1];
        let error = JsonPatch::from_value(Value::Array(many)).unwrap_err();
        assert_eq!(Status::from(error).code, 413);
    }
}
