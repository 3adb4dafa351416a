//! Every field of a pod is supported, refused, warned about, or has no meaning on this node.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::*;

/// The fields of every type, one type a line.
const TYPES: &str = include_str!("../../../apimachinery/src/types/builtin.txt");

/// Fields that do what they say.
const HONOURED: [(&str, &str); 14] = [
    (
        "PodSpec",
        "activeDeadlineSeconds automountServiceAccountToken containers dnsConfig dnsPolicy ephemeralContainers hostAliases hostname \
         imagePullSecrets initContainers nodeName readinessGates restartPolicy runtimeClassName schedulerName schedulingGates \
         securityContext serviceAccount serviceAccountName shareProcessNamespace subdomain terminationGracePeriodSeconds volumes",
    ),
    (
        "PodSecurityContext",
        "fsGroup runAsGroup runAsNonRoot runAsUser supplementalGroups",
    ),
    (
        "SecurityContext",
        "allowPrivilegeEscalation readOnlyRootFilesystem runAsGroup runAsNonRoot runAsUser",
    ),
    (
        "Container",
        "args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports readinessProbe resources securityContext \
         startupProbe stdin stdinOnce terminationMessagePath terminationMessagePolicy tty volumeMounts workingDir",
    ),
    (
        "EnvVarSource",
        "configMapKeyRef fieldRef resourceFieldRef secretKeyRef",
    ),
    ("VolumeMount", "mountPath name readOnly subPath subPathExpr"),
    ("ContainerPort", "containerPort name protocol"),
    ("ResourceRequirements", "limits requests"),
    ("Lifecycle", "postStart preStop stopSignal"),
    ("LifecycleHandler", "exec httpGet sleep"),
    (
        "Probe",
        "exec failureThreshold grpc httpGet initialDelaySeconds periodSeconds successThreshold tcpSocket \
         terminationGracePeriodSeconds timeoutSeconds",
    ),
    ("HTTPGetAction", "host httpHeaders path port scheme"),
    ("TCPSocketAction", "host port"),
    (
        "VolumeProjection",
        "configMap downwardAPI secret serviceAccountToken",
    ),
];

/// Fields whose value is refused with a reason, elsewhere.
const REFUSED: [(&str, &str); 2] = [
    ("PodSpec", "hostIPC hostNetwork hostPID"),
    ("SecurityContext", "capabilities privileged"),
];

/// Fields with nothing to do on one node, or whose scheduler is the one to speak.
const WITHOUT_MEANING: [(&str, &str); 4] = [
    (
        // No service has an address of its own here, so there is nothing to put into variables; what follows is the
        // scheduler's; and what a runtime class adds to the requests.
        "PodSpec",
        "enableServiceLinks affinity nodeSelector topologySpreadConstraints tolerations priority priorityClassName preemptionPolicy \
         overhead",
    ),
    // How labels and owners of files are set, not which.
    (
        "PodSecurityContext",
        "fsGroupChangePolicy seLinuxChangePolicy",
    ),
    // There is no subresource to resize a pod with.
    ("Container", "resizePolicy"),
    // Has an effect only with a host port, which causes a warning.
    ("ContainerPort", "hostIP"),
];

/// The fields of a type, and the type of each.
fn fields(kind: &str) -> BTreeMap<&'static str, &'static str> {
    let line = TYPES
        .lines()
        .find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))
        .unwrap_or_else(|| panic!("{kind} is not in the table"));
    line.split(' ')
        .filter_map(|field| field.split_once(':'))
        // A list's type comes after its brackets.
        .map(|(name, kind)| (name, kind.rsplit(']').next().unwrap()))
        .collect()
}

/// The fields that a path goes through, each with the type it is one of.
fn walk(kind: &'static str, path: &'static str) -> Vec<(&'static str, &'static str)> {
    let mut kind = kind;
    let mut passed = Vec::new();
    for step in path.split('/').filter(|step| *step != "*") {
        let next = fields(kind);
        let next = next
            .get(step)
            .unwrap_or_else(|| panic!("{kind} has no {step}"));
        passed.push((kind, step));
        kind = next;
    }
    passed
}

fn tables() -> [(&'static str, &'static [Rule]); 4] {
    [
        ("PodSpec", OF_POD),
        ("Container", OF_CONTAINER),
        ("Container", OF_PLAIN_CONTAINER),
        ("Volume", OF_VOLUME),
    ]
}

/// An object in which the field at `path` has this value.
fn with(path: &str, value: &Value) -> Value {
    match path.rsplit_once('/') {
        Some((rest, "*")) => with(rest, &json!([value])),
        Some((rest, field)) => with(rest, &json!({field: value})),
        None => json!({path: value}),
    }
}

