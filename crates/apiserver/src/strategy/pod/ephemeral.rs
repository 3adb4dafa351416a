//! Ephemeral containers, which are added to a running pod: validation of new ones; existing ones are immutable.

use std::collections::BTreeSet;

use apimachinery::field::FieldError;
use serde_json::Value;

use super::containers;
use crate::strategy::fields::{fields, items, text};

const PATH: &str = "spec.ephemeralContainers";

/// Fields of a container that are not allowed, because an ephemeral container starts late and is never restarted.
const FORBIDDEN: [&str; 8] = [
    "lifecycle",
    "livenessProbe",
    "ports",
    "readinessProbe",
    "resizePolicy",
    "resources",
    "restartPolicy",
    "startupProbe",
];

/// Copies everything but the ephemeral containers from the stored pod.
pub fn restrict(pod: &mut Value, old: &Value) {
    let containers = pod.pointer("/spec/ephemeralContainers").cloned();
    // The UID cannot change either, but must not be ignored: a client that sets it means exactly that pod, not another of the
    // same name.
    let kept = ["managedFields", "uid"].map(|field| (field, pod["metadata"].get(field).cloned()));
    let mut restricted = old.clone();
    let spec = fields(&mut restricted["spec"]);
    match containers {
        Some(containers) => spec.insert("ephemeralContainers".into(), containers),
        None => spec.remove("ephemeralContainers"),
    };
    for (field, value) in kept {
        if let Some(value) = value {
            restricted["metadata"][field] = value;
        }
    }
    *pod = restricted;
}

/// Validates the change from the ephemeral containers of `old` to those of `spec`.
pub fn validate(spec: &Value, old: &Value, errors: &mut Vec<FieldError>) {
    let volumes: BTreeSet<&str> = items(spec, "volumes")
        .iter()
        .map(|volume| text(volume, "name"))
        .collect();
    let main: BTreeSet<&str> = items(spec, "containers")
        .iter()
        .map(|container| text(container, "name"))
        .collect();
    let mut names: BTreeSet<&str> = items(spec, "initContainers")
        .iter()
        .map(|container| text(container, "name"))
        .chain(main.iter().copied())
        .collect();
    for (index, container) in items(spec, "ephemeralContainers").iter().enumerate() {
        let path = format!("{PATH}[{index}]");
        containers::validate(container, &path, &volumes, errors);
        let name = text(container, "name");
        if !name.is_empty() && !names.insert(name) {
            errors.push(FieldError::duplicate(format!("{path}.name"), name));
        }
        let target = text(container, "targetContainerName");
        if !target.is_empty() && !main.contains(target) {
            errors.push(FieldError::not_found(
                format!("{path}.targetContainerName"),
                target,
            ));
        }
        for field in FORBIDDEN.iter().filter(|field| is_set(container, field)) {
            errors.push(FieldError::forbidden(
                format!("{path}.{field}"),
                "cannot be set for an Ephemeral Container",
            ));
        }
        for (mount, _) in items(container, "volumeMounts")
            .iter()
            .enumerate()
            .filter(|(_, mount)| is_set(mount, "subPath") || is_set(mount, "subPathExpr"))
        {
            errors.push(FieldError::forbidden(
                format!("{path}.volumeMounts[{mount}].subPath"),
                "cannot be set for an Ephemeral Container",
            ));
        }
    }
    for existing in items(old, "ephemeralContainers") {
        let name = text(existing, "name");
        let now = items(spec, "ephemeralContainers")
            .iter()
            .find(|container| text(container, "name") == name);
        let problem = match now {
            None => "removed",
            Some(now) if now != existing => "changed",
            Some(_) => continue,
        };
        errors.push(FieldError::forbidden(
            PATH,
            format!("existing ephemeral containers \"{name}\" may not be {problem}\n"),
        ));
    }
}

/// Whether a field has a value. Clients send empty structures, which do not count.
fn is_set(object: &Value, field: &str) -> bool {
    match object.get(field) {
        None | Some(Value::Null) => false,
        Some(Value::Object(members)) => !members.is_empty(),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::String(text)) => !text.is_empty(),
        Some(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(containers: &Value, before: &Value) -> Vec<String> {
        let spec = |ephemeral: &Value| {
            json!({"containers": [{"name": "main", "image": "host"}], "initContainers": [{"name": "first", "image": "host"}],
                "volumes": [{"name": "v", "emptyDir": {}}], "ephemeralContainers": ephemeral})
        };
        let mut errors = Vec::new();
        validate(&spec(containers), &spec(before), &mut errors);
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_container_may_be_added_to_existing_ones() {
        let one = json!({"name": "one", "image": "host", "targetContainerName": "main", "resources": {},
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]});
        let two = json!({"name": "two", "image": "host"});
        assert!(problems(&json!([one]), &json!([])).is_empty());
        assert!(problems(&json!([one, two]), &json!([one])).is_empty());
    }

    #[test]
    fn invalid_fields_of_an_ephemeral_container_are_refused() {
        for (container, field) in [
            (json!({"image": "host"}), "spec.ephemeralContainers[0].name"),
            (json!({"name": "d"}), "spec.ephemeralContainers[0].image"),
            (
                json!({"name": "main", "image": "host"}),
                "spec.ephemeralContainers[0].name",
            ),
            (
                json!({"name": "first", "image": "host"}),
                "spec.ephemeralContainers[0].name",
            ),
            (
                json!({"name": "d", "image": "host", "targetContainerName": "none"}),
                "spec.ephemeralContainers[0].targetContainerName",
            ),
            (
                json!({"name": "d", "image": "host", "ports": [{"containerPort": 1}]}),
                "spec.ephemeralContainers[0].ports",
            ),
            (
                json!({"name": "d", "image": "host", "resources": {"limits": {"cpu": "1"}}}),
                "spec.ephemeralContainers[0].resources",
            ),
            (
                json!({"name": "d", "image": "host", "volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "s"}]}),
                "spec.ephemeralContainers[0].volumeMounts[0].subPath",
            ),
        ] {
            let found = problems(&json!([container]), &json!([]));
            assert!(
                found.iter().any(|problem| problem.starts_with(field)),
                "{container}: {found:?}"
            );
        }
    }

    #[test]
    fn existing_containers_cannot_be_changed_or_removed() {
        let one = json!({"name": "one", "image": "host"});
        let other = json!({"name": "one", "image": "other"});
        assert_eq!(
            problems(&json!([]), &json!([one])),
            [
                "spec.ephemeralContainers: Forbidden: existing ephemeral containers \"one\" may not be removed\n"
            ]
        );
        assert_eq!(
            problems(&json!([other]), &json!([one])),
            [
                "spec.ephemeralContainers: Forbidden: existing ephemeral containers \"one\" may not be changed\n"
            ]
        );
    }
}
