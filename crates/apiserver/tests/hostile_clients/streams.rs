//! Commands in pods by roles that may only read.

use http::{Request, header};
use kube::client::Body;
use serde_json::json;

use super::{answer, grant, mallory};
use crate::support::server;

const STREAMS: [&str; 3] = ["exec", "attach", "portforward"];

/// The code of the answer to a WebSocket upgrade, which is a GET.
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
async fn a_read_only_role_opens_no_exec_attach_or_port_forward() {
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
async fn the_right_to_create_opens_streams_by_get_and_by_post() {
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
        assert_eq!(code, 404, "there is no such pod: {message}");
    }
    drop(client);
    server.shutdown().await;
}
