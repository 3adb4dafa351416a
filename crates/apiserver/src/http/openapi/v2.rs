//! OpenAPI v2, made from the documents of v3: what v2 cannot say is left out, as kube-apiserver leaves it out. kubectl before 1.29
//! merges by it, and newer ones read it when they are given a `List`.

use http::{HeaderMap, HeaderValue, StatusCode, header};
use serde_json::{Map, Value, json};

use super::{
    body::{self, Answer},
    builtin::REFERENCE,
    document, gnostic, group_versions, hash, unless_known,
};
use crate::registry::Registry;

/// The form client-go wants. It asks with an `@`, which is no valid media type and which it could not read in the answer: that has
/// the first of these.
const PROTOBUF: [&str; 2] = [
    "application/com.github.proto-openapi.spec.v2.v1.0+protobuf",
    "application/com.github.proto-openapi.spec.v2@v1.0+protobuf",
];

/// What a schema of v2 has no word for.
const UNKNOWN_WORDS: [&str; 5] = ["nullable", "oneOf", "anyOf", "not", "$schema"];

/// The whole document, in the form asked for.
pub fn answer(registry: &Registry, headers: &HeaderMap) -> Answer {
    let accepted = headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let document = document(registry);
    let known = headers.get(header::IF_NONE_MATCH);
    if !PROTOBUF.iter().any(|kind| accepted.contains(kind)) {
        let text = document.to_string();
        return unless_known(known, &hash(text.as_bytes()), || {
            body::json_bytes(StatusCode::OK, text.clone())
        });
    }
    let bytes = gnostic::encode(&document);
    let hash = hash(&bytes);
    unless_known(known, &hash, || {
        let mut answer = Answer::new(body::full(bytes));
        answer
            .headers_mut()
            .insert(header::CONTENT_TYPE, HeaderValue::from_static(PROTOBUF[0]));
        answer
    })
}

fn document(registry: &Registry) -> Value {
    let (mut paths, mut definitions) = (Map::new(), Map::new());
    for (group, version) in group_versions(registry) {
        let mut described = document::document(&registry.resources(group, version));
        if let Value::Object(schemas) = described["components"]["schemas"].take() {
            let older = schemas
                .into_iter()
                .map(|(name, schema)| (name, older(schema)));
            definitions.extend(older);
        }
        if let Value::Object(described) = described["paths"].take() {
            let older = described
                .into_iter()
                .map(|(path, item)| (path, older_path(&item)));
            paths.extend(older);
        }
    }
    json!({
        "swagger": "2.0",
        "info": {"title": "Kubernetes", "version": "v1.35.0"},
        "paths": paths,
        "definitions": definitions,
    })
}

/// A schema in the words of v2.
fn older(schema: Value) -> Value {
    let Value::Object(mut schema) = schema else {
        return schema;
    };
    for word in UNKNOWN_WORDS {
        schema.remove(word);
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
        // A client that checks fields by v2 would refuse those that the schema does not name.
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
    for word in ["items", "additionalProperties"] {
        if let Some(value) = schema.get_mut(word) {
            *value = older(value.take());
        }
    }
    if let Some(Value::Object(properties)) = schema.get_mut("properties") {
        for property in properties.values_mut() {
            *property = older(property.take());
        }
    }
    Value::Object(schema)
}

fn older_path(item: &Value) -> Value {
    let operations = item.as_object().into_iter().flatten();
    let older = operations.map(|(method, operation)| (method.clone(), older_operation(operation)));
    Value::Object(older.collect())
}

fn older_operation(operation: &Value) -> Value {
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
            .map(|media| older(media["schema"].clone()));
        parameters.push(json!({"name": "body", "in": "body", "required": true, "schema": schema}));
    }
    let schema =
        older(operation["responses"]["200"]["content"]["application/json"]["schema"].clone());
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
    fn the_form_is_the_one_asked_for() {
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
    fn kinds_are_defined_in_the_words_of_v2() {
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
        let custom = older(
            json!({"nullable": true, "x-kubernetes-preserve-unknown-fields": true, "properties": {"a": {}}}),
        );
        assert_eq!(
            custom,
            json!({"x-kubernetes-preserve-unknown-fields": true})
        );
    }
}
