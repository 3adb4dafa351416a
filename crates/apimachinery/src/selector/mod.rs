//! Label and field selectors: parsing, matching and printing.
//!
//! Selectors work on labels and field values handed to them; how a resource's fields are looked up is the caller's.

mod field;
mod label;
mod parser;

pub use field::{FieldSelector, FieldTerm};
pub use label::{LabelSelector, Operator, Requirement};

/// A selector that cannot be understood. The text is what kube-apiserver answers in a 400.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub(crate) String);
