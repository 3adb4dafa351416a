//! The rules of endpoint slices.

use std::collections::BTreeSet;

use apimachinery::field::FieldError;
use serde_json::Value;

use super::{
    Kind,
    fields::{default_field, default_text, immutable, items, items_mut, one_of, text},
};
use crate::{registry::Resource, target::Part};

/// Endpoint slices.
pub struct EndpointSlice;

impl Kind for EndpointSlice {
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

fn default(slice: &mut Value) {
    for port in items_mut(slice, "ports") {
        default_field(port, "name", "");
        default_text(port, "protocol", "TCP");
    }
}

fn validate(slice: &Value, old: Option<&Value>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    match text(slice, "addressType") {
        "" => errors.push(FieldError::required("addressType", "")),
        _ => one_of(
            &slice["addressType"],
            "addressType",
            &["FQDN", "IPv4", "IPv6"],
            &mut errors,
        ),
    }
    immutable(slice, old, "/addressType", "addressType", &mut errors);
    for (index, endpoint) in items(slice, "endpoints").iter().enumerate() {
        if items(endpoint, "addresses").is_empty() {
            errors.push(FieldError::required(
                format!("endpoints[{index}].addresses"),
                "must contain at least 1 address",
            ));
        }
    }
    let mut seen = BTreeSet::new();
    for (index, port) in items(slice, "ports").iter().enumerate() {
        if !seen.insert(text(port, "name")) {
            errors.push(FieldError::duplicate(
                format!("ports[{index}].name"),
                text(port, "name"),
            ));
        }
        one_of(
            &port["protocol"],
            &format!("ports[{index}].protocol"),
            &["SCTP", "TCP", "UDP"],
            &mut errors,
        );
    }
    errors
}
