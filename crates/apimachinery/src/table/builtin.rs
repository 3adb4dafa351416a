//! The table columns of built-in resources.

use jiff::Timestamp;
use serde_json::Value;

use super::{age, pods};
use crate::selector::LabelSelector;

type CellsOf = fn(&Value, Timestamp) -> Vec<Value>;

/// The columns of each resource, in order. `+` marks columns that only `-o wide` shows.
const COLUMNS: [(&str, CellsOf, &str); 17] = [
    (
        "pods",
        pods::cells,
        "Name,Ready,Status,Restarts,Age,+IP,+Node,+Nominated Node,+Readiness Gates",
    ),
    (
        "services",
        service,
        "Name,Type,Cluster-IP,External-IP,Port(s),Age,+Selector",
    ),
    ("endpoints", endpoints, "Name,Endpoints,Age"),
    (
        "endpointslices",
        endpoint_slice,
        "Name,AddressType,Ports,Endpoints,Age",
    ),
    (
        "persistentvolumeclaims",
        claim,
        "Name,Status,Volume,Capacity,Access Modes,StorageClass,VolumeAttributesClass,Age,+VolumeMode",
    ),
    (
        "persistentvolumes",
        volume,
        "Name,Capacity,Access Modes,Reclaim Policy,Status,Claim,StorageClass,VolumeAttributesClass,Reason,Age,+VolumeMode",
    ),
    (
        "nodes",
        node,
        "Name,Status,Roles,Age,Version,+Internal-IP,+External-IP,+OS-Image,+Kernel-Version,+Container-Runtime",
    ),
    ("namespaces", namespace, "Name,Status,Age"),
    (
        "events",
        event,
        "Last Seen,Type,Reason,Object,+Subobject,+Source,Message,+First Seen,+Count,+Name",
    ),
    ("configmaps", config_map, "Name,Data,Age"),
    ("secrets", secret, "Name,Type,Data,Age"),
    ("serviceaccounts", service_account, "Name,Age"),
    ("leases", lease, "Name,Holder,Age"),
    ("networkpolicies", network_policy, "Name,Pod-Selector,Age"),
    ("runtimeclasses", runtime_class, "Name,Handler,Age"),
    (
        "storageclasses",
        storage_class,
        "Name,Provisioner,ReclaimPolicy,VolumeBindingMode,AllowVolumeExpansion,Age",
    ),
    (
        "rolebindings",
        role_binding,
        "Name,Role,Age,+Users,+Groups,+ServiceAccounts",
    ),
];

/// The column names of a resource and the function that fills them.
pub(super) fn columns(resource: &str) -> (&'static str, CellsOf) {
    let wanted = if resource == "clusterrolebindings" {
        "rolebindings"
    } else {
        resource
    };
    match COLUMNS.iter().find(|(name, _, _)| *name == wanted) {
        Some((_, cells, names)) => (names, *cells),
        None => ("Name,Created At", created),
    }
}

fn created(object: &Value, _: Timestamp) -> Vec<Value> {
    vec![
        name(object),
        text(object, "/metadata/creationTimestamp").into(),
    ]
}

fn namespace(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![
        name(object),
        text(object, "/status/phase").into(),
        age_of(object, now),
    ]
}

fn config_map(object: &Value, now: Timestamp) -> Vec<Value> {
    let count = count(object, "/data") + count(object, "/binaryData");
    vec![name(object), count.into(), age_of(object, now)]
}

fn secret(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![
        name(object),
        text(object, "/type").into(),
        count(object, "/data").into(),
        age_of(object, now),
    ]
}

fn service_account(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![name(object), age_of(object, now)]
}

fn lease(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![
        name(object),
        text(object, "/spec/holderIdentity").into(),
        age_of(object, now),
    ]
}

fn network_policy(object: &Value, now: Timestamp) -> Vec<Value> {
    let shown = match LabelSelector::from_object(object.pointer("/spec/podSelector")) {
        Ok(selector) => or_none(&selector.to_string()).to_owned(),
        Err(_) => "<error>".to_owned(),
    };
    vec![name(object), shown.into(), age_of(object, now)]
}

fn runtime_class(object: &Value, now: Timestamp) -> Vec<Value> {
    vec![
        name(object),
        text(object, "/handler").into(),
        age_of(object, now),
    ]
}

pub(super) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

