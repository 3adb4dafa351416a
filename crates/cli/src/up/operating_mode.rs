//! Defaults `operatingMode: Running` on new v1beta1 sandboxes that set neither it nor `replicas`.
//!
//! A CRD default cannot depend on another field, and an unconditional one would put the mode on objects of clients that know only
//! `replicas`, which are given other conditions ([ADR 57](../../../../docs/adr/0057-conditions-follow-the-client-generation.md)).
//! A mutating webhook could not tell either: it sees objects after the schema has filled in `replicas: 1`.

use std::sync::Arc;

use apiserver::{Admission, AdmissionRequest, GroupVersionResource, Status};
use serde_json::{Value, json};

/// The hook that fills in the mode.
pub struct DefaultOperatingMode;

impl DefaultOperatingMode {
    pub fn hook() -> Arc<dyn Admission> {
        Arc::new(Self)
    }
}

impl Admission for DefaultOperatingMode {
    fn fill_in(&self, resource: &GroupVersionResource, object: &mut Value) {
        let is_sandbox = resource.resource == "sandboxes"
            && resource.group == api::CORE_GROUP
            && resource.version == api::STORAGE_VERSION;
        if is_sandbox
            && let Some(Value::Object(spec)) = object.get_mut("spec")
            && !spec.contains_key("replicas")
        {
            let mode = spec.entry("operatingMode").or_insert(Value::Null);
            if mode.is_null() {
                *mode = json!("Running");
            }
        }
    }

    fn admit(&self, _request: &mut AdmissionRequest) -> Result<(), Status> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled_in(version: &str, resource: &str, spec: &Value) -> Value {
        let resource = GroupVersionResource {
            group: api::CORE_GROUP.to_owned(),
            version: version.to_owned(),
            resource: resource.to_owned(),
        };
        let mut object = json!({ "spec": spec });
        DefaultOperatingMode.fill_in(&resource, &mut object);
        object["spec"].clone()
    }

    #[test]
    fn a_sandbox_that_sets_neither_field_runs_in_the_newer_form() {
        let running = json!({"operatingMode": "Running"});
        let table = [
            (json!({}), running.clone()),
            (json!({"operatingMode": null}), running),
            (
                json!({"operatingMode": "Suspended"}),
                json!({"operatingMode": "Suspended"}),
            ),
            (json!({"replicas": 1}), json!({"replicas": 1})),
            (json!({"replicas": 0}), json!({"replicas": 0})),
        ];
        for (spec, expected) in table {
            assert_eq!(filled_in("v1beta1", "sandboxes", &spec), expected);
            assert_eq!(filled_in("v1alpha1", "sandboxes", &spec), spec);
            assert_eq!(filled_in("v1beta1", "others", &spec), spec);
        }
    }
}
