//! The defaults that Kubernetes sets on a pod.

use serde_json::{Value, json};

use crate::strategy::fields::{default_field, default_text, fields, items_mut, text};

/// Sets the defaults of a pod.
pub fn apply(pod: &mut Value) {
    if !pod.get("spec").is_some_and(Value::is_object) {
        return;
    }
    let spec = &mut pod["spec"];
    default_text(spec, "restartPolicy", "Always");
    default_text(spec, "dnsPolicy", "ClusterFirst");
    default_text(spec, "schedulerName", "default-scheduler");
    default_field(spec, "terminationGracePeriodSeconds", 30);
    default_field(spec, "enableServiceLinks", true);
    default_field(spec, "securityContext", json!({}));
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        for container in items_mut(spec, list) {
            default_container(container);
        }
    }
    for volume in items_mut(spec, "volumes") {
        default_volume(volume);
    }
    if spec["hostNetwork"] == true {
        for container in items_mut(spec, "containers") {
            for port in items_mut(container, "ports") {
                let number = port["containerPort"].clone();
                default_field(port, "hostPort", number);
            }
        }
    }
}

fn default_container(container: &mut Value) {
    let image = text(container, "image").to_owned();
    let policy = if is_latest(&image) {
        "Always"
    } else {
        "IfNotPresent"
    };
    default_text(container, "imagePullPolicy", policy);
    default_text(container, "terminationMessagePath", "/dev/termination-log");
    default_text(container, "terminationMessagePolicy", "File");
    default_field(container, "resources", json!({}));
    default_requests(&mut container["resources"]);
    for port in items_mut(container, "ports") {
        default_text(port, "protocol", "TCP");
    }
    for variable in items_mut(container, "env") {
        if let Some(reference) = variable.pointer_mut("/valueFrom/fieldRef") {
            default_text(reference, "apiVersion", "v1");
        }
    }
    for probe in ["livenessProbe", "readinessProbe", "startupProbe"] {
        if let Some(probe) = container.get_mut(probe).filter(|probe| probe.is_object()) {
            default_probe(probe);
        }
    }
    for hook in ["postStart", "preStop"] {
        if let Some(get) = container.pointer_mut(&format!("/lifecycle/{hook}/httpGet")) {
            default_http_get(get);
        }
    }
}

/// Whether an image reference has the tag `latest`, explicitly or by default.
fn is_latest(image: &str) -> bool {
    if image.contains('@') {
        return false;
    }
    let last = image.rsplit('/').next().unwrap_or_default();
    last.split_once(':').is_none_or(|(_, tag)| tag == "latest")
}

fn default_requests(resources: &mut Value) {
    let Some(limits) = resources.get("limits").and_then(Value::as_object).cloned() else {
        return;
    };
    default_field(resources, "requests", json!({}));
    for (name, quantity) in limits {
        default_field(&mut resources["requests"], &name, quantity);
    }
    if resources["requests"]
        .as_object()
        .is_some_and(serde_json::Map::is_empty)
    {
        fields(resources).remove("requests");
    }
}

fn default_probe(probe: &mut Value) {
    for (field, value) in [
        ("timeoutSeconds", 1),
        ("periodSeconds", 10),
        ("successThreshold", 1),
        ("failureThreshold", 3),
    ] {
        if probe
            .get(field)
            .is_none_or(|present| present.is_null() || *present == 0)
        {
            probe[field] = Value::from(value);
        }
    }
    if let Some(get) = probe.get_mut("httpGet").filter(|get| get.is_object()) {
        default_http_get(get);
    }
    if let Some(grpc) = probe.get_mut("grpc").filter(|grpc| grpc.is_object()) {
        default_field(grpc, "service", "");
    }
}

fn default_http_get(get: &mut Value) {
    default_text(get, "path", "/");
    default_text(get, "scheme", "HTTP");
}

fn default_volume(volume: &mut Value) {
    const FILE_MODE: i32 = 0o644;
    let sources = volume.as_object().map_or(0, |fields| {
        fields.keys().filter(|field| *field != "name").count()
    });
    if sources == 0 {
        volume["emptyDir"] = json!({});
    }
    for source in ["secret", "configMap", "projected", "downwardAPI"] {
        if let Some(source) = volume.get_mut(source).filter(|source| source.is_object()) {
            default_field(source, "defaultMode", FILE_MODE);
        }
    }
    if let Some(path) = volume.get_mut("hostPath").filter(|path| path.is_object()) {
        default_field(path, "type", "");
    }
    let files = [
        volume.pointer_mut("/downwardAPI").is_some(),
        volume.pointer_mut("/projected").is_some(),
    ];
    if files[0] {
        for item in items_mut(&mut volume["downwardAPI"], "items") {
            default_field_ref(item);
        }
    }
    if files[1] {
        for source in items_mut(&mut volume["projected"], "sources") {
            if let Some(token) = source
                .get_mut("serviceAccountToken")
                .filter(|token| token.is_object())
            {
                default_field(token, "expirationSeconds", 3600);
            }
            if source.get("downwardAPI").is_some() {
                for item in items_mut(&mut source["downwardAPI"], "items") {
                    default_field_ref(item);
                }
            }
        }
    }
    if let Some(template) = volume.pointer_mut("/ephemeral/volumeClaimTemplate/spec") {
        default_text(template, "volumeMode", "Filesystem");
    }
}

fn default_field_ref(item: &mut Value) {
    if let Some(reference) = item
        .get_mut("fieldRef")
        .filter(|reference| reference.is_object())
    {
        default_text(reference, "apiVersion", "v1");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minimal_pod_gets_kubernetes_defaults() {
        let mut pod = json!({"spec": {"containers": [{"name": "a", "image": "b/c", "ports": [{"containerPort": 1}],
            "livenessProbe": {"httpGet": {"port": 1}}, "resources": {"limits": {"cpu": "1"}}}], "volumes": [{"name": "v"}]}});
        apply(&mut pod);
        let container = &pod["spec"]["containers"][0];
        assert_eq!(container["imagePullPolicy"], "Always");
        assert_eq!(container["ports"][0]["protocol"], "TCP");
        assert_eq!(container["livenessProbe"]["periodSeconds"], 10);
        assert_eq!(container["livenessProbe"]["httpGet"]["scheme"], "HTTP");
        assert_eq!(container["resources"]["requests"]["cpu"], "1");
        assert_eq!(
            pod["spec"]["volumes"][0],
            json!({"name": "v", "emptyDir": {}})
        );
        assert_eq!(pod["spec"]["restartPolicy"], "Always");
        let once = pod.clone();
        apply(&mut pod);
        assert_eq!(pod, once);
    }

    #[test]
    fn only_the_latest_tag_is_always_pulled() {
        for (image, latest) in [
            ("a", true),
            ("a:latest", true),
            ("a:1", false),
            ("h:5000/a", true),
            ("h:5000/a:1", false),
            ("a@sha256:00", false),
        ] {
            assert_eq!(is_latest(image), latest, "{image}");
        }
    }
}
