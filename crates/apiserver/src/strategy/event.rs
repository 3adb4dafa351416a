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

/// What is wrong with an event, in either form. What it must have depends on whether it says when it happened, as only newer clients
/// do; through the newer group it must, when it is made.
pub fn validate(event: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let newer = event["apiVersion"] == "events.k8s.io/v1";
    let mut errors = if text(event, "eventTime").is_empty() {
        validate_older(event, newer)
    } else {
        validate_timed(event, newer)
    };
    if newer && old.is_none() {
        errors.extend(validate_newer(event));
    }
    errors
}

fn namespaces(event: &Value, newer: bool) -> (&str, &str) {
    let subject = if newer { "regarding" } else { "involvedObject" };
    (
        text(&event[subject], "namespace"),
        text(&event["metadata"], "namespace"),
    )
}

fn mismatch(namespace: &str) -> FieldError {
    let detail = "does not match event.namespace";
    FieldError::invalid("involvedObject.namespace", namespace, detail)
}

fn validate_older(event: &Value, newer: bool) -> Vec<FieldError> {
    let (namespace, own) = namespaces(event, newer);
    // Events of cluster-scoped objects live in `default`.
    let matches = if namespace.is_empty() {
        own == "default"
    } else {
        namespace == own
    };
    (!matches)
        .then(|| mismatch(namespace))
        .into_iter()
        .collect()
}

fn validate_timed(event: &Value, newer: bool) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let (namespace, own) = namespaces(event, newer);
    if namespace.is_empty() && !matches!(own, "default" | "kube-system") {
        errors.push(mismatch(namespace));
    }
    let reporter = if newer {
        "reportingController"
    } else {
        "reportingComponent"
    };
    let missing = [reporter, "reportingInstance", "action", "reason"]
        .into_iter()
        .filter(|field| text(event, field).is_empty());
    errors.extend(missing.map(|field| FieldError::required(field, "")));
    errors
}

fn validate_newer(event: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    if text(event, "eventTime").is_empty() {
        errors.push(FieldError::required("eventTime", ""));
    }
    let kind = text(event, "type");
    if !matches!(kind, "Normal" | "Warning") {
        let detail = format!("has invalid value: {kind}");
        errors.push(FieldError::invalid("type", "", detail));
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

    fn wrong(event: &Value, old: Option<&Value>) -> Vec<String> {
        let errors = validate(event, old);
        errors.into_iter().map(|error| error.field).collect()
    }

    #[test]
    fn an_event_of_the_newer_group_says_when_and_by_whom() {
        let bare = json!({"apiVersion": "events.k8s.io/v1", "metadata": {"namespace": "a"}, "regarding": {"namespace": "a"}, "type": "Odd"});
        assert_eq!(wrong(&bare, None), ["eventTime", "type"]);
        let mut timed = bare.clone();
        timed["eventTime"] = json!("2026-01-01T00:00:00.000000Z");
        timed["type"] = json!("Normal");
        let fields = [
            "reportingController",
            "reportingInstance",
            "action",
            "reason",
        ];
        assert_eq!(wrong(&timed, None), fields);
        for field in fields {
            timed[field] = json!("x");
        }
        assert!(wrong(&timed, None).is_empty());
        assert!(
            wrong(&bare, Some(&timed)).is_empty(),
            "an update need not say it again"
        );
    }

    #[test]
    fn an_older_event_is_in_the_namespace_of_its_object() {
        let event = |own: &str, subject: &str| json!({"apiVersion": "v1", "metadata": {"namespace": own}, "involvedObject": {"namespace": subject}});
        assert!(wrong(&event("a", "a"), None).is_empty());
        assert!(wrong(&event("default", ""), None).is_empty());
        for (own, subject) in [("a", "b"), ("a", "")] {
            let errors = wrong(&event(own, subject), None);
            assert_eq!(errors, ["involvedObject.namespace"], "{own} {subject}");
        }
    }
}
