//! Validation of the containers and the volumes of a pod, with kube-apiserver's messages.

use std::collections::BTreeSet;

use apimachinery::{field::FieldError, names, quantity::Quantity};
use serde_json::Value;

use super::{privileges, probes, user_ids};
use crate::strategy::{
    fields::{items, one_of, text},
    quantities,
};

/// Validates the volumes and the containers of a new pod.
pub fn validate_all(spec: &Value, errors: &mut Vec<FieldError>) {
    let volumes = validate_volumes(spec, errors);
    let grace = spec["terminationGracePeriodSeconds"]
        .as_i64()
        .filter(|grace| *grace >= 0);
    let mut container_names = BTreeSet::new();
    for list in ["initContainers", "containers"] {
        for (index, container) in items(spec, list).iter().enumerate() {
            let path = format!("spec.{list}[{index}]");
            validate(container, &path, &volumes, errors);
            if list == "containers" || text(container, "restartPolicy") == "Always" {
                probes::validate(container, &path, grace, errors);
            } else {
                probes::forbid(container, &path, errors);
            }
            let name = text(container, "name");
            if !name.is_empty() && !container_names.insert(name) {
                errors.push(FieldError::duplicate(format!("{path}.name"), name));
            }
        }
    }
}

fn validate_volumes<'a>(spec: &'a Value, errors: &mut Vec<FieldError>) -> BTreeSet<&'a str> {
    let mut seen = BTreeSet::new();
    for (index, volume) in items(spec, "volumes").iter().enumerate() {
        let path = format!("spec.volumes[{index}]");
        let name = text(volume, "name");
        if name.is_empty() {
            errors.push(FieldError::required(format!("{path}.name"), ""));
        } else {
            errors.extend(
                names::dns_1123_label(name)
                    .into_iter()
                    .map(|problem| FieldError::invalid(format!("{path}.name"), name, problem)),
            );
        }
        if !seen.insert(name) {
            errors.push(FieldError::duplicate(format!("{path}.name"), name));
        }
        let sources: Vec<&String> = volume
            .as_object()
            .into_iter()
            .flatten()
            .map(|(field, _)| field)
            .filter(|field| *field != "name")
            .collect();
        if let [_, second, ..] = sources.as_slice() {
            errors.push(FieldError::forbidden(
                format!("{path}.{second}"),
                "may not specify more than 1 volume type",
            ));
        }
        if volume
            .get("persistentVolumeClaim")
            .is_some_and(|claim| text(claim, "claimName").is_empty())
        {
            errors.push(FieldError::required(
                format!("{path}.persistentVolumeClaim.claimName"),
                "",
            ));
        }
    }
    seen
}

/// Validates one container. It may mount only `volumes`.
pub fn validate(
    container: &Value,
    path: &str,
    volumes: &BTreeSet<&str>,
    errors: &mut Vec<FieldError>,
) {
    let name = text(container, "name");
    if name.is_empty() {
        errors.push(FieldError::required(format!("{path}.name"), ""));
    } else {
        errors.extend(
            names::dns_1123_label(name)
                .into_iter()
                .map(|problem| FieldError::invalid(format!("{path}.name"), name, problem)),
        );
    }
    if text(container, "image").is_empty() {
        errors.push(FieldError::required(format!("{path}.image"), ""));
    }
    one_of(
        &container["imagePullPolicy"],
        &format!("{path}.imagePullPolicy"),
        &["Always", "IfNotPresent", "Never"],
        errors,
    );
    one_of(
        &container["terminationMessagePolicy"],
        &format!("{path}.terminationMessagePolicy"),
        &["FallbackToLogsOnError", "File"],
        errors,
    );
    for (index, variable) in items(container, "env").iter().enumerate() {
        let field = format!("{path}.env[{index}].name");
        match text(variable, "name") {
            "" => errors.push(FieldError::required(field, "")),
            name => {
                let problems = names::environment_variable(name).into_iter();
                errors.extend(problems.map(|problem| FieldError::invalid(&field, name, problem)));
            }
        }
        if !text(variable, "value").is_empty() && variable.get("valueFrom").is_some() {
            errors.push(FieldError::invalid(
                format!("{path}.env[{index}].valueFrom"),
                "",
                "may not be specified when `value` is not empty",
            ));
        }
    }
    validate_ports(container, path, errors);
    validate_resources(container, path, errors);
    user_ids::validate_container(container, path, errors);
    privileges::validate(container, path, errors);
    let mut mounted = BTreeSet::new();
    for (index, mount) in items(container, "volumeMounts").iter().enumerate() {
        let field = format!("{path}.volumeMounts[{index}]");
        match text(mount, "name") {
            "" => errors.push(FieldError::required(format!("{field}.name"), "")),
            name if !volumes.contains(name) => {
                errors.push(FieldError::not_found(format!("{field}.name"), name));
            }
            _ => {}
        }
        match text(mount, "mountPath") {
            "" => errors.push(FieldError::required(format!("{field}.mountPath"), "")),
            place if !mounted.insert(place) => {
                errors.push(FieldError::invalid(
                    format!("{field}.mountPath"),
                    place,
                    "must be unique",
                ));
            }
            _ => {}
        }
        for part in ["subPath", "subPathExpr"] {
            // kube-apiserver omits the index here.
            validate_descending_path(
                text(mount, part),
                &format!("{path}.volumeMounts.{part}"),
                errors,
            );
        }
    }
}

