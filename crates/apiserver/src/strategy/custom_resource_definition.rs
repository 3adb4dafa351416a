//! The rules of CustomResourceDefinitions. The write that stores a definition also accepts its names and establishes it, so a new
//! kind is served when the create request returns.

use std::collections::BTreeSet;

use apimachinery::{field::FieldError, names, schema::Schema, table::Printer};
use serde_json::{Value, json};
use store::{Range, ResourceId};

use super::{
    Context, Kind,
    fields::{default_field, default_text, immutable, items, one_of, text},
};
use crate::{
    metadata,
    registry::{Resource, custom::has_condition},
    target::Part,
};

/// The finalizer that delays the removal of a definition until its objects are deleted.
pub const CLEANUP: &str = "customresourcecleanup.apiextensions.k8s.io";

/// CustomResourceDefinitions.
pub struct CustomResourceDefinition;

impl Kind for CustomResourceDefinition {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
    }

    fn prepare_create(&self, context: &Context<'_>, object: &mut Value) {
        prepare_create(context, object);
    }

    fn prepare_update(&self, context: &Context<'_>, object: &mut Value, _old: &Value, part: Part) {
        if part == Part::Main {
            prepare_update(context, object);
        }
    }

    fn validate(
        &self,
        _resource: &Resource,
        object: &Value,
        old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        validate(object, old)
    }
}

fn default(definition: &mut Value) {
    if !definition["spec"].is_object() {
        return;
    }
    let spec = &mut definition["spec"];
    default_field(spec, "conversion", json!({"strategy": "None"}));
    let kind = text(&spec["names"], "kind").to_owned();
    if spec["names"].is_object() {
        default_text(&mut spec["names"], "singular", &kind.to_lowercase());
        default_text(&mut spec["names"], "listKind", &format!("{kind}List"));
    }
}

fn prepare_create(context: &Context<'_>, definition: &mut Value) {
    default(definition);
    let metadata = metadata::of(definition);
    let mut finalizers = metadata
        .get("finalizers")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    if !finalizers.iter().any(|finalizer| finalizer == CLEANUP) {
        finalizers.push(Value::from(CLEANUP));
    }
    metadata.insert("finalizers".into(), Value::from(finalizers));
    definition["status"] = json!({"conditions": [], "storedVersions": []});
    establish(context, definition);
}

fn prepare_update(context: &Context<'_>, definition: &mut Value) {
    default(definition);
    establish(context, definition);
}

/// Accepts the names unless another definition of the group uses them, and sets the condition `Established`.
fn establish(context: &Context<'_>, definition: &mut Value) {
    let now = metadata::timestamp(context.clock.now());
    let conflict = name_conflict(context, definition);
    let accepted = conflict.is_none();
    let names = match &conflict {
        None => condition(
            "NamesAccepted",
            true,
            "NoConflicts",
            "no conflicts found",
            &now,
        ),
        Some(problem) => condition("NamesAccepted", false, "NameConflict", problem, &now),
    };
    set_condition(definition, names);
    let was_established = has_condition(definition, "Established");
    let established = if accepted || was_established {
        condition(
            "Established",
            true,
            "InitialNamesAccepted",
            "the initial names have been accepted",
            &now,
        )
    } else {
        condition(
            "Established",
            false,
            "NotAccepted",
            "not all names are accepted",
            &now,
        )
    };
    set_condition(definition, established);
    if accepted {
        definition["status"]["acceptedNames"] = definition["spec"]["names"].clone();
    } else {
        default_field(
            &mut definition["status"],
            "acceptedNames",
            json!({"plural": "", "kind": ""}),
        );
    }
    let storage = items(&definition["spec"], "versions")
        .iter()
        .find(|version| version["storage"] == true);
    if let Some(name) = storage.map(|version| version["name"].clone()) {
        let mut stored = definition
            .pointer("/status/storedVersions")
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default();
        if !stored.contains(&name) {
            stored.push(name);
        }
        definition["status"]["storedVersions"] = Value::from(stored);
    }
}

fn condition(kind: &str, status: bool, reason: &str, message: &str, now: &Value) -> Value {
    json!({"type": kind, "status": if status { "True" } else { "False" }, "reason": reason, "message": message, "lastTransitionTime": now})
}

fn set_condition(definition: &mut Value, mut condition: Value) {
    let mut conditions = definition
        .pointer("/status/conditions")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    match conditions
        .iter_mut()
        .find(|present| present["type"] == condition["type"])
    {
        Some(present) => {
            if present["status"] == condition["status"] {
                condition["lastTransitionTime"] = present["lastTransitionTime"].clone();
            }
            *present = condition;
        }
        None => conditions.push(condition),
    }
    definition["status"]["conditions"] = Value::from(conditions);
}

fn names_of(definition: &Value) -> BTreeSet<String> {
    let names = &definition["spec"]["names"];
    let mut all: BTreeSet<String> = ["plural", "singular"]
        .iter()
        .map(|field| text(names, field).to_owned())
        .collect();
    all.extend(
        items(names, "shortNames")
            .iter()
            .filter_map(Value::as_str)
            .map(ToOwned::to_owned),
    );
    all.remove("");
    all
}

