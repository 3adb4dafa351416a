//! Invalid credentials and malformed requests.

use apiserver::{Config, Server};
use http::Method;
use serde_json::json;

use super::{create, send};
use crate::support::server;

#[tokio::test(flavor = "multi_thread")]
async fn a_token_for_another_audience_fails_a_review_without_audiences() {
    let server = server().await;
    let admin = server.client();
    let issue = async |audiences: &[&str]| {
        let target = "/api/v1/namespaces/default/serviceaccounts/default/token";
        let request = json!({"spec": {"audiences": audiences}});
        let (code, answer) = create(&admin, target, &request).await;
        assert_eq!(code, 201, "{answer}");
        answer["status"]["token"].clone()
    };
    let (own, vault) = (issue(&[]).await, issue(&["vault"]).await);
    let api = "https://kubernetes.default.svc.cluster.local";
    for (token, audiences, expected) in [
        (&own, json!(null), json!([api])),
        (&own, json!(["vault"]), json!(null)),
        (&vault, json!(null), json!(null)),
        (&vault, json!([]), json!(null)),
        (&vault, json!(["vault", "other"]), json!(["vault"])),
    ] {
        let review = json!({"spec": {"token": token, "audiences": audiences}});
        let target = "/apis/authentication.k8s.io/v1/tokenreviews";
        let (_, answer) = create(&admin, target, &review).await;
        let status = &answer["status"];
        assert_eq!(status["audiences"], expected, "{audiences}: {status}");
        assert_eq!(
            status["authenticated"].as_bool().unwrap_or_default(),
            !expected.is_null(),
            "{status}"
        );
    }
    drop(admin);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_not_bound_to_a_pod_of_another_account() {
    let server = server().await;
    let admin = server.client();
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    let account = json!({"metadata": {"name": "other"}});
    assert_eq!(create(&admin, accounts, &account).await.0, 201);
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "host"}]}});
    let (code, answer) = create(&admin, "/api/v1/namespaces/default/pods", &pod).await;
    assert_eq!(code, 201, "{answer}");
    let request =
        json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p"}}});
    for (account, expected) in [("default", 201), ("other", 400)] {
        let target = format!("{accounts}/{account}/token");
        let (code, answer) = create(&admin, &target, &request).await;
        assert_eq!(code, expected, "{account}: {answer}");
    }
    drop(admin);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_empty_admin_token_stops_the_server_from_opening() {
    let directory = tempfile::tempdir().unwrap();
    let open = || Server::open(Config::new(directory.path()));
    open().await.unwrap().shutdown().await;
    let token = directory.path().join("pki/admin.token");
    for content in ["", "\n", "  \t\n", "short"] {
        std::fs::write(&token, content).unwrap();
        let error = open().await.expect_err("no server with such a token");
        let error = std::error::Error::source(&error).expect("the cause");
        assert!(error.to_string().contains("admin.token"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_admin_token_does_not_replace_the_authority() {
    let directory = tempfile::tempdir().unwrap();
    let open = || Server::open(Config::new(directory.path()));
    open().await.unwrap().shutdown().await;
    let authority = std::fs::read(directory.path().join("pki/ca.crt")).unwrap();
    std::fs::remove_file(directory.path().join("pki/admin.token")).unwrap();
    assert!(open().await.is_err());
    let kept = std::fs::read(directory.path().join("pki/ca.crt")).unwrap();
    assert_eq!(kept, authority);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_http_method_gets_no_permission() {
    let server = server().await;
    let client = server.client_as(super::mallory());
    super::grant(
        &server.client(),
        json!([{"verbs": ["list"], "apiGroups": [""], "resources": ["secrets"]}]),
        json!([]),
    )
    .await;
    let method = Method::from_bytes(b"list").unwrap();
    let (code, _) = send(
        &client,
        method,
        "/api/v1/namespaces/default/secrets",
        "application/json",
        "",
    )
    .await;
    assert_eq!(code, 403);
    drop(client);
    server.shutdown().await;
}
