//! Strategic merge patch: a merge patch that uses type information to merge lists by key.
//!
//! Directives: `$patch: replace|delete|merge` in an object or list item, `$retainKeys` beside the fields it lists,
//! `$deleteFromPrimitiveList/<list>` and `$setElementOrder/<list>` beside a list. Custom resources do not support this kind of
//! patch; the caller answers 415 for them.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use crate::go;
use crate::status::Status;
use crate::types::{PatchList, TypeRef};

const PATCH: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const DELETE_FROM_LIST: &str = "$deleteFromPrimitiveList/";
const SET_ORDER: &str = "$setElementOrder/";

/// Why a patch cannot be applied. The messages are those of kube-apiserver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("invalid JSON document")]
    NotAnObject,
    #[error("map: {map} does not contain declared merge key: {key}")]
    NoMergeKey { map: String, key: &'static str },
    #[error("expected a {expected}, but received a {actual}")]
    WrongType {
        expected: &'static str,
        actual: &'static str,
    },
    #[error("unknown patch type: {directive} in map: {map}")]
    UnknownDirective { directive: String, map: String },
    #[error("merging lists cannot yet be specified in the patch")]
    MergeInList,
    #[error("invalid patch format of retainKeys")]
    RetainKeys,
    #[error("The order in patch list:\n{patch}\n doesn't match $setElementOrder list:\n{order}\n")]
    OrderMismatch { patch: String, order: String },
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        match error {
            Error::NotAnObject => Status::bad_request(error.to_string()),
            _ => Status::unprocessable(error.to_string()),
        }
    }
}

/// Returns the patched object.
pub fn apply(object: &Value, patch: &Value, types: TypeRef<'_>) -> Result<Value, Error> {
    match (object, patch) {
        (Value::Object(object), Value::Object(patch)) => {
            merge_objects(object.clone(), patch.clone(), types).map(Value::Object)
        }
        _ => Err(Error::NotAnObject),
    }
}

fn describe(members: &Map<String, Value>) -> String {
    go::syntax(&Value::Object(members.clone()))
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "nil",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "[]interface {}",
        Value::Object(_) => "map[string]interface {}",
    }
}

fn as_list(value: Value) -> Result<Vec<Value>, Error> {
    match value {
        Value::Array(items) => Ok(items),
        other => Err(Error::WrongType {
            expected: "[]interface {}",
            actual: type_name(&other),
        }),
    }
}

fn merge_objects(
    mut original: Map<String, Value>,
    mut patch: Map<String, Value>,
    types: TypeRef<'_>,
) -> Result<Map<String, Value>, Error> {
    if let Some(directive) = patch.get(PATCH) {
        return match directive.as_str() {
            Some("replace") => {
                patch.remove(PATCH);
                Ok(patch)
            }
            Some("delete") => Ok(Map::new()),
            // Merging is the default.
            Some("merge") => {
                patch.remove(PATCH);
                merge_objects(original, patch, types)
            }
            _ => Err(Error::UnknownDirective {
                directive: directive.to_string(),
                map: describe(&patch),
            }),
        };
    }
    retain_keys(&mut original, &mut patch)?;
    merge_ordered_lists(&mut original, &mut patch, types)?;
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix(DELETE_FROM_LIST) {
            delete_from_list(&mut original, list, value)?;
            continue;
        }
        merge_member(&mut original, key, value, types)?;
    }
    Ok(original)
}

fn merge_member(
    original: &mut Map<String, Value>,
    key: String,
    value: Value,
    types: TypeRef<'_>,
) -> Result<(), Error> {
    let member = types.member(&key);
    let before = original.remove(&key);
    let after = match (before, value) {
        (_, Value::Null) => None,
        (Some(Value::Object(before)), Value::Object(patch)) => {
            Some(Value::Object(merge_objects(before, patch, member)?))
        }
        (Some(Value::Array(before)), Value::Array(patch)) => {
            Some(Value::Array(merge_lists(before, patch, member)?))
        }
        (_, value) => without_directives(value),
    };
    if let Some(after) = after {
        original.insert(key, after);
    }
    Ok(())
}

