//! Validation of the probes and lifecycle hooks of containers, with kube-apiserver's messages.

use apimachinery::{field::FieldError, names};
use serde_json::Value;

use crate::strategy::fields::{items, one_of, text};

const KINDS: [&str; 3] = ["livenessProbe", "readinessProbe", "startupProbe"];

/// The handler types of probes and hooks; each may have only one.
const HANDLERS: [&str; 5] = ["exec", "httpGet", "tcpSocket", "grpc", "sleep"];

const NEGATIVE: &str = "must be greater than or equal to 0";

/// Validates the probes and hooks of a container. `grace` is the pod's grace period.
pub fn validate(container: &Value, path: &str, grace: Option<i64>, errors: &mut Vec<FieldError>) {
    for hook in ["postStart", "preStop"] {
        if let Some(handler) = container["lifecycle"]
            .get(hook)
            .filter(|hook| hook.is_object())
        {
            validate_handler(handler, &format!("{path}.lifecycle.{hook}"), grace, errors);
        }
    }
    for kind in KINDS {
        if let Some(probe) = container.get(kind).filter(|probe| probe.is_object()) {
            validate_probe(probe, kind, &format!("{path}.{kind}"), grace, errors);
        }
    }
}

/// Rejects probes and hooks of an init container that runs to completion.
pub fn forbid(container: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let is_given = |field: &&str| container.get(*field).is_some_and(Value::is_object);
    for field in ["lifecycle"]
        .iter()
        .chain(&KINDS)
        .filter(|field| is_given(field))
    {
        errors.push(FieldError::forbidden(
            format!("{path}.{field}"),
            "may not be set for init containers without restartPolicy=Always",
        ));
    }
}

fn validate_probe(
    probe: &Value,
    kind: &str,
    path: &str,
    grace: Option<i64>,
    errors: &mut Vec<FieldError>,
) {
    validate_handler(probe, path, grace, errors);
    let number = |field: &str| probe.get(field).and_then(Value::as_i64);
    for field in [
        "initialDelaySeconds",
        "timeoutSeconds",
        "periodSeconds",
        "successThreshold",
        "failureThreshold",
    ] {
        if let Some(number) = number(field).filter(|number| *number < 0) {
            errors.push(FieldError::invalid(
                format!("{path}.{field}"),
                number,
                NEGATIVE,
            ));
        }
    }
    let own_grace = number("terminationGracePeriodSeconds");
    if let Some(seconds) = own_grace.filter(|seconds| *seconds <= 0) {
        errors.push(FieldError::invalid(
            format!("{path}.terminationGracePeriodSeconds"),
            seconds,
            "must be greater than 0",
        ));
    }
    match (kind, own_grace, number("successThreshold")) {
        ("readinessProbe", Some(seconds), _) => errors.push(FieldError::invalid(
            format!("{path}.terminationGracePeriodSeconds"),
            seconds,
            "must not be set for readinessProbes",
        )),
        ("livenessProbe" | "startupProbe", _, Some(threshold)) if threshold != 1 => {
            errors.push(FieldError::invalid(
                format!("{path}.successThreshold"),
                threshold,
                "must be 1",
            ));
        }
        _ => {}
    }
}

fn validate_handler(handler: &Value, path: &str, grace: Option<i64>, errors: &mut Vec<FieldError>) {
    let mut handlers = HANDLERS
        .into_iter()
        .filter(|kind| handler.get(*kind).is_some_and(Value::is_object));
    let Some(first) = handlers.next() else {
        errors.push(FieldError::required(path, "must specify a handler type"));
        return;
    };
    let action = &handler[first];
    let path_of_first = format!("{path}.{first}");
    match first {
        "exec" if items(action, "command").is_empty() => {
            errors.push(FieldError::required(format!("{path_of_first}.command"), ""));
        }
        "httpGet" => validate_http_get(action, &path_of_first, errors),
        "tcpSocket" | "grpc" => {
            validate_port(&action["port"], &format!("{path_of_first}.port"), errors);
        }
        "sleep" => {
            let seconds = action["seconds"].as_i64().unwrap_or_default();
            if let Some(grace) = grace.filter(|grace| !(0..=*grace).contains(&seconds)) {
                let detail = format!(
                    "must be non-negative and less than terminationGracePeriodSeconds ({grace})"
                );
                errors.push(FieldError::invalid(path_of_first, seconds, detail));
            }
        }
        _ => {}
    }
    for further in handlers {
        errors.push(FieldError::forbidden(
            format!("{path}.{further}"),
            "may not specify more than 1 handler type",
        ));
    }
}

fn validate_http_get(action: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if text(action, "path").is_empty() {
        errors.push(FieldError::required(format!("{path}.path"), ""));
    }
    validate_port(&action["port"], &format!("{path}.port"), errors);
    one_of(
        &action["scheme"],
        &format!("{path}.scheme"),
        &["HTTP", "HTTPS"],
        errors,
    );
    for header in items(action, "httpHeaders") {
        let name = text(header, "name");
        let is_valid = !name.is_empty()
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        if !is_valid {
            errors.push(FieldError::invalid(
                format!("{path}.httpHeaders"),
                name,
                "a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')",
            ));
        }
    }
}

