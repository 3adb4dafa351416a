//! Validation of labels and label selectors inside objects, with kube-apiserver's messages.

use apimachinery::{field::FieldError, names};
use serde_json::Value;

use super::fields::{items, text};

/// Validates a `LabelSelector`.
pub fn validate(selector: &Value, path: &str, errors: &mut Vec<FieldError>) {
    validate_labels(
        &selector["matchLabels"],
        &format!("{path}.matchLabels"),
        errors,
    );
    for (index, requirement) in items(selector, "matchExpressions").iter().enumerate() {
        let path = format!("{path}.matchExpressions[{index}]");
        validate_requirement(requirement, &path, errors);
    }
}

/// Validates a map of labels. Errors have the path of the map, not of the key.
pub fn validate_labels(labels: &Value, path: &str, errors: &mut Vec<FieldError>) {
    for (key, value) in labels.as_object().into_iter().flatten() {
        validate_key(key, path, errors);
        let value = value.as_str().unwrap_or_default();
        let problems = names::label_value(value).into_iter();
        errors.extend(problems.map(|problem| FieldError::invalid(path, value, problem)));
    }
}

/// Validates the key of a label.
pub fn validate_key(key: &str, path: &str, errors: &mut Vec<FieldError>) {
    let problems = names::qualified_name(key).into_iter();
    errors.extend(problems.map(|problem| FieldError::invalid(path, key, problem)));
}

fn validate_requirement(requirement: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let values = items(requirement, "values");
    match text(requirement, "operator") {
        "In" | "NotIn" if values.is_empty() => errors.push(FieldError::required(
            format!("{path}.values"),
            "must be specified when `operator` is 'In' or 'NotIn'",
        )),
        "Exists" | "DoesNotExist" if !values.is_empty() => errors.push(FieldError::forbidden(
            format!("{path}.values"),
            "may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
        )),
        "In" | "NotIn" | "Exists" | "DoesNotExist" => {}
        other => errors.push(FieldError::invalid(
            format!("{path}.operator"),
            other,
            "not a valid selector operator",
        )),
    }
    validate_key(text(requirement, "key"), &format!("{path}.key"), errors);
    for (index, value) in values.iter().filter_map(Value::as_str).enumerate() {
        let path = format!("{path}.values[{index}]");
        let problems = names::label_value(value).into_iter();
        errors.extend(problems.map(|problem| FieldError::invalid(&path, value, problem)));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_operators_and_values_are_validated() {
        let name = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
        for (selector, expected) in [
            (json!({"matchLabels": {"a": "b"}}), String::new()),
            (
                json!({"matchLabels": {"a b": "c"}}),
                format!("s.matchLabels: Invalid value: \"a b\": {name}"),
            ),
            (
                json!({"matchExpressions": [{"key": "\"; drop", "operator": "Exists"}]}),
                format!("s.matchExpressions[0].key: Invalid value: \"\\\"; drop\": {name}"),
            ),
            (
                json!({"matchExpressions": [{"key": "a", "operator": "In"}]}),
                "s.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'".to_owned(),
            ),
            (
                json!({"matchExpressions": [{"key": "a", "operator": "Exists", "values": ["b"]}]}),
                "s.matchExpressions[0].values: Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'".to_owned(),
            ),
            (
                json!({"matchExpressions": [{"key": "a", "operator": "Like"}]}),
                "s.matchExpressions[0].operator: Invalid value: \"Like\": not a valid selector operator".to_owned(),
            ),
        ] {
            let mut errors = Vec::new();
            validate(&selector, "s", &mut errors);
            let found: Vec<String> = errors.iter().map(ToString::to_string).collect();
            assert_eq!(found.join("\n"), expected);
        }
    }
}
