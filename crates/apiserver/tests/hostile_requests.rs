//! Malformed requests: every path, query, header and body gets a quick response, and never an internal server error.

mod support;

use std::time::Duration;

use apiserver::Server;
use http::{Method, Request, header};
use http_body_util::BodyExt;
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, api::PostParams, client::Body};
use proptest::{prelude::*, test_runner::TestRunner};
use support::{define_widgets, server, widget, widgets};

/// Responses take milliseconds, but a busy machine may stop this process for seconds.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The number of frames after which an endless stream is not read any more.
const MAXIMUM_FRAMES: usize = 20;

#[derive(Clone, Debug)]
struct Hostile {
    method: &'static str,
    target: String,
    content_type: &'static str,
    accept: &'static str,
    body: Vec<u8>,
}

fn one_of(choices: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop::sample::select(choices).prop_map(ToOwned::to_owned)
}

fn segment() -> impl Strategy<Value = String> {
    prop_oneof![
        6 => one_of(&[
            "api", "apis", "v1", "namespaces", "default", "pods", "configmaps", "one", "status", "scale", "log", "exec", "binding",
            "eviction", "example.x-k8s.io", "widgets", "openapi", "v3", "v2", "apiextensions.k8s.io", "customresourcedefinitions",
            "authorization.k8s.io", "selfsubjectaccessreviews", "authentication.k8s.io", "tokenreviews", "serviceaccounts", "token",
        ]),
        1 => one_of(&["", ".", "..", "%2e%2e", "%00", "%", "%zz", "%ff%fe", "a%2Fb", "watch", "proxy"]),
        1 => "[a-z%.~-]{0,12}",
    ]
}

fn target() -> impl Strategy<Value = String> {
    let parameter = one_of(&[
        "watch",
        "labelSelector",
        "fieldSelector",
        "limit",
        "continue",
        "resourceVersion",
        "resourceVersionMatch",
        "timeoutSeconds",
        "sendInitialEvents",
        "allowWatchBookmarks",
        "dryRun",
        "fieldManager",
        "fieldValidation",
        "force",
        "propagationPolicy",
        "gracePeriodSeconds",
        "hash",
        "pretty",
        "includeObject",
        "command",
        "container",
        "x",
    ]);
    let value = prop_oneof![
        4 => one_of(&[
            "", "1", "0", "-1", "true", "false", "18446744073709551615", "99999999999999999999999", "NaN", "Exact", "NotOlderThan", "All",
            "Strict", "a%3Db", "a+in+(b,c)", "!a", "metadata.name%3Done", "spec.nodeName!%3D", "(((", "eyJ2IjoiIn0", "Foreground", "%00",
        ]),
        1 => "[a-z0-9=,()!%+&;-]{0,24}",
    ];
    let query = prop::collection::vec((parameter, value), 0..5).prop_map(|pairs| {
        pairs
            .into_iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect::<Vec<_>>()
            .join("&")
    });
    let known = one_of(&[
        "/api/v1/namespaces/default/configmaps",
        "/api/v1/namespaces/default/configmaps/one",
        "/api/v1/configmaps",
        "/apis",
        "/api",
        "/apis/example.x-k8s.io/v1/namespaces/default/widgets",
        "/apis/example.x-k8s.io/v1/namespaces/default/widgets/one",
        "/apis/example.x-k8s.io/v1/namespaces/default/widgets/one/scale",
        "/api/v1/namespaces/default/pods/one/log",
        "/openapi/v3",
    ]);
    let made = prop::collection::vec(segment(), 0..8)
        .prop_map(|segments| format!("/{}", segments.join("/")));
    (prop_oneof![known, made], query).prop_map(|(path, query)| format!("{path}?{query}"))
}

