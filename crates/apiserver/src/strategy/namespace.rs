//! The rules of namespaces: finalizers in the spec, the label with the name, and the namespaces that may not be deleted.

use apimachinery::{names, status::Status};
use serde_json::{Value, json};

use super::{Context, Kind};
use crate::{registry::Resource, target::Part};

/// The namespaces that the server itself uses.
const PROTECTED: [&str; 3] = ["default", "kube-system", "kube-public"];

/// Namespaces.
pub struct Namespace;

impl Kind for Namespace {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
    }

    fn prepare_create(&self, _context: &Context<'_>, object: &mut Value) {
        prepare_create(object);
    }

    /// The finalizers in the spec have a subresource of their own.
    fn prepare_update(&self, _context: &Context<'_>, object: &mut Value, old: &Value, part: Part) {
        if part == Part::Main {
            let finalizers = old
                .pointer("/spec/finalizers")
                .cloned()
                .unwrap_or_else(|| json!([]));
            object["spec"]["finalizers"] = finalizers;
        }
    }

    fn name_problems(&self, name: &str) -> Vec<String> {
        names::dns_1123_label(name)
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &["metadata.name", "status.phase"]
    }

    fn check_delete(&self, name: &str) -> Result<(), Status> {
        if PROTECTED.contains(&name) {
            let cause = "this namespace may not be deleted";
            return Err(Status::forbidden("", "namespaces", name, cause));
        }
        Ok(())
    }

    fn mark_for_deletion(&self, object: &mut Value) {
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("deletionGracePeriodSeconds");
        }
        object["status"]["phase"] = Value::from("Terminating");
    }

    fn has_own_finalizers(&self, object: &Value) -> bool {
        object
            .pointer("/spec/finalizers")
            .and_then(Value::as_array)
            .is_some_and(|finalizers| !finalizers.is_empty())
    }
}

fn prepare_create(namespace: &mut Value) {
    namespace["status"] = json!({"phase": "Active"});
    let finalizers = namespace
        .pointer("/spec/finalizers")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let mut finalizers: Vec<Value> = finalizers
        .into_iter()
        .filter(|finalizer| *finalizer != "kubernetes")
        .collect();
    finalizers.push(Value::from("kubernetes"));
    namespace["spec"] = json!({"finalizers": finalizers});
}

fn default(namespace: &mut Value) {
    let name = namespace["metadata"]["name"].clone();
    if !namespace["metadata"]["labels"].is_object() {
        namespace["metadata"]["labels"] = json!({});
    }
    namespace["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
}
