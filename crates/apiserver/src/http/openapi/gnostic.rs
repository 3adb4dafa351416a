//! Encodes an OpenAPI v2 document as the protobuf message that client-go requests: gnostic's `openapi.v2.Document`. The field
//! numbers come from that schema. Fields that our documents never contain have no encoder here.

use serde_json::{Map, Value};

/// A message under construction.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0
                .push(u8::try_from(value & 0x7f).unwrap_or_default() | 0x80);
            value >>= 7;
        }
        self.0.push(u8::try_from(value).unwrap_or_default());
    }

    fn bytes(&mut self, field: u64, content: &[u8]) {
        const LENGTH_DELIMITED: u64 = 2;
        self.number((field << 3) | LENGTH_DELIMITED);
        self.number(content.len() as u64);
        self.0.extend_from_slice(content);
    }

    fn text(&mut self, field: u64, value: &Value) {
        if let Some(text) = value.as_str() {
            self.bytes(field, text.as_bytes());
        }
    }

    fn texts(&mut self, field: u64, value: &Value) {
        for text in value.as_array().into_iter().flatten() {
            self.text(field, text);
        }
    }

    fn flag(&mut self, field: u64, value: &Value) {
        if value.as_bool() == Some(true) {
            self.number(field << 3);
            self.number(1);
        }
    }

    fn integer(&mut self, field: u64, value: &Value) {
        if let Some(number) = value.as_u64() {
            self.number(field << 3);
            self.number(number);
        }
    }

    fn double(&mut self, field: u64, value: &Value) {
        const EIGHT_BYTES: u64 = 1;
        if let Some(number) = value.as_f64() {
            self.number((field << 3) | EIGHT_BYTES);
            self.0.extend_from_slice(&number.to_le_bytes());
        }
    }

    fn message(&mut self, field: u64, write: impl FnOnce(&mut Self)) {
        let mut inner = Self::default();
        write(&mut inner);
        self.bytes(field, &inner.0);
    }

    /// A value of any type. gnostic stores it as YAML, and JSON is valid YAML.
    fn any(&mut self, field: u64, value: &Value) {
        self.message(field, |any| any.bytes(2, value.to_string().as_bytes()));
    }

    /// One entry of a map: a name, and the value that `write` encodes.
    fn named(&mut self, field: u64, name: &str, write: impl FnOnce(&mut Self)) {
        self.message(field, |entry| {
            entry.bytes(1, name.as_bytes());
            entry.message(2, write);
        });
    }

    fn extensions(&mut self, field: u64, object: &Map<String, Value>) {
        for (name, value) in object.iter().filter(|(name, _)| name.starts_with("x-")) {
            self.named(field, name, |any| {
                any.bytes(2, value.to_string().as_bytes());
            });
        }
    }
}

/// Encodes a whole document.
pub fn encode(document: &Value) -> Vec<u8> {
    let mut message = Message::default();
    message.text(1, &document["swagger"]);
    message.message(2, |info| {
        info.text(1, &document["info"]["title"]);
        info.text(2, &document["info"]["version"]);
    });
    message.message(8, |paths| {
        for (path, item) in document["paths"].as_object().into_iter().flatten() {
            paths.named(2, path, |inner| path_item(inner, item));
        }
    });
    message.message(9, |definitions| {
        for (name, value) in document["definitions"].as_object().into_iter().flatten() {
            definitions.named(1, name, |inner| schema(inner, value));
        }
    });
    message.0
}

fn path_item(message: &mut Message, item: &Value) {
    const METHODS: [(&str, u64); 5] = [
        ("get", 2),
        ("put", 3),
        ("post", 4),
        ("delete", 5),
        ("patch", 8),
    ];
    for (method, field) in METHODS {
        if let Some(Value::Object(found)) = item.get(method) {
            message.message(field, |inner| operation(inner, found));
        }
    }
}

fn operation(message: &mut Message, operation: &Map<String, Value>) {
    let at = |name: &str| operation.get(name).unwrap_or(&Value::Null);
    message.text(5, at("operationId"));
    message.texts(6, at("produces"));
    message.texts(7, at("consumes"));
    for item in at("parameters").as_array().into_iter().flatten() {
        // An item is a parameter or a reference. Our documents contain only parameters.
        message.message(8, |inner| inner.message(1, |inner| parameter(inner, item)));
    }
    message.message(9, |responses| {
        for (code, response) in at("responses").as_object().into_iter().flatten() {
            responses.named(1, code, |inner| {
                inner.message(1, |inner| {
                    inner.text(1, &response["description"]);
                    inner.message(2, |item| {
                        item.message(1, |inner| schema(inner, &response["schema"]));
                    });
                });
            });
        }
    });
    message.extensions(13, operation);
}

