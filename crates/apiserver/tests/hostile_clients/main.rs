//! Attacks by authenticated clients with few or no permissions.

#[path = "../support/mod.rs"]
mod support;

mod bodies;
mod escalation;
mod front;
mod overload;
mod streams;

use apiserver::User;
use http::{Method, Request, header};
use http_body_util::BodyExt;
use kube::{Client, client::Body};
use serde_json::Value;

/// An account with only the permissions that every account has.
fn mallory() -> User {
    User {
        name: "mallory".into(),
        groups: vec!["system:authenticated".into()],
        ..User::default()
    }
}

/// Sends a request unchanged, and returns the status code and the body of the response.
async fn send(
    client: &Client,
    method: Method,
    target: &str,
    content_type: &str,
    body: impl Into<Vec<u8>>,
) -> (u16, Value) {
    let request = Request::builder()
        .method(method)
        .uri(target)
        .header(header::CONTENT_TYPE, content_type)
        .body(Body::from(body.into()))
        .expect("a request");
    answer(client, request).await
}

async fn answer(client: &Client, request: Request<Body>) -> (u16, Value) {
    let answer = client.send(request).await.expect("an answer");
    let code = answer.status().as_u16();
    let bytes = answer
        .into_body()
        .collect()
        .await
        .expect("a whole body")
        .to_bytes();
    (code, serde_json::from_slice(&bytes).unwrap_or_default())
}

/// Creates an object as JSON.
async fn create(client: &Client, target: &str, object: &Value) -> (u16, Value) {
    send(
        client,
        Method::POST,
        target,
        "application/json",
        object.to_string(),
    )
    .await
}

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";

/// Grants `mallory` the `local` rules in the namespace `default` and the `everywhere` rules cluster-wide.
async fn grant(admin: &Client, local: Value, everywhere: Value) {
    let subjects = serde_json::json!([{"kind": "User", "name": "mallory"}]);
    for (kind, rules, below) in [
        ("Role", local, "/namespaces/default"),
        ("ClusterRole", everywhere, ""),
    ] {
        let plural = kind.to_lowercase();
        let role = serde_json::json!({"metadata": {"name": "granted"}, "rules": rules});
        let (code, answer) = create(admin, &format!("{RBAC}{below}/{plural}s"), &role).await;
        assert_eq!(code, 201, "{answer}");
        let binding = serde_json::json!({"metadata": {"name": "granted"}, "subjects": subjects,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "granted"}});
        let (code, answer) =
            create(admin, &format!("{RBAC}{below}/{plural}bindings"), &binding).await;
        assert_eq!(code, 201, "{answer}");
    }
}
