//! OpenAPI v3: which paths exist, which parameters they take, and the schemas of custom resources.
//!
//! kubectl reads from it whether the server validates fields, and `explain` shows what definitions describe. Built-in kinds appear
//! as open objects: their fields are checked by the server, and are documented by Kubernetes.

use http::StatusCode;
use serde_json::{Map, Value, json};

use super::body::{self, Answer};
use crate::registry::{Registry, Resource};
use apimachinery::status::Status;

/// Answers a path below `/openapi`, or nothing when there is no such document.
pub fn answer(registry: &Registry, path: &str) -> Option<Answer> {
    let rest = path.strip_prefix("/openapi/v3")?.trim_matches('/');
    if rest.is_empty() {
        return Some(body::json(StatusCode::OK, &index(registry)));
    }
    let (group, version) = match rest.split('/').collect::<Vec<_>>().as_slice() {
        ["api", version] => (String::new(), (*version).to_owned()),
        ["apis", group, version] => ((*group).to_owned(), (*version).to_owned()),
        _ => return Some(body::failure(&Status::unknown_path())),
    };
    let resources = registry.resources(&group, &version);
    if resources.is_empty() {
        return Some(body::failure(&Status::unknown_path()));
    }
    Some(body::json(StatusCode::OK, &document(&resources)))
}

fn root(resource: &Resource) -> String {
    if resource.group.is_empty() {
        format!("api/{}", resource.version)
    } else {
        format!("apis/{}/{}", resource.group, resource.version)
    }
}

/// The documents there are.
fn index(registry: &Registry) -> Value {
    let mut paths = Map::new();
    let groups = registry.groups();
    let core = registry
        .versions("")
        .into_iter()
        .flatten()
        .map(|version| ("", version));
    let others = groups
        .iter()
        .flat_map(|(group, versions)| versions.iter().map(move |version| (&***group, version)));
    for (group, version) in core.chain(others) {
        let resources = registry.resources(group, version);
        let Some(first) = resources.first() else {
            continue;
        };
        let text = document(&resources).to_string();
        // The hash lets clients keep a document until it changes.
        let hash = crc32fast::hash(text.as_bytes());
        let path = root(first);
        paths.insert(
            path.clone(),
            json!({"serverRelativeURL": format!("/openapi/v3/{path}?hash={hash:08X}")}),
        );
    }
    json!({"paths": paths})
}

fn document(resources: &[&std::sync::Arc<Resource>]) -> Value {
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    for resource in resources {
        let name = schema_name(resource);
        schemas.insert(name.clone(), schema(resource));
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

/// `io.x-k8s.agents.v1beta1.Sandbox`: the group's labels reversed, then version and kind.
fn schema_name(resource: &Resource) -> String {
    if resource.group.is_empty() {
        return format!("io.k8s.api.core.{}.{}", resource.version, resource.kind);
    }
    let reversed: Vec<&str> = resource.group.split('.').rev().collect();
    format!(
        "{}.{}.{}",
        reversed.join("."),
        resource.version,
        resource.kind
    )
}

fn group_version_kind(resource: &Resource) -> Value {
    json!({"group": &*resource.group, "version": &*resource.version, "kind": &*resource.kind})
}

fn schema(resource: &Resource) -> Value {
    let custom = resource
        .custom
        .as_ref()
        .map(|custom| custom.open_api.clone());
    let mut schema = custom
        .filter(Value::is_object)
        .unwrap_or_else(|| json!({"type": "object"}));
    for (field, kind) in [
        ("apiVersion", "string"),
        ("kind", "string"),
        ("metadata", "object"),
    ] {
        if schema["properties"].get(field).is_none() {
            schema["properties"][field] = json!({"type": kind});
        }
    }
    schema["x-kubernetes-group-version-kind"] = json!([group_version_kind(resource)]);
    schema
}

fn parameter(name: &str, description: &str) -> Value {
    json!({"name": name, "in": "query", "description": description, "schema": {"type": "string", "uniqueItems": true}})
}

fn write_parameters() -> Vec<Value> {
    vec![
        parameter(
            "dryRun",
            "With All, every check is made and nothing is stored.",
        ),
        parameter(
            "fieldManager",
            "Name under which the written fields are managed.",
        ),
        parameter(
            "fieldValidation",
            "What happens to unknown and repeated fields: Ignore, Warn or Strict.",
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
        parameter("limit", "Most objects in one answer."),
        parameter("continue", "Where the answer before ended."),
        parameter("watch", "Follow changes instead of listing."),
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
        "With server-side apply, take fields from other managers.",
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
        "delete": operation(resource, "delete", schema, &[parameter("propagationPolicy", "What happens to dependents.")], &[]),
    })
}
