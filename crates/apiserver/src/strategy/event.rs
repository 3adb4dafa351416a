//! Events, which two API groups serve in two forms. The core form is stored.

use apimachinery::field::FieldError;
use serde_json::{Map, Value};

use super::{fields, text};

/// Names in `events.k8s.io` and in core.
const RENAMED: &[(&str, &str)] = &[
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("reportingController", "reportingComponent"),
    ("deprecatedSource", "source"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
];

/// From the form of `events.k8s.io` to the core form.
pub fn to_core(event: &mut Value) {
    rename(fields(event), RENAMED.iter().copied());
}

/// From the core form to that of `events.k8s.io`.
pub fn from_core(event: &mut Value) {
    rename(
        fields(event),
        RENAMED.iter().map(|(newer, core)| (*core, *newer)),
    );
}

fn rename<'a>(event: &mut Map<String, Value>, names: impl Iterator<Item = (&'a str, &'a str)>) {
    for (from, to) in names {
        if let Some(value) = event.remove(from) {
            event.insert(to.to_owned(), value);
        }
    }
}

/// What is wrong with an event, in either form.
pub fn validate(event: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let newer = event["apiVersion"] == "events.k8s.io/v1";
    let subject = if newer { "regarding" } else { "involvedObject" };
    let namespace = event
        .pointer(&format!("/{subject}/namespace"))
        .and_then(Value::as_str)
        .unwrap_or_default();
    let own = event
        .pointer("/metadata/namespace")
        .and_then(Value::as_str)
        .unwrap_or_default();
    // Events of cluster-scoped objects live in `default`.
    let matches = if namespace.is_empty() {
        matches!(own, "default" | "kube-system")
    } else {
        namespace == own
    };
    if !matches {
        let path = format!("{subject}.namespace");
        errors.push(FieldError::invalid(
            path,
            namespace,
            "does not match event.namespace",
        ));
    }
    if newer {
        for field in [
            "reportingController",
            "reportingInstance",
            "action",
            "reason",
        ] {
            if text(event, field).is_empty() {
                errors.push(FieldError::required(field, ""));
            }
        }
    }
    errors
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_event_survives_both_forms() {
        let newer = json!({"regarding": {"name": "a"}, "note": "n", "reportingController": "c", "deprecatedCount": 2, "type": "Normal"});
        let mut event = newer.clone();
        to_core(&mut event);
        assert_eq!(event["involvedObject"]["name"], "a");
        assert_eq!(event["count"], 2);
        from_core(&mut event);
        assert_eq!(event, newer);
    }
}