pub(super) fn items<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    object
        .pointer(pointer)
        .and_then(Value::as_array)
        .map(Vec::as_slice)
        .unwrap_or_default()
}

pub(super) fn name(object: &Value) -> Value {
    text(object, "/metadata/name").into()
}

pub(super) fn age_of(object: &Value, now: Timestamp) -> Value {
    age(
        object
            .pointer("/metadata/creationTimestamp")
            .and_then(Value::as_str),
        now,
    )
    .into()
}

pub(super) fn or_none(text: &str) -> &str {
    or(text, "<none>")
}

fn or<'a>(text: &'a str, otherwise: &'a str) -> &'a str {
    if text.is_empty() { otherwise } else { text }
}

fn count(object: &Value, pointer: &str) -> usize {
    object
        .pointer(pointer)
        .and_then(Value::as_object)
        .map_or(0, serde_json::Map::len)
}

fn is_terminating(object: &Value) -> bool {
    !text(object, "/metadata/deletionTimestamp").is_empty()
}

fn joined<'a>(items: impl Iterator<Item = &'a str>) -> String {
    items.collect::<Vec<_>>().join(",")
}

fn service(object: &Value, now: Timestamp) -> Vec<Value> {
    let cluster_ip = or_none(
        items(object, "/spec/clusterIPs")
            .first()
            .and_then(Value::as_str)
            .unwrap_or(text(object, "/spec/clusterIP")),
    );
    let port = |port: &Value| {
        let number = |name: &str| port.get(name).and_then(Value::as_i64).unwrap_or(0);
        let protocol = port
            .get("protocol")
            .and_then(Value::as_str)
            .unwrap_or("TCP");
        match number("nodePort") {
            0 => format!("{}/{protocol}", number("port")),
            node_port => format!("{}:{node_port}/{protocol}", number("port")),
        }
    };
    let ports: Vec<String> = items(object, "/spec/ports").iter().map(port).collect();
    let selector = object.pointer("/spec/selector").and_then(Value::as_object);
    let selector: Vec<String> = selector
        .into_iter()
        .flatten()
        .map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default()))
        .collect();
    vec![
        name(object),
        text(object, "/spec/type").into(),
        cluster_ip.into(),
        external_ip(object).into(),
        or_none(&ports.join(",")).into(),
        age_of(object, now),
        or_none(&selector.join(",")).into(),
    ]
}

fn external_ip(object: &Value) -> String {
    let external = joined(
        items(object, "/spec/externalIPs")
            .iter()
            .filter_map(Value::as_str),
    );
    match text(object, "/spec/type") {
        "LoadBalancer" => {
            let ingress = items(object, "/status/loadBalancer/ingress")
                .iter()
                .map(|ingress| {
                    let ip = ingress
                        .get("ip")
                        .and_then(Value::as_str)
                        .unwrap_or_default();
                    or(
                        ip,
                        ingress
                            .get("hostname")
                            .and_then(Value::as_str)
                            .unwrap_or_default(),
                    )
                });
            let all = joined(ingress.chain((!external.is_empty()).then_some(external.as_str())));
            or(&all, "<pending>").to_owned()
        }
        "ExternalName" => text(object, "/spec/externalName").to_owned(),
        _ => or_none(&external).to_owned(),
    }
}

/// The first three items and the number of further ones.
fn shortened(list: &[String]) -> String {
    match list.len() {
        0 => "<none>".to_owned(),
        1..=3 => list.join(","),
        more => format!("{} + {} more...", list[..3].join(","), more - 3),
    }
}

fn endpoints(object: &Value, now: Timestamp) -> Vec<Value> {
    let mut list = Vec::new();
    for subset in items(object, "/subsets") {
        let addresses: Vec<&str> = items(subset, "/addresses")
            .iter()
            .map(|address| text(address, "/ip"))
            .collect();
        let ports = items(subset, "/ports");
        if ports.is_empty() {
            list.extend(addresses.iter().map(ToString::to_string));
        }
        for port in ports {
            let number = port.get("port").and_then(Value::as_i64).unwrap_or(0);
            list.extend(addresses.iter().map(|address| {
                if address.contains(':') {
                    format!("[{address}]:{number}")
                } else {
                    format!("{address}:{number}")
                }
            }));
        }
    }
    vec![name(object), shortened(&list).into(), age_of(object, now)]
}