/// Rejects an absolute path and a path with `..` (path traversal).
fn validate_descending_path(inside: &str, path: &str, errors: &mut Vec<FieldError>) {
    if inside.starts_with('/') {
        errors.push(FieldError::invalid(path, inside, "must be a relative path"));
    }
    if inside.split('/').any(|part| part == "..") {
        errors.push(FieldError::invalid(path, inside, "must not contain '..'"));
    }
}

fn validate_ports(container: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let mut named = BTreeSet::new();
    for (index, port) in items(container, "ports").iter().enumerate() {
        let field = format!("{path}.ports[{index}]");
        let name = text(port, "name");
        if !name.is_empty() {
            errors.extend(
                names::port_name(name)
                    .into_iter()
                    .map(|problem| FieldError::invalid(format!("{field}.name"), name, problem)),
            );
            if !named.insert(name) {
                errors.push(FieldError::duplicate(format!("{field}.name"), name));
            }
        }
        match port
            .get("containerPort")
            .and_then(Value::as_i64)
            .unwrap_or_default()
        {
            0 => errors.push(FieldError::required(format!("{field}.containerPort"), "")),
            number => {
                let problems = names::port_number(number).into_iter();
                errors.extend(problems.map(|problem| {
                    FieldError::invalid(format!("{field}.containerPort"), number, problem)
                }));
            }
        }
        let host_port = port["hostPort"].as_i64().filter(|number| *number != 0);
        if let Some(number) = host_port {
            let problems = names::port_number(number).into_iter();
            errors.extend(
                problems.map(|problem| {
                    FieldError::invalid(format!("{field}.hostPort"), number, problem)
                }),
            );
        }
        one_of(
            &port["protocol"],
            &format!("{field}.protocol"),
            &["SCTP", "TCP", "UDP"],
            errors,
        );
    }
}

fn validate_resources(container: &Value, path: &str, errors: &mut Vec<FieldError>) {
    for kind in ["limits", "requests"] {
        let quantities = container
            .pointer(&format!("/resources/{kind}"))
            .and_then(Value::as_object)
            .into_iter()
            .flatten();
        for (name, quantity) in quantities {
            let written = quantities::text_of(quantity);
            let parsed = written.parse::<Quantity>();
            if parsed.is_ok_and(|parsed| parsed.sign() < 0) {
                errors.push(FieldError::invalid(
                    format!("{path}.resources.{kind}[{name}]"),
                    written,
                    "must be greater than or equal to 0",
                ));
            }
        }
    }
    let both = |name: &str| {
        let of = |kind: &str| {
            container
                .pointer(&format!("/resources/{kind}/{name}"))
                .and_then(Value::as_str)?
                .parse::<Quantity>()
                .ok()
        };
        Some((of("requests")?, of("limits")?))
    };
    for name in ["cpu", "memory"] {
        if let Some((request, limit)) =
            both(name).filter(|(request, limit)| request.milli_value() > limit.milli_value())
        {
            let detail = format!("must be less than or equal to {name} limit of {limit}");
            errors.push(FieldError::invalid(
                format!("{path}.resources.requests"),
                request.to_string(),
                detail,
            ));
        }
    }
}
