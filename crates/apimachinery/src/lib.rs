//! Kubernetes API semantics as pure functions over JSON: no I/O, no clock, no async.
//!
//! An API server composes these: decode strictly ([`strict`], [`yaml`]), find the object, apply a patch ([`patch`], [`apply`]), prune,
//! default and validate ([`schema`]), record who owns what ([`apply`]), and answer failures as a [`status::Status`].

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![expect(
    clippy::result_large_err,
    reason = "a Status is the answer itself, serialised at once: boxing it would only add an allocation"
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
pub mod schema;
pub mod selector;
pub mod status;
pub mod strict;
pub mod table;
pub mod time;
pub mod types;
pub mod yaml;
