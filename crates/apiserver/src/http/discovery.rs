//! API discovery: the served groups, versions and resources, in the formats that kubectl and the client libraries request.

use http::{HeaderMap, StatusCode, header};
use serde_json::{Value, json};

use crate::{
    auth::reviews::REVIEWS,
    body::{self, HttpResponse},
    registry::{Registry, Resource, Rules, Scope},
};
use apimachinery::status::Status;

const VERBS: &[&str] = &[
    "create",
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "update",
    "watch",
];
const SUBRESOURCE_VERBS: &[&str] = &["get", "patch", "update"];

/// The verbs of a resource. Namespaces have no `deletecollection`.
fn verbs(resource: &Resource) -> Vec<&'static str> {
    let has_delete_collection = resource.rules != Rules::Namespace;
    let verbs = VERBS.iter().copied();
    verbs
        .filter(|verb| has_delete_collection || *verb != "deletecollection")
        .collect()
}

/// Answers a path below `/api` or `/apis`.
pub fn answer(registry: &Registry, segments: &[String], headers: &HeaderMap) -> HttpResponse {
    let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
    let review = |group: &str| REVIEWS.iter().any(|(reviewed, ..)| *reviewed == group);
    let document = match segments.as_slice() {
        ["api"] if wants_aggregated(headers) => return aggregated(registry, true),
        ["apis"] if wants_aggregated(headers) => return aggregated(registry, false),
        ["api"] => Some(json!({
            "kind": "APIVersions", "versions": ["v1"],
            "serverAddressByClientCIDRs": [{"clientCIDR": "0.0.0.0/0", "serverAddress": ""}],
        })),
        ["api", "v1"] => Some(resource_list(registry, "", "v1")),
        ["apis"] => {
            let groups: Vec<Value> = registry
                .groups()
                .into_iter()
                .map(|(group, _)| group_document(registry, group))
                .collect();
            let groups = [groups, REVIEW_GROUPS.map(review_group).to_vec()].concat();
            Some(json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}))
        }
        ["apis", group] if review(group) => {
            let mut document = review_group(group);
            document["kind"] = Value::from("APIGroup");
            document["apiVersion"] = Value::from("v1");
            Some(document)
        }
        ["apis", group, "v1"] if review(group) => Some(review_list(group)),
        ["apis", group] if !group.is_empty() && registry.versions(group).is_some() => {
            let mut document = group_document(registry, group);
            document["kind"] = Value::from("APIGroup");
            document["apiVersion"] = Value::from("v1");
            Some(document)
        }
        ["apis", group, version]
            if registry
                .versions(group)
                .is_some_and(|versions| versions.iter().any(|served| &**served == *version)) =>
        {
            Some(resource_list(registry, group, version))
        }
        _ => None,
    };
    match document {
        Some(document) => body::json(StatusCode::OK, &document),
        None => body::failure(&Status::unknown_path()),
    }
}

fn group_version(group: &str, version: &str) -> Value {
    let joined = if group.is_empty() {
        version.to_owned()
    } else {
        format!("{group}/{version}")
    };
    json!({"groupVersion": joined, "version": version})
}

fn group_document(registry: &Registry, group: &str) -> Value {
    let versions: Vec<Value> = registry
        .versions(group)
        .into_iter()
        .flatten()
        .map(|version| group_version(group, version))
        .collect();
    json!({"name": group, "versions": versions, "preferredVersion": versions.first()})
}

const REVIEW_GROUPS: [&str; 2] = ["authentication.k8s.io", "authorization.k8s.io"];

fn review_group(group: &str) -> Value {
    let version = group_version(group, "v1");
    json!({"name": group, "versions": [version], "preferredVersion": version})
}

fn review_list(group: &str) -> Value {
    let reviews = REVIEWS.iter().filter(|(reviewed, ..)| *reviewed == group);
    let resources: Vec<Value> = reviews
        .map(|(_, plural, kind, namespaced)| {
            json!({"name": plural, "singularName": kind.to_lowercase(), "namespaced": namespaced, "kind": kind, "verbs": ["create"]})
        })
        .collect();
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("{group}/v1"), "resources": resources})
}

fn aggregated_reviews(group: &str) -> Value {
    let reviews = REVIEWS.iter().filter(|(reviewed, ..)| *reviewed == group);
    let resources: Vec<Value> = reviews
        .map(|(_, plural, kind, namespaced)| {
            json!({
                "resource": plural, "responseKind": {"group": group, "version": "v1", "kind": kind},
                "scope": if *namespaced { "Namespaced" } else { "Cluster" },
                "singularResource": kind.to_lowercase(), "verbs": ["create"],
            })
        })
        .collect();
    let version = json!({"version": "v1", "resources": resources, "freshness": "Current"});
    json!({"metadata": {"name": group, "creationTimestamp": null}, "versions": [version]})
}