/// Removes nulls and directives from a value that is added as a whole, because there is nothing they could act on.
fn without_directives(value: Value) -> Option<Value> {
    match value {
        Value::Object(members) if members.contains_key(PATCH) => None,
        Value::Object(members) => Some(Value::Object(
            members
                .into_iter()
                .filter(|(key, value)| {
                    !value.is_null()
                        && !key.starts_with(SET_ORDER)
                        && !key.starts_with(DELETE_FROM_LIST)
                        && key != RETAIN_KEYS
                })
                .filter_map(|(key, value)| without_directives(value).map(|value| (key, value)))
                .collect(),
        )),
        Value::Array(items) => Some(Value::Array(
            items.into_iter().filter_map(without_directives).collect(),
        )),
        other => Some(other),
    }
}

/// `$retainKeys`: removes the fields of the original that are not listed. The patch may set only listed fields.
fn retain_keys(
    original: &mut Map<String, Value>,
    patch: &mut Map<String, Value>,
) -> Result<(), Error> {
    let Some(directive) = patch.remove(RETAIN_KEYS) else {
        return Ok(());
    };
    let Value::Array(listed) = directive else {
        return Err(Error::RetainKeys);
    };
    let listed: HashSet<&str> = listed.iter().filter_map(Value::as_str).collect();
    let stray = patch.iter().any(|(key, value)| {
        !value.is_null()
            && !key.starts_with(DELETE_FROM_LIST)
            && !key.starts_with(SET_ORDER)
            && !listed.contains(key.as_str())
    });
    if stray {
        return Err(Error::RetainKeys);
    }
    original.retain(|key, _| listed.contains(key.as_str()));
    Ok(())
}

fn delete_from_list(
    original: &mut Map<String, Value>,
    list: &str,
    unwanted: Value,
) -> Result<(), Error> {
    let unwanted: HashSet<String> = as_list(unwanted)?.iter().map(ToString::to_string).collect();
    if let Some(Value::Array(items)) = original.get_mut(list) {
        items.retain(|item| !unwanted.contains(&item.to_string()));
    }
    Ok(())
}

/// The identity of an item: the value of its merge key, or the item itself if it is a scalar.
fn identity(item: &Value, key: Option<&'static str>) -> Result<String, Error> {
    let Some(key) = key else {
        return Ok(item.to_string());
    };
    match item {
        Value::Object(members) => match members.get(key) {
            Some(value) => Ok(value.to_string()),
            None => Err(Error::NoMergeKey {
                map: describe(members),
                key,
            }),
        },
        other => Err(Error::WrongType {
            expected: "map[string]interface {}",
            actual: type_name(other),
        }),
    }
}

fn identities(items: &[Value], key: Option<&'static str>) -> Result<Vec<String>, Error> {
    items.iter().map(|item| identity(item, key)).collect()
}

fn merge_lists(
    original: Vec<Value>,
    patch: Vec<Value>,
    types: TypeRef<'_>,
) -> Result<Vec<Value>, Error> {
    let key = match types.patch_list() {
        PatchList::Replace => {
            return Ok(patch.into_iter().filter_map(without_directives).collect());
        }
        PatchList::MergeScalars => return merge_scalars(original, patch),
        PatchList::MergeBy(key) => key,
    };
    let (original, patch) = list_directives(original, patch, key)?;
    let server = identities(&original, Some(key))?;
    let wanted = identities(&patch, Some(key))?;
    let mut index: HashMap<String, usize> = HashMap::new();
    for (position, identity) in server.iter().enumerate() {
        index.entry(identity.clone()).or_insert(position);
    }
    let mut merged: Vec<Value> = original;
    for (item, identity) in patch.into_iter().zip(&wanted) {
        match (index.get(identity), item) {
            (Some(position), Value::Object(change)) => {
                if let Value::Object(before) = std::mem::take(&mut merged[*position]) {
                    merged[*position] = Value::Object(merge_objects(before, change, types.item())?);
                }
            }
            (_, item) => {
                if let Some(item) = without_directives(item) {
                    index.insert(identity.clone(), merged.len());
                    merged.push(item);
                }
            }
        }
    }
    in_order(merged, &wanted, &server, Some(key))
}

