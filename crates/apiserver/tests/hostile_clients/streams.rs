//! Roles with only read permissions must not run commands in pods.

use http::{Request, header};
use kube::client::Body;
use serde_json::json;

use super::{answer, grant, mallory};
use crate::support::server;

const STREAMS: [&str; 3] = ["exec", "attach", "portforward"];

/// Sends a WebSocket upgrade, which is a GET request. Returns the status code and the message of the response.
async fn upgrade(client: &kube::Client, subresource: &str, query: &str) -> (u16, String) {
    let request = Request::get(format!(
        "/api/v1/namespaces/default/pods/p/{subresource}?{query}"
    ))
    .header(header::CONNECTION, "Upgrade")
    .header(header::UPGRADE, "websocket")
    .header(header::SEC_WEBSOCKET_VERSION, "13")
    .header(header::SEC_WEBSOCKET_KEY, "dGhlIHNhbXBsZSBub25jZQ==")
    .body(Body::empty())
    .expect("a request");
    let (code, status) = answer(client, request).await;
    (
        code,
        status["message"].as_str().unwrap_or_default().to_owned(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_role_cannot_exec_attach_or_port_forward() {
    let server = server().await;
    grant(
        &server.client(),
        json!([{"verbs": ["get", "list", "watch"], "apiGroups": [""], "resources": ["pods", "pods/*", "pods/exec", "pods/attach", "pods/portforward"]}]),
        json!([]),
    )
    .await;
    let client = server.client_as(mallory());
    for subresource in STREAMS {
        let (code, message) = upgrade(&client, subresource, "command=id&stdout=1").await;
        assert_eq!(code, 403, "{subresource}: {message}");
        let expected = format!(
            "User \"mallory\" cannot create resource \"pods/{subresource}\" in API group \"\" in the namespace \"default\""
        );
        assert!(message.contains(&expected), "{message}");
    }
    drop(client);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_watch_subresources_cannot_use_them_with_a_watch_parameter() {
    let server = server().await;
    grant(
        &server.client(),
        json!([{"verbs": ["watch"], "apiGroups": [""], "resources": ["*"]}]),
        json!([]),
    )
    .await;
    let client = server.client_as(mallory());
    for subresource in STREAMS.into_iter().chain(["log", "status"]) {
        for query in ["watch=1", "watch=true", "watch"] {
            let (code, message) = upgrade(&client, subresource, query).await;
            assert_eq!(code, 403, "{subresource}?{query}: {message}");
        }
    }
    drop(client);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_create_verb_allows_streams_by_get_and_by_post() {
    let server = server().await;
    grant(
        &server.client(),
        json!([{"verbs": ["get", "create"], "apiGroups": [""], "resources": ["pods/exec", "pods/attach", "pods/portforward"]}]),
        json!([]),
    )
    .await;
    let client = server.client_as(mallory());
    for subresource in STREAMS {
        let (code, message) = upgrade(&client, subresource, "command=id&stdout=1").await;
        assert_eq!(code, 404, "the pod does not exist: {message}");
    }
    drop(client);
    server.shutdown().await;
}
