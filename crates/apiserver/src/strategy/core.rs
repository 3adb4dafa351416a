//! The rules of the small core kinds: namespaces, secrets, config maps, volumes and claims, classes, leases, role bindings.

use apimachinery::{field::FieldError, names};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Value, json};

use super::{default_field, default_text, fields, immutable, items, items_mut, one_of, text};

const SECRET_BYTES: usize = 1 << 20;

pub fn prepare_namespace(namespace: &mut Value) {
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

pub fn default_namespace(namespace: &mut Value) {
    let name = namespace["metadata"]["name"].clone();
    if !namespace["metadata"]["labels"].is_object() {
        namespace["metadata"]["labels"] = json!({});
    }
    namespace["metadata"]["labels"]["kubernetes.io/metadata.name"] = name;
}

pub fn default_secret(secret: &mut Value) {
    default_text(secret, "type", "Opaque");
    let Some(Value::Object(plain)) = fields(secret).remove("stringData") else {
        return;
    };
    for (key, value) in plain {
        let encoded = STANDARD.encode(value.as_str().unwrap_or_default());
        default_field(secret, "data", json!({}));
        secret["data"][key] = Value::from(encoded);
    }
}

pub fn validate_secret(secret: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut total = 0;
    for (key, value) in secret
        .get("data")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        errors.extend(
            names::config_key(key)
                .into_iter()
                .map(|problem| FieldError::invalid(format!("data[{key}]"), key.as_str(), problem)),
        );
        match value.as_str().map(|text| STANDARD.decode(text)) {
            Some(Ok(bytes)) => total += bytes.len(),
            _ if value.is_null() => {}
            _ => errors.push(FieldError::invalid(
                format!("data[{key}]"),
                "<secret contents redacted>",
                "must be base64",
            )),
        }
    }
    if total > SECRET_BYTES {
        errors.push(FieldError::too_long("data", SECRET_BYTES));
    }
    immutable(secret, old, "/type", "type", &mut errors);
    validate_immutable_data(secret, old, &["/data"], &mut errors);
    errors
}

pub fn validate_config_map(map: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut total = 0;
    for field in ["data", "binaryData"] {
        for (key, value) in map
            .get(field)
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
        {
            let path = format!("{field}[{key}]");
            errors.extend(
                names::config_key(key)
                    .into_iter()
                    .map(|problem| FieldError::invalid(&path, key.as_str(), problem)),
            );
            total += value.as_str().map_or(0, str::len);
            if field == "binaryData"
                && map
                    .pointer("/data")
                    .is_some_and(|data| data.get(key).is_some())
            {
                errors.push(FieldError::invalid(
                    &path,
                    key.as_str(),
                    "duplicate of key present in data",
                ));
            }
            if !value.is_string() {
                errors.push(FieldError::type_invalid(
                    path,
                    value.clone(),
                    "must be a string",
                ));
            }
        }
    }
    if total > SECRET_BYTES {
        errors.push(FieldError::too_long("", SECRET_BYTES));
    }
    validate_immutable_data(map, old, &["/data", "/binaryData"], &mut errors);
    errors
}

/// Validates `immutable: true`, which cannot be removed and makes the data immutable.
fn validate_immutable_data(
    object: &Value,
    old: Option<&Value>,
    data: &[&str],
    errors: &mut Vec<FieldError>,
) {
    let Some(old) = old.filter(|old| old["immutable"] == true) else {
        return;
    };
    if object["immutable"] != true {
        errors.push(FieldError::forbidden(
            "immutable",
            "field is immutable when `immutable` is set",
        ));
    }
    for pointer in data {
        if object.pointer(pointer) != old.pointer(pointer) {
            errors.push(FieldError::forbidden(
                &pointer[1..],
                "field is immutable when `immutable` is set",
            ));
        }
    }
}

pub fn default_claim(claim: &mut Value) {
    if claim["spec"].is_object() {
        default_text(&mut claim["spec"], "volumeMode", "Filesystem");
    }
    if claim["status"].is_object() {
        default_text(&mut claim["status"], "phase", "Pending");
    }
}

pub fn default_volume(volume: &mut Value) {
    if volume["spec"].is_object() {
        default_text(&mut volume["spec"], "volumeMode", "Filesystem");
        default_text(
            &mut volume["spec"],
            "persistentVolumeReclaimPolicy",
            "Retain",
        );
    }
    if volume["status"].is_object() {
        default_text(&mut volume["status"], "phase", "Pending");
    }
}

const ACCESS_MODES: &[&str] = &[
    "ReadOnlyMany",
    "ReadWriteMany",
    "ReadWriteOnce",
    "ReadWriteOncePod",
];

/// The finalizer that protects a volume claim while pods use it.
pub const CLAIM_PROTECTION: &str = "kubernetes.io/pvc-protection";

