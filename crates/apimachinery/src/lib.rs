//! Kubernetes API semantics as pure functions over JSON: no I/O, no clock, no async.
//!
//! An API server composes these: strict decoding ([`strict`], [`yaml`]), patches ([`patch`], [`apply`]), pruning, defaulting and
//! validation ([`schema`]), tracking of field ownership ([`apply`]), and errors as a [`status::Status`].

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![expect(
    clippy::result_large_err,
    reason = "a Status is the response body and is serialized at once: boxing it would only add an allocation"
)]

pub mod apply;
mod cel;
pub mod duration;
pub mod field;
pub mod go;
pub mod jsonpath;
pub mod memory_budget;
pub mod names;
pub mod nesting;
pub mod patch;
pub mod quantity;
pub mod rfc3339;
pub mod schema;
pub mod selector;
pub mod status;
pub mod strict;
pub mod table;
pub mod time;
pub mod types;
pub mod yaml;

/// The largest integer that JavaScript, and therefore a JSON document, represents exactly: 2^53 - 1.
const MAX_SAFE_INTEGER: f64 = 9_007_199_254_740_991.0;

/// Converts a number to an integer: `1` and `1.0` are integers. A whole float beyond 2^53 is not, as in kube-apiserver.
fn whole_number(value: &serde_json::Value) -> Option<i64> {
    if let Some(integer) = value.as_i64() {
        return Some(integer);
    }
    let float = value.as_f64().filter(|_| value.is_f64())?;
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the number is whole and within 2^53"
    )]
    (float.fract() == 0.0 && float.abs() <= MAX_SAFE_INTEGER).then_some(float as i64)
}

/// The examples of README.md.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
