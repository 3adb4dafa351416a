//! A container's environment: literal values, references, and the `$(NAME)` syntax. Pure.

use std::collections::BTreeMap;
use std::fmt::Write;

use k8s_openapi::api::core::v1::{Container, EnvVarSource, Pod};

use crate::api_objects::Objects;
use crate::quantity;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum EnvironmentError {
    #[error("configmap \"{0}\" not found")]
    NoConfigMap(String),
    #[error("secret \"{0}\" not found")]
    NoSecret(String),
    #[error("couldn't find key {key} in {kind} {name}")]
    NoKey {
        kind: &'static str,
        name: String,
        key: String,
    },
    #[error("field path {0:?} is not supported")]
    UnsupportedField(String),
    #[error("the pod has no UID")]
    NoUid,
    #[error("resource {0:?} is not supported")]
    UnsupportedResource(String),
}

/// The properties of a pod that are not in its specification.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// The first is `status.podIP`.
    pub pod_addresses: Vec<String>,
    pub node_address: String,
    /// The limits that the downward API reports for a container without limits.
    pub allocatable_cpu_milli: u64,
    pub allocatable_memory: u64,
}

/// The container's variables in order, later ones replacing earlier ones of the same name.
pub fn resolve(
    pod: &Pod,
    container: &Container,
    objects: &Objects,
    surroundings: &Surroundings,
) -> Result<Vec<(String, String)>, EnvironmentError> {
    let mut variables: Vec<(String, String)> = Vec::new();
    let mut set = |name: String, value: String| {
        variables.retain(|(existing, _)| *existing != name);
        variables.push((name, value));
    };
    for source in container.env_from.iter().flatten() {
        let prefix = source.prefix.clone().unwrap_or_default();
        if let Some(reference) = &source.config_map_ref {
            match objects.config_maps.get(&reference.name) {
                Some(found) => found
                    .data
                    .iter()
                    .flatten()
                    .for_each(|(key, value)| set(format!("{prefix}{key}"), value.clone())),
                None if reference.optional == Some(true) => {}
                None => return Err(EnvironmentError::NoConfigMap(reference.name.clone())),
            }
        }
        if let Some(reference) = &source.secret_ref {
            match objects.secrets.get(&reference.name) {
                Some(found) => found.data.iter().flatten().for_each(|(key, value)| {
                    set(
                        format!("{prefix}{key}"),
                        String::from_utf8_lossy(&value.0).into_owned(),
                    );
                }),
                None if reference.optional == Some(true) => {}
                None => return Err(EnvironmentError::NoSecret(reference.name.clone())),
            }
        }
    }
    let mut known: BTreeMap<String, String> = variables.iter().cloned().collect();
    for variable in container.env.iter().flatten() {
        let value = match (&variable.value, &variable.value_from) {
            (_, Some(source)) => match referenced(pod, container, source, objects, surroundings)? {
                Some(value) => value,
                None => continue,
            },
            (Some(value), None) => expand(value, &known),
            (None, None) => String::new(),
        };
        known.insert(variable.name.clone(), value.clone());
        variables.retain(|(existing, _)| *existing != variable.name);
        variables.push((variable.name.clone(), value));
    }
    Ok(variables)
}

