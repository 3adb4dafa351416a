//! Kubernetes' own types within the CRDs: which objects and lists merge under server-side apply, which fields have defaults, and what a
//! condition may hold. The tables state what controller-gen writes for the markers of `k8s.io/api` 0.35 (`+structType=atomic`,
//! `+mapType=atomic`, `+listType`, `+default`) and `metav1.Condition`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{schema_of, schemas, written_schemas};

/// Objects that are replaced as a whole. `containers` stands for init and ephemeral containers too.
const ATOMIC_OBJECTS: [&str; 39] = [
    "affinity.nodeAffinity.preferredDuringSchedulingIgnoredDuringExecution[].preference",
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution",
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[]",
    "affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm.labelSelector",
    "affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm.namespaceSelector",
    "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[].labelSelector",
    "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[].namespaceSelector",
    "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm.labelSelector",
    "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution[].podAffinityTerm.namespaceSelector",
    "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[].labelSelector",
    "affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[].namespaceSelector",
    "containers[].envFrom[].configMapRef",
    "containers[].envFrom[].secretRef",
    "containers[].env[].valueFrom.configMapKeyRef",
    "containers[].env[].valueFrom.fieldRef",
    "containers[].env[].valueFrom.fileKeyRef",
    "containers[].env[].valueFrom.resourceFieldRef",
    "containers[].env[].valueFrom.secretKeyRef",
    "imagePullSecrets[]",
    "nodeSelector",
    "topologySpreadConstraints[].labelSelector",
    "volumes[].cephfs.secretRef",
    "volumes[].cinder.secretRef",
    "volumes[].configMap",
    "volumes[].csi.nodePublishSecretRef",
    "volumes[].downwardAPI.items[].fieldRef",
    "volumes[].downwardAPI.items[].resourceFieldRef",
    "volumes[].ephemeral.volumeClaimTemplate.spec.dataSource",
    "volumes[].ephemeral.volumeClaimTemplate.spec.selector",
    "volumes[].flexVolume.secretRef",
    "volumes[].iscsi.secretRef",
    "volumes[].projected.sources[].clusterTrustBundle.labelSelector",
    "volumes[].projected.sources[].configMap",
    "volumes[].projected.sources[].downwardAPI.items[].fieldRef",
    "volumes[].projected.sources[].downwardAPI.items[].resourceFieldRef",
    "volumes[].projected.sources[].secret",
    "volumes[].rbd.secretRef",
    "volumes[].scaleIO.secretRef",
    "volumes[].storageos.secretRef",
];

/// Lists that merge by key or by value. Every other list is atomic.
const MERGED_LISTS: [(&str, &[&str]); 14] = [
    ("containers", &["name"]),
    ("containers[].env", &["name"]),
    ("containers[].ports", &["containerPort", "protocol"]),
    ("containers[].resources.claims", &["name"]),
    ("containers[].restartPolicyRules[].exitCodes.values", &[]),
    ("containers[].volumeDevices", &["devicePath"]),
    ("containers[].volumeMounts", &["mountPath"]),
    ("hostAliases", &["ip"]),
    ("imagePullSecrets", &["name"]),
    ("resourceClaims", &["name"]),
    ("resources.claims", &["name"]),
    ("schedulingGates", &["name"]),
    (
        "topologySpreadConstraints",
        &["topologyKey", "whenUnsatisfiable"],
    ),
    ("volumes", &["name"]),
];

/// Defaults of fields. The name of a referenced object in the same namespace, which may be empty for historical reasons, is in
/// [`names_that_may_be_empty`].
fn defaults() -> BTreeMap<String, Value> {
    let mut defaults: BTreeMap<String, Value> = [
        (
            "containers[].env[].valueFrom.fileKeyRef.optional",
            json!(false),
        ),
        ("containers[].livenessProbe.grpc.service", json!("")),
        ("containers[].readinessProbe.grpc.service", json!("")),
        ("containers[].startupProbe.grpc.service", json!("")),
        ("containers[].ports[].protocol", json!("TCP")),
        ("volumes[].azureDisk.fsType", json!("ext4")),
        ("volumes[].azureDisk.readOnly", json!(false)),
        ("volumes[].iscsi.iscsiInterface", json!("default")),
        ("volumes[].rbd.keyring", json!("/etc/ceph/keyring")),
        ("volumes[].rbd.pool", json!("rbd")),
        ("volumes[].rbd.user", json!("admin")),
        ("volumes[].scaleIO.fsType", json!("xfs")),
        ("volumes[].scaleIO.storageMode", json!("ThinProvisioned")),
    ]
    .into_iter()
    .map(|(path, value)| (path.to_owned(), value))
    .collect();
    defaults.extend(names_that_may_be_empty().map(|path| (path, json!(""))));
    defaults
}