fn endpoint_slice(object: &Value, now: Timestamp) -> Vec<Value> {
    let port = |port: &Value| match (
        port.get("port").and_then(Value::as_i64),
        text(port, "/name"),
    ) {
        (Some(number), _) => number.to_string(),
        (None, "") => "*".to_owned(),
        (None, name) => name.to_owned(),
    };
    let ports: Vec<String> = items(object, "/ports").iter().map(port).collect();
    let ports = if ports.is_empty() {
        "<unset>".to_owned()
    } else {
        shortened(&ports)
    };
    let addresses: Vec<String> = items(object, "/endpoints")
        .iter()
        .flat_map(|endpoint| items(endpoint, "/addresses"))
        .filter_map(Value::as_str)
        .map(str::to_owned)
        .collect();
    let endpoints = if addresses.is_empty() {
        "<unset>".to_owned()
    } else {
        shortened(&addresses)
    };
    vec![
        name(object),
        text(object, "/addressType").into(),
        ports.into(),
        endpoints.into(),
        age_of(object, now),
    ]
}

fn access_modes(object: &Value, pointer: &str) -> String {
    let short = |mode: &Value| match mode.as_str() {
        Some("ReadWriteOnce") => "RWO",
        Some("ReadOnlyMany") => "ROX",
        Some("ReadWriteMany") => "RWX",
        Some("ReadWriteOncePod") => "RWOP",
        _ => "",
    };
    joined(
        items(object, pointer)
            .iter()
            .map(short)
            .filter(|mode| !mode.is_empty()),
    )
}

fn claim(object: &Value, now: Timestamp) -> Vec<Value> {
    let phase = if is_terminating(object) {
        "Terminating"
    } else {
        text(object, "/status/phase")
    };
    let volume = text(object, "/spec/volumeName");
    let (capacity, modes) = if volume.is_empty() {
        ("", String::new())
    } else {
        (
            or(text(object, "/status/capacity/storage"), "0"),
            access_modes(object, "/status/accessModes"),
        )
    };
    vec![
        name(object),
        phase.into(),
        volume.into(),
        capacity.into(),
        modes.into(),
        text(object, "/spec/storageClassName").into(),
        or(text(object, "/spec/volumeAttributesClassName"), "<unset>").into(),
        age_of(object, now),
        or(text(object, "/spec/volumeMode"), "<unset>").into(),
    ]
}

fn volume(object: &Value, now: Timestamp) -> Vec<Value> {
    let phase = if is_terminating(object) {
        "Terminating"
    } else {
        text(object, "/status/phase")
    };
    let claim = match text(object, "/spec/claimRef/name") {
        "" => String::new(),
        claim => format!("{}/{claim}", text(object, "/spec/claimRef/namespace")),
    };
    vec![
        name(object),
        or(text(object, "/spec/capacity/storage"), "0").into(),
        access_modes(object, "/spec/accessModes").into(),
        text(object, "/spec/persistentVolumeReclaimPolicy").into(),
        phase.into(),
        claim.into(),
        text(object, "/spec/storageClassName").into(),
        or(text(object, "/spec/volumeAttributesClassName"), "<unset>").into(),
        text(object, "/status/reason").into(),
        age_of(object, now),
        or(text(object, "/spec/volumeMode"), "<unset>").into(),
    ]
}

fn node(object: &Value, now: Timestamp) -> Vec<Value> {
    let ready = items(object, "/status/conditions")
        .iter()
        .find(|condition| text(condition, "/type") == "Ready");
    let mut status = match ready.map(|condition| text(condition, "/status")) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    if object.pointer("/spec/unschedulable") == Some(&Value::Bool(true)) {
        status.push_str(",SchedulingDisabled");
    }
    let labels = object
        .pointer("/metadata/labels")
        .and_then(Value::as_object);
    let mut roles: Vec<&str> = labels
        .into_iter()
        .flatten()
        .filter_map(
            |(key, value)| match key.strip_prefix("node-role.kubernetes.io/") {
                Some(role) => Some(role),
                None if key == "kubernetes.io/role" => value.as_str(),
                None => None,
            },
        )
        .filter(|role| !role.is_empty())
        .collect();
    roles.sort_unstable();
    roles.dedup();
    let address = |kind: &str| {
        let found = items(object, "/status/addresses")
            .iter()
            .find(|address| text(address, "/type") == kind);
        found.map_or("<none>", |address| text(address, "/address"))
    };
    let info = |name: &str| text(object, &format!("/status/nodeInfo/{name}"));
    vec![
        name(object),
        status.into(),
        or_none(&roles.join(",")).into(),
        age_of(object, now),
        info("kubeletVersion").into(),
        address("InternalIP").into(),
        address("ExternalIP").into(),
        or(info("osImage"), "<unknown>").into(),
        or(info("kernelVersion"), "<unknown>").into(),
        or(info("containerRuntimeVersion"), "<unknown>").into(),
    ]
}

