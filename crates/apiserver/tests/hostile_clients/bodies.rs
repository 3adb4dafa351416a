//! Bodies that are small to send and expensive to decode. Every account may request a review of its own permissions, so an
//! attacker needs no permission to have a body decoded.

use std::time::{Duration, Instant};

use http::{Method, Request};
use kube::client::Body;

use super::{answer, mallory, send};
use crate::support::server;

const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";

/// Responses take milliseconds, but a busy machine may stop this process for seconds.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

async fn code_of(content_type: &str, body: String) -> u16 {
    let server = server().await;
    let client = server.client_as(mallory());
    let started = Instant::now();
    let (code, _) = send(&client, Method::POST, REVIEWS, content_type, body).await;
    assert!(
        started.elapsed() < RESPONSE_TIMEOUT,
        "{:?}",
        started.elapsed()
    );
    drop(client);
    server.shutdown().await;
    code
}

#[tokio::test(flavor = "multi_thread")]
async fn a_yaml_body_of_nested_sequences_is_refused_quickly() {
    for opening in ["[", "[\n", "{a: "] {
        let nested = opening.repeat(600_000 / opening.len());
        assert_eq!(code_of("application/yaml", nested).await, 400);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_yaml_body_whose_aliases_multiply_one_scalar_is_refused() {
    let scalar = "x".repeat(64 << 10);
    let body = format!("a: &a {scalar}\nb: [{}]\n", "*a,".repeat(1000));
    assert_eq!(code_of("application/yaml", body).await, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_json_body_of_many_tiny_objects_is_refused() {
    let body = format!("{{\"spec\":[{}0]}}", r#"{"":0},"#.repeat(400_000));
    assert_eq!(code_of("application/json", body).await, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_protobuf_body_of_many_tiny_messages_is_refused() {
    // A Pod whose spec holds containers (field 2) with a name (field 1) of one letter each.
    let containers = [0x12, 0x03, 0x0a, 0x01, b'a'].repeat(400_000);
    let envelope = |field: u8, content: &[u8]| {
        let mut bytes = vec![field];
        let mut length = content.len();
        while length >= 0x80 {
            bytes.push(u8::try_from(length & 0x7f).expect("seven bits") | 0x80);
            length >>= 7;
        }
        bytes.push(u8::try_from(length).expect("seven bits"));
        bytes.extend_from_slice(content);
        bytes
    };
    let identity = [envelope(0x0a, b"v1"), envelope(0x12, b"Pod")].concat();
    let object = envelope(0x12, &containers);
    let mut body = b"k8s\0".to_vec();
    body.extend(envelope(0x0a, &identity));
    body.extend(envelope(0x12, &object));
    let server = server().await;
    let (code, _) = send(
        &server.client(),
        Method::POST,
        "/api/v1/namespaces/default/pods",
        "application/vnd.kubernetes.protobuf",
        body,
    )
    .await;
    assert_eq!(code, 400);
    server.shutdown().await;
}

/// On a single thread, the server answers a small request while it decodes a large body.
#[tokio::test]
async fn a_large_body_is_decoded_off_the_async_workers() {
    let server = server().await;
    let client = server.client_as(mallory());
    let mut body = String::from("spec:\n  resourceAttributes:\n    verb: get\nlist:\n");
    body.push_str(&"- some: text\n".repeat(40_000));
    let large = std::pin::pin!(send(
        &client,
        Method::POST,
        REVIEWS,
        "application/yaml",
        body
    ));
    let request = Request::get("/api").body(Body::empty()).unwrap();
    let small = std::pin::pin!(answer(&client, request));
    match futures::future::select(large, small).await {
        futures::future::Either::Right(((code, _), large)) => {
            assert_eq!(code, 200);
            assert_eq!(large.await.0, 201);
        }
        futures::future::Either::Left(_) => {
            panic!("the async worker was blocked by the large body")
        }
    }
}

/// Every tenant may write objects, and each invalid item of a list is an error of its own.
#[tokio::test(flavor = "multi_thread")]
async fn an_object_with_hundreds_of_thousands_of_errors_gets_a_quick_and_short_response() {
    let server = server().await;
    let schema = serde_json::json!({"openAPIV3Schema": {"type": "object", "properties": {
        "list": {"type": "array", "items": {"type": "string"}}}}});
    let definition = serde_json::json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "notes.example.io"},
        "spec": {"group": "example.io", "scope": "Namespaced", "names": {"plural": "notes", "singular": "note", "kind": "Note"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": schema}]}});
    let client = server.client();
    let target = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    let (code, answer) = super::create(&client, target, &definition).await;
    assert_eq!(code, 201, "{answer}");
    let body = format!(
        r#"{{"apiVersion":"example.io/v1","kind":"Note","metadata":{{"name":"n"}},"list":[{}0]}}"#,
        "0,".repeat(300_000)
    );
    let target = "/apis/example.io/v1/namespaces/default/notes";
    let started = Instant::now();
    let (code, answer) = send(&client, Method::POST, target, "application/json", body).await;
    assert!(
        started.elapsed() < RESPONSE_TIMEOUT,
        "{:?}",
        started.elapsed()
    );
    assert_eq!(code, 422);
    assert!(answer.to_string().len() < 1 << 20);
    drop(client);
    server.shutdown().await;
}