/// A specification of a pod with an object of the kind that a table is for.
fn around(kind: &str, mut object: Value) -> Value {
    object["name"] = json!("x");
    match kind {
        "Container" => json!({"containers": [object]}),
        "Volume" => json!({"volumes": [object]}),
        _ => object,
    }
}

#[test]
fn each_field_that_is_not_honoured_is_told_of_by_name() {
    for (kind, rules) in tables() {
        for (path, when, _) in rules {
            let value = match when {
                When::Given => json!({"some": "thing"}),
                When::True => json!(true),
                When::NotZero => json!(1),
                When::Is(text) => json!(text),
                When::IsNot(_) => json!("another"),
            };
            let warnings = in_specification(&around(kind, with(path, &value)));
            let known = ["name", "type", "tcpSocket"];
            let mut steps = path.rsplit('/');
            let word = steps.find(|step| !known.contains(step)).unwrap();
            let word = if word == "claims" {
                "resource claims"
            } else {
                word
            };
            assert!(
                warnings.len() == 1 && warnings[0].contains(word),
                "{kind} {path}: {warnings:?}"
            );
            assert_eq!(
                kind == "PodSpec",
                !warnings[0].contains("\"x\""),
                "whose it is: {warnings:?}"
            );
        }
    }
}

#[test]
fn what_a_field_means_by_itself_is_told_too() {
    let container = |fields: Value| json!({"containers": [fields]});
    for (spec, expected) in [
        (
            container(
                json!({"name": "c", "resources": {"limits": {"cpu": "1", "example.com/gpu": "1"}}}),
            ),
            "container \"c\" asks for resources that this node does not have: example.com/gpu",
        ),
        (
            container(json!({"name": "c", "lifecycle": {"stopSignal": "SIGNONSENSE"}})),
            "stopSignal \"SIGNONSENSE\" of container \"c\" is unknown: SIGTERM is sent",
        ),
        (
            json!({"runtimeClassName": "gvisor", "shareProcessNamespace": true}),
            "shareProcessNamespace is ignored in runtime class \"gvisor\": every container has its own processes",
        ),
        (
            json!({"runtimeClassName": "gvisor", "ephemeralContainers": [{"name": "e", "targetContainerName": "c"}]}),
            "targetContainerName of container \"e\" is ignored in runtime class \"gvisor\": every container has its own processes",
        ),
    ] {
        assert_eq!(in_specification(&spec), [expected]);
    }
}

#[test]
fn only_what_was_added_to_a_pod_is_told_of_again() {
    let pod = |ephemeral: Value| -> Pod {
        serde_json::from_value(json!({"spec": {"hostUsers": true, "containers": [], "ephemeralContainers": ephemeral}}))
            .unwrap()
    };
    let first = json!({"name": "first", "securityContext": {"procMount": "Unmasked"}});
    let second = json!({"name": "second", "securityContext": {"procMount": "Unmasked"}});
    let (before, now) = (pod(json!([first])), pod(json!([first, second])));
    let new = added(&before, &now);
    let warnings: Vec<String> = new.iter().flat_map(|new| in_added(&now, new)).collect();
    assert_eq!(
        warnings,
        ["procMount Unmasked of container \"second\" is ignored"]
    );
    assert!(added(&now, &now).is_empty());
}

#[test]
fn common_fields_cause_no_warning() {
    let usual = json!({"containers": [{"name": "c", "image": "host", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
        "securityContext": {"allowPrivilegeEscalation": false, "seccompProfile": {"type": "RuntimeDefault"}},
        "lifecycle": {"stopSignal": "SIGRTMIN+3"},
        "volumeMounts": [{"name": "v", "mountPath": "/v"}], "ports": [{"containerPort": 80}]}],
        "initContainers": [{"name": "s", "image": "host", "restartPolicy": "Always"}],
        "shareProcessNamespace": true, "os": {"name": "linux"}, "volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}]});
    let pod: Pod = serde_json::from_value(json!({"spec": usual})).unwrap();
    assert_eq!(unsupported(&pod), Vec::<String>::new());
}

#[test]
fn no_field_of_a_pod_is_forgotten() {
    let mut accounted: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let lists = HONOURED.iter().chain(&REFUSED).chain(&WITHOUT_MEANING);
    for (kind, fields) in lists {
        accounted
            .entry(kind)
            .or_default()
            .extend(fields.split_whitespace());
    }
    for (kind, rules) in tables() {
        for (path, _, _) in rules {
            for (kind, field) in walk(kind, path) {
                if let Some(known) = accounted.get_mut(kind) {
                    known.insert(field);
                }
            }
        }
    }
    for (kind, known) in accounted {
        let fields: BTreeSet<&str> = fields(kind).into_keys().collect();
        assert_eq!(known, fields, "fields of {kind}");
    }
}
