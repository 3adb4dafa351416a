//! Finds the quantities in an object, such as `100m` or `1Gi`.

use serde_json::Value;

/// The quantities in `limits` and `requests`.
pub fn of_resources<'a>(resources: &'a Value, path: &str) -> Vec<(String, &'a Value)> {
    ["limits", "requests"]
        .into_iter()
        .flat_map(|kind| of_map(&resources[kind], &format!("{path}.{kind}")))
        .collect()
}

/// The quantities in a map by resource name.
pub fn of_map<'a>(map: &'a Value, path: &str) -> Vec<(String, &'a Value)> {
    let entries = map.as_object().into_iter().flatten();
    entries
        .map(|(name, quantity)| (format!("{path}[{name}]"), quantity))
        .collect()
}

/// The text of a quantity, which may also be a JSON number.
pub fn text_of(quantity: &Value) -> String {
    match quantity {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
