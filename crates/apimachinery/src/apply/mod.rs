//! Server-side apply and field ownership tracking.
//!
//! [`apply`] merges a configuration into an object on behalf of a field manager; [`track_update`] records the changes of every
//! other kind of write. Both update `metadata.managedFields`. Ownership is per field: the types define which lists and maps are
//! granular and which are atomic (owned as a whole).

mod field_set;
mod managers;
mod typed;
mod update;

#[cfg(test)]
mod tests;

use std::collections::HashSet;

use jiff::Timestamp;
use serde_json::{Map, Value};

use crate::status::{Cause, Status};
use crate::types::TypeRef;
use field_set::FieldSet;
use managers::{Managed, Manager, Managers, Operation};
use typed::Comparison;
use update::record_update;
pub use update::track_update;

const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// The manager of the fields that an object had before the first apply.
const BEFORE_FIRST_APPLY: &str = "before-first-apply";
/// Fields that the server sets or that identify the object. No manager owns them.
const UNOWNED: [&[&str]; 11] = [
    &["f:apiVersion"],
    &["f:kind"],
    &["f:metadata"],
    &["f:metadata", "f:name"],
    &["f:metadata", "f:namespace"],
    &["f:metadata", "f:creationTimestamp"],
    &["f:metadata", "f:selfLink"],
    &["f:metadata", "f:uid"],
    &["f:metadata", "f:generation"],
    &["f:metadata", "f:managedFields"],
    &["f:metadata", "f:resourceVersion"],
];

/// The writer of a change: its field manager, the endpoint and the time.
#[derive(Debug, Clone, Copy)]
pub struct Writer<'a> {
    /// The field manager's name.
    pub manager: &'a str,
    /// The API version of the request: `apps/v1`.
    pub api_version: &'a str,
    /// `status`, `scale`, or empty.
    pub subresource: &'a str,
    pub types: TypeRef<'a>,
    /// Field paths that this endpoint does not change, such as `["status"]` on the main resource.
    pub ignored: &'a [&'a [&'a str]],
    pub now: Timestamp,
}

impl Writer<'_> {
    fn identity(&self, operation: Operation) -> Manager {
        Manager {
            operation,
            name: self.manager.to_owned(),
            subresource: self.subresource.to_owned(),
            api_version: match operation {
                Operation::Apply => String::new(),
                Operation::Update => self.api_version.to_owned(),
            },
        }
    }

    /// Whether an entry records updates of this writer.
    fn wrote(&self, entry: &Value) -> bool {
        let is = |name: &str, value: &str| {
            entry.get(name).and_then(Value::as_str).unwrap_or_default() == value
        };
        is("operation", Operation::Update.name())
            && is("manager", self.manager)
            && is("subresource", self.subresource)
            && is("apiVersion", self.api_version)
    }

    fn managed(&self, fields: FieldSet) -> Managed {
        Managed {
            api_version: self.api_version.to_owned(),
            fields,
            time: Some(crate::time::format(self.now)),
        }
    }

    fn compare(&self, old: &Value, new: &Value) -> Comparison {
        let mut comparison = typed::compare(old, new, self.types);
        for path in self.ignored {
            comparison.ignore(path);
        }
        comparison
    }
}

/// A field that the applied configuration would change and that another manager owns.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Conflict {
    manager: String,
    path: String,
}

fn take_from_others(
    managers: &mut Managers,
    taken: &FieldSet,
    removed: &FieldSet,
    except: Option<&Manager>,
) {
    managers.0.retain(|manager, managed| {
        if Some(manager) != except {
            managed.fields.subtract(taken);
            managed.fields.subtract(removed);
        }
        !managed.fields.is_empty()
    });
}

fn strip_unowned(fields: &mut FieldSet) {
    for path in UNOWNED {
        fields.remove_exact(path);
    }
}