pub fn protect_claim(claim: &mut Value) {
    let metadata = fields(&mut claim["metadata"]);
    let finalizers = metadata.entry("finalizers").or_insert_with(|| json!([]));
    if let Value::Array(finalizers) = finalizers
        && !finalizers.iter().any(|found| found == CLAIM_PROTECTION)
    {
        finalizers.push(Value::from(CLAIM_PROTECTION));
    }
}

pub fn validate_claim(claim: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &claim["spec"];
    if items(spec, "accessModes").is_empty() {
        errors.push(FieldError::required(
            "spec.accessModes",
            "at least 1 access mode is required",
        ));
    }
    for mode in items(spec, "accessModes") {
        one_of(mode, "spec.accessModes", ACCESS_MODES, &mut errors);
    }
    match spec.pointer("/resources/requests/storage") {
        None => errors.push(FieldError::required("spec.resources[storage]", "")),
        Some(storage) => validate_capacity(storage, "spec.resources[storage]", &mut errors),
    }
    let Some(old) = old else { return errors };
    let mut allowed = spec.clone();
    for field in ["resources", "volumeAttributesClassName"] {
        match old["spec"].get(field) {
            Some(value) => allowed[field] = value.clone(),
            None => drop(fields(&mut allowed).remove(field)),
        }
    }
    // The binder sets these fields once.
    for field in ["volumeName", "storageClassName"] {
        if old["spec"].get(field).is_none_or(|value| value == "") {
            match old["spec"].get(field) {
                Some(value) => allowed[field] = value.clone(),
                None => drop(fields(&mut allowed).remove(field)),
            }
        }
    }
    if allowed != old["spec"] {
        let detail = "spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims";
        errors.push(FieldError::forbidden("spec", detail));
    }
    errors
}

fn validate_capacity(quantity: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let written = super::quantity_text(quantity);
    let parsed = written.parse::<apimachinery::quantity::Quantity>();
    if parsed.is_ok_and(|parsed| parsed.sign() <= 0) {
        let detail = "must be greater than zero";
        errors.push(FieldError::invalid(path, written, detail));
    }
}

pub fn validate_volume(volume: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &volume["spec"];
    if items(spec, "accessModes").is_empty() {
        errors.push(FieldError::required("spec.accessModes", ""));
    }
    for mode in items(spec, "accessModes") {
        one_of(mode, "spec.accessModes", ACCESS_MODES, &mut errors);
    }
    match spec.pointer("/capacity/storage") {
        None => errors.push(FieldError::required("spec.capacity", "")),
        Some(storage) => validate_capacity(storage, "spec.capacity[storage]", &mut errors),
    }
    one_of(
        &spec["persistentVolumeReclaimPolicy"],
        "spec.persistentVolumeReclaimPolicy",
        &["Delete", "Recycle", "Retain"],
        &mut errors,
    );
    errors
}

pub fn default_storage_class(class: &mut Value) {
    default_text(class, "reclaimPolicy", "Delete");
    default_text(class, "volumeBindingMode", "Immediate");
}

pub fn validate_storage_class(class: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if text(class, "provisioner").is_empty() {
        errors.push(FieldError::required("provisioner", ""));
    }
    one_of(
        &class["reclaimPolicy"],
        "reclaimPolicy",
        &["Delete", "Retain"],
        &mut errors,
    );
    one_of(
        &class["volumeBindingMode"],
        "volumeBindingMode",
        &["Immediate", "WaitForFirstConsumer"],
        &mut errors,
    );
    for (pointer, path) in [
        ("/provisioner", "provisioner"),
        ("/parameters", "parameters"),
        ("/reclaimPolicy", "reclaimPolicy"),
    ] {
        immutable(class, old, pointer, path, &mut errors);
    }
    errors
}

pub fn validate_runtime_class(class: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    match text(class, "handler") {
        "" => errors.push(FieldError::required("handler", "")),
        handler => errors.extend(
            names::dns_1123_label(handler)
                .into_iter()
                .map(|problem| FieldError::invalid("handler", handler, problem)),
        ),
    }
    immutable(class, old, "/handler", "handler", &mut errors);
    errors
}

pub fn validate_lease(lease: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &lease["spec"];
    if let Some(seconds) = spec["leaseDurationSeconds"]
        .as_i64()
        .filter(|seconds| *seconds <= 0)
    {
        errors.push(FieldError::invalid(
            "spec.leaseDurationSeconds",
            seconds,
            "must be greater than 0",
        ));
    }
    if let Some(count) = spec["leaseTransitions"].as_i64().filter(|count| *count < 0) {
        errors.push(FieldError::invalid(
            "spec.leaseTransitions",
            count,
            "must be greater than or equal to 0",
        ));
    }
    errors
}

const RBAC: &str = "rbac.authorization.k8s.io";

pub fn default_binding(binding: &mut Value) {
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

pub fn validate_binding(binding: &Value, old: Option<&Value>) -> Vec<FieldError> {
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