fn merge_scalars(original: Vec<Value>, patch: Vec<Value>) -> Result<Vec<Value>, Error> {
    let server = identities(&original, None)?;
    let wanted = identities(&patch, None)?;
    let mut seen = HashSet::new();
    let both = original.into_iter().chain(patch);
    let merged = both.filter(|item| seen.insert(item.to_string())).collect();
    in_order(merged, &wanted, &server, None)
}

/// Processes `$patch` in list items: which items to delete, and whether the whole list is replaced.
fn list_directives(
    mut original: Vec<Value>,
    patch: Vec<Value>,
    key: &'static str,
) -> Result<(Vec<Value>, Vec<Value>), Error> {
    let mut plain = Vec::with_capacity(patch.len());
    let mut unwanted = HashSet::new();
    let mut replace = false;
    for item in patch {
        let directive = item.get(PATCH).cloned();
        match directive.as_ref().map(Value::as_str) {
            None => plain.push(item),
            Some(Some("delete")) => {
                unwanted.insert(identity(&item, Some(key))?);
            }
            Some(Some("replace")) => replace = true,
            Some(Some("merge")) => return Err(Error::MergeInList),
            Some(_) => {
                let map = item.as_object().map(describe).unwrap_or_default();
                let directive = directive
                    .map(|directive| directive.to_string())
                    .unwrap_or_default();
                return Err(Error::UnknownDirective { directive, map });
            }
        }
    }
    if replace {
        return Ok((plain, Vec::new()));
    }
    if !unwanted.is_empty() {
        original.retain(|item| {
            identity(item, Some(key)).map_or(true, |found| !unwanted.contains(&found))
        });
    }
    Ok((original, plain))
}

/// Orders a merged list: items of the patch in the order of the patch, the other items among them at their place on the server.
fn in_order(
    merged: Vec<Value>,
    patch_order: &[String],
    server_order: &[String],
    key: Option<&'static str>,
) -> Result<Vec<Value>, Error> {
    let positions = |order: &[String]| -> HashMap<String, usize> {
        order
            .iter()
            .enumerate()
            .map(|(position, identity)| (identity.clone(), position))
            .collect()
    };
    let (in_patch, on_server) = (positions(patch_order), positions(server_order));
    let mut patched: Vec<(usize, Option<usize>, Value)> = Vec::new();
    let mut server_only: Vec<(usize, Value)> = Vec::new();
    for item in merged {
        let identity = identity(&item, key)?;
        let server = on_server.get(&identity).copied();
        match in_patch.get(&identity) {
            Some(position) => patched.push((*position, server, item)),
            None => server_only.push((server.unwrap_or(usize::MAX), item)),
        }
    }
    patched.sort_by_key(|(position, _, _)| *position);
    server_only.sort_by_key(|(position, _)| *position);
    let mut ordered = Vec::with_capacity(patched.len() + server_only.len());
    let mut server_only = server_only.into_iter().peekable();
    for (_, server, item) in patched {
        while let Some((position, other)) =
            server_only.next_if(|(position, _)| server.is_some_and(|server| *position < server))
        {
            debug_assert!(position < usize::MAX);
            ordered.push(other);
        }
        ordered.push(item);
    }
    ordered.extend(server_only.map(|(_, item)| item));
    Ok(ordered)
}