/// Applies `config` on behalf of the writer. Returns the new object, or a `Status` that lists the conflicts.
///
/// `live` is `None` if the object does not exist yet; then the configuration becomes the object.
pub fn apply(
    live: Option<&Value>,
    config: &Value,
    writer: &Writer<'_>,
    force: bool,
) -> Result<Value, Status> {
    check_config(config, writer)?;
    let empty = Value::Object(Map::new());
    let base = live.map_or_else(
        || empty.clone(),
        |live| {
            let mut base = live.clone();
            take_managed_fields(&mut base);
            base
        },
    );
    let mut managers = live.map(Managers::of).unwrap_or_default();
    if live.is_some() && managers.0.is_empty() {
        let before = Writer {
            manager: BEFORE_FIRST_APPLY,
            ..*writer
        };
        let comparison = before.compare(&empty, &base);
        record_update(&mut managers, comparison, &before);
    }
    match run_apply(&base, config, &managers, writer, force) {
        Ok(result) => Ok(result),
        Err(conflicts) => {
            let remaining = exclude_last_applied(conflicts, &base, writer);
            if remaining.is_empty() {
                run_apply(&base, config, &managers, writer, true)
                    .map_err(|conflicts| conflict_status(&conflicts))
            } else {
                Err(conflict_status(&remaining))
            }
        }
    }
}