fn referenced(
    pod: &Pod,
    container: &Container,
    source: &EnvVarSource,
    objects: &Objects,
    surroundings: &Surroundings,
) -> Result<Option<String>, EnvironmentError> {
    if let Some(field) = &source.field_ref {
        return field_value(pod, &field.field_path, surroundings).map(Some);
    }
    if let Some(resource) = &source.resource_field_ref {
        return resource_value(pod, container, resource, surroundings).map(Some);
    }
    if let Some(reference) = &source.config_map_key_ref {
        let optional = reference.optional == Some(true);
        let Some(found) = objects.config_maps.get(&reference.name) else {
            return if optional {
                Ok(None)
            } else {
                Err(EnvironmentError::NoConfigMap(reference.name.clone()))
            };
        };
        return match found
            .data
            .as_ref()
            .and_then(|data| data.get(&reference.key))
        {
            Some(value) => Ok(Some(value.clone())),
            None if optional => Ok(None),
            None => Err(EnvironmentError::NoKey {
                kind: "ConfigMap",
                name: reference.name.clone(),
                key: reference.key.clone(),
            }),
        };
    }
    if let Some(reference) = &source.secret_key_ref {
        let optional = reference.optional == Some(true);
        let Some(found) = objects.secrets.get(&reference.name) else {
            return if optional {
                Ok(None)
            } else {
                Err(EnvironmentError::NoSecret(reference.name.clone()))
            };
        };
        return match found
            .data
            .as_ref()
            .and_then(|data| data.get(&reference.key))
        {
            Some(value) => Ok(Some(String::from_utf8_lossy(&value.0).into_owned())),
            None if optional => Ok(None),
            None => Err(EnvironmentError::NoKey {
                kind: "Secret",
                name: reference.name.clone(),
                key: reference.key.clone(),
            }),
        };
    }
    // `fileKeyRef` is not supported: the variable is not set, and an event of the pod reports it.
    Ok(None)
}

/// The value of a downward-API field.
pub fn field_value(
    pod: &Pod,
    path: &str,
    surroundings: &Surroundings,
) -> Result<String, EnvironmentError> {
    let metadata = &pod.metadata;
    let spec = pod.spec.as_ref();
    let keyed = |map: &Option<BTreeMap<String, String>>, key: &str| {
        map.as_ref()
            .and_then(|map| map.get(key))
            .cloned()
            .unwrap_or_default()
    };
    let listed = |map: &Option<BTreeMap<String, String>>| {
        let lines = map
            .iter()
            .flatten()
            .map(|(key, value)| format!("{key}={value:?}"));
        lines.collect::<Vec<_>>().join("\n")
    };
    if let Some((field, key)) = path
        .strip_suffix("']")
        .and_then(|path| path.split_once("['"))
    {
        return match field {
            "metadata.labels" => Ok(keyed(&metadata.labels, key)),
            "metadata.annotations" => Ok(keyed(&metadata.annotations, key)),
            _ => Err(EnvironmentError::UnsupportedField(path.to_owned())),
        };
    }
    Ok(match path {
        "metadata.name" => metadata.name.clone().unwrap_or_default(),
        "metadata.namespace" => metadata.namespace.clone().unwrap_or_default(),
        "metadata.uid" => metadata.uid.clone().ok_or(EnvironmentError::NoUid)?,
        "metadata.labels" => listed(&metadata.labels),
        "metadata.annotations" => listed(&metadata.annotations),
        "spec.nodeName" => spec
            .and_then(|spec| spec.node_name.clone())
            .unwrap_or_default(),
        "spec.serviceAccountName" => spec
            .and_then(|spec| spec.service_account_name.clone())
            .unwrap_or_default(),
        "status.hostIP" | "status.hostIPs" => surroundings.node_address.clone(),
        "status.podIP" => surroundings
            .pod_addresses
            .first()
            .cloned()
            .unwrap_or_default(),
        "status.podIPs" => surroundings.pod_addresses.join(","),
        _ => return Err(EnvironmentError::UnsupportedField(path.to_owned())),
    })
}

/// The value of a downward-API resource, in units of its divisor and rounded up.
pub fn resource_value(
    pod: &Pod,
    own: &Container,
    reference: &k8s_openapi::api::core::v1::ResourceFieldSelector,
    surroundings: &Surroundings,
) -> Result<String, EnvironmentError> {
    let spec = pod.spec.as_ref();
    let named = reference.container_name.as_ref().and_then(|name| {
        spec.and_then(|spec| {
            spec.containers
                .iter()
                .chain(spec.init_containers.iter().flatten())
                .find(|found| found.name == *name)
        })
    });
    let resources = named.unwrap_or(own).resources.clone().unwrap_or_default();
    let unsupported = || EnvironmentError::UnsupportedResource(reference.resource.clone());
    let (kind, resource) = reference.resource.split_once('.').ok_or_else(unsupported)?;
    let limits = resources.limits.unwrap_or_default();
    let table = match kind {
        "limits" => limits.clone(),
        "requests" => resources.requests.unwrap_or_default(),
        _ => return Err(unsupported()),
    };
    let milli = match (
        table.get(resource).or_else(|| limits.get(resource)),
        resource,
    ) {
        (Some(quantity), _) => quantity::milli(&quantity.0).ok_or_else(unsupported)?,
        (None, "cpu") => surroundings.allocatable_cpu_milli,
        (None, "memory") => surroundings.allocatable_memory.saturating_mul(1000),
        (None, _) => 0,
    };
    let divisor = reference
        .divisor
        .as_ref()
        .and_then(|divisor| quantity::milli(&divisor.0))
        .filter(|divisor| *divisor > 0);
    Ok(milli.div_ceil(divisor.unwrap_or(1000)).to_string())
}