/// Events of both APIs: core/v1 has `involvedObject`, `message`, `source`; events.k8s.io/v1 has `regarding`, `note`,
/// `deprecated…`.
fn event(object: &Value, now: Timestamp) -> Vec<Value> {
    let either = |core: &str, new: &str| or(text(object, core), text(object, new)).to_owned();
    let since = |time: &str| age((!time.is_empty()).then_some(time), now);
    let event_time = text(object, "/eventTime").to_owned();
    let first = either("/firstTimestamp", "/deprecatedFirstTimestamp");
    let first = or(&first, &event_time);
    let last = either("/lastTimestamp", "/deprecatedLastTimestamp");
    let series = text(object, "/series/lastObservedTime");
    let last = or(series, or(&last, first));
    let count = ["/series/count", "/count", "/deprecatedCount"]
        .iter()
        .find_map(|pointer| object.pointer(pointer).and_then(Value::as_i64))
        .filter(|count| *count > 0)
        .unwrap_or(1);
    let kind = either("/involvedObject/kind", "/regarding/kind").to_lowercase();
    let target = match either("/involvedObject/name", "/regarding/name").as_str() {
        "" => kind,
        name => format!("{kind}/{name}"),
    };
    let component = or(
        text(object, "/source/component"),
        text(object, "/deprecatedSource/component"),
    );
    let component = or(
        component,
        or(
            text(object, "/reportingComponent"),
            text(object, "/reportingController"),
        ),
    );
    let host = or(
        text(object, "/source/host"),
        text(object, "/deprecatedSource/host"),
    );
    let host = or(host, text(object, "/reportingInstance"));
    let source = if host.is_empty() {
        component.to_owned()
    } else {
        format!("{component}, {host}")
    };
    vec![
        since(last).into(),
        text(object, "/type").into(),
        text(object, "/reason").into(),
        target.into(),
        either("/involvedObject/fieldPath", "/regarding/fieldPath").into(),
        source.into(),
        either("/message", "/note").trim().into(),
        since(first).into(),
        count.into(),
        name(object),
    ]
}

fn storage_class(object: &Value, now: Timestamp) -> Vec<Value> {
    let annotations = object.pointer("/metadata/annotations");
    let is_default = annotations
        .and_then(|annotations| annotations.get("storageclass.kubernetes.io/is-default-class"))
        .is_some_and(|value| value == "true");
    let suffix = if is_default { " (default)" } else { "" };
    vec![
        format!("{}{suffix}", text(object, "/metadata/name")).into(),
        text(object, "/provisioner").into(),
        or(text(object, "/reclaimPolicy"), "Delete").into(),
        or(text(object, "/volumeBindingMode"), "Immediate").into(),
        object
            .pointer("/allowVolumeExpansion")
            .and_then(Value::as_bool)
            .unwrap_or(false)
            .into(),
        age_of(object, now),
    ]
}

fn role_binding(object: &Value, now: Timestamp) -> Vec<Value> {
    let subjects = |kind: &str| {
        let matching = items(object, "/subjects")
            .iter()
            .filter(|subject| text(subject, "/kind") == kind);
        let names: Vec<String> = matching
            .map(|subject| match text(subject, "/namespace") {
                "" => text(subject, "/name").to_owned(),
                namespace => format!("{namespace}/{}", text(subject, "/name")),
            })
            .collect();
        names.join(", ")
    };
    vec![
        name(object),
        format!(
            "{}/{}",
            text(object, "/roleRef/kind"),
            text(object, "/roleRef/name")
        )
        .into(),
        age_of(object, now),
        subjects("User").into(),
        subjects("Group").into(),
        subjects("ServiceAccount").into(),
    ]
}
