//! Formats values like Go: the `%q` and `%#v` forms that appear in Kubernetes' error messages.
//!
//! Clients and tests compare those messages, so the server must produce the same characters. This module does not know what the
//! messages are about.

use std::fmt::Write;

use serde_json::Value;

/// Formats a string like `%q`: double-quoted, with Go's escapes.
pub fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for character in text.chars() {
        match character {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            '\u{7}' => quoted.push_str("\\a"),
            '\u{8}' => quoted.push_str("\\b"),
            '\u{b}' => quoted.push_str("\\v"),
            '\u{c}' => quoted.push_str("\\f"),
            control if (control as u32) < 0x20 || control == '\u{7f}' => {
                let _ = write!(quoted, "\\x{:02x}", control as u32);
            }
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

/// Formats a JSON value like `%#v` formats the corresponding Go value.
pub fn syntax(value: &Value) -> String {
    match value {
        Value::Null => "interface {}(nil)".to_owned(),
        Value::Bool(boolean) => boolean.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => quote(text),
        Value::Array(items) => {
            let inner: Vec<String> = items.iter().map(syntax).collect();
            format!("[]interface {{}}{{{}}}", inner.join(", "))
        }
        Value::Object(members) => {
            let mut inner: Vec<String> = members
                .iter()
                .map(|(key, value)| format!("{}:{}", quote(key), syntax(value)))
                .collect();
            inner.sort();
            format!("map[string]interface {{}}{{{}}}", inner.join(", "))
        }
    }
}

/// Formats a finite float like `%v`: the shortest form, with an exponent for very large and very small magnitudes.
pub fn float(number: f64) -> String {
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e6).contains(&magnitude) {
        let scientific = format!("{number:e}");
        let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        let (sign, digits) = match exponent.strip_prefix('-') {
            Some(digits) => ('-', digits),
            None => ('+', exponent),
        };
        return format!("{mantissa}e{sign}{digits:0>2}");
    }
    format!("{number}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn strings_are_quoted_with_go_escapes() {
        assert_eq!(quote("a\"b\\c\n\u{1}é"), r#""a\"b\\c\n\x01é""#);
    }

    #[test]
    fn compound_values_print_as_go_syntax() {
        assert_eq!(
            syntax(&json!({"b": [1, null], "a": "x"})),
            r#"map[string]interface {}{"a":"x", "b":[]interface {}{1, interface {}(nil)}}"#
        );
    }

    #[test]
    fn floats_switch_to_exponents_where_go_does() {
        assert_eq!(float(1.0), "1");
        assert_eq!(float(0.5), "0.5");
        assert_eq!(float(1e21), "1e+21");
        assert_eq!(float(100_000.0), "100000");
        assert_eq!(float(1e6), "1e+06");
        assert_eq!(float(1.5e-7), "1.5e-07");
        assert_eq!(float(123_456_789.0), "1.23456789e+08");
    }
}
