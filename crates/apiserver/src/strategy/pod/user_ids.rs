//! Validation of user and group ids in a pod, with kube-apiserver's messages.

use apimachinery::field::FieldError;
use serde_json::Value;

use crate::strategy::fields::items;

const RANGE: std::ops::RangeInclusive<i64> = 0..=2_147_483_647;
const OUT_OF_RANGE: &str = "must be between 0 and 2147483647, inclusive";

/// Validates the user and group ids in a pod's security context.
pub fn validate_pod(context: &Value, errors: &mut Vec<FieldError>) {
    let path = "spec.securityContext";
    validate(
        context,
        path,
        &["fsGroup", "runAsUser", "runAsGroup"],
        errors,
    );
    for (index, group) in items(context, "supplementalGroups").iter().enumerate() {
        check(
            group,
            &format!("{path}.supplementalGroups[{index}]"),
            errors,
        );
    }
}

/// Validates the user and group ids in a container's security context.
pub fn validate_container(container: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let path = format!("{path}.securityContext");
    let context = &container["securityContext"];
    validate(context, &path, &["runAsUser", "runAsGroup"], errors);
}

fn validate(context: &Value, path: &str, fields: &[&str], errors: &mut Vec<FieldError>) {
    for field in fields {
        check(&context[*field], &format!("{path}.{field}"), errors);
    }
}

fn check(number: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if let Some(number) = number.as_i64().filter(|number| !RANGE.contains(number)) {
        errors.push(FieldError::invalid(path, number, OUT_OF_RANGE));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn user_and_group_ids_have_31_bits() {
        let mut errors = Vec::new();
        validate_pod(
            &json!({"runAsUser": -1, "fsGroup": 0, "supplementalGroups": [1, 2_147_483_648_i64]}),
            &mut errors,
        );
        validate_container(
            &json!({"securityContext": {"runAsGroup": -7, "runAsUser": 5}}),
            "c",
            &mut errors,
        );
        let found: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "spec.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive",
                "spec.securityContext.supplementalGroups[1]: Invalid value: 2147483648: must be between 0 and 2147483647, inclusive",
                "c.securityContext.runAsGroup: Invalid value: -7: must be between 0 and 2147483647, inclusive",
            ]
        );
    }
}
