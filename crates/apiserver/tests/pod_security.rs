//! PodSecurity admission by the labels of a namespace, as in Kubernetes.

mod support;

use apiserver::{Config, Server, audit};
use serde_json::{Value, json};
use support::{json_body, send, server};

/// A response: its status code, its body and its warnings.
struct Answer {
    code: u16,
    body: Value,
    warnings: Vec<String>,
}

async fn ask(server: &Server, method: &str, path: &str, kind: &str, body: &Value) -> Answer {
    let answer = send(server, method, path, kind, body.to_string()).await;
    let code = answer.status().as_u16();
    let warnings = answer.headers().get_all("warning").iter();
    let warnings = warnings
        .map(|value| {
            let text = value.to_str().expect("a warning is text");
            let text = text.strip_prefix("299 - \"").expect("a warning has a code");
            text.strip_suffix('"')
                .expect("a warning is quoted")
                .replace("\\\"", "\"")
        })
        .collect();
    Answer {
        code,
        body: json_body(answer).await,
        warnings,
    }
}

async fn create(server: &Server, path: &str, body: &Value) -> Answer {
    ask(server, "POST", path, "application/json", body).await
}

async fn namespace(server: &Server, name: &str, labels: Value) -> Answer {
    let body = json!({"metadata": {"name": name, "labels": labels}});
    create(server, "/api/v1/namespaces", &body).await
}

fn pod(name: &str, context: &Value) -> Value {
    json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "host", "securityContext": context}]}})
}

const RESTRICTED: &str = "violates PodSecurity \"restricted:latest\": allowPrivilegeEscalation != false (container \"c\" must set securityContext.allowPrivilegeEscalation=false), unrestricted capabilities (container \"c\" must set securityContext.capabilities.drop=[\"ALL\"]), runAsNonRoot != true (pod or container \"c\" must set securityContext.runAsNonRoot=true), seccompProfile (pod or container \"c\" must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")";

#[tokio::test]
async fn a_pod_that_violates_the_enforced_level_is_refused() {
    let server = server().await;
    let labels = json!({"pod-security.kubernetes.io/enforce": "restricted"});
    assert_eq!(namespace(&server, "strict", labels).await.code, 201);
    let pods = "/api/v1/namespaces/strict/pods";
    let refused = create(&server, pods, &pod("x", &json!({}))).await;
    assert_eq!(refused.code, 403);
    assert_eq!(refused.body["reason"], "Forbidden");
    assert_eq!(
        refused.body["message"],
        format!("pods \"x\" is forbidden: {RESTRICTED}")
    );
    let hardened = json!({"allowPrivilegeEscalation": false, "runAsNonRoot": true, "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"}});
    let taken = create(&server, pods, &pod("x", &hardened)).await;
    assert_eq!(
        (taken.code, taken.warnings),
        (201, Vec::new()),
        "{}",
        taken.body
    );
    // An ephemeral container must not circumvent the policy.
    let debug = json!({"spec": {"ephemeralContainers": [{"name": "d", "image": "host"}]}});
    let kind = "application/strategic-merge-patch+json";
    let path = format!("{pods}/x/ephemeralcontainers");
    let refused = ask(&server, "PATCH", &path, kind, &debug).await;
    assert_eq!(refused.code, 403, "{}", refused.body);
    server.shutdown().await;
}

#[tokio::test]
async fn a_namespace_can_only_warn_and_pin_a_version() {
    let server = server().await;
    let labels = json!({"pod-security.kubernetes.io/warn": "baseline", "pod-security.kubernetes.io/warn-version": "v1.30"});
    namespace(&server, "gentle", labels).await;
    let privileged = pod("x", &json!({"privileged": true}));
    let taken = create(&server, "/api/v1/namespaces/gentle/pods", &privileged).await;
    assert_eq!(taken.code, 201, "{}", taken.body);
    assert_eq!(
        taken.warnings,
        [
            "would violate PodSecurity \"baseline:v1.30\": privileged (container \"c\" must not set securityContext.privileged=true)"
        ]
    );
    server.shutdown().await;
}

#[tokio::test]
async fn a_stricter_level_causes_warnings_about_existing_pods() {
    let server = server().await;
    namespace(&server, "n", json!({})).await;
    let pods = "/api/v1/namespaces/n/pods";
    for name in ["b", "a"] {
        assert_eq!(
            create(&server, pods, &pod(name, &json!({}))).await.code,
            201
        );
    }
    let patch =
        json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}});
    let kind = "application/merge-patch+json";
    let changed = ask(&server, "PATCH", "/api/v1/namespaces/n", kind, &patch).await;
    assert_eq!(changed.code, 200, "{}", changed.body);
    assert_eq!(
        changed.warnings,
        [
            "existing pods in namespace \"n\" violate the new PodSecurity enforce level \"restricted:latest\"",
            "a (and 1 other pod): allowPrivilegeEscalation != false, unrestricted capabilities, runAsNonRoot != true, seccompProfile",
        ]
    );
    // Existing pods are not affected: their status and metadata can still be written.
    let patch = json!({"metadata": {"annotations": {"a": "b"}}});
    let changed = ask(&server, "PATCH", &format!("{pods}/a"), kind, &patch).await;
    assert_eq!(changed.code, 200, "{}", changed.body);
    server.shutdown().await;
}

#[tokio::test]
async fn invalid_level_labels_are_refused() {
    let server = server().await;
    let labels = json!({"pod-security.kubernetes.io/enforce": "strict"});
    let refused = namespace(&server, "n", labels).await;
    assert_eq!(refused.code, 422);
    assert_eq!(
        refused.body["message"],
        "Namespace \"n\" is invalid: metadata.labels[pod-security.kubernetes.io/enforce]: Invalid value: \"strict\": must be one of privileged, baseline, restricted"
    );
    server.shutdown().await;
}

#[tokio::test]
async fn violations_of_the_audit_level_are_in_the_audit_log() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.log");
    let server = Server::open(Config {
        audit: Some(audit::Options {
            path: path.clone(),
            max_bytes: 1 << 20,
            max_backups: 1,
        }),
        ..Config::in_memory()
    })
    .await
    .unwrap();
    let labels = json!({"pod-security.kubernetes.io/audit": "baseline"});
    namespace(&server, "noted", labels).await;
    let privileged = pod("x", &json!({"privileged": true}));
    let taken = create(&server, "/api/v1/namespaces/noted/pods", &privileged).await;
    assert_eq!((taken.code, taken.warnings), (201, Vec::new()));
    server.shutdown().await;
    let text = std::fs::read_to_string(path).unwrap();
    let mut events = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let event: Value = events
        .find(|event: &Value| event["objectRef"]["resource"] == "pods" && event["verb"] == "create")
        .unwrap();
    assert_eq!(
        event["annotations"]["pod-security.kubernetes.io/audit-violations"],
        "would violate PodSecurity \"baseline:latest\": privileged (container \"c\" must not set securityContext.privileged=true)"
    );
    assert_eq!(
        event["annotations"]["pod-security.kubernetes.io/enforce-policy"],
        "privileged:latest"
    );
}