/// `$setElementOrder/<list>`: merges the list and then sorts it in the given order.
fn merge_ordered_lists(
    original: &mut Map<String, Value>,
    patch: &mut Map<String, Value>,
    types: TypeRef<'_>,
) -> Result<(), Error> {
    let directives: Vec<String> = patch
        .keys()
        .filter(|key| key.starts_with(SET_ORDER))
        .cloned()
        .collect();
    for directive in directives {
        let list = directive[SET_ORDER.len()..].to_owned();
        let Some(order) = patch.remove(&directive) else {
            continue;
        };
        let order = as_list(order)?;
        let member = types.member(&list);
        let key = match member.patch_list() {
            PatchList::MergeBy(key) => Some(key),
            _ => None,
        };
        let changes = patch.remove(&list).map(as_list).transpose()?;
        let order_identities = identities(&order, key)?;
        if let Some(changes) = &changes {
            check_order(changes, &order, &order_identities, key)?;
        }
        let before = original.remove(&list).map(as_list).transpose()?;
        let server = identities(before.as_deref().unwrap_or_default(), key)?;
        let merged = match (before, changes) {
            (None, None) => continue,
            (Some(before), None) => before,
            (None, Some(changes)) => changes.into_iter().filter_map(without_directives).collect(),
            (Some(before), Some(changes)) => merge_lists(before, changes, member)?,
        };
        original.insert(
            list,
            Value::Array(in_order(merged, &order_identities, &server, key)?),
        );
    }
    Ok(())
}

