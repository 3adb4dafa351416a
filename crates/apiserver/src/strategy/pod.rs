//! The rules of pods: initial state, validation, and which fields may change later.

use std::collections::BTreeSet;

use apimachinery::{field::FieldError, names};
use serde_json::{Value, json};

mod ephemeral;
mod privileges;
mod probes;
mod user_ids;

pub use self::ephemeral::restrict as restrict_to_ephemeral_containers;
use super::{default_field, default_text, fields, items, label_selector, one_of, text};
use crate::target::Part;

const IMMUTABLE_SPEC: &str = "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

/// Maximum of `activeDeadlineSeconds`, as in kube-apiserver.
const MAXIMUM_DEADLINE_SECONDS: i64 = 2_147_483_647;

/// Sets the initial status of a new pod, and the fields that the default admission plugins of Kubernetes set.
pub fn prepare_create(pod: &mut Value) {
    pod["status"] = json!({"phase": "Pending"});
    if !pod.get("spec").is_some_and(Value::is_object) {
        return;
    }
    let spec = &mut pod["spec"];
    let account = match text(spec, "serviceAccountName") {
        "" => text(spec, "serviceAccount").to_owned(),
        name => name.to_owned(),
    };
    let account = if account.is_empty() {
        "default".to_owned()
    } else {
        account
    };
    spec["serviceAccountName"] = Value::from(account.as_str());
    spec["serviceAccount"] = Value::from(account);
    default_field(spec, "priority", 0);
    default_text(spec, "preemptionPolicy", "PreemptLowerPriority");
    default_field(spec, "tolerations", json!([]));
    for taint in [
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
    ] {
        let tolerated = items(spec, "tolerations")
            .iter()
            .any(|toleration| toleration["key"] == taint);
        if !tolerated && let Some(tolerations) = spec["tolerations"].as_array_mut() {
            tolerations.push(json!({"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}));
        }
    }
}

/// Sets the quality-of-service class that follows from the pod's resources.
pub fn classify(pod: &mut Value) {
    let spec = &pod["spec"];
    let containers = items(spec, "containers")
        .iter()
        .chain(items(spec, "initContainers"));
    let (mut any, mut guaranteed) = (false, true);
    for container in containers {
        let of = |kind: &str, name: &str| {
            container
                .pointer(&format!("/resources/{kind}/{name}"))
                .filter(|quantity| **quantity != "0")
        };
        for name in ["cpu", "memory"] {
            let (request, limit) = (of("requests", name), of("limits", name));
            any |= request.is_some() || limit.is_some();
            guaranteed &= limit.is_some() && request == limit;
        }
    }
    let class = match (any, guaranteed) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    };
    pod["status"]["qosClass"] = Value::from(class);
}

/// Validates a pod.
pub fn validate(pod: &Value, old: Option<&Value>, part: Part) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &pod["spec"];
    if part == Part::Status {
        return errors;
    }
    if let Some(old) = old {
        if part == Part::EphemeralContainers {
            ephemeral::validate(spec, &old["spec"], &mut errors);
        }
        if part == Part::Main {
            validate_deadline_change(spec, &old["spec"], &mut errors);
            if immutable_spec(spec) != immutable_spec(&old["spec"]) {
                errors.push(FieldError::forbidden("spec", IMMUTABLE_SPEC));
            }
        }
        return errors;
    }
    validate_containers(spec, &mut errors);
    if items(spec, "containers").is_empty() {
        errors.push(FieldError::required("spec.containers", ""));
    }
    if !items(spec, "ephemeralContainers").is_empty() {
        errors.push(FieldError::forbidden(
            "spec.ephemeralContainers",
            "cannot be set on create",
        ));
    }
    one_of(
        &spec["restartPolicy"],
        "spec.restartPolicy",
        &["Always", "OnFailure", "Never"],
        &mut errors,
    );
    one_of(
        &spec["dnsPolicy"],
        "spec.dnsPolicy",
        &["ClusterFirstWithHostNet", "ClusterFirst", "Default", "None"],
        &mut errors,
    );
    for (field, path) in [
        ("hostname", "spec.hostname"),
        ("subdomain", "spec.subdomain"),
    ] {
        let value = text(spec, field);
        if !value.is_empty() {
            errors.extend(
                names::dns_1123_label(value)
                    .into_iter()
                    .map(|problem| FieldError::invalid(path, value, problem)),
            );
        }
    }
    for (field, path) in [
        ("nodeName", "spec.nodeName"),
        ("serviceAccountName", "spec.serviceAccountName"),
        ("runtimeClassName", "spec.runtimeClassName"),
    ] {
        let value = text(spec, field);
        if !value.is_empty() {
            errors.extend(
                names::dns_1123_subdomain(value)
                    .into_iter()
                    .map(|problem| FieldError::invalid(path, value, problem)),
            );
        }
    }
    validate_seconds(spec, &mut errors);
    label_selector::validate_labels(&spec["nodeSelector"], "spec.nodeSelector", &mut errors);
    user_ids::validate_pod(&spec["securityContext"], &mut errors);
    errors
}

/// Validates the volumes and the containers of a new pod.
fn validate_containers(spec: &Value, errors: &mut Vec<FieldError>) {
    let volumes = validate_volumes(spec, errors);
    let grace = spec["terminationGracePeriodSeconds"]
        .as_i64()
        .filter(|grace| *grace >= 0);
    let mut container_names = BTreeSet::new();
    for list in ["initContainers", "containers"] {
        for (index, container) in items(spec, list).iter().enumerate() {
            let path = format!("spec.{list}[{index}]");
            validate_container(container, &path, &volumes, errors);
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

/// Validates the deadline and the grace period of a new pod.
fn validate_seconds(spec: &Value, errors: &mut Vec<FieldError>) {
    let deadline = spec["activeDeadlineSeconds"].as_i64();
    if let Some(seconds) =
        deadline.filter(|seconds| !(1..=MAXIMUM_DEADLINE_SECONDS).contains(seconds))
    {
        let detail = format!("must be between 1 and {MAXIMUM_DEADLINE_SECONDS}, inclusive");
        errors.push(FieldError::invalid(
            "spec.activeDeadlineSeconds",
            seconds,
            detail,
        ));
    }
    let grace = spec["terminationGracePeriodSeconds"].as_i64();
    if let Some(seconds) = grace.filter(|seconds| *seconds < 0) {
        errors.push(FieldError::invalid(
            "spec.terminationGracePeriodSeconds",
            seconds,
            "must be greater than or equal to 0",
        ));
    }
}

/// Validates a change of the deadline: it may be set and shortened, but not extended or removed.
fn validate_deadline_change(spec: &Value, old: &Value, errors: &mut Vec<FieldError>) {
    let path = "spec.activeDeadlineSeconds";
    let (now, before) = (
        spec["activeDeadlineSeconds"].as_i64(),
        old["activeDeadlineSeconds"].as_i64(),
    );
    let problem = match (now, before) {
        (now, before) if now == before => return,
        (None, _) => "must not update from a positive integer to nil value".to_owned(),
        (Some(now), _) if !(0..=MAXIMUM_DEADLINE_SECONDS).contains(&now) => {
            format!("must be between 0 and {MAXIMUM_DEADLINE_SECONDS}, inclusive")
        }
        (Some(now), Some(before)) if before < now => {
            "must be less than or equal to previous value".to_owned()
        }
        _ => return,
    };
    errors.push(FieldError::invalid(
        path,
        now.map_or(Value::Null, Value::from),
        problem,
    ));
}

/// A spec without the mutable fields.
fn immutable_spec(spec: &Value) -> Value {
    let mut spec = spec.clone();
    for field in [
        "activeDeadlineSeconds",
        "tolerations",
        "terminationGracePeriodSeconds",
        "schedulingGates",
    ] {
        fields(&mut spec).remove(field);
    }
    for list in ["containers", "initContainers"] {
        for container in super::items_mut(&mut spec, list) {
            for field in ["image", "imagePullPolicy"] {
                fields(container).remove(field);
            }
        }
    }
    spec
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

fn validate_container(
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

/// All quantities of a pod's containers and volumes, with their field paths.
pub fn quantities(pod: &Value) -> Vec<(String, &Value)> {
    let spec = &pod["spec"];
    let mut found = super::quantities_in(&spec["overhead"], "spec.overhead");
    found.extend(super::quantities_of(&spec["resources"], "spec.resources"));
    for kind in ["initContainers", "containers", "ephemeralContainers"] {
        for (index, container) in items(spec, kind).iter().enumerate() {
            let path = format!("spec.{kind}[{index}].resources");
            found.extend(super::quantities_of(&container["resources"], &path));
        }
    }
    for (index, volume) in items(spec, "volumes").iter().enumerate() {
        if let Some(limit) = volume.pointer("/emptyDir/sizeLimit") {
            found.push((format!("spec.volumes[{index}].emptyDir.sizeLimit"), limit));
        }
    }
    found
}

fn validate_resources(container: &Value, path: &str, errors: &mut Vec<FieldError>) {
    for kind in ["limits", "requests"] {
        let quantities = container
            .pointer(&format!("/resources/{kind}"))
            .and_then(Value::as_object)
            .into_iter()
            .flatten();
        for (name, quantity) in quantities {
            let written = super::quantity_text(quantity);
            let parsed = written.parse::<apimachinery::quantity::Quantity>();
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
                .parse::<apimachinery::quantity::Quantity>()
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
