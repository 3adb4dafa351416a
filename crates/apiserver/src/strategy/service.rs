//! The rules of services, and the allocation of their cluster IPs and node ports.

use std::{collections::HashSet, net::Ipv4Addr};

use apimachinery::{field::FieldError, names};
use rand::Rng;
use serde_json::{Value, json};
use store::{Range, ResourceId};

use super::{
    Context, Kind,
    fields::{default_field, default_text, fields, items, items_mut, one_of, text},
    label_selector,
};
use crate::{registry::Resource, target::Part};

/// 10.96.0.0/16: the usual range of cluster IPs.
const NETWORK: u32 = 0x0a60_0000;
const NODE_PORTS: std::ops::Range<u16> = 30_000..32_768;

/// Services.
pub struct Service;

impl Kind for Service {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
    }

    fn prepare_create(&self, context: &Context<'_>, object: &mut Value) {
        prepare_create(context, object);
    }

    fn prepare_update(&self, context: &Context<'_>, object: &mut Value, old: &Value, _part: Part) {
        prepare_update(context, object, old);
    }

    fn validate(
        &self,
        _resource: &Resource,
        object: &Value,
        old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        validate(object, old)
    }

    fn name_problems(&self, name: &str) -> Vec<String> {
        names::dns_1035_label(name)
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &[
            "metadata.name",
            "metadata.namespace",
            "spec.clusterIP",
            "spec.type",
        ]
    }
}

fn default(service: &mut Value) {
    if !service["spec"].is_object() {
        return;
    }
    let spec = &mut service["spec"];
    default_text(spec, "type", "ClusterIP");
    default_text(spec, "sessionAffinity", "None");
    for port in items_mut(spec, "ports") {
        default_text(port, "protocol", "TCP");
        let number = port.get("port").cloned().unwrap_or_default();
        if port
            .get("targetPort")
            .is_none_or(|target| target.is_null() || target == "" || *target == 0)
        {
            port["targetPort"] = number;
        }
    }
    if text(spec, "type") == "ExternalName" {
        return;
    }
    default_text(spec, "internalTrafficPolicy", "Cluster");
    default_text(spec, "ipFamilyPolicy", "SingleStack");
    default_field(spec, "ipFamilies", json!(["IPv4"]));
    if matches!(text(spec, "type"), "NodePort" | "LoadBalancer") {
        default_text(spec, "externalTrafficPolicy", "Cluster");
    }
    if text(spec, "type") == "LoadBalancer" {
        default_field(spec, "allocateLoadBalancerNodePorts", true);
    }
}

fn prepare_create(context: &Context<'_>, service: &mut Value) {
    service["status"] = json!({"loadBalancer": {}});
    allocate(context, service);
}

fn prepare_update(context: &Context<'_>, service: &mut Value, old: &Value) {
    if !service["spec"].is_object() {
        return;
    }
    // Keeps allocated addresses and ports if the client omits them.
    for field in ["clusterIP", "clusterIPs"] {
        if service["spec"]
            .get(field)
            .is_none_or(|value| value.is_null() || value == "")
            && text(&service["spec"], "type") != "ExternalName"
            && let Some(value) = old["spec"].get(field)
        {
            service["spec"][field] = value.clone();
        }
    }
    let before = items(&old["spec"], "ports").to_vec();
    for port in items_mut(&mut service["spec"], "ports") {
        let same = before.iter().find(|other| {
            other["port"] == port["port"] && text(other, "protocol") == text(port, "protocol")
        });
        if port.get("nodePort").is_none()
            && let Some(number) = same.and_then(|same| same.get("nodePort"))
        {
            port["nodePort"] = number.clone();
        }
    }
    allocate(context, service);
}

fn allocate(context: &Context<'_>, service: &mut Value) {
    if !service["spec"].is_object() || text(&service["spec"], "type") == "ExternalName" {
        return;
    }
    let spec = &mut service["spec"];
    if text(spec, "clusterIP").is_empty() {
        let first = spec
            .pointer("/clusterIPs/0")
            .and_then(Value::as_str)
            .map(ToOwned::to_owned);
        spec["clusterIP"] = Value::from(first.unwrap_or_else(|| free_address(context)));
    }
    spec["clusterIPs"] = json!([spec["clusterIP"]]);
    let wants_node_ports = matches!(text(spec, "type"), "NodePort" | "LoadBalancer");
    for port in items_mut(spec, "ports") {
        if !wants_node_ports {
            fields(port).remove("nodePort");
        } else if port
            .get("nodePort")
            .and_then(Value::as_i64)
            .unwrap_or_default()
            == 0
        {
            port["nodePort"] = Value::from(free_node_port(context));
        }
    }
}

fn allocated(context: &Context<'_>, read: impl Fn(&Value) -> Vec<Value>) -> HashSet<String> {
    let services = context.store.list(
        &ResourceId::new("", "services"),
        &Range::namespace(""),
        None,
    );
    let services = services
        .map(|snapshot| snapshot.objects)
        .unwrap_or_default();
    services
        .iter()
        .flat_map(|service| read(&service.value()))
        .map(|value| value.to_string())
        .collect()
}

