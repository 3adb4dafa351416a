//! Selects the objects that a list or watch covers: label and field selectors over stored objects.

use std::collections::BTreeMap;

use apimachinery::{
    selector::{FieldSelector, LabelSelector},
    status::Status,
};
use serde_json::Value;
use store::Object;

use crate::registry::{Resource, Rules};

/// A label and a field selector together.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    labels: LabelSelector,
    fields: FieldSelector,
    /// Whether a field selector uses a field other than name and namespace, which requires parsing the JSON.
    parses_json: bool,
}

impl Selection {
    /// Parses both selectors. Rejects field selectors that the kind does not support.
    pub fn parse(
        resource: &Resource,
        labels: Option<&str>,
        fields: Option<&str>,
    ) -> Result<Self, Status> {
        let labels = labels.map_or_else(|| Ok(LabelSelector::everything()), LabelSelector::parse);
        let labels = labels.map_err(|error| {
            Status::bad_request(format!("unable to parse requirement: {error}"))
        })?;
        let fields = FieldSelector::parse(fields.unwrap_or_default())
            .map_err(|error| Status::bad_request(error.to_string()))?;
        let custom = resource
            .custom
            .as_ref()
            .map(|version| version.selectable_fields.as_slice())
            .unwrap_or_default();
        for term in fields.terms() {
            let known =
                selectable(resource).contains(&&*term.field) || custom.contains(&term.field);
            if !known {
                return Err(Status::bad_request(format!(
                    "field label not supported: {}",
                    term.field
                )));
            }
        }
        let parses_json = fields
            .terms()
            .iter()
            .any(|term| !matches!(&*term.field, "metadata.name" | "metadata.namespace"));
        Ok(Self {
            labels,
            fields,
            parses_json,
        })
    }

    /// Whether all objects are selected.
    pub fn is_everything(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// The only name that can match, if the field selector requires one.
    pub fn name(&self) -> Option<&str> {
        self.fields.required_value("metadata.name")
    }

    /// Whether an object is selected.
    pub fn matches(&self, object: &Object) -> bool {
        let labels = object.metadata.labels.as_deref();
        let labelled = self.labels.matches_with(|name| {
            labels
                .and_then(|labels| labels.get(name))
                .map(String::as_str)
        });
        if !labelled || self.fields.is_empty() {
            return labelled;
        }
        if !self.parses_json {
            return self.fields.matches(|field| match field {
                "metadata.name" => Some(object.key.name()),
                "metadata.namespace" => Some(object.key.namespace()),
                _ => None,
            });
        }
        let value = object.value();
        let found: BTreeMap<&str, String> = self
            .fields
            .terms()
            .iter()
            .filter_map(|term| Some((&*term.field, read(&value, &term.field)?)))
            .collect();
        self.fields
            .matches(|field| found.get(field).map(String::as_str))
    }
}

/// The fields that a field selector of a kind may use.
fn selectable(resource: &Resource) -> &'static [&'static str] {
    match resource.rules {
        Rules::Pod => &[
            "metadata.name",
            "metadata.namespace",
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "spec.hostNetwork",
            "status.phase",
            "status.podIP",
            "status.podIPs",
            "status.nominatedNodeName",
        ],
        Rules::Event => &[
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
        ],
        Rules::Secret => &["metadata.name", "metadata.namespace", "type"],
        Rules::Namespace => &["metadata.name", "status.phase"],
        Rules::Node => &["metadata.name", "spec.unschedulable"],
        Rules::Service => &[
            "metadata.name",
            "metadata.namespace",
            "spec.clusterIP",
            "spec.type",
        ],
        _ => &["metadata.name", "metadata.namespace"],
    }
}

/// A field of a stored object as text. Events are stored in their core/v1 form.
fn read(object: &Value, field: &str) -> Option<String> {
    let stored = match field.split_once('.') {
        Some(("regarding", rest)) => format!("involvedObject.{rest}"),
        _ if field == "reportingController" => "reportingComponent".to_owned(),
        _ => field.to_owned(),
    };
    if field == "source" {
        let component = object
            .pointer("/source/component")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let component = if component.is_empty() {
            object["reportingComponent"].as_str().unwrap_or_default()
        } else {
            component
        };
        return Some(component.to_owned());
    }
    let found = stored
        .trim_start_matches('.')
        .split('.')
        .try_fold(object, |value, segment| value.get(segment));
    match (found, field) {
        (Some(Value::String(text)), _) => Some(text.clone()),
        (Some(Value::Bool(flag)), _) => Some(flag.to_string()),
        (Some(Value::Number(number)), _) => Some(number.to_string()),
        (_, "spec.unschedulable" | "spec.hostNetwork") => Some("false".to_owned()),
        _ => None,
    }
}
