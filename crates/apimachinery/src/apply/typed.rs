//! Typed objects: which fields an object sets, how two objects differ, and how one is merged into another.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value};

use super::field_set::{self, FieldSet};
use crate::types::{ListKind, TypeRef};

/// The difference between two versions of an object.
#[derive(Debug, Default)]
pub(super) struct Comparison {
    pub added: FieldSet,
    pub modified: FieldSet,
    pub removed: FieldSet,
}

impl Comparison {
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.modified.is_empty() && self.removed.is_empty()
    }

    /// The fields that the change sets: those added and modified.
    pub fn set(&self) -> FieldSet {
        let mut set = self.added.clone();
        set.extend(&self.modified);
        set
    }

    /// The fields that the change sets, and those that it removes.
    pub fn into_parts(self) -> (FieldSet, FieldSet) {
        let mut set = self.added;
        set.merge(self.modified);
        (set, self.removed)
    }

    pub fn ignore(&mut self, path: &[&str]) {
        self.added.remove_prefix(path);
        self.modified.remove_prefix(path);
        self.removed.remove_prefix(path);
    }
}

/// The path element of an item of a granular list, or the problem with the item.
pub(super) fn item_element(item: &Value, types: TypeRef<'_>) -> Result<String, String> {
    match types.list() {
        ListKind::Set => Ok(field_set::value(item)),
        ListKind::Map(keys) => {
            let item_type = types.item();
            let defaults: Vec<(&str, Value)> = keys
                .iter()
                .filter(|key| item.get(*key).is_none_or(Value::is_null))
                .filter_map(|key| item_type.member_default(key).map(|default| (key, default)))
                .collect();
            let mut found: Vec<(&str, &Value)> = Vec::new();
            for key in keys.iter() {
                let present = item.get(key).filter(|value| !value.is_null());
                let default = || {
                    defaults
                        .iter()
                        .find(|(name, _)| *name == key)
                        .map(|(_, value)| value)
                };
                if let Some(value) = present.or_else(default) {
                    found.push((key, value));
                }
            }
            if !item.is_object() || found.is_empty() {
                let name = keys.iter().next().unwrap_or_default();
                return Err(format!(
                    "associative list with keys has an element that omits key field {} (and doesn't have default value)",
                    crate::go::quote(name)
                ));
            }
            found.sort_unstable_by_key(|(name, _)| *name);
            Ok(field_set::keys(&found))
        }
        ListKind::Atomic => Err("atomic lists have no elements".to_owned()),
    }
}

/// The path element of an item of a stored object. An item without keys is identified by its position.
fn stored_element(item: &Value, position: usize, types: TypeRef<'_>) -> String {
    item_element(item, types).unwrap_or_else(|_| format!("i:{position}"))
}

/// Reports the problems of an applied object: unknown fields, and list items with missing or duplicate keys.
pub(super) fn check(value: &Value, types: TypeRef<'_>, path: &str, errors: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let at = format!("{path}.{name}");
                if types.is_closed() && !types.is_named_field(name) {
                    errors.push(format!("{at}: field not declared in schema"));
                } else {
                    check(member, types.member(name), &at, errors);
                }
            }
        }
        Value::Array(items) => {
            let mut seen = HashSet::new();
            for (position, item) in items.iter().enumerate() {
                if types.list() == ListKind::Atomic {
                    check(item, types.item(), &format!("{path}[{position}]"), errors);
                    continue;
                }
                match item_element(item, types) {
                    Ok(element) => {
                        check(item, types.item(), &format!("{path}[{position}]"), errors);
                        if !seen.insert(element.clone()) {
                            let mut set = FieldSet::default();
                            set.insert(element);
                            errors.push(format!(
                                "{path}: duplicate entries for key {}",
                                set.paths().concat()
                            ));
                        }
                    }
                    Err(problem) => errors.push(format!("{path}: element {position}: {problem}")),
                }
            }
        }
        _ => {}
    }
}

/// The fields that an object sets.
pub(super) fn fields_of(value: &Value, types: TypeRef<'_>) -> FieldSet {
    let mut set = FieldSet::default();
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let member_type = types.member(name);
                let leaf = is_leaf(member, member_type);
                let is_empty_map = member.as_object().is_some_and(Map::is_empty);
                let below = if leaf {
                    FieldSet::default()
                } else {
                    fields_of(member, member_type)
                };
                let owned = leaf || is_empty_map || !types.is_named_field(name);
                set.put(field_set::field(name), owned, below);
            }
        }
        Value::Array(items) => {
            for (position, item) in items.iter().enumerate() {
                let below = if is_leaf(item, types.item()) {
                    FieldSet::default()
                } else {
                    fields_of(item, types.item())
                };
                set.put(stored_element(item, position, types), true, below);
            }
        }
        _ => {}
    }
    set
}

/// Whether a value is atomic: owned as a whole.
fn is_leaf(value: &Value, types: TypeRef<'_>) -> bool {
    match value {
        Value::Object(_) => types.is_atomic_map(),
        Value::Array(_) => types.list() == ListKind::Atomic,
        _ => true,
    }
}