/// Bodies from random bytes to nearly valid objects.
fn body() -> impl Strategy<Value = Vec<u8>> {
    let text = one_of(&[
        "",
        "null",
        "{}",
        "[]",
        "{",
        "\"text\"",
        "1e999",
        "{\"a\":1,\"a\":2}",
        "a: &a [*a, *a]",
        "a: &x [1]\nb: [*x,*x,*x]",
        "- - - -",
        r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"two"},"data":{"a":"b"}}"#,
        r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":["two"]},"data":7}"#,
        r#"{"apiVersion":"v1","kind":"ConfigMap","metadata":{"generateName":"x","finalizers":[1],"ownerReferences":[{}],"managedFields":[{"fieldsV1":3}]}}"#,
        r#"{"apiVersion":"example.x-k8s.io/v1","kind":"Widget","metadata":{"name":"three"},"spec":{"size":1e40}}"#,
        r#"{"metadata":{"resourceVersion":"-1","labels":{"a":null}},"spec":{"size":null}}"#,
        r#"[{"op":"copy","from":"","path":"/data"},{"op":"copy","from":"","path":"/data"},{"op":"move","from":"/metadata","path":"/metadata/x"}]"#,
        r#"[{"op":"add","path":"/data/-1","value":{}},{"op":"test","path":"","value":null},{"op":"remove","path":""}]"#,
        r#"{"$patch":"replace","data":{"$patch":"delete"},"$setElementOrder/data":[1],"$retainKeys":[{}]}"#,
    ]);
    let envelope = prop::collection::vec(any::<u8>(), 0..64).prop_map(|noise| {
        let identity = b"\x0a\x02v1\x12\x09ConfigMap";
        let mut bytes = b"k8s\0".to_vec();
        bytes.extend([0x0a, u8::try_from(identity.len()).expect("short")]);
        bytes.extend(identity);
        bytes.extend([0x12, u8::try_from(noise.len()).expect("short")]);
        bytes.extend(noise);
        bytes
    });
    let deep = (1_usize..3000)
        .prop_map(|depth| format!("{}{}", "[".repeat(depth), "]".repeat(depth)).into_bytes());
    prop_oneof![
        6 => text.prop_map(String::into_bytes),
        2 => envelope,
        1 => deep,
        1 => prop::collection::vec(any::<u8>(), 0..128),
    ]
}

fn hostile() -> impl Strategy<Value = Hostile> {
    let methods = prop::sample::select(
        &[
            "GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "BREW",
        ][..],
    );
    let content_types = prop::sample::select(
        &[
            "",
            "application/json",
            "application/yaml",
            "application/vnd.kubernetes.protobuf",
            "application/json-patch+json",
            "application/merge-patch+json",
            "application/strategic-merge-patch+json",
            "application/apply-patch+yaml",
            "text/plain",
        ][..],
    );
    let accepts = prop::sample::select(
        &[
            "",
            "*/*",
            "application/json;as=Table;v=v1;g=meta.k8s.io",
            "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io",
            "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
            "application/vnd.kubernetes.protobuf",
            ";;,as=,",
        ][..],
    );
    (methods, target(), content_types, accepts, body()).prop_map(
        |(method, target, content_type, accept, body)| Hostile {
            method,
            target,
            content_type,
            accept,
            body,
        },
    )
}

/// Sends a request and returns the status code of the response, after its body has been read.
async fn ask(server: &Server, hostile: &Hostile) -> Option<u16> {
    let request = Request::builder()
        .method(Method::from_bytes(hostile.method.as_bytes()).expect("a method"))
        .uri(&hostile.target)
        .header(header::CONTENT_TYPE, hostile.content_type)
        .header(header::ACCEPT, hostile.accept)
        .body(Body::from(hostile.body.clone()));
    // A string that is not a URI never reaches a server.
    let answer = server
        .client()
        .send(request.ok()?)
        .await
        .expect("the server answers");
    let code = answer.status().as_u16();
    let mut content = answer.into_body();
    for _ in 0..MAXIMUM_FRAMES {
        // A watch without events stays open, as it should.
        match tokio::time::timeout(Duration::from_millis(20), content.frame()).await {
            Ok(Some(frame)) => drop(frame.expect("the body is whole")),
            Ok(None) | Err(_) => break,
        }
    }
    Some(code)
}

#[test]
fn every_request_gets_a_quick_response_that_is_no_internal_error() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let server = runtime.block_on(async {
        let server = server().await;
        define_widgets(&server.client()).await;
        let one = widget("one", serde_json::json!({"size": 1}));
        widgets(&server.client())
            .create(&PostParams::default(), &one)
            .await
            .unwrap();
        server
    });
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 3000,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let outcome = runner.run(&hostile(), |hostile| {
        let code = runtime.block_on(async {
            tokio::time::timeout(RESPONSE_TIMEOUT, ask(&server, &hostile)).await
        });
        let code = code.map_err(|_| TestCaseError::fail("no answer in time"))?;
        // 501 means that a feature is not served, 503 that a node is unreachable. Only 500 means an internal error.
        prop_assert!(!matches!(code, Some(500)), "{code:?}");
        Ok(())
    });
    outcome.unwrap();
    runtime.block_on(async {
        // The server still works.
        let namespace =
            serde_json::from_value(serde_json::json!({"metadata": {"name": "afterwards"}}))
                .unwrap();
        Api::<Namespace>::all(server.client())
            .create(&PostParams::default(), &namespace)
            .await
            .unwrap();
        server.shutdown().await;
    });
}
