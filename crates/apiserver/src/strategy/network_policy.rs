//! The rules of network policies.

use apimachinery::{field::FieldError, names};
use serde_json::{Value, json};

use super::{
    Kind,
    fields::{default_field, default_text, items, items_mut, one_of, text},
    label_selector,
};
use crate::{registry::Resource, target::Part};

/// Network policies.
pub struct NetworkPolicy;

impl Kind for NetworkPolicy {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
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
}

fn default(policy: &mut Value) {
    if !policy["spec"].is_object() {
        policy["spec"] = json!({});
    }
    let spec = &mut policy["spec"];
    default_field(spec, "podSelector", json!({}));
    if items(spec, "policyTypes").is_empty() {
        let egress = spec.get("egress").is_some_and(Value::is_array);
        spec["policyTypes"] = if egress {
            json!(["Ingress", "Egress"])
        } else {
            json!(["Ingress"])
        };
    }
    for direction in ["ingress", "egress"] {
        for rule in items_mut(spec, direction) {
            for port in items_mut(rule, "ports") {
                default_text(port, "protocol", "TCP");
            }
        }
    }
}

/// Validates a network policy. An unchanged spec is not validated again (validation ratcheting).
fn validate(policy: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &policy["spec"];
    if old.is_some_and(|old| old["spec"] == *spec) {
        return errors;
    }
    label_selector::validate(&spec["podSelector"], "spec.podSelector", &mut errors);
    for (direction, peers) in [("ingress", "from"), ("egress", "to")] {
        for (index, rule) in items(spec, direction).iter().enumerate() {
            let path = format!("spec.{direction}[{index}]");
            for (at, port) in items(rule, "ports").iter().enumerate() {
                validate_port(port, &format!("{path}.ports[{at}]"), &mut errors);
            }
            for (at, peer) in items(rule, peers).iter().enumerate() {
                validate_peer(peer, &format!("{path}.{peers}[{at}]"), &mut errors);
            }
        }
    }
    if items(spec, "policyTypes").len() > 2 {
        errors.push(FieldError::invalid(
            "spec.policyTypes",
            spec["policyTypes"].clone(),
            "may not specify more than two policyTypes",
        ));
        return errors;
    }
    for (index, kind) in items(spec, "policyTypes").iter().enumerate() {
        one_of(
            kind,
            &format!("spec.policyTypes[{index}]"),
            &["Egress", "Ingress"],
            &mut errors,
        );
    }
    errors
}

fn validate_peer(peer: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let is_given = |field: &&str| peer.get(*field).is_some_and(Value::is_object);
    let selectors: Vec<&str> = ["podSelector", "namespaceSelector"]
        .into_iter()
        .filter(is_given)
        .collect();
    for field in &selectors {
        label_selector::validate(&peer[*field], &format!("{path}.{field}"), errors);
    }
    let Some(block) = peer.get("ipBlock").filter(|block| block.is_object()) else {
        if selectors.is_empty() {
            errors.push(FieldError::required(path, "must specify a peer"));
        }
        return;
    };
    if !selectors.is_empty() {
        errors.push(FieldError::forbidden(
            path,
            "may not specify both ipBlock and another peer",
        ));
    }
    let range = text(block, "cidr");
    match parse_range(range) {
        Some(outer) => {
            for (index, except) in items(block, "except")
                .iter()
                .filter_map(Value::as_str)
                .enumerate()
            {
                let inside = parse_range(except).is_some_and(|inner| contains(outer, inner));
                if !inside {
                    let detail = format!("must be a strict subset of `cidr`: {range}");
                    errors.push(FieldError::invalid(
                        format!("{path}.ipBlock.except[{index}]"),
                        except,
                        detail,
                    ));
                }
            }
        }
        None if range.is_empty() => {
            errors.push(FieldError::required(format!("{path}.ipBlock.cidr"), ""));
        }
        None => errors.push(FieldError::invalid(
            format!("{path}.ipBlock.cidr"),
            range,
            "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)",
        )),
    }
}

fn validate_port(port: &Value, path: &str, errors: &mut Vec<FieldError>) {
    one_of(
        &port["protocol"],
        &format!("{path}.protocol"),
        &["TCP", "UDP", "SCTP"],
        errors,
    );
    match &port["port"] {
        Value::Number(number) => {
            let number = number.as_i64().unwrap_or_default();
            let problems = names::port_number(number).into_iter();
            errors.extend(
                problems
                    .map(|problem| FieldError::invalid(format!("{path}.port"), number, problem)),
            );
        }
        Value::String(name) => {
            let problems = names::port_name(name).into_iter();
            errors.extend(problems.map(|problem| {
                FieldError::invalid(format!("{path}.port"), name.as_str(), problem)
            }));
        }
        _ => {}
    }
    validate_end_port(port, path, errors);
}

