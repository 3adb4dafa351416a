//! Requests as they are written down in `scenarios/`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// Requests that are asked in order, in a namespace of their own.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The promise that it keeps.
    pub scenario: String,
    /// Compare who owns which field, too.
    #[serde(default)]
    pub managed_fields: bool,
    pub steps: Vec<Step>,
}

/// One request. `{name}` stands for a value that an earlier step kept; `{namespace}` for the scenario's own.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Method and path.
    pub request: String,
    pub body: Option<Value>,
    /// A body that is not JSON.
    pub text: Option<String>,
    #[serde(rename = "type")]
    pub content_type: Option<String>,
    pub accept: Option<String>,
    /// Ask as this user.
    #[serde(rename = "as")]
    pub user: Option<String>,
    /// Values of the answer for later steps, by JSON pointer.
    #[serde(default)]
    pub keep: BTreeMap<String, String>,
    /// Ask again until this holds.
    pub until: Option<Until>,
    /// Only the first so many events of a watch.
    pub first: Option<usize>,
    /// Only the names of a list's items.
    #[serde(default)]
    pub names: bool,
    /// Answer headers that are compared.
    #[serde(default)]
    pub headers: Vec<String>,
    /// What of the answer is not compared, by JSON pointer; an empty one is all of it.
    #[serde(default)]
    pub ignore: Vec<String>,
    /// Why the embedded server answers otherwise, where that is meant.
    pub differs: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Until {
    /// The answer has this code.
    Code(u16),
    /// Values of the answer, by JSON pointer; null is any value.
    Values(BTreeMap<String, Value>),
}

impl Until {
    pub fn holds(&self, code: u16, answer: &Value) -> bool {
        match self {
            Self::Code(wanted) => *wanted == code,
            Self::Values(wanted) => wanted.iter().all(|(pointer, value)| {
                answer
                    .pointer(pointer)
                    .is_some_and(|found| value.is_null() || found == value)
            }),
        }
    }
}