/// How `new` differs from `old`.
pub(super) fn compare(old: &Value, new: &Value, types: TypeRef<'_>) -> Comparison {
    let mut comparison = Comparison::default();
    let Comparison {
        added,
        modified,
        removed,
    } = &mut comparison;
    compare_values(old, new, types, added, modified, removed);
    comparison
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Object(members) => members.is_empty(),
        Value::Array(items) => items.is_empty(),
        _ => false,
    }
}

fn compare_values(
    old: &Value,
    new: &Value,
    types: TypeRef<'_>,
    added: &mut FieldSet,
    modified: &mut FieldSet,
    removed: &mut FieldSet,
) {
    match (old, new) {
        (Value::Object(old), Value::Object(new)) => {
            for (name, before) in old {
                let pair = (Some(before), new.get(name));
                compare_member(
                    Element::Field(name),
                    pair,
                    types.member(name),
                    added,
                    modified,
                    removed,
                );
            }
            for (name, after) in new.iter().filter(|(name, _)| !old.contains_key(*name)) {
                compare_member(
                    Element::Field(name),
                    (None, Some(after)),
                    types.member(name),
                    added,
                    modified,
                    removed,
                );
            }
        }
        (Value::Array(old), Value::Array(new)) => {
            let index = |items: &'_ [Value]| -> Vec<String> {
                items
                    .iter()
                    .enumerate()
                    .map(|(position, item)| stored_element(item, position, types))
                    .collect()
            };
            let (old_elements, new_elements) = (index(old), index(new));
            let after: HashMap<&str, &Value> =
                new_elements.iter().map(String::as_str).zip(new).collect();
            let before: HashSet<&str> = old_elements.iter().map(String::as_str).collect();
            for (element, item) in old_elements.iter().zip(old) {
                let pair = (Some(item), after.get(element.as_str()).copied());
                let element = Element::Item(element);
                compare_member(element, pair, types.item(), added, modified, removed);
            }
            for (element, item) in new_elements.iter().zip(new) {
                if !before.contains(element.as_str()) {
                    compare_member(
                        Element::Item(element),
                        (None, Some(item)),
                        types.item(),
                        added,
                        modified,
                        removed,
                    );
                }
            }
        }
        _ => {}
    }
}

/// A path element that is formatted only where something differs.
#[derive(Clone, Copy)]
enum Element<'a> {
    Field(&'a str),
    Item(&'a str),
}

impl Element<'_> {
    fn path(self) -> String {
        match self {
            Self::Field(name) => field_set::field(name),
            Self::Item(element) => element.to_owned(),
        }
    }
}

fn compare_member(
    element: Element<'_>,
    pair: (Option<&Value>, Option<&Value>),
    types: TypeRef<'_>,
    added: &mut FieldSet,
    modified: &mut FieldSet,
    removed: &mut FieldSet,
) {
    match pair {
        // Do not compare objects for equality first: they are compared member by member below, and would be compared twice.
        (Some(old), Some(new)) if !(old.is_object() && new.is_object()) && old == new => {}
        (Some(old), Some(new)) => {
            let same_shape = matches!(
                (old, new),
                (Value::Object(_), Value::Object(_)) | (Value::Array(_), Value::Array(_))
            );
            if !same_shape || is_leaf(new, types) || (is_empty(old) && is_empty(new)) {
                if old == new {
                    return;
                }
                modified.insert(element.path());
                // If a value changed its JSON type, everything below the old value is removed and everything below the new one is
                // added.
                if !same_shape {
                    removed.insert_below(element.path(), subtree(old, types));
                    added.insert_below(element.path(), subtree(new, types));
                }
                return;
            }
            let (mut below_added, mut below_modified, mut below_removed): (
                FieldSet,
                FieldSet,
                FieldSet,
            ) = Default::default();
            compare_values(
                old,
                new,
                types,
                &mut below_added,
                &mut below_modified,
                &mut below_removed,
            );
            for (set, below) in [
                (added, below_added),
                (modified, below_modified),
                (removed, below_removed),
            ] {
                if !below.has_no_entries() {
                    set.insert_below(element.path(), below);
                }
            }
        }
        (Some(old), None) => removed.put(element.path(), true, subtree(old, types)),
        (None, Some(new)) => added.put(element.path(), true, subtree(new, types)),
        (None, None) => {}
    }
}

/// All paths of a value, including its containers.
fn subtree(value: &Value, types: TypeRef<'_>) -> FieldSet {
    let mut set = FieldSet::default();
    if is_leaf(value, types) {
        return set;
    }
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                let below = subtree(member, types.member(name));
                set.put(field_set::field(name), true, below);
            }
        }
        Value::Array(items) => {
            for (position, item) in items.iter().enumerate() {
                let below = subtree(item, types.item());
                set.put(stored_element(item, position, types), true, below);
            }
        }
        _ => {}
    }
    set
}

