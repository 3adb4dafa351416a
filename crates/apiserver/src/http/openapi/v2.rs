//! OpenAPI v2, converted from the v3 documents. Keywords that v2 lacks are left out, as kube-apiserver does. kubectl before 1.29
//! uses v2 for merges, and newer versions read it when they get a `List`.

use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::{Map, Value, json};

use super::{builtin::REFERENCE, document, gnostic, group_versions, hash, unless_current};
use crate::{
    body::{self, HttpResponse},
    registry::Registry,
};

/// The protobuf media types of client-go. It requests the one with an `@`, which is not a valid media type and which it cannot
/// parse in a response. So the response has the first one.
const PROTOBUF: [&str; 2] = [
    "application/com.github.proto-openapi.spec.v2.v1.0+protobuf",
    "application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
];

/// Schema keywords that v2 does not have.
const UNSUPPORTED_KEYWORDS: [&str; 5] = ["nullable", "oneOf", "anyOf", "not", "$schema"];

/// Answers with the whole document, in the requested format.
pub fn answer(registry: &Registry, headers: &HeaderMap) -> HttpResponse {
    let accepted = headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let document = document(registry);
    let known = headers.get(header::IF_NONE_MATCH);
    if !PROTOBUF.iter().any(|kind| accepted.contains(kind)) {
        let text = document.to_string();
        return unless_current(known, &hash(text.as_bytes()), || {
            body::json_bytes(StatusCode::OK, text.clone())
        });
    }
    let bytes = gnostic::encode(&document);
    let hash = hash(&bytes);
    unless_current(known, &hash, || {
        let mut response = HttpResponse::new(body::full(bytes));
        response
            .headers_mut()
            .insert(header::CONTENT_TYPE, HeaderValue::from_static(PROTOBUF[0]));
        response
    })
}

fn document(registry: &Registry) -> Value {
    let (mut paths, mut definitions) = (Map::new(), Map::new());
    for (group, version) in group_versions(registry) {
        let mut described = document::document(&registry.resources(group, version));
        if let Value::Object(schemas) = described["components"]["schemas"].take() {
            let converted = schemas
                .into_iter()
                .map(|(name, schema)| (name, schema_to_v2(schema)));
            definitions.extend(converted);
        }
        if let Value::Object(described) = described["paths"].take() {
            let converted = described
                .into_iter()
                .map(|(path, item)| (path, path_to_v2(&item)));
            paths.extend(converted);
        }
    }
    json!({
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": "v1.35.0"},
        "paths": paths,
        "definitions": definitions,
    })
}

/// Converts a schema from v3 to v2.
fn schema_to_v2(schema: Value) -> Value {
    let Value::Object(mut schema) = schema else {
        return schema;
    };
    for keyword in UNSUPPORTED_KEYWORDS {
        schema.remove(keyword);
    }
    if let Some(Value::Array(parts)) = schema.remove("allOf")
        && let [Value::Object(part)] = parts.as_slice()
        && let Some(reference) = part.get("$ref")
    {
        schema.insert("$ref".into(), reference.clone());
    }
    if let Some(Value::String(reference)) = schema.get_mut("$ref") {
        *reference = reference.replace(REFERENCE, "#/definitions/");
    }
    if schema.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(true)) {
        // A client that validates fields by v2 would reject fields that the schema does not list.
        schema.remove("properties");
        schema.remove("items");
    }
    if schema.get("x-kubernetes-int-or-string") == Some(&Value::Bool(true)) {
        schema.remove("type");
    }
    if schema
        .get("additionalProperties")
        .is_some_and(Value::is_boolean)
    {
        schema.remove("additionalProperties");
    }
    for keyword in ["items", "additionalProperties"] {
        if let Some(value) = schema.get_mut(keyword) {
            *value = schema_to_v2(value.take());
        }
    }
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        for property in properties.values_mut() {
            *property = schema_to_v2(property.take());
        }
    }
    Value::Object(schema)
}

fn path_to_v2(item: &Value) -> Value {
    let operations = item.as_object().into_iter().flatten();
    let converted =
        operations.map(|(method, operation)| (method.clone(), operation_to_v2(operation)));
    Value::Object(converted.collect())
}

fn operation_to_v2(operation: &Value) -> Value {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut parameters: Vec<Value> = list(&operation["parameters"])
        .into_iter()
        .map(|parameter| {
            json!({"name": parameter["name"], "in": parameter["in"], "description": parameter["description"], "type": "string", "uniqueItems": true})
        })
        .collect();
    let mut consumes = Vec::new();
    if let Some(content) = operation["requestBody"]["content"].as_object() {
        consumes.extend(content.keys().cloned());
        let schema = content
            .values()
            .next()
            .map(|media| schema_to_v2(media["schema"].clone()));
        parameters.push(json!({"name": "body", "in": "body", "required": true, "schema": schema}));
    }
    let schema = schema_to_v2(
        operation["responses"]["200"]["content"]["application/json"]["schema"].clone(),
    );
    json!({
        "operationId": operation["operationId"],
        "consumes": consumes,
        "produces": ["application/json"],
        "parameters": parameters,
        "responses": {"200": {"description": "OK", "schema": schema}},
        "x-kubernetes-action": operation["x-kubernetes-action"],
        "x-kubernetes-group-version-kind": operation["x-kubernetes-group-version-kind"],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_response_has_the_requested_media_type() {
        let registry = Registry::new(&Registry::default(), std::iter::empty());
        let mut headers = HeaderMap::new();
        let kind = |headers: &HeaderMap| {
            answer(&registry, headers).headers()[header::CONTENT_TYPE].clone()
        };
        assert_eq!(kind(&headers), "application/json");
        for protobuf in PROTOBUF {
            headers.insert(header::ACCEPT, HeaderValue::from_static(protobuf));
            assert_eq!(kind(&headers), PROTOBUF[0]);
        }
    }

    #[test]
    fn schemas_are_converted_to_v2() {
        let registry = Registry::new(&Registry::default(), std::iter::empty());
        let document = document(&registry);
        let pod = &document["definitions"]["io.k8s.api.core.v1.Pod"];
        assert_eq!(
            pod["properties"]["spec"]["$ref"],
            "#/definitions/io.k8s.api.core.v1.PodSpec"
        );
        assert!(pod["properties"]["spec"]["description"].is_string());
        assert!(!document.to_string().contains(REFERENCE));
        let patch = &document["paths"]["/api/v1/namespaces/{namespace}/pods/{name}"]["patch"];
        let names: Vec<_> = patch["parameters"]
            .as_array()
            .unwrap()
            .iter()
            .map(|parameter| &parameter["name"])
            .collect();
        assert!(
            names.contains(&&json!("dryRun")) && names.contains(&&json!("fieldValidation")),
            "{names:?}"
        );
        let custom = schema_to_v2(
            json!({"nullable": true, "x-kubernetes-preserve-unknown-fields": true, "properties": {"a": {}}}),
        );
        assert_eq!(
            custom,
            json!({"x-kubernetes-preserve-unknown-fields": true})
        );
    }
}