/// Replaces `$(NAME)` by the value of a variable and `$$` by a dollar sign. References to unknown variables are not changed.
pub fn expand(text: &str, variables: &BTreeMap<String, String>) -> String {
    let mut output = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(position) = rest.find('$') {
        output.push_str(&rest[..position]);
        rest = &rest[position + 1..];
        if let Some(after) = rest.strip_prefix('$') {
            output.push('$');
            rest = after;
        } else if let Some((name, after)) = rest
            .strip_prefix('(')
            .and_then(|inner| inner.split_once(')'))
        {
            match variables.get(name) {
                Some(value) => output.push_str(value),
                None => {
                    let _ = write!(output, "$({name})");
                }
            }
            rest = after;
        } else {
            output.push('$');
        }
    }
    output.push_str(rest);
    output
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn dollar_syntax_expands_known_names_only() {
        let known = BTreeMap::from([("A".to_owned(), "1".to_owned())]);
        for (text, expected) in [
            ("$(A)", "1"),
            ("$$(A)", "$(A)"),
            ("$(B)", "$(B)"),
            ("a$", "a$"),
            ("$(A", "$(A"),
            ("x$(A)$(A)y", "x11y"),
        ] {
            assert_eq!(expand(text, &known), expected, "{text}");
        }
    }

    #[test]
    fn variables_come_from_literals_references_and_the_pod_itself() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"app": "x"}},
            "spec": {"containers": [{"name": "c", "image": "host",
                "resources": {"limits": {"memory": "64Mi", "cpu": "1500m"}},
                "envFrom": [{"configMapRef": {"name": "m"}, "prefix": "P_"}],
                "env": [
                    {"name": "A", "value": "one"},
                    {"name": "B", "value": "$(A)-$(P_k)"},
                    {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "t"}}},
                    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "L", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['app']"}}},
                    {"name": "MEM", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
                    {"name": "CPU", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                    {"name": "GONE", "valueFrom": {"configMapKeyRef": {"name": "zz", "key": "k", "optional": true}}},
                ]}]}
        }))
        .unwrap();
        let mut objects = Objects::default();
        objects.config_maps.insert(
            "m".into(),
            serde_json::from_value(json!({"data": {"k": "v"}})).unwrap(),
        );
        objects.secrets.insert(
            "s".into(),
            serde_json::from_value(json!({"data": {"t": "aGk="}})).unwrap(),
        );
        let surroundings = Surroundings {
            pod_addresses: vec!["10.0.0.9".into(), "fd00::9".into()],
            ..Surroundings::default()
        };
        let container = &pod.spec.as_ref().unwrap().containers[0];
        let variables: BTreeMap<_, _> = resolve(&pod, container, &objects, &surroundings)
            .unwrap()
            .into_iter()
            .collect();
        let expected = [
            ("P_k", "v"),
            ("A", "one"),
            ("B", "one-v"),
            ("S", "hi"),
            ("IP", "10.0.0.9"),
            ("L", "x"),
            ("MEM", "64"),
            ("CPU", "2"),
        ];
        assert_eq!(
            variables,
            expected
                .into_iter()
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .collect()
        );

        objects.config_maps.clear();
        let missing = resolve(&pod, container, &objects, &surroundings).unwrap_err();
        assert_eq!(missing.to_string(), "configmap \"m\" not found");
    }
}
