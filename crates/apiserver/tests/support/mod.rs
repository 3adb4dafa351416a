//! Shared helpers of the integration tests: a server in memory and a sample CustomResourceDefinition.

#![allow(
    dead_code,
    reason = "each test program uses only some of these helpers"
)]

use std::time::Duration;

use apiserver::{Config, Server};
use http_body_util::BodyExt;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client,
    api::{DynamicObject, PostParams},
    core::{ApiResource, GroupVersionKind, Status},
};
use serde_json::{Value, json};

pub const DEADLINE: Duration = Duration::from_secs(120);

pub async fn server() -> Server {
    Server::open(Config::in_memory())
        .await
        .expect("cannot open an in-memory server")
}

/// Sends a request like an untyped client.
pub async fn send(
    server: &Server,
    method: &str,
    path: &str,
    content_type: &str,
    body: impl Into<Vec<u8>>,
) -> http::Response<kube::client::Body> {
    let request = http::Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", content_type)
        .body(kube::client::Body::from(body.into()))
        .expect("the request is well formed");
    server
        .client()
        .send(request)
        .await
        .expect("the server answers")
}

/// Reads the whole body of a response as JSON.
pub async fn json_body(answer: http::Response<kube::client::Body>) -> Value {
    let bytes = answer.into_body().collect().await;
    let bytes = bytes.expect("the answer is whole").to_bytes();
    serde_json::from_slice(&bytes).expect("the answer is JSON")
}

/// A namespaced kind `Widget` with a schema, a default, a status, a scale and an older version.
pub fn widget_definition() -> CustomResourceDefinition {
    let schema = json!({"openAPIV3Schema": {"type": "object", "properties": {
        "spec": {"type": "object", "required": ["size"], "properties": {
            "size": {"type": "integer", "minimum": 1},
            "color": {"type": "string", "default": "red"},
            "replicas": {"type": "integer"},
        }},
        "status": {"type": "object", "properties": {
            "phase": {"type": "string"}, "replicas": {"type": "integer"}, "selector": {"type": "string"},
        }},
    }}});
    let version = |name: &str, storage: bool| {
        json!({"name": name, "served": true, "storage": storage, "schema": schema, "deprecated": !storage, "subresources": {
            "status": {},
            "scale": {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".status.selector"},
        }})
    };
    serde_json::from_value(json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.example.x-k8s.io"},
        "spec": {
            "group": "example.x-k8s.io", "scope": "Namespaced",
            "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "shortNames": ["wd"]},
            "versions": [version("v1", true), version("v1alpha1", false)],
        },
    }))
    .expect("the definition is well formed")
}

pub async fn define_widgets(client: &Client) {
    Api::<CustomResourceDefinition>::all(client.clone())
        .create(&PostParams::default(), &widget_definition())
        .await
        .expect("widgets are defined");
}

pub fn widget_resource(version: &str) -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk(
        "example.x-k8s.io",
        version,
        "Widget",
    ))
}

pub fn widgets(client: &Client) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), "default", &widget_resource("v1"))
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "callers build the value in place"
)]
pub fn widget(name: &str, spec: Value) -> DynamicObject {
    let mut object = DynamicObject::new(name, &widget_resource("v1"));
    object.data = json!({"spec": spec});
    object
}

/// The `Status` of a rejected request.
pub fn refusal<T: std::fmt::Debug>(outcome: Result<T, kube::Error>) -> Status {
    match outcome {
        Err(kube::Error::Api(status)) => *status,
        other => panic!("expected an API error, got {other:?}"),
    }
}

/// The code of an API error.
pub fn code<T: std::fmt::Debug>(outcome: Result<T, kube::Error>) -> u16 {
    refusal(outcome).code
}