fn validate_port(port: &Value, path: &str, errors: &mut Vec<FieldError>) {
    match port {
        Value::String(name) => {
            let problems = names::port_name(name).into_iter();
            errors
                .extend(problems.map(|problem| FieldError::invalid(path, name.as_str(), problem)));
        }
        number => {
            let number = number.as_i64().unwrap_or_default();
            let problems = names::port_number(number).into_iter();
            errors.extend(problems.map(|problem| FieldError::invalid(path, number, problem)));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(container: &Value) -> Vec<String> {
        let mut errors = Vec::new();
        validate(container, "c", Some(30), &mut errors);
        errors.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn common_probes_and_hooks_are_valid() {
        let container = json!({
            "livenessProbe": {"httpGet": {"path": "/", "port": 80, "scheme": "HTTP", "httpHeaders": [{"name": "X-A", "value": "b"}]}, "periodSeconds": 10, "successThreshold": 1, "terminationGracePeriodSeconds": 1},
            "readinessProbe": {"tcpSocket": {"port": "web"}, "successThreshold": 3},
            "startupProbe": {"exec": {"command": ["true"]}, "initialDelaySeconds": 0},
            "lifecycle": {"preStop": {"sleep": {"seconds": 30}}, "postStart": {"exec": {"command": ["true"]}}},
        });
        assert_eq!(problems(&container), [""; 0]);
    }

    #[test]
    fn negative_numbers_and_invalid_handlers_are_refused_with_kubernetes_messages() {
        let tcp = json!({"port": 80});
        for (container, expected) in [
            (
                json!({"livenessProbe": {"tcpSocket": tcp, "periodSeconds": -1}}),
                "c.livenessProbe.periodSeconds: Invalid value: -1: must be greater than or equal to 0",
            ),
            (
                json!({"readinessProbe": {"tcpSocket": tcp, "timeoutSeconds": -2_147_483_648_i64}}),
                "c.readinessProbe.timeoutSeconds: Invalid value: -2147483648: must be greater than or equal to 0",
            ),
            (
                json!({"startupProbe": {"tcpSocket": tcp, "initialDelaySeconds": -5}}),
                "c.startupProbe.initialDelaySeconds: Invalid value: -5: must be greater than or equal to 0",
            ),
            (
                json!({"readinessProbe": {"tcpSocket": tcp, "failureThreshold": -1}}),
                "c.readinessProbe.failureThreshold: Invalid value: -1: must be greater than or equal to 0",
            ),
            (
                json!({"livenessProbe": {"tcpSocket": tcp, "terminationGracePeriodSeconds": 0}}),
                "c.livenessProbe.terminationGracePeriodSeconds: Invalid value: 0: must be greater than 0",
            ),
            (
                json!({"readinessProbe": {"tcpSocket": tcp, "terminationGracePeriodSeconds": 9}}),
                "c.readinessProbe.terminationGracePeriodSeconds: Invalid value: 9: must not be set for readinessProbes",
            ),
            (
                json!({"livenessProbe": {"tcpSocket": tcp, "successThreshold": 2}}),
                "c.livenessProbe.successThreshold: Invalid value: 2: must be 1",
            ),
            (
                json!({"livenessProbe": {}}),
                "c.livenessProbe: Required value: must specify a handler type",
            ),
            (
                json!({"livenessProbe": {"tcpSocket": tcp, "exec": {"command": ["true"]}}}),
                "c.livenessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type",
            ),
            (
                json!({"livenessProbe": {"exec": {}}}),
                "c.livenessProbe.exec.command: Required value",
            ),
            (
                json!({"livenessProbe": {"tcpSocket": {"port": -1}}}),
                "c.livenessProbe.tcpSocket.port: Invalid value: -1: must be between 1 and 65535, inclusive",
            ),
            (
                json!({"livenessProbe": {"grpc": {"port": 0}}}),
                "c.livenessProbe.grpc.port: Invalid value: 0: must be between 1 and 65535, inclusive",
            ),
            (
                json!({"livenessProbe": {"httpGet": {"path": "/", "port": 1, "scheme": "FILE"}}}),
                "c.livenessProbe.httpGet.scheme: Unsupported value: \"FILE\": supported values: \"HTTP\", \"HTTPS\"",
            ),
            (
                json!({"livenessProbe": {"httpGet": {"path": "/", "port": 1, "httpHeaders": [{"name": "a\r\nb"}]}}}),
                "c.livenessProbe.httpGet.httpHeaders: Invalid value: \"a\\r\\nb\": a valid HTTP header must consist of alphanumeric characters or '-' (e.g. 'X-Header-Name', regex used for validation is '[-A-Za-z0-9]+')",
            ),
            (
                json!({"lifecycle": {"preStop": {"sleep": {"seconds": -1}}}}),
                "c.lifecycle.preStop.sleep: Invalid value: -1: must be non-negative and less than terminationGracePeriodSeconds (30)",
            ),
            (
                json!({"lifecycle": {"preStop": {}}}),
                "c.lifecycle.preStop: Required value: must specify a handler type",
            ),
        ] {
            assert_eq!(problems(&container), [expected], "{container}");
        }
    }
}
