//! Fields of a pod that this node does not support, reported to the user as warnings. Pure.
//!
//! Fields without which a pod would run with less isolation than requested, or not at all, are refused where they are read
//! ([`container_spec`](crate::container_spec), [`volumes`](crate::volumes)). The fields here are ignored with a warning. A test checks
//! that every field of a pod is handled in one of these ways.

use k8s_openapi::api::core::v1::{EphemeralContainer, Pod};
use serde_json::Value;

use container_runtime::signals;

/// Resources that are enforced or counted.
const KNOWN_RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];

/// Which values of a field are not supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// Every value.
    Given,
    True,
    NotZero,
    Is(&'static str),
    /// Every value except these.
    IsNot(&'static [&'static str]),
}

impl When {
    fn holds(self, value: &Value) -> bool {
        match self {
            Self::Given => match value {
                Value::Null => false,
                Value::Array(items) => !items.is_empty(),
                _ => true,
            },
            Self::True => value == &Value::Bool(true),
            Self::NotZero => value.as_i64().is_some_and(|number| number != 0),
            Self::Is(text) => value == text,
            Self::IsNot(texts) => value
                .as_str()
                .is_some_and(|text| !text.is_empty() && !texts.contains(&text)),
        }
    }
}

/// A field by its path, with `*` for the items of a list; which values are not supported; and the warning, with `{}` for the object
/// that has the field.
type Rule = (&'static str, When, &'static str);

const OF_POD: &[Rule] = &[
    (
        "hostUsers",
        When::True,
        "hostUsers is ignored: every pod has its own UID range",
    ),
    (
        "os/name",
        When::IsNot(&["linux"]),
        "os is ignored: this node runs Linux",
    ),
    (
        "resourceClaims",
        When::Given,
        "resourceClaims are ignored: this node has no devices to allocate",
    ),
    (
        "resources",
        When::Given,
        "resources of the pod as a whole are ignored: set those of its containers",
    ),
    (
        "hostnameOverride",
        When::Given,
        "hostnameOverride is ignored: use hostname",
    ),
    (
        "setHostnameAsFQDN",
        When::True,
        "setHostnameAsFQDN is ignored: the hostname is the pod's, and the full name is in /etc/hosts",
    ),
    (
        "workloadRef",
        When::Given,
        "workloadRef is ignored: pods are scheduled one by one",
    ),
    (
        "securityContext/sysctls",
        When::Given,
        "sysctls are ignored",
    ),
    (
        "securityContext/seLinuxOptions",
        When::Given,
        "seLinuxOptions of the pod are ignored",
    ),
    (
        "securityContext/appArmorProfile",
        When::Given,
        "appArmorProfile of the pod is ignored",
    ),
    (
        "securityContext/windowsOptions",
        When::Given,
        "windowsOptions of the pod are ignored",
    ),
    (
        "securityContext/supplementalGroupsPolicy",
        When::Is("Strict"),
        "supplementalGroupsPolicy Strict is ignored: groups of the image's user are added",
    ),
    (
        "securityContext/seccompProfile/type",
        When::Is("Unconfined"),
        "the pod's seccompProfile Unconfined is ignored: it gets the default one",
    ),
];

/// For containers of every kind.
const OF_CONTAINER: &[Rule] = &[
    (
        "volumeDevices",
        When::Given,
        "volumeDevices of {} are ignored",
    ),
    (
        "restartPolicyRules",
        When::Given,
        "restartPolicyRules of {} are ignored: the pod's restartPolicy holds for it",
    ),
    (
        "ports/*/hostPort",
        When::NotZero,
        "hostPort of {} is ignored: reach the pod at its address, by a service or by port-forward",
    ),
    (
        "resources/claims",
        When::Given,
        "resource claims of {} are ignored",
    ),
    (
        "env/*/valueFrom/fileKeyRef",
        When::Given,
        "fileKeyRef of {} is not read: the variable is not set; use a config map or a secret",
    ),
    (
        "volumeMounts/*/mountPropagation",
        When::IsNot(&["None"]),
        "mountPropagation in {} is ignored: no mount leaves or enters it",
    ),
    (
        "volumeMounts/*/recursiveReadOnly",
        When::IsNot(&["Disabled"]),
        "recursiveReadOnly in {} is ignored: nothing is mounted below a volume",
    ),
    (
        "lifecycle/postStart/tcpSocket",
        When::Given,
        "the postStart hook of {} is a tcpSocket, which does nothing",
    ),
    (
        "lifecycle/preStop/tcpSocket",
        When::Given,
        "the preStop hook of {} is a tcpSocket, which does nothing",
    ),
    (
        "securityContext/seLinuxOptions",
        When::Given,
        "seLinuxOptions of {} are ignored",
    ),
    (
        "securityContext/appArmorProfile",
        When::Given,
        "appArmorProfile of {} is ignored",
    ),
    (
        "securityContext/windowsOptions",
        When::Given,
        "windowsOptions of {} are ignored",
    ),
    (
        "securityContext/procMount",
        When::Is("Unmasked"),
        "procMount Unmasked of {} is ignored",
    ),
    (
        "securityContext/seccompProfile/type",
        When::Is("Unconfined"),
        "seccompProfile Unconfined of {} is ignored: it gets the default one",
    ),
];