fn free_address(context: &Context<'_>) -> String {
    let allocated = allocated(context, |service| {
        vec![service["spec"]["clusterIP"].clone()]
    });
    loop {
        let host = rand::rng().random_range(2..0xfffe_u32);
        let address = Ipv4Addr::from_bits(NETWORK | host).to_string();
        if !allocated.contains(&Value::from(address.as_str()).to_string()) {
            return address;
        }
    }
}

fn free_node_port(context: &Context<'_>) -> u16 {
    let allocated = allocated(context, |service| {
        items(&service["spec"], "ports")
            .iter()
            .map(|port| port["nodePort"].clone())
            .collect()
    });
    let start = rand::rng().random_range(NODE_PORTS);
    let candidates = (start..NODE_PORTS.end).chain(NODE_PORTS.start..start);
    candidates
        .into_iter()
        .find(|port| !allocated.contains(&port.to_string()))
        .unwrap_or(start)
}

fn validate_affinity_timeout(spec: &Value, errors: &mut Vec<FieldError>) {
    const MAXIMUM_SECONDS: i64 = 86_400;
    let timeout = spec.pointer("/sessionAffinityConfig/clientIP/timeoutSeconds");
    let seconds = timeout.and_then(Value::as_i64);
    if let Some(seconds) = seconds.filter(|seconds| !(1..=MAXIMUM_SECONDS).contains(seconds)) {
        errors.push(FieldError::invalid(
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
            seconds,
            format!("must be greater than 0 and less than {MAXIMUM_SECONDS}"),
        ));
    }
}

fn validate(service: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &service["spec"];
    let headless = text(spec, "clusterIP") == "None";
    let external = text(spec, "type") == "ExternalName";
    one_of(
        &spec["type"],
        "spec.type",
        &["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"],
        &mut errors,
    );
    one_of(
        &spec["sessionAffinity"],
        "spec.sessionAffinity",
        &["ClientIP", "None"],
        &mut errors,
    );
    let is_changed = |field: &str| old.is_none_or(|old| old["spec"][field] != spec[field]);
    if is_changed("selector") {
        label_selector::validate_labels(&spec["selector"], "spec.selector", &mut errors);
    }
    if text(spec, "sessionAffinity") == "ClientIP" && is_changed("sessionAffinityConfig") {
        validate_affinity_timeout(spec, &mut errors);
    }
    let ports = items(spec, "ports");
    if ports.is_empty() && !headless && !external {
        errors.push(FieldError::required("spec.ports", ""));
    }
    if external && text(spec, "externalName").is_empty() {
        errors.push(FieldError::required("spec.externalName", ""));
    }
    let mut seen = HashSet::new();
    for (index, port) in ports.iter().enumerate() {
        let path = format!("spec.ports[{index}]");
        let name = text(port, "name");
        match name {
            "" if ports.len() > 1 => errors.push(FieldError::required(format!("{path}.name"), "")),
            "" => {}
            name => errors.extend(
                names::dns_1123_label(name)
                    .into_iter()
                    .map(|problem| FieldError::invalid(format!("{path}.name"), name, problem)),
            ),
        }
        if !name.is_empty() && !seen.insert(name) {
            errors.push(FieldError::duplicate(format!("{path}.name"), name));
        }
        let number = port.get("port").and_then(Value::as_i64).unwrap_or_default();
        errors.extend(
            names::port_number(number)
                .into_iter()
                .map(|problem| FieldError::invalid(format!("{path}.port"), number, problem)),
        );
        one_of(
            &port["protocol"],
            &format!("{path}.protocol"),
            &["SCTP", "TCP", "UDP"],
            &mut errors,
        );
        match &port["targetPort"] {
            Value::Number(target) => {
                let target = target.as_i64().unwrap_or_default();
                errors.extend(names::port_number(target).into_iter().map(|problem| {
                    FieldError::invalid(format!("{path}.targetPort"), target, problem)
                }));
            }
            Value::String(target) => {
                errors.extend(names::port_name(target).into_iter().map(|problem| {
                    FieldError::invalid(format!("{path}.targetPort"), target.as_str(), problem)
                }));
            }
            _ => {}
        }
    }
    let address = text(spec, "clusterIP");
    if !external && !headless && address.parse::<std::net::IpAddr>().is_err() {
        errors.push(FieldError::invalid(
            "spec.clusterIPs[0]",
            address,
            "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
        ));
    }
    if let Some(old) = old {
        let before = text(&old["spec"], "clusterIP");
        if !before.is_empty()
            && !external
            && before != address
            && text(&old["spec"], "type") != "ExternalName"
        {
            errors.push(FieldError::invalid(
                "spec.clusterIPs[0]",
                json!([address]),
                "may not change once set",
            ));
        }
    }
    errors
}