fn parameter(message: &mut Message, parameter: &Value) {
    if parameter["in"] == "body" {
        message.message(1, |body| {
            body.text(2, &parameter["name"]);
            body.text(3, &parameter["in"]);
            body.flag(4, &parameter["required"]);
            body.message(5, |inner| schema(inner, &parameter["schema"]));
        });
        return;
    }
    message.message(2, |non_body| {
        non_body.message(3, |query| {
            query.text(2, &parameter["in"]);
            query.text(3, &parameter["description"]);
            query.text(4, &parameter["name"]);
            query.text(6, &parameter["type"]);
            query.flag(20, &parameter["uniqueItems"]);
        });
    });
}

fn schema(message: &mut Message, value: &Value) {
    let Value::Object(object) = value else {
        return;
    };
    let at = |name: &str| object.get(name).unwrap_or(&Value::Null);
    message.text(1, at("$ref"));
    message.text(2, at("format"));
    message.text(3, at("title"));
    message.text(4, at("description"));
    if let Some(default) = object.get("default") {
        message.any(5, default);
    }
    message.double(7, at("maximum"));
    message.flag(8, at("exclusiveMaximum"));
    message.double(9, at("minimum"));
    message.flag(10, at("exclusiveMinimum"));
    message.integer(11, at("maxLength"));
    message.integer(12, at("minLength"));
    message.text(13, at("pattern"));
    message.integer(14, at("maxItems"));
    message.integer(15, at("minItems"));
    message.flag(16, at("uniqueItems"));
    message.integer(17, at("maxProperties"));
    message.integer(18, at("minProperties"));
    message.texts(19, at("required"));
    for choice in at("enum").as_array().into_iter().flatten() {
        message.any(20, choice);
    }
    if let Some(values) = object.get("additionalProperties") {
        message.message(21, |item| item.message(1, |inner| schema(inner, values)));
    }
    if at("type").is_string() {
        message.message(22, |item| item.text(1, at("type")));
    }
    if let Some(items) = object.get("items") {
        message.message(23, |item| item.message(1, |inner| schema(inner, items)));
    }
    if let Some(Value::Object(properties)) = object.get("properties") {
        message.message(25, |inner| {
            for (name, property) in properties {
                inner.named(1, name, |inner| schema(inner, property));
            }
        });
    }
    message.extensions(31, object);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protobuf::wire::{Reader, WireField, WireValue};
    use serde_json::json;

    /// Follows a path of field numbers and returns the bytes of the first match at each step.
    fn find<'a>(mut bytes: &'a [u8], path: &[u64]) -> &'a [u8] {
        for wanted in path {
            let found = Reader::new(bytes).find_map(|part| match part {
                Ok(WireField {
                    number,
                    scalar: WireValue::Bytes(inner),
                }) if number == *wanted => Some(inner),
                _ => None,
            });
            bytes = found.unwrap_or_else(|| panic!("no field {wanted} of {path:?}"));
        }
        bytes
    }

    #[test]
    fn an_encoded_document_has_gnostics_field_numbers() {
        let long = "d".repeat(300);
        let bytes = encode(&json!({
            "swagger": "2.0", "info": {"title": "t", "version": "v"}, "paths": {},
            "definitions": {"a.Kind": {"description": long, "type": "object", "x-kubernetes-group-version-kind": [{"kind": "Kind"}],
                "properties": {"list": {"type": "array", "items": {"$ref": "#/definitions/b"}}}}},
        }));
        assert_eq!(find(&bytes, &[1]), b"2.0");
        assert_eq!(find(&bytes, &[9, 1, 1]), b"a.Kind");
        assert_eq!(find(&bytes, &[9, 1, 2, 4]), long.as_bytes());
        assert_eq!(find(&bytes, &[9, 1, 2, 22, 1]), b"object");
        assert_eq!(
            find(&bytes, &[9, 1, 2, 25, 1, 2, 23, 1, 1]),
            b"#/definitions/b"
        );
        assert_eq!(find(&bytes, &[9, 1, 2, 31, 2, 2]), br#"[{"kind":"Kind"}]"#);
    }
}
