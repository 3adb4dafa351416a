//! The rules of nodes.

use serde_json::Value;

use super::{Kind, fields::scalar};

/// Nodes.
pub struct Node;

impl Kind for Node {
    fn selectable_fields(&self) -> &'static [&'static str] {
        &["metadata.name", "spec.unschedulable"]
    }

    fn selected_field(&self, object: &Value, field: &str) -> Option<String> {
        let found = scalar(object, field);
        match field {
            "spec.unschedulable" => found.or_else(|| Some("false".to_owned())),
            _ => found,
        }
    }
}
