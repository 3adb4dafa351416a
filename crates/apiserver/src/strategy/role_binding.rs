//! The rules of role bindings and cluster role bindings, which differ only in the roles that they may reference.

use apimachinery::field::FieldError;
use serde_json::Value;

use super::{
    Kind,
    fields::{default_field, default_text, fields, items, items_mut, one_of, text},
    role,
};
use crate::{registry::Resource, target::Part};

const RBAC: &str = "rbac.authorization.k8s.io";

/// Role bindings and cluster role bindings.
pub struct RoleBinding;

impl Kind for RoleBinding {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
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

    fn name_problems(&self, name: &str) -> Vec<String> {
        role::path_segment_problems(name)
    }
}

fn default(binding: &mut Value) {
    if binding["roleRef"].is_object() {
        default_text(&mut binding["roleRef"], "apiGroup", RBAC);
    }
    for subject in items_mut(binding, "subjects") {
        match text(subject, "kind") {
            "ServiceAccount" => default_field(subject, "apiGroup", ""),
            _ => default_text(subject, "apiGroup", RBAC),
        }
        if text(subject, "apiGroup").is_empty() {
            fields(subject).remove("apiGroup");
        }
    }
}

fn validate(binding: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let role = &binding["roleRef"];
    let kinds: &[&str] = if binding["kind"] == "ClusterRoleBinding" {
        &["ClusterRole"]
    } else {
        &["Role", "ClusterRole"]
    };
    one_of(&role["apiGroup"], "roleRef.apiGroup", &[RBAC], &mut errors);
    one_of(&role["kind"], "roleRef.kind", kinds, &mut errors);
    if text(role, "name").is_empty() {
        errors.push(FieldError::required("roleRef.name", ""));
    }
    if let Some(old) = old
        && old["roleRef"] != *role
    {
        errors.push(FieldError::invalid(
            "roleRef",
            role.clone(),
            "cannot change roleRef",
        ));
    }
    for (index, subject) in items(binding, "subjects").iter().enumerate() {
        let path = format!("subjects[{index}]");
        if text(subject, "name").is_empty() {
            errors.push(FieldError::required(format!("{path}.name"), ""));
        }
        one_of(
            &subject["kind"],
            &format!("{path}.kind"),
            &["ServiceAccount", "User", "Group"],
            &mut errors,
        );
        if text(subject, "kind") == "ServiceAccount"
            && text(subject, "namespace").is_empty()
            && binding["kind"] == "ClusterRoleBinding"
        {
            errors.push(FieldError::required(format!("{path}.namespace"), ""));
        }
    }
    errors
}
