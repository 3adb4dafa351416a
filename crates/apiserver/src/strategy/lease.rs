//! The rules of leases.

use apimachinery::field::FieldError;
use serde_json::Value;

use super::Kind;
use crate::{registry::Resource, target::Part};

/// Leases.
pub struct Lease;

impl Kind for Lease {
    fn validate(
        &self,
        _resource: &Resource,
        object: &Value,
        _old: Option<&Value>,
        _part: Part,
    ) -> Vec<FieldError> {
        validate(object)
    }
}

fn validate(lease: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let spec = &lease["spec"];
    if let Some(seconds) = spec["leaseDurationSeconds"]
        .as_i64()
        .filter(|seconds| *seconds <= 0)
    {
        errors.push(FieldError::invalid(
            "spec.leaseDurationSeconds",
            seconds,
            "must be greater than 0",
        ));
    }
    if let Some(count) = spec["leaseTransitions"].as_i64().filter(|count| *count < 0) {
        errors.push(FieldError::invalid(
            "spec.leaseTransitions",
            count,
            "must be greater than or equal to 0",
        ));
    }
    errors
}