/// Checks that the items of a patch list appear in the order of the `$setElementOrder` list.
fn check_order(
    changes: &[Value],
    order: &[Value],
    order_identities: &[String],
    key: Option<&'static str>,
) -> Result<(), Error> {
    if changes.is_empty() || order.is_empty() {
        return Ok(());
    }
    let mut remaining = order_identities.iter();
    for item in changes.iter().filter(|item| item.get(PATCH).is_none()) {
        let wanted = identity(item, key)?;
        if !remaining.any(|identity| *identity == wanted) {
            return Err(Error::OrderMismatch {
                patch: Value::Array(changes.to_vec()).to_string(),
                order: Value::Array(order.to_vec()).to_string(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn patched(spec: &Value, patch: &Value) -> Result<Value, String> {
        let types = TypeRef::builtin("v1", "Pod").unwrap();
        let result = apply(&json!({"spec": spec}), &json!({"spec": patch}), types);
        result
            .map(|object| object["spec"].clone())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn lists_merge_by_key_and_keep_what_the_patch_does_not_name() {
        let spec = json!({"containers": [{"name": "a", "image": "1", "tty": true}, {"name": "b", "image": "1"}], "hostname": "h"});
        let cases = [
            (
                json!({"containers": [{"name": "b", "image": "2"}]}),
                json!([{"name": "a", "image": "1", "tty": true}, {"name": "b", "image": "2"}]),
            ),
            (
                json!({"containers": [{"name": "c", "image": "3"}]}),
                json!([{"name": "c", "image": "3"}, {"name": "a", "image": "1", "tty": true}, {"name": "b", "image": "1"}]),
            ),
            (
                json!({"containers": [{"name": "a", "tty": null}]}),
                json!([{"name": "a", "image": "1"}, {"name": "b", "image": "1"}]),
            ),
            (
                json!({"containers": [{"name": "a", "$patch": "delete"}]}),
                json!([{"name": "b", "image": "1"}]),
            ),
            (
                json!({"containers": [{"$patch": "replace"}, {"name": "z"}]}),
                json!([{"name": "z"}]),
            ),
            (
                json!({"containers": [{"name": "a", "image": "2"}], "$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]}),
                json!([{"name": "b", "image": "1"}, {"name": "a", "image": "2", "tty": true}]),
            ),
        ];
        for (patch, expected) in cases {
            assert_eq!(
                patched(&spec, &patch).unwrap()["containers"],
                expected,
                "{patch}"
            );
        }
        assert_eq!(
            patched(&spec, &json!({"hostname": null}))
                .unwrap()
                .get("hostname"),
            None
        );
    }

    #[test]
    fn scalars_merge_as_sets_and_can_be_deleted() {
        let types = TypeRef::builtin("v1", "Pod").unwrap();
        let object = json!({"metadata": {"finalizers": ["a", "b"]}});
        let result = apply(
            &object,
            &json!({"metadata": {"finalizers": ["c", "a"]}}),
            types,
        )
        .unwrap();
        assert_eq!(result["metadata"]["finalizers"], json!(["c", "a", "b"]));
        let result = apply(
            &object,
            &json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["a"]}}),
            types,
        )
        .unwrap();
        assert_eq!(result["metadata"]["finalizers"], json!(["b"]));
    }

    #[test]
    fn lists_without_a_strategy_are_replaced() {
        let spec = json!({"containers": [{"name": "a", "args": ["1", "2"]}], "tolerations": [{"key": "x"}]});
        let patch =
            json!({"containers": [{"name": "a", "args": ["3"]}], "tolerations": [{"key": "y"}]});
        assert_eq!(patched(&spec, &patch).unwrap(), patch);
    }

    #[test]
    fn retained_keys_drop_the_others() {
        let spec = json!({"volumes": [{"name": "v", "emptyDir": {}}]});
        let patch = json!({"volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/x"}}]});
        assert_eq!(
            patched(&spec, &patch).unwrap()["volumes"],
            json!([{"name": "v", "hostPath": {"path": "/x"}}])
        );
        let bad = json!({"volumes": [{"name": "v", "$retainKeys": ["name"], "hostPath": {}}]});
        assert_eq!(
            patched(&spec, &bad).unwrap_err(),
            "invalid patch format of retainKeys"
        );
    }

    #[test]
    fn objects_can_be_replaced_and_deleted() {
        let spec =
            json!({"securityContext": {"runAsUser": 1, "fsGroup": 2}, "nodeSelector": {"a": "b"}});
        let patch = json!({"securityContext": {"$patch": "replace", "runAsUser": 5}, "nodeSelector": {"c": "d"}});
        assert_eq!(
            patched(&spec, &patch).unwrap(),
            json!({"securityContext": {"runAsUser": 5}, "nodeSelector": {"a": "b", "c": "d"}})
        );
        assert_eq!(
            patched(&spec, &json!({"securityContext": {"$patch": "delete"}})).unwrap()["securityContext"],
            json!({})
        );
    }

    #[test]
    fn invalid_patches_get_the_message_of_kube_apiserver() {
        let spec = json!({"containers": [{"name": "a"}]});
        let cases = [
            (
                json!({"containers": [{"image": "x"}]}),
                "map: map[string]interface {}{\"image\":\"x\"} does not contain declared merge key: name",
            ),
            (
                json!({"containers": [{"name": "a", "$patch": "frob"}]}),
                "unknown patch type: \"frob\" in map: map[string]interface {}{\"$patch\":\"frob\", \"name\":\"a\"}",
            ),
            (
                json!({"containers": [{"name": "a", "$patch": "merge"}]}),
                "merging lists cannot yet be specified in the patch",
            ),
            (
                json!({"containers": [3]}),
                "expected a map[string]interface {}, but received a number",
            ),
            (
                json!({"$setElementOrder/containers": 1}),
                "expected a []interface {}, but received a number",
            ),
        ];
        for (patch, expected) in cases {
            assert_eq!(patched(&spec, &patch).unwrap_err(), expected);
        }
        let mismatch = json!({"containers": [{"name": "b"}, {"name": "a"}], "$setElementOrder/containers": [{"name": "a"}, {"name": "b"}]});
        assert!(
            patched(&spec, &mismatch)
                .unwrap_err()
                .starts_with("The order in patch list:")
        );
        assert_eq!(
            apply(&json!({}), &json!([]), TypeRef::unknown()),
            Err(Error::NotAnObject)
        );
    }
}
