//! The rules of events. Two API groups serve them in two forms; the core form is stored.

use apimachinery::field::FieldError;
use serde_json::{Map, Value};

use super::{
    Kind,
    fields::{fields, scalar, text},
};
use crate::{registry::Resource, target::Part};

/// Pairs of field names in `events.k8s.io` and in core.
const RENAMED: &[(&str, &str)] = &[
    ("regarding", "involvedObject"),
    ("note", "message"),
    ("reportingController", "reportingComponent"),
    ("deprecatedSource", "source"),
    ("deprecatedFirstTimestamp", "firstTimestamp"),
    ("deprecatedLastTimestamp", "lastTimestamp"),
    ("deprecatedCount", "count"),
];

/// The group with the newer form.
const NEWER_GROUP: &str = "events.k8s.io";

/// Events.
pub struct Event;

impl Kind for Event {
    fn validate(
        &self,
        _resource: &Resource,
        object: &Value,
        old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        validate(object, old)
    }

    fn selectable_fields(&self) -> &'static [&'static str] {
        &[
            "metadata.name",
            "metadata.namespace",
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "regarding.kind",
            "regarding.namespace",
            "regarding.name",
            "regarding.uid",
            "regarding.apiVersion",
            "regarding.resourceVersion",
            "regarding.fieldPath",
            "reason",
            "reportingComponent",
            "reportingController",
            "source",
            "type",
        ]
    }

    fn selected_field(&self, object: &Value, field: &str) -> Option<String> {
        match field {
            "source" => Some(source(object).to_owned()),
            "reportingController" => scalar(object, "reportingComponent"),
            _ => match field.split_once('.') {
                Some(("regarding", rest)) => scalar(object, &format!("involvedObject.{rest}")),
                _ => scalar(object, field),
            },
        }
    }

    fn needs_conversion(&self, resource: &Resource) -> bool {
        &*resource.group == NEWER_GROUP
    }

    fn convert_to_storage(&self, object: &mut Value) {
        to_core(object);
    }

    fn convert_from_storage(&self, object: &mut Value) {
        from_core(object);
    }

    /// Errors always name the core kind.
    fn group_in_errors<'a>(&self, _resource: &'a Resource) -> &'a str {
        ""
    }
}

/// The component that reported a stored event.
fn source(event: &Value) -> &str {
    let component = event
        .pointer("/source/component")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if component.is_empty() {
        event["reportingComponent"].as_str().unwrap_or_default()
    } else {
        component
    }
}

/// Converts from the form of `events.k8s.io` to the core form.
fn to_core(event: &mut Value) {
    rename(fields(event), RENAMED.iter().copied());
}

/// Converts from the core form to that of `events.k8s.io`.
fn from_core(event: &mut Value) {
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

/// Validates an event in either form. The required fields depend on whether it has an `eventTime`, which only newer clients set.
/// A new event in the group `events.k8s.io` must have one.
fn validate(event: &Value, old: Option<&Value>) -> Vec<FieldError> {
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
    // Events of cluster-scoped objects are in the namespace `default`.
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
    fn an_event_converts_to_the_core_form_and_back() {
        let newer = json!({"regarding": {"name": "a"}, "note": "n", "reportingController": "c", "deprecatedCount": 2, "type": "Normal"});
        let mut event = newer.clone();
        to_core(&mut event);
        assert_eq!(event["involvedObject"]["name"], "a");
        assert_eq!(event["count"], 2);
        from_core(&mut event);
        assert_eq!(event, newer);
    }

    fn invalid_fields(event: &Value, old: Option<&Value>) -> Vec<String> {
        let errors = validate(event, old);
        errors.into_iter().map(|error| error.field).collect()
    }

    #[test]
    fn a_new_event_of_the_events_group_needs_a_time_and_a_reporter() {
        let bare = json!({"apiVersion": "events.k8s.io/v1", "metadata": {"namespace": "a"}, "regarding": {"namespace": "a"}, "type": "Odd"});
        assert_eq!(invalid_fields(&bare, None), ["eventTime", "type"]);
        let mut timed = bare.clone();
        timed["eventTime"] = json!("2026-01-01T00:00:00.000000Z");
        timed["type"] = json!("Normal");
        let fields = [
            "reportingController",
            "reportingInstance",
            "action",
            "reason",
        ];
        assert_eq!(invalid_fields(&timed, None), fields);
        for field in fields {
            timed[field] = json!("x");
        }
        assert!(invalid_fields(&timed, None).is_empty());
        assert!(
            invalid_fields(&bare, Some(&timed)).is_empty(),
            "an update does not need them"
        );
    }

    #[test]
    fn an_event_without_a_time_is_in_the_namespace_of_its_object() {
        let event = |own: &str, subject: &str| json!({"apiVersion": "v1", "metadata": {"namespace": own}, "involvedObject": {"namespace": subject}});
        assert!(invalid_fields(&event("a", "a"), None).is_empty());
        assert!(invalid_fields(&event("default", ""), None).is_empty());
        for (own, subject) in [("a", "b"), ("a", "")] {
            let errors = invalid_fields(&event(own, subject), None);
            assert_eq!(errors, ["involvedObject.namespace"], "{own} {subject}");
        }
    }
}
