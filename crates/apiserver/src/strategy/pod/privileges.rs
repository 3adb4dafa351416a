//! Validation of `allowPrivilegeEscalation` against the privileges of a container, with kube-apiserver's messages.

use apimachinery::field::FieldError;
use serde_json::Value;

use crate::strategy::fields::items;

/// Rejects `allowPrivilegeEscalation: false` on a container that is privileged or has `CAP_SYS_ADMIN`: it could gain privileges
/// anyway.
pub fn validate(container: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let context = &container["securityContext"];
    if context["allowPrivilegeEscalation"] != Value::Bool(false) {
        return;
    }
    let field = format!("{path}.securityContext");
    if context["privileged"] == Value::Bool(true) {
        let detail = "cannot set `allowPrivilegeEscalation` to false and `privileged` to true";
        errors.push(FieldError::invalid(&field, context.clone(), detail));
    }
    let added = items(&context["capabilities"], "add");
    if added.iter().any(|name| name == "CAP_SYS_ADMIN") {
        let detail =
            "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN";
        errors.push(FieldError::invalid(&field, context.clone(), detail));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_privileged_container_cannot_forbid_privilege_escalation() {
        for (context, refused) in [
            (json!({}), None),
            (json!({"allowPrivilegeEscalation": false}), None),
            (json!({"privileged": true}), None),
            (
                json!({"allowPrivilegeEscalation": true, "privileged": true}),
                None,
            ),
            (
                json!({"allowPrivilegeEscalation": false, "privileged": true}),
                Some("cannot set `allowPrivilegeEscalation` to false and `privileged` to true"),
            ),
            (
                json!({"allowPrivilegeEscalation": false, "capabilities": {"add": ["CAP_SYS_ADMIN"]}}),
                Some(
                    "cannot set `allowPrivilegeEscalation` to false and `capabilities.Add` CAP_SYS_ADMIN",
                ),
            ),
            (
                json!({"allowPrivilegeEscalation": false, "capabilities": {"add": ["CHOWN"]}}),
                None,
            ),
        ] {
            let mut errors = Vec::new();
            let container = json!({"name": "c", "securityContext": context});
            validate(&container, "spec.containers[0]", &mut errors);
            let reported = errors.first().map(ToString::to_string);
            match refused {
                None => assert_eq!(reported, None, "{context}"),
                Some(detail) => {
                    let reported = reported.unwrap_or_default();
                    let path = "spec.containers[0].securityContext: Invalid value: ";
                    assert!(
                        reported.starts_with(path) && reported.ends_with(detail),
                        "{reported}"
                    );
                }
            }
        }
    }
}