/// Merges `config` into `live`: the fields of `config` win, all others stay.
pub(super) fn merge(live: &Value, config: &Value, types: TypeRef<'_>) -> Value {
    if is_leaf(config, types) {
        return config.clone();
    }
    match (live, config) {
        (Value::Object(live), Value::Object(config)) => {
            let mut merged = live.clone();
            for (name, value) in config {
                let result = match live.get(name) {
                    Some(before) => merge(before, value, types.member(name)),
                    None => value.clone(),
                };
                merged.insert(name.clone(), result);
            }
            Value::Object(merged)
        }
        (Value::Array(live), Value::Array(config)) => {
            Value::Array(merge_lists(live, config, types))
        }
        _ => config.clone(),
    }
}

/// Merges lists by element. Items in both lists take the order of `config`; items only in `live` keep their place among them.
fn merge_lists(live: &[Value], config: &[Value], types: TypeRef<'_>) -> Vec<Value> {
    let elements = |items: &[Value]| -> Vec<String> {
        items
            .iter()
            .enumerate()
            .map(|(position, item)| stored_element(item, position, types))
            .collect()
    };
    let (left, right) = (elements(live), elements(config));
    let in_right: HashMap<&str, usize> = right
        .iter()
        .enumerate()
        .map(|(position, element)| (element.as_str(), position))
        .collect();
    let in_left: HashMap<&str, usize> = left
        .iter()
        .enumerate()
        .map(|(position, element)| (element.as_str(), position))
        .collect();
    let mut shared = right
        .iter()
        .filter(|element| in_left.contains_key(element.as_str()))
        .peekable();
    let mut merged = Vec::with_capacity(live.len().max(config.len()));
    let mut done: HashSet<&str> = HashSet::new();
    let (mut at_left, mut at_right) = (0, 0);
    let combine = |position: usize| match in_left.get(right[position].as_str()) {
        Some(before) => merge(&live[*before], &config[position], types.item()),
        None => config[position].clone(),
    };
    while at_left < left.len() || at_right < right.len() {
        if at_left < left.len() {
            let element = left[at_left].as_str();
            let is_shared = in_right.contains_key(element);
            if at_right < right.len() && element == right[at_right] {
                done.insert(element);
                merged.push(combine(at_right));
                at_left += 1;
                at_right += 1;
                shared.next();
                continue;
            }
            if !is_shared {
                merged.push(live[at_left].clone());
                at_left += 1;
                continue;
            }
            let is_next = shared.peek().is_some_and(|next| next.as_str() == element);
            if done.contains(element)
                || (at_right < right.len() && shared.peek().is_some() && !is_next)
            {
                // The item is already placed, or comes later in `config`.
                at_left += 1;
                continue;
            }
        }
        if at_right < right.len() {
            let element = right[at_right].as_str();
            done.insert(element);
            merged.push(combine(at_right));
            if shared.peek().is_some_and(|next| next.as_str() == element) {
                shared.next();
            }
            at_right += 1;
        } else {
            at_left += 1;
        }
    }
    merged
}

/// Returns the object without the paths in `remove`. Returns `None` for a container that becomes empty.
pub(super) fn without(value: &Value, remove: &FieldSet, types: TypeRef<'_>) -> Option<Value> {
    if is_leaf(value, types) || is_empty(value) {
        return Some(value.clone());
    }
    match value {
        Value::Object(members) => {
            let mut kept = Map::new();
            for (name, member) in members {
                let element = field_set::field(name);
                if remove.contains(&element) {
                    continue;
                }
                let result = match remove.below(&element) {
                    Some(below) => without(member, below, types.member(name)),
                    None => Some(member.clone()),
                };
                if let Some(result) = result {
                    kept.insert(name.clone(), result);
                }
            }
            (!kept.is_empty()).then_some(Value::Object(kept))
        }
        Value::Array(items) => {
            let mut kept = Vec::with_capacity(items.len());
            for (position, item) in items.iter().enumerate() {
                let element = stored_element(item, position, types);
                if remove.contains(&element) {
                    continue;
                }
                match remove.below(&element) {
                    Some(below) => kept.extend(without(item, below, types.item())),
                    None => kept.push(item.clone()),
                }
            }
            (!kept.is_empty()).then_some(Value::Array(kept))
        }
        other => Some(other.clone()),
    }
}

/// Adds to the set each struct field above its paths: an owner of `a.b.c` also owns `a` if `a` is a field of a struct.
pub(super) fn with_named_fields(set: &FieldSet, types: TypeRef<'_>) -> FieldSet {
    let mut result = FieldSet::default();
    for element in set.elements() {
        let name = field_set::field_name(element);
        let child_type = match name {
            Some(name) => types.member(name),
            None => types.item(),
        };
        let below = set.below(element);
        let is_named = name.is_some_and(|name| types.is_named_field(name));
        if set.contains(element) || (is_named && below.is_some()) {
            result.insert(element.to_owned());
        }
        if let Some(below) = below {
            result.insert_below(element.to_owned(), with_named_fields(below, child_type));
        }
    }
    result
}