fn validate_end_port(port: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let Some(end) = port["endPort"].as_i64() else {
        return;
    };
    let path = format!("{path}.endPort");
    match &port["port"] {
        Value::Number(start) => {
            let start = start.as_i64().unwrap_or_default();
            if end < start {
                // kube-apiserver reports the start port here, not the end port.
                let detail = "must be greater than or equal to `port`";
                errors.push(FieldError::invalid(&path, start, detail));
            }
            let problems = names::port_number(end).into_iter();
            errors.extend(problems.map(|problem| FieldError::invalid(&path, end, problem)));
        }
        Value::String(_) => errors.push(FieldError::invalid(
            path,
            end,
            "may not be specified when `port` is non-numeric",
        )),
        _ => errors.push(FieldError::invalid(
            path,
            end,
            "may not be specified when `port` is not specified",
        )),
    }
}

/// Address bits, prefix length and address width of a CIDR range.
fn parse_range(text: &str) -> Option<(u128, u32, u32)> {
    let (address, prefix) = text.split_once('/')?;
    let prefix: u32 = prefix.parse().ok()?;
    let (bits, width) = match address.parse::<std::net::IpAddr>().ok()? {
        std::net::IpAddr::V4(address) => (u128::from(address.to_bits()), 32),
        std::net::IpAddr::V6(address) => (address.to_bits(), 128),
    };
    (prefix <= width).then_some((bits, prefix, width))
}

fn contains(
    (outer, outer_prefix, outer_width): (u128, u32, u32),
    (inner, inner_prefix, inner_width): (u128, u32, u32),
) -> bool {
    let network = |bits: u128| {
        bits.checked_shr(outer_width - outer_prefix)
            .unwrap_or_default()
    };
    outer_width == inner_width && inner_prefix > outer_prefix && network(outer) == network(inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_gets_default_types_and_protocols() {
        let mut policy =
            json!({"spec": {"podSelector": {}, "egress": [{"ports": [{"port": 53}]}]}});
        default(&mut policy);
        assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress", "Egress"]));
        assert_eq!(policy["spec"]["egress"][0]["ports"][0]["protocol"], "TCP");
    }

    #[test]
    fn an_exception_must_be_within_its_ip_block() {
        let policy = |except: &str| json!({"spec": {"egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [except]}}]}]}});
        assert!(validate(&policy("10.0.0.0/8"), None).is_empty());
        assert_eq!(
            validate(&policy("fe80::/10"), None)[0].field,
            "spec.egress[0].to[0].ipBlock.except[0]"
        );
    }
    #[test]
    fn invalid_selectors_and_ports_are_refused_with_kubernetes_messages() {
        let rule = |rule: Value| json!({"podSelector": {}, "ingress": [rule]});
        for (spec, expected) in [
            (
                json!({"podSelector": {"matchLabels": {"": "x"}}}),
                "spec.podSelector.matchLabels: Invalid value: \"\": name part must be non-empty",
            ),
            (
                rule(
                    json!({"from": [{"namespaceSelector": {"matchExpressions": [{"key": "a", "operator": "Like"}]}}]}),
                ),
                "spec.ingress[0].from[0].namespaceSelector.matchExpressions[0].operator: Invalid value: \"Like\": not a valid selector operator",
            ),
            (
                rule(json!({"ports": [{"port": 80, "endPort": 79}]})),
                "spec.ingress[0].ports[0].endPort: Invalid value: 80: must be greater than or equal to `port`",
            ),
            (
                rule(json!({"ports": [{"port": 80, "endPort": 70_000}]})),
                "spec.ingress[0].ports[0].endPort: Invalid value: 70000: must be between 1 and 65535, inclusive",
            ),
            (
                rule(json!({"ports": [{"port": "web", "endPort": 90}]})),
                "spec.ingress[0].ports[0].endPort: Invalid value: 90: may not be specified when `port` is non-numeric",
            ),
            (
                rule(json!({"ports": [{"endPort": 90}]})),
                "spec.ingress[0].ports[0].endPort: Invalid value: 90: may not be specified when `port` is not specified",
            ),
        ] {
            let policy = json!({"spec": spec});
            let errors = validate(&policy, None);
            assert!(!errors.is_empty(), "{policy}");
            assert_eq!(errors[0].to_string(), expected, "{policy}");
            assert!(
                validate(&policy, Some(&policy)).is_empty(),
                "an unchanged spec passes"
            );
        }
    }
}
