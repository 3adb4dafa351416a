//! Builds the OpenAPI v3 document of one group and version: the paths, their parameters, and the schemas of the kinds. Built-in
//! kinds use Kubernetes' own schemas, custom kinds the schemas in their CustomResourceDefinitions.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::builtin::{self, REFERENCE};
use crate::registry::Resource;

/// The path prefix of a group and version: `api/v1`, `apis/apps/v1`.
pub fn root(resource: &Resource) -> String {
    if resource.group.is_empty() {
        format!("api/{}", resource.version)
    } else {
        format!("apis/{}/{}", resource.group, resource.version)
    }
}

/// The document of one group and version.
pub fn document(resources: &[&Arc<Resource>]) -> Value {
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    for resource in resources {
        let name = add_schemas(resource, &mut schemas);
        let base = if resource.is_namespaced() {
            format!(
                "/{}/namespaces/{{namespace}}/{}",
                root(resource),
                resource.plural
            )
        } else {
            format!("/{}/{}", root(resource), resource.plural)
        };
        paths.insert(base.clone(), collection(resource, &name));
        paths.insert(format!("{base}/{{name}}"), object(resource, &name));
    }
    json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "v1.35.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

/// Adds the schemas of a kind and of its list. Returns the name of the kind's schema.
fn add_schemas(resource: &Resource, schemas: &mut Map<String, Value>) -> String {
    if let Some(name) = builtin::of_kind(&resource.api_version, &resource.kind) {
        builtin::add(schemas, name);
        if let Some(list) = builtin::of_kind(&resource.api_version, &resource.list_kind) {
            builtin::add(schemas, list);
        }
        return name.to_owned();
    }
    let (name, list) = (
        schema_name(resource, &resource.kind),
        schema_name(resource, &resource.list_kind),
    );
    builtin::add(schemas, builtin::OBJECT_META);
    builtin::add(schemas, builtin::LIST_META);
    schemas.insert(name.clone(), custom_schema(resource));
    schemas.insert(list, list_schema(resource, &name));
    name
}

/// `io.x-k8s.agents.v1beta1.Sandbox`: the group's labels reversed, then version and kind.
fn schema_name(resource: &Resource, kind: &str) -> String {
    let reversed: Vec<&str> = resource.group.split('.').rev().collect();
    format!("{}.{}.{kind}", reversed.join("."), resource.version)
}

fn group_version_kind(resource: &Resource) -> Value {
    json!({"group": &*resource.group, "version": &*resource.version, "kind": &*resource.kind})
}

fn reference(name: &str) -> Value {
    json!({"allOf": [{"$ref": format!("{REFERENCE}{name}")}]})
}

fn custom_schema(resource: &Resource) -> Value {
    let custom = resource.custom.as_ref();
    let mut schema = custom
        .and_then(|custom| serde_json::from_str(custom.open_api.as_deref()?).ok())
        .unwrap_or_else(|| json!({"type": "object"}));
    for field in ["apiVersion", "kind"] {
        if schema["properties"].get(field).is_none() {
            schema["properties"][field] = json!({"type": "string"});
        }
    }
    schema["properties"]["metadata"] = reference(builtin::OBJECT_META);
    schema["x-kubernetes-group-version-kind"] = json!([group_version_kind(resource)]);
    schema
}

fn list_schema(resource: &Resource, item: &str) -> Value {
    let kind = json!({"group": &*resource.group, "version": &*resource.version, "kind": &*resource.list_kind});
    json!({
        "description": format!("{} is a list of {}.", resource.list_kind, resource.kind),
        "type": "object",
        "required": ["items"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": reference(builtin::LIST_META),
            "items": {"type": "array", "items": reference(item)},
        },
        "x-kubernetes-group-version-kind": [kind],
    })
}

fn parameter(name: &str, description: &str) -> Value {
    json!({"name": name, "in": "query", "description": description, "schema": {"type": "string", "uniqueItems": true}})
}

fn write_parameters() -> Vec<Value> {
    vec![
        parameter(
            "dryRun",
            "With All, the server makes every check and stores nothing.",
        ),
        parameter(
            "fieldManager",
            "Name of the field manager that owns the written fields.",
        ),
        parameter(
            "fieldValidation",
            "How the server handles unknown and duplicate fields: Ignore, Warn or Strict.",
        ),
    ]
}

fn operation(
    resource: &Resource,
    action: &str,
    schema: &str,
    parameters: &[Value],
    body: &[&str],
) -> Value {
    let reference = json!({"$ref": format!("#/components/schemas/{schema}")});
    let mut operation = json!({
        "operationId": format!("{action}{}", resource.kind),
        "parameters": parameters,
        "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": reference}}}},
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": group_version_kind(resource),
    });
    if !body.is_empty() {
        let content: Map<String, Value> = body
            .iter()
            .map(|media_type| ((*media_type).to_owned(), json!({"schema": reference})))
            .collect();
        operation["requestBody"] = json!({"content": content, "required": true});
    }
    operation
}

fn collection(resource: &Resource, schema: &str) -> Value {
    let selectors = [
        parameter("labelSelector", "Only objects whose labels match."),
        parameter("fieldSelector", "Only objects whose fields match."),
        parameter("limit", "Maximum number of objects in one response."),
        parameter("continue", "The continue token of the previous response."),
        parameter("watch", "Watch for changes instead of listing."),
    ];
    json!({
        "get": operation(resource, "list", schema, &selectors, &[]),
        "post": operation(resource, "post", schema, &write_parameters(), &["application/json", "application/yaml"]),
        "delete": operation(resource, "deletecollection", schema, &selectors, &[]),
    })
}

fn object(resource: &Resource, schema: &str) -> Value {
    let mut patch_parameters = write_parameters();
    patch_parameters.push(parameter(
        "force",
        "With server-side apply, take over fields from other managers.",
    ));
    let mut formats = vec![
        "application/json-patch+json",
        "application/merge-patch+json",
        "application/apply-patch+yaml",
    ];
    if resource.custom.is_none() {
        formats.push("application/strategic-merge-patch+json");
    }
    json!({
        "get": operation(resource, "get", schema, &[], &[]),
        "put": operation(resource, "put", schema, &write_parameters(), &["application/json", "application/yaml"]),
        "patch": operation(resource, "patch", schema, &patch_parameters, &formats),
        "delete": operation(resource, "delete", schema, &[parameter("propagationPolicy", "How the server handles dependents.")], &[]),
    })
}
