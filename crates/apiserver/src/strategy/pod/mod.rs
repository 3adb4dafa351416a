//! The rules of pods: initial state, validation, and which fields may change later.

use apimachinery::{field::FieldError, names};
use serde_json::{Value, json};

pub mod binding;
mod containers;
mod defaults;
mod ephemeral;
mod privileges;
mod probes;
mod user_ids;

use super::{
    Context, Kind,
    fields::{default_field, default_text, fields, items, items_mut, one_of, scalar, text},
    label_selector, quantities,
};
use crate::{registry::Resource, target::Part};

const IMMUTABLE_SPEC: &str = "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";

/// Maximum of `activeDeadlineSeconds`, as in kube-apiserver.
const MAXIMUM_DEADLINE_SECONDS: i64 = 2_147_483_647;

/// The grace period of a pod that states none.
const DEFAULT_GRACE_SECONDS: i64 = 30;

/// Pods.
pub struct Pod;

impl Kind for Pod {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        defaults::apply(object);
    }

    fn prepare_create(&self, _context: &Context<'_>, object: &mut Value) {
        prepare_create(object);
    }

    fn complete_create(&self, object: &mut Value) {
        classify(object);
    }

    fn prepare_update(&self, _context: &Context<'_>, object: &mut Value, old: &Value, part: Part) {
        if part == Part::EphemeralContainers {
            ephemeral::restrict(object, old);
        }
    }

    fn validate(
        &self,
        _resource: &Resource,
        object: &Value,
        old: Option<&Value>,
        part: Part,
    ) -> Vec<FieldError> {
        validate(object, old, part)
    }

    fn quantities<'a>(&self, object: &'a Value) -> Vec<(String, &'a Value)> {
        quantities_of(object)
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &[
            "metadata.name",
            "metadata.namespace",
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.podIPs",
            "status.nominatedNodeName",
        ]
    }

    fn selected_field(&self, object: &Value, field: &str) -> Option<String> {
        let found = scalar(object, field);
        match field {
            "spec.hostNetwork" => found.or_else(|| Some("false".to_owned())),
            _ => found,
        }
    }

    fn keeps_generation(&self, object: &Value, old: &Value) -> bool {
        only_assigns_node(object, old)
    }

    fn grace_period_seconds(&self, object: &Value, requested: Option<i64>) -> i64 {
        grace_period_seconds(object, requested)
    }

    fn is_terminating_when_removed(&self) -> bool {
        true
    }
}

/// Sets the initial status of a new pod, and the fields that the default admission plugins of Kubernetes set.
fn prepare_create(pod: &mut Value) {
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
fn classify(pod: &mut Value) {
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
fn validate(pod: &Value, old: Option<&Value>, part: Part) -> Vec<FieldError> {
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
    containers::validate_all(spec, &mut errors);
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
        for container in items_mut(&mut spec, list) {
            for field in ["image", "imagePullPolicy"] {
                fields(container).remove(field);
            }
        }
    }
    spec
}

/// All quantities of a pod's containers and volumes, with their field paths.
fn quantities_of(pod: &Value) -> Vec<(String, &Value)> {
    let spec = &pod["spec"];
    let mut found = quantities::of_map(&spec["overhead"], "spec.overhead");
    found.extend(quantities::of_resources(
        &spec["resources"],
        "spec.resources",
    ));
    for kind in ["initContainers", "containers", "ephemeralContainers"] {
        for (index, container) in items(spec, kind).iter().enumerate() {
            let path = format!("spec.{kind}[{index}].resources");
            found.extend(quantities::of_resources(&container["resources"], &path));
        }
    }
    for (index, volume) in items(spec, "volumes").iter().enumerate() {
        if let Some(limit) = volume.pointer("/emptyDir/sizeLimit") {
            found.push((format!("spec.volumes[{index}].emptyDir.sizeLimit"), limit));
        }
    }
    found
}

/// Whether the only change of a pod's spec is its assignment to a node, which is not a change of the desired state.
fn only_assigns_node(object: &Value, old: &Value) -> bool {
    let is_bound = |pod: &Value| pod.pointer("/spec/nodeName").is_some_and(|node| node != "");
    if is_bound(old) || !is_bound(object) {
        return false;
    }
    let mut spec = object["spec"].clone();
    if let Some(fields) = spec.as_object_mut() {
        fields.remove("nodeName");
    }
    spec == old["spec"]
}

/// The time in which a pod must terminate: zero unless it is assigned to a node and still runs.
fn grace_period_seconds(pod: &Value, requested: Option<i64>) -> i64 {
    let bound = pod
        .pointer("/spec/nodeName")
        .and_then(Value::as_str)
        .is_some_and(|node| !node.is_empty());
    let ended = matches!(
        pod.pointer("/status/phase").and_then(Value::as_str),
        Some("Succeeded" | "Failed")
    );
    if !bound || ended {
        return 0;
    }
    let wanted = requested
        .or_else(|| {
            pod.pointer("/spec/terminationGracePeriodSeconds")
                .and_then(Value::as_i64)
        })
        .unwrap_or(DEFAULT_GRACE_SECONDS);
    // A negative period used to mean "immediately"; kube-apiserver treats it as one second.
    if wanted < 0 { 1 } else { wanted }
}
