//! The rules of endpoints.

use serde_json::Value;

use super::{
    Kind,
    fields::{default_text, items_mut},
};
use crate::registry::Resource;

/// Endpoints.
pub struct Endpoints;

impl Kind for Endpoints {
    fn default(&self, _resource: &Resource, object: &mut Value) {
        default(object);
    }
}

fn default(endpoints: &mut Value) {
    for subset in items_mut(endpoints, "subsets") {
        for port in items_mut(subset, "ports") {
            default_text(port, "protocol", "TCP");
        }
    }
}
