//! Limits the nesting depth of objects. Recursive JSON parsers must stop at some depth, and an object that could be written but
//! not read again would be inaccessible.

use serde_json::Value;

/// The maximum levels of maps and lists in an object. Parsers stop at 127; the difference is room for fields that the server
/// adds.
pub const MOST_LEVELS: usize = 120;

/// The number of nested levels of maps and lists in a value.
pub fn levels(value: &Value) -> usize {
    measure(value).0
}

/// The number of nested levels of maps and lists in a value, and the number of values.
pub fn measure(value: &Value) -> (usize, usize) {
    let (mut deepest, mut values) = (0, 0);
    let mut rest = vec![(value, 0)];
    while let Some((value, above)) = rest.pop() {
        values += 1;
        let level = above + 1;
        match value {
            Value::Array(items) => rest.extend(items.iter().map(|item| (item, level))),
            Value::Object(members) => rest.extend(members.values().map(|member| (member, level))),
            _ => continue,
        }
        deepest = deepest.max(level);
    }
    (deepest, values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn maps_and_lists_count_as_levels_and_scalars_do_not() {
        for (value, expected) in [
            (json!(1), 0),
            (json!({}), 1),
            (json!([[], 1]), 2),
            (json!({"a": {"b": [{"c": 1}]}, "d": 1}), 4),
        ] {
            assert_eq!(levels(&value), expected, "{value}");
        }
    }
}