fn names_that_may_be_empty() -> impl Iterator<Item = String> {
    [
        "containers[].envFrom[].configMapRef",
        "containers[].envFrom[].secretRef",
        "containers[].env[].valueFrom.configMapKeyRef",
        "containers[].env[].valueFrom.secretKeyRef",
        "imagePullSecrets[]",
        "volumes[].cephfs.secretRef",
        "volumes[].cinder.secretRef",
        "volumes[].configMap",
        "volumes[].csi.nodePublishSecretRef",
        "volumes[].flexVolume.secretRef",
        "volumes[].iscsi.secretRef",
        "volumes[].projected.sources[].configMap",
        "volumes[].projected.sources[].secret",
        "volumes[].rbd.secretRef",
        "volumes[].scaleIO.secretRef",
        "volumes[].storageos.secretRef",
    ]
    .into_iter()
    .map(|object| format!("{object}.name"))
}

/// Calls `visit` for a schema and everything below it, with its path: `containers[].image`, `limits{}`.
fn walk<'a>(schema: &'a Value, path: &str, visit: &mut impl FnMut(&str, &'a Value)) {
    visit(path, schema);
    if let Some(properties) = schema["properties"].as_object() {
        for (name, property) in properties {
            let below = if path.is_empty() {
                name.clone()
            } else {
                format!("{path}.{name}")
            };
            walk(property, &below, visit);
        }
    }
    if schema["items"].is_object() {
        walk(&schema["items"], &format!("{path}[]"), visit);
    }
    if schema["additionalProperties"].is_object() {
        let below = format!("{path}{{}}");
        walk(&schema["additionalProperties"], &below, visit);
    }
}

/// The schema of every pod spec within the CRDs, by where it is.
fn pod_specs() -> BTreeMap<String, Value> {
    let mut found = BTreeMap::new();
    for ((api_version, kind), schema) in written_schemas() {
        walk(&schema, "", &mut |path, below| {
            if below["properties"]["containers"].is_object() {
                found.insert(format!("{api_version} {kind} {path}"), below.clone());
            }
        });
    }
    found
}

/// What `fact` finds in a pod's spec, by path, with all three lists of containers held to be the same.
fn facts<'a, T: PartialEq + std::fmt::Debug>(
    pod_spec: &'a Value,
    fact: impl Fn(&'a Value) -> Option<T>,
) -> BTreeMap<String, T> {
    let mut found = BTreeMap::new();
    walk(pod_spec, "", &mut |path, schema| {
        if let Some(fact) = fact(schema) {
            let path = path
                .replace("initContainers", "containers")
                .replace("ephemeralContainers", "containers");
            if let Some(other) = found.get(&path) {
                assert_eq!(*other, fact, "{path} differs between lists of containers");
            }
            found.insert(path, fact);
        }
    });
    found
}

#[test]
fn a_pod_is_embedded_in_the_kinds_that_make_pods() {
    let places: Vec<String> = pod_specs().into_keys().collect();
    assert_eq!(
        places,
        [
            "agents.kruise.io/v1alpha1 SandboxSet spec.template.spec",
            "agents.x-k8s.io/v1alpha1 Sandbox spec.podTemplate.spec",
            "agents.x-k8s.io/v1beta1 Sandbox spec.podTemplate.spec",
            "extensions.agents.x-k8s.io/v1alpha1 SandboxTemplate spec.podTemplate.spec",
            "extensions.agents.x-k8s.io/v1beta1 SandboxTemplate spec.podTemplate.spec",
        ]
    );
}

#[test]
fn objects_of_a_pod_are_atomic_where_kubernetes_marks_them() {
    for (place, pod_spec) in pod_specs() {
        let found = facts(&pod_spec, |schema| {
            schema["x-kubernetes-map-type"].as_str().map(str::to_owned)
        });
        let expected: BTreeMap<String, String> = ATOMIC_OBJECTS
            .iter()
            .map(|path| ((*path).to_owned(), "atomic".to_owned()))
            .collect();
        assert_eq!(found, expected, "{place}");
    }
}

#[test]
fn lists_of_a_pod_merge_as_kubernetes_merges_them() {
    for (place, pod_spec) in pod_specs() {
        let found = facts(&pod_spec, |schema| {
            if schema["type"] != "array" || schema["x-kubernetes-list-type"] == "atomic" {
                return None;
            }
            Some((
                schema["x-kubernetes-list-type"].clone(),
                schema["x-kubernetes-list-map-keys"].clone(),
            ))
        });
        let expected: BTreeMap<String, (Value, Value)> = MERGED_LISTS
            .iter()
            .map(|(path, keys)| {
                let fact = if keys.is_empty() {
                    (json!("set"), Value::Null)
                } else {
                    (json!("map"), json!(keys))
                };
                ((*path).to_owned(), fact)
            })
            .collect();
        assert_eq!(found, expected, "{place}");
    }
}

