//! Tracks updates: how a write that is not an apply changes the managed fields.

use serde_json::{Map, Value};

use super::managers::{self, Managers, Operation};
use super::typed::Comparison;
use super::{
    Writer, put_managed_fields, set_managed_fields, strip_unowned, take_from_others,
    take_managed_fields,
};

/// Records the changes of a create (`live` is `None`), update or patch in `new.metadata.managedFields`.
///
/// On the main resource, clients may edit the managed fields: those in `new` are used, and an empty list resets them.
pub fn track_update(live: Option<&Value>, new: &mut Value, writer: &Writer<'_>) {
    let stored = live.and_then(managers::entries_of);
    if let Some(live) = live
        && stored.is_some_and(|entries| !entries.is_empty())
        && managers::entries_of(new) == stored
    {
        let comparison = writer.compare(live, new);
        let entries = take_managed_fields(new).unwrap_or_default();
        let entries = record_in_place(entries, comparison, writer);
        put_managed_fields(new, entries);
        return;
    }
    let given = take_managed_fields(new);
    let mut managers = starting_managers(live, given, writer);
    let Some(mut managers) = managers.take() else {
        return;
    };
    let empty = Value::Object(Map::new());
    let comparison = writer.compare(live.unwrap_or(&empty), new);
    record_update(&mut managers, comparison, writer);
    set_managed_fields(new, managers);
}

/// The managers before the update. `None` if the object was written without tracking: it stays untracked until the first apply.
fn starting_managers(
    live: Option<&Value>,
    given: Option<Vec<Value>>,
    writer: &Writer<'_>,
) -> Option<Managers> {
    let from_live = || live.map(Managers::of).unwrap_or_default();
    let managers = match given {
        Some(_) if !writer.subresource.is_empty() => from_live(),
        Some(entries) if is_reset(&entries) => Managers::default(),
        Some(entries) => match Managers::decode(&entries) {
            Some(managers) if !managers.0.is_empty() => managers,
            _ => from_live(),
        },
        None => from_live(),
    };
    let untracked = live.is_some() && managers.0.is_empty();
    (!untracked).then_some(managers)
}

fn is_reset(entries: &[Value]) -> bool {
    match entries {
        [] => true,
        [Value::Object(only)] => only.is_empty(),
        _ => false,
    }
}

/// Assigns the changed fields to the writer and removes them from all other managers.
pub(super) fn record_update(managers: &mut Managers, comparison: Comparison, writer: &Writer<'_>) {
    if comparison.is_empty() {
        return;
    }
    let (mut taken, removed) = comparison.into_parts();
    take_from_others(managers, &taken, &removed, None);
    strip_unowned(&mut taken);
    if !taken.is_empty() {
        let identity = writer.identity(Operation::Update);
        if let Some(previous) = managers.0.remove(&identity) {
            taken.merge(previous.fields);
        }
        managers.0.insert(identity, writer.managed(taken));
    }
    managers.cap();
}

/// Like [`record_update`], but changes the stored entries in place. Most writes change a small part of a single entry, so
/// decoding and encoding all entries would be most of the work.
fn record_in_place(
    mut entries: Vec<Value>,
    comparison: Comparison,
    writer: &Writer<'_>,
) -> Vec<Value> {
    if comparison.is_empty() {
        return entries;
    }
    let (mut taken, removed) = comparison.into_parts();
    entries.retain_mut(|entry| {
        let fields = entry.get_mut("fieldsV1").and_then(Value::as_object_mut);
        fields.is_some_and(|fields| {
            taken.take_from(fields);
            removed.take_from(fields);
            !fields.is_empty()
        })
    });
    strip_unowned(&mut taken);
    if taken.is_empty() {
        return entries;
    }
    let own = entries.iter_mut().find(|entry| writer.wrote(entry));
    if let Some(own) = own.and_then(Value::as_object_mut) {
        if let Some(Value::Object(fields)) = own.get_mut("fieldsV1") {
            taken.add_to(fields);
        }
        let time = crate::time::format(writer.now);
        own.insert("time".to_owned(), Value::String(time));
    } else {
        let identity = writer.identity(Operation::Update);
        entries.push(identity.encode(writer.managed(taken)));
    }
    if managers::exceeds_manager_limit(&entries)
        && let Some(mut all) = Managers::decode(&entries)
    {
        all.cap();
        return match all.encode() {
            Value::Array(entries) => entries,
            _ => Vec::new(),
        };
    }
    managers::sort(&mut entries);
    entries
}