fn resource_list(registry: &Registry, group: &str, version: &str) -> Value {
    let mut resources = Vec::new();
    for resource in registry.resources(group, version) {
        let mut entry = json!({
            "name": &*resource.plural, "singularName": &*resource.singular, "namespaced": resource.is_namespaced(),
            "kind": &*resource.kind, "verbs": verbs(resource),
        });
        if !resource.short_names.is_empty() {
            entry["shortNames"] = json!(resource.short_names);
        }
        if !resource.categories.is_empty() {
            entry["categories"] = json!(resource.categories);
        }
        resources.push(entry);
        for part in subresources(resource) {
            let mut entry = json!({
                "name": format!("{}/{}", resource.plural, part.name), "singularName": "", "namespaced": resource.is_namespaced(),
                "kind": part.kind, "verbs": part.verbs,
            });
            if !part.group.is_empty() {
                entry["group"] = Value::from(part.group);
                entry["version"] = Value::from(part.version);
            }
            resources.push(entry);
        }
    }
    json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version(group, version)["groupVersion"], "resources": resources})
}

struct Subresource {
    name: &'static str,
    kind: String,
    group: &'static str,
    version: &'static str,
    verbs: &'static [&'static str],
}

fn subresources(resource: &Resource) -> Vec<Subresource> {
    let own = |name, verbs| Subresource {
        name,
        kind: resource.kind.to_string(),
        group: "",
        version: "",
        verbs,
    };
    let mut parts = Vec::new();
    if resource.has_status {
        parts.push(own("status", SUBRESOURCE_VERBS));
    }
    if resource.scale.is_some() {
        parts.push(Subresource {
            name: "scale",
            kind: "Scale".into(),
            group: "autoscaling",
            version: "v1",
            verbs: SUBRESOURCE_VERBS,
        });
    }
    match resource.rules {
        Rules::Pod => {
            parts.push(Subresource {
                name: "binding",
                kind: "Binding".into(),
                group: "",
                version: "",
                verbs: &["create"],
            });
            parts.push(own("ephemeralcontainers", SUBRESOURCE_VERBS));
            for (name, kind) in [
                ("attach", "PodAttachOptions"),
                ("exec", "PodExecOptions"),
                ("portforward", "PodPortForwardOptions"),
            ] {
                parts.push(Subresource {
                    name,
                    kind: kind.into(),
                    group: "",
                    version: "",
                    verbs: &["create", "get"],
                });
            }
            parts.push(own("log", &["get"]));
            parts.push(Subresource {
                name: "eviction",
                kind: "Eviction".into(),
                group: "policy",
                version: "v1",
                verbs: &["create"],
            });
        }
        Rules::ServiceAccount => parts.push(Subresource {
            name: "token",
            kind: "TokenRequest".into(),
            group: "authentication.k8s.io",
            version: "v1",
            verbs: &["create"],
        }),
        Rules::Namespace => parts.push(own("finalize", &["update"])),
        _ => {}
    }
    parts
}

fn wants_aggregated(headers: &HeaderMap) -> bool {
    headers
        .get(header::ACCEPT)
        .and_then(|value| value.to_str().ok())
        .is_some_and(|accept| {
            accept.split(',').next().is_some_and(|first| {
                first.contains("as=APIGroupDiscoveryList") && first.contains("v=v2;")
            }) || accept.split(',').any(|choice| {
                choice.contains("as=APIGroupDiscoveryList")
                    && (choice.contains("v=v2;") || choice.trim_end().ends_with("v=v2"))
            })
        })
}

fn aggregated(registry: &Registry, core: bool) -> HttpResponse {
    let groups: Vec<&str> = if core {
        vec![""]
    } else {
        registry
            .groups()
            .into_iter()
            .map(|(group, _)| &**group)
            .collect()
    };
    let mut items: Vec<Value> = groups
        .into_iter()
        .map(|group| {
            let versions: Vec<Value> = registry
                .versions(group)
                .into_iter()
                .flatten()
                .map(|version| {
                    let resources: Vec<Value> = registry
                        .resources(group, version)
                        .into_iter()
                        .map(|resource| aggregated_resource(resource))
                        .collect();
                    json!({"version": &**version, "resources": resources, "freshness": "Current"})
                })
                .collect();
            let mut metadata = json!({"creationTimestamp": null});
            if !group.is_empty() {
                metadata["name"] = Value::from(group);
            }
            json!({"metadata": metadata, "versions": versions})
        })
        .collect();
    if !core {
        items.extend(REVIEW_GROUPS.map(aggregated_reviews));
    }
    let document = json!({"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items});
    let mut response = body::json(StatusCode::OK, &document);
    let media_type = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        http::HeaderValue::from_static(media_type),
    );
    response
}

fn aggregated_resource(resource: &Resource) -> Value {
    let kind = |kind: &str, group: &str, version: &str| json!({"group": group, "version": version, "kind": kind});
    let parts: Vec<Value> = subresources(resource)
        .into_iter()
        .map(|part| {
            let (group, version) = if part.group.is_empty() { (&*resource.group, &*resource.version) } else { (part.group, part.version) };
            json!({"subresource": part.name, "responseKind": kind(&part.kind, group, version), "verbs": part.verbs})
        })
        .collect();
    let mut document = json!({
        "resource": &*resource.plural,
        "responseKind": kind(&resource.kind, &resource.group, &resource.version),
        "scope": if resource.scope == Scope::Namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": &*resource.singular,
        "verbs": verbs(resource),
    });
    for (field, value) in [
        ("shortNames", json!(resource.short_names)),
        ("categories", json!(resource.categories)),
        ("subresources", Value::from(parts)),
    ] {
        if value.as_array().is_some_and(|list| !list.is_empty()) {
            document[field] = value;
        }
    }
    document
}