fn name_conflict(context: &Context<'_>, definition: &Value) -> Option<String> {
    let id = ResourceId::new("apiextensions.k8s.io", "customresourcedefinitions");
    let others = context.store.list(&id, &Range::namespace(""), None).ok()?;
    let (own, kind) = (
        names_of(definition),
        text(&definition["spec"]["names"], "kind"),
    );
    let own_name = metadata::text(definition, "name");
    for other in others
        .objects
        .iter()
        .filter(|other| other.key.name() != own_name)
        .map(|other| other.value())
    {
        if other["spec"]["group"] != definition["spec"]["group"] {
            continue;
        }
        if let Some(name) = names_of(&other).intersection(&own).next() {
            return Some(format!("\"{name}\" is already in use"));
        }
        if text(&other["spec"]["names"], "kind") == kind {
            return Some(format!("\"{kind}\" is already in use"));
        }
    }
    None
}

fn validate(definition: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &definition["spec"];
    let (group, plural) = (text(spec, "group"), text(&spec["names"], "plural"));
    let expected = format!("{plural}.{group}");
    let name = metadata::text(definition, "name");
    if name != expected {
        errors.push(FieldError::invalid(
            "metadata.name",
            name,
            format!("must be spec.names.plural+\".\"+spec.group: \"{expected}\""),
        ));
    }
    match group {
        "" => errors.push(FieldError::required("spec.group", "")),
        group => errors.extend(
            names::dns_1123_subdomain(group)
                .into_iter()
                .map(|problem| FieldError::invalid("spec.group", group, problem)),
        ),
    }
    for field in ["plural", "singular", "kind", "listKind"] {
        let path = format!("spec.names.{field}");
        match text(&spec["names"], field) {
            "" => errors.push(FieldError::required(path, "")),
            value => {
                let problems = names::dns_1035_label(&value.to_lowercase()).into_iter();
                errors.extend(problems.map(|problem| FieldError::invalid(&path, value, problem)));
            }
        }
    }
    match text(spec, "scope") {
        "" => errors.push(FieldError::required("spec.scope", "")),
        _ => one_of(
            &spec["scope"],
            "spec.scope",
            &["Cluster", "Namespaced"],
            &mut errors,
        ),
    }
    if spec
        .pointer("/conversion/strategy")
        .is_some_and(|strategy| strategy != "None")
    {
        let detail = "this server converts between versions by name alone: use strategy None";
        errors.push(FieldError::not_supported(
            "spec.conversion.strategy",
            spec["conversion"]["strategy"].clone(),
            &["None"],
        ));
        errors.push(FieldError::forbidden("spec.conversion.strategy", detail));
    }
    validate_versions(spec, &mut errors);
    if let Some(old) = old {
        for (pointer, path) in [
            ("/spec/group", "spec.group"),
            ("/spec/scope", "spec.scope"),
            ("/spec/names/plural", "spec.names.plural"),
            ("/spec/names/kind", "spec.names.kind"),
        ] {
            immutable(definition, Some(old), pointer, path, &mut errors);
        }
    }
    errors
}

fn validate_versions(spec: &Value, errors: &mut Vec<FieldError>) {
    let versions = items(spec, "versions");
    if versions.is_empty() {
        errors.push(FieldError::required("spec.versions", ""));
        return;
    }
    let storage = versions
        .iter()
        .filter(|version| version["storage"] == true)
        .count();
    if storage != 1 {
        errors.push(FieldError::invalid(
            "spec.versions",
            spec["versions"].clone(),
            "must have exactly one version marked as storage version",
        ));
    }
    let schema_of = |version: &Value| version.pointer("/schema/openAPIV3Schema").cloned();
    let shared = schema_of(&versions[0]);
    let is_shared = versions.iter().all(|version| schema_of(version) == shared);
    let mut seen = BTreeSet::new();
    for (index, version) in versions.iter().enumerate() {
        let path = format!("spec.versions[{index}]");
        let name = text(version, "name");
        errors.extend(
            names::dns_1035_label(name)
                .into_iter()
                .map(|problem| FieldError::invalid(format!("{path}.name"), name, problem)),
        );
        if !seen.insert(name) {
            errors.push(FieldError::duplicate(format!("{path}.name"), name));
        }
        let schema = version.pointer("/schema/openAPIV3Schema");
        let place = format!("{path}.schema.openAPIV3Schema");
        match schema.filter(|schema| schema.is_object()) {
            None => errors.push(FieldError::required(place, "schemas are required")),
            // If all versions have the same schema, Kubernetes treats it as one and uses another path in errors.
            Some(schema) if is_shared => {
                if index == 0 {
                    let place = "spec.validation.openAPIV3Schema";
                    errors.extend(Schema::compile(schema, place).err().unwrap_or_default());
                }
            }
            Some(schema) => {
                errors.extend(Schema::compile(schema, &place).err().unwrap_or_default());
            }
        }
        let columns = version.get("additionalPrinterColumns");
        let place = format!("{path}.additionalPrinterColumns");
        errors.extend(Printer::custom(columns, &place).err().unwrap_or_default());
        if let Some(scale) = version.pointer("/subresources/scale") {
            for (field, root) in [
                ("specReplicasPath", ".spec."),
                ("statusReplicasPath", ".status."),
            ] {
                if !text(scale, field).starts_with(root) {
                    let detail =
                        format!("should be a json path under {}", root.trim_end_matches('.'));
                    errors.push(FieldError::invalid(
                        format!("{path}.subresources.scale.{field}"),
                        text(scale, field),
                        detail,
                    ));
                }
            }
        }
    }
}