/// For containers that are neither init nor ephemeral containers.
const OF_PLAIN_CONTAINER: &[Rule] = &[(
    "restartPolicy",
    When::Given,
    "restartPolicy of {} is ignored: the pod's holds for it",
)];

const OF_VOLUME: &[Rule] = &[
    (
        "emptyDir/medium",
        When::IsNot(&["Memory"]),
        "the medium of {} is ignored: it is a directory on disk",
    ),
    (
        "projected/sources/*/clusterTrustBundle",
        When::Given,
        "clusterTrustBundle in {} is ignored",
    ),
    (
        "projected/sources/*/podCertificate",
        When::Given,
        "podCertificate in {} is ignored",
    ),
];

/// Whether a field below `value` has an unsupported value.
fn is_met(value: &Value, path: &str, when: When) -> bool {
    let (step, rest) = match path.split_once('/') {
        Some((step, rest)) => (step, Some(rest)),
        None => (path, None),
    };
    let meets = |found: &Value| match rest {
        Some(rest) => is_met(found, rest, when),
        None => when.holds(found),
    };
    match step {
        "*" => value
            .as_array()
            .is_some_and(|items| items.iter().any(meets)),
        _ => value.get(step).is_some_and(meets),
    }
}

fn judge(rules: &[Rule], object: &Value, whose: &str, found: &mut Vec<String>) {
    let met = rules
        .iter()
        .filter(|(path, when, _)| is_met(object, path, *when));
    found.extend(met.map(|(_, _, text)| text.replace("{}", whose)));
}

fn items<'a>(object: &'a Value, list: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    object
        .get(list)
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
}

/// An object of the specification, by its name.
fn named(kind: &str, object: &Value) -> String {
    format!("{kind} {}", object["name"])
}

/// The warnings for a pod.
pub fn unsupported(pod: &Pod) -> Vec<String> {
    pod.spec
        .as_ref()
        .map_or_else(Vec::new, |spec| in_specification(&serialised(spec)))
}

/// The ephemeral containers that were added to a pod since `before`.
pub fn added(before: &Pod, now: &Pod) -> Vec<EphemeralContainer> {
    let of = |pod: &Pod| {
        let containers = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.ephemeral_containers.clone());
        containers.unwrap_or_default()
    };
    let known = of(before);
    let mut containers = of(now);
    containers.retain(|container| known.iter().all(|known| known.name != container.name));
    containers
}

/// The warnings for an ephemeral container that was added to a pod.
pub fn in_added(pod: &Pod, container: &EphemeralContainer) -> Vec<String> {
    let mut found = Vec::new();
    let class = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.runtime_class_name.as_deref());
    in_ephemeral(
        &serialised(container),
        class.unwrap_or_default(),
        &mut found,
    );
    found
}

fn serialised(object: &impl serde::Serialize) -> Value {
    serde_json::to_value(object).unwrap_or_default()
}

fn in_specification(spec: &Value) -> Vec<String> {
    let mut found = Vec::new();
    judge(OF_POD, spec, "", &mut found);
    let class = spec["runtimeClassName"].as_str().unwrap_or_default();
    if spec["shareProcessNamespace"] == true && !class.is_empty() {
        found.push(format!(
            "shareProcessNamespace is ignored in runtime class {class:?}: every container has its own processes"
        ));
    }
    for container in items(spec, "initContainers") {
        in_container(container, &mut found);
    }
    for container in items(spec, "containers") {
        in_container(container, &mut found);
        judge(
            OF_PLAIN_CONTAINER,
            container,
            &named("container", container),
            &mut found,
        );
    }
    for container in items(spec, "ephemeralContainers") {
        in_ephemeral(container, class, &mut found);
    }
    for volume in items(spec, "volumes") {
        judge(OF_VOLUME, volume, &named("volume", volume), &mut found);
    }
    found
}

fn in_ephemeral(container: &Value, class: &str, found: &mut Vec<String>) {
    in_container(container, found);
    let target = container["targetContainerName"]
        .as_str()
        .unwrap_or_default();
    if !target.is_empty() && !class.is_empty() {
        found.push(format!(
            "targetContainerName of {} is ignored in runtime class {class:?}: every container has its own processes",
            named("container", container)
        ));
    }
}

fn in_container(container: &Value, found: &mut Vec<String>) {
    let whose = named("container", container);
    judge(OF_CONTAINER, container, &whose, found);
    let signal = container["lifecycle"]["stopSignal"].as_str();
    if let Some(signal) = signal.filter(|signal| signals::number(signal).is_none()) {
        found.push(format!(
            "stopSignal {signal:?} of {whose} is unknown: SIGTERM is sent"
        ));
    }
    let asked = ["limits", "requests"].map(|list| container["resources"][list].as_object());
    let asked = asked.into_iter().flatten().flat_map(|list| list.keys());
    let mut others: Vec<&str> = asked
        .map(String::as_str)
        .filter(|resource| !KNOWN_RESOURCES.contains(resource))
        .collect();
    others.sort_unstable();
    others.dedup();
    if !others.is_empty() {
        found.push(format!(
            "{whose} asks for resources that this node does not have: {}",
            others.join(", ")
        ));
    }
}

#[cfg(test)]
mod tests;