#[test]
fn fields_of_a_pod_have_the_defaults_that_kubernetes_declares() {
    for (place, pod_spec) in pod_specs() {
        let found = facts(&pod_spec, |schema| schema.get("default").cloned());
        assert_eq!(found, defaults(), "{place}");
    }
}

#[test]
fn a_number_or_text_says_so_as_controller_gen_does() {
    for (place, schema) in written_schemas() {
        walk(&schema, "", &mut |path, below| {
            if below["x-kubernetes-int-or-string"] == true {
                assert_eq!(
                    below["anyOf"],
                    json!([{"type": "integer"}, {"type": "string"}]),
                    "{place:?} {path}"
                );
            }
        });
    }
}

#[test]
fn a_condition_holds_what_metav1_condition_may_hold() {
    let condition = json!({
        "type": "object",
        "required": ["lastTransitionTime", "message", "reason", "status", "type"],
        "properties": {
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "message": {"type": "string", "maxLength": 32768},
            "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
            "reason": {
                "type": "string", "minLength": 1, "maxLength": 1024,
                "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$",
            },
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "type": {
                "type": "string", "maxLength": 316,
                "pattern": r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/)?(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])$",
            },
        },
    });
    let mut kinds = Vec::new();
    for ((api_version, kind), schema) in written_schemas() {
        let conditions = &schema["properties"]["status"]["properties"]["conditions"];
        if conditions.is_null() {
            continue;
        }
        let mut item = conditions["items"].clone();
        drop_descriptions(&mut item);
        assert_eq!(item, condition, "{api_version} {kind}");
        assert_eq!(conditions["x-kubernetes-list-type"], "map");
        assert_eq!(conditions["x-kubernetes-list-map-keys"], json!(["type"]));
        kinds.push(format!("{api_version} {kind}"));
    }
    assert_eq!(
        kinds,
        [
            "agents.kruise.io/v1alpha1 SandboxClaim",
            "agents.kruise.io/v1alpha1 SandboxSet",
            "agents.x-k8s.io/v1alpha1 Sandbox",
            "agents.x-k8s.io/v1beta1 Sandbox",
            "extensions.agents.x-k8s.io/v1alpha1 SandboxClaim",
            "extensions.agents.x-k8s.io/v1alpha1 SandboxWarmPool",
            "extensions.agents.x-k8s.io/v1beta1 SandboxClaim",
            "extensions.agents.x-k8s.io/v1beta1 SandboxWarmPool",
        ]
    );
}

/// Removes what is only for readers.
fn drop_descriptions(schema: &mut Value) {
    if let Some(schema) = schema.as_object_mut() {
        schema.remove("description");
        if let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) {
            properties.values_mut().for_each(drop_descriptions);
        }
    }
}

#[test]
fn an_observed_generation_is_never_negative() {
    for (place, schema) in written_schemas() {
        walk(&schema, "", &mut |path, below| {
            if path.ends_with("observedGeneration") {
                assert_eq!(below["minimum"], 0, "{place:?} {path}");
            }
        });
    }
}

#[test]
fn a_condition_that_no_client_could_read_is_refused() {
    let schemas = schemas();
    let valid = json!({"type": "Ready", "status": "True", "reason": "DependenciesReady", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let cases = [
        ("type", json!("Not ready")),
        ("type", json!("R".repeat(317))),
        ("status", json!("Maybe")),
        ("reason", json!("")),
        ("reason", json!("Not a word")),
        ("reason", json!("R".repeat(1025))),
        ("message", json!("m".repeat(32769))),
        ("observedGeneration", json!(-1)),
        ("lastTransitionTime", json!("yesterday")),
    ];
    let claim = |condition: &Value| {
        json!({"apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim", "metadata": {"name": "x"},
            "spec": {"warmPoolRef": {"name": "p"}}, "status": {"conditions": [condition]}})
    };
    assert_eq!(
        schema_of(&schemas, &claim(&valid)).validate(&claim(&valid)),
        []
    );
    for (field, value) in cases {
        let mut condition = valid.clone();
        condition[field] = value;
        let claim = claim(&condition);
        let errors = schema_of(&schemas, &claim).validate(&claim);
        let path = format!("status.conditions[0].{field}");
        assert!(
            !errors.is_empty() && errors.iter().all(|error| error.field == path),
            "{field}: {errors:?}"
        );
    }
}
