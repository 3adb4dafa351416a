//! Selects the objects that a list or watch covers: label and field selectors over stored objects.

use std::collections::BTreeMap;

use apimachinery::{
    selector::{FieldSelector, LabelSelector},
    status::Status,
};
use store::Object;

use crate::{
    registry::Resource,
    strategy::{self, Kind},
};

/// A label and a field selector together.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    labels: LabelSelector,
    fields: FieldSelector,
    /// Reads the fields of an object, if a field selector uses more than name and namespace. This requires parsing the JSON.
    reader: Option<&'static dyn Kind>,
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
        let kind = strategy::of(resource);
        for term in fields.terms() {
            let known =
                kind.selectable_fields().contains(&&*term.field) || custom.contains(&term.field);
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
            reader: parses_json.then_some(kind),
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
        let Some(kind) = self.reader else {
            return self.fields.matches(|field| match field {
                "metadata.name" => Some(object.key.name()),
                "metadata.namespace" => Some(object.key.namespace()),
                _ => None,
            });
        };
        let value = object.value();
        let found: BTreeMap<&str, String> = self
            .fields
            .terms()
            .iter()
            .filter_map(|term| Some((&*term.field, kind.selected_field(&value, &term.field)?)))
            .collect();
        self.fields
            .matches(|field| found.get(field).map(String::as_str))
    }
}
