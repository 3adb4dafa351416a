//! Label and field selectors: parsing, matching and printing.
//!
//! Selectors work on given labels and field values. The caller knows how to look up the fields of a resource.

mod field;
mod label;
mod parser;

pub use field::{FieldSelector, FieldTerm};
pub use label::{LabelSelector, Operator, Requirement};

/// A malformed selector. The text is the message of kube-apiserver's 400 response.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub(crate) String);