fn check_config(config: &Value, writer: &Writer<'_>) -> Result<(), Status> {
    let given = config
        .get("apiVersion")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if given != writer.api_version {
        return Err(Status::bad_request(format!(
            "Incorrect version specified in apply patch. Specified patch version: {given}, expected: {}",
            writer.api_version
        )));
    }
    if config
        .pointer("/metadata/managedFields")
        .is_some_and(|fields| !fields.is_null())
    {
        return Err(Status::bad_request("metadata.managedFields must be nil"));
    }
    let mut errors = Vec::new();
    typed::check(config, writer.types, "", &mut errors);
    if errors.is_empty() {
        return Ok(());
    }
    let text = |pointer: &str| {
        config
            .pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    let details = match &errors[..] {
        [only] => only.clone(),
        several => format!("errors:\n  {}", several.join("\n  ")),
    };
    Err(Status::failure(
        500,
        "",
        format!(
            "failed to create typed patch object ({}/{}; {given}, Kind={}): {details}",
            text("/metadata/namespace"),
            text("/metadata/name"),
            text("/kind"),
        ),
    ))
}

fn run_apply(
    base: &Value,
    config: &Value,
    managers: &Managers,
    writer: &Writer<'_>,
    force: bool,
) -> Result<Value, Vec<Conflict>> {
    let mut managers = managers.clone();
    let identity = writer.identity(Operation::Apply);
    let merged = typed::merge(base, config, writer.types);
    let mut fields = typed::fields_of(config, writer.types);
    for path in writer.ignored {
        fields.remove_prefix(path);
    }
    let last = managers.0.remove(&identity);
    let last_time = last.as_ref().and_then(|last| last.time.clone());
    managers.0.insert(identity.clone(), writer.managed(fields));
    let result = match last {
        Some(last) if !last.fields.is_empty() => {
            prune_unowned(merged, &managers, &last.fields, writer.types)
        }
        _ => merged,
    };
    let comparison = writer.compare(base, &result);
    let wanted = comparison.set();
    if !force {
        let conflicts = conflicts(&managers, &wanted, &identity);
        if !conflicts.is_empty() {
            return Err(conflicts);
        }
    }
    take_from_others(&mut managers, &wanted, &comparison.removed, Some(&identity));
    if let Some(managed) = managers.0.get_mut(&identity) {
        strip_unowned(&mut managed.fields);
        // An apply without changes keeps the old timestamp.
        if result == *base && last_time.is_some() {
            managed.time = last_time;
        }
        if managed.fields.is_empty() {
            managers.0.remove(&identity);
        }
    }
    let mut result = result;
    set_managed_fields(&mut result, managers);
    Ok(result)
}

/// Removes fields that the manager applied before, no longer applies, and no other manager owns.
fn prune_unowned(merged: Value, managers: &Managers, last: &FieldSet, types: TypeRef<'_>) -> Value {
    let named = |set: &FieldSet| typed::with_named_fields(set, types);
    let last = named(last);
    let empty = || Value::Object(Map::new());
    let all = named(&typed::fields_of(&merged, types));
    let pruned = typed::without(&merged, &last, types).unwrap_or_else(empty);
    // Restore the fields that some manager owns, including the applying one.
    let mut owned = FieldSet::default();
    for managed in managers.0.values() {
        owned.extend(&managed.fields);
    }
    let mut kept = named(&typed::fields_of(&pruned, types));
    kept.extend(&named(&owned));
    let pruned = typed::without(&merged, &all.difference(&kept), types).unwrap_or_else(empty);
    // Restore the fields that the manager did not own before.
    let kept = named(&typed::fields_of(&pruned, types));
    let remove = all.difference(&kept).intersection(&last);
    if remove.is_empty() {
        return merged;
    }
    typed::without(&merged, &remove, types).unwrap_or_else(empty)
}

fn conflicts(managers: &Managers, wanted: &FieldSet, identity: &Manager) -> Vec<Conflict> {
    let mut conflicts = Vec::new();
    for (manager, managed) in managers
        .0
        .iter()
        .filter(|(manager, _)| *manager != identity)
    {
        let contested = managed.fields.intersection(wanted);
        let described = manager.describe(managed);
        conflicts.extend(contested.paths().into_iter().map(|path| Conflict {
            manager: described.clone(),
            path,
        }));
    }
    conflicts
}

/// Lets `kubectl` migrate from client-side apply: fields that still have the value of its last-applied annotation do not
/// conflict.
fn exclude_last_applied(
    conflicts: Vec<Conflict>,
    base: &Value,
    writer: &Writer<'_>,
) -> Vec<Conflict> {
    if writer.manager != "kubectl" {
        return conflicts;
    }
    let annotations = base
        .get("metadata")
        .and_then(|metadata| metadata.get("annotations"));
    let text = annotations
        .and_then(|annotations| annotations.get(LAST_APPLIED))
        .and_then(Value::as_str);
    let Some(last) = text.and_then(|text| serde_json::from_str::<Value>(text).ok()) else {
        return conflicts;
    };
    if last.get("apiVersion").and_then(Value::as_str) != Some(writer.api_version) {
        return conflicts;
    }
    let comparison = typed::compare(&last, base, writer.types);
    let mut unchanged = typed::fields_of(&last, writer.types);
    for changed in [&comparison.modified, &comparison.added, &comparison.removed] {
        unchanged.subtract(changed);
    }
    let allowed: HashSet<String> = unchanged.paths().into_iter().collect();
    conflicts
        .into_iter()
        .filter(|conflict| !allowed.contains(&conflict.path))
        .collect()
}

fn conflict_status(conflicts: &[Conflict]) -> Status {
    let causes = conflicts
        .iter()
        .map(|conflict| Cause {
            reason: "FieldManagerConflict".to_owned(),
            message: format!("conflict with {}", conflict.manager),
            field: conflict.path.clone(),
        })
        .collect();
    let message = match conflicts {
        [only] => format!(
            "Apply failed with 1 conflict: conflict with {}: {}",
            only.manager, only.path
        ),
        several => {
            let mut lines = Vec::new();
            let mut managers: Vec<&str> = several
                .iter()
                .map(|conflict| conflict.manager.as_str())
                .collect();
            managers.sort_unstable();
            managers.dedup();
            for manager in managers {
                lines.push(format!("conflicts with {manager}:"));
                let paths = several
                    .iter()
                    .filter(|conflict| conflict.manager == manager);
                lines.extend(paths.map(|conflict| format!("- {}", conflict.path)));
            }
            format!(
                "Apply failed with {} conflicts: {}",
                several.len(),
                lines.join("\n")
            )
        }
    };
    Status::apply_conflict(message, causes)
}

fn take_managed_fields(object: &mut Value) -> Option<Vec<Value>> {
    match object
        .get_mut("metadata")?
        .as_object_mut()?
        .remove("managedFields")?
    {
        Value::Array(entries) => Some(entries),
        _ => None,
    }
}

fn set_managed_fields(object: &mut Value, managers: Managers) {
    match managers.encode() {
        Value::Array(entries) => put_managed_fields(object, entries),
        _ => put_managed_fields(object, Vec::new()),
    }
}

fn put_managed_fields(object: &mut Value, entries: Vec<Value>) {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
        return;
    };
    if entries.is_empty() {
        metadata.remove("managedFields");
    } else {
        metadata.insert("managedFields".to_owned(), Value::Array(entries));
    }
}
