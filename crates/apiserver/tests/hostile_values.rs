//! Values that kube-apiserver cannot decode are never stored, because one such object would break every typed client that lists
//! its kind.

mod support;

use apiserver::Server;
use serde_json::{Value, json};
use support::{define_widgets, json_body, send, server};

/// The status code and the body of a response.
async fn ask(server: &Server, method: &str, path: &str, kind: &str, body: &str) -> (u16, Value) {
    let answer = send(server, method, path, kind, body).await;
    let code = answer.status().as_u16();
    (code, json_body(answer).await)
}

async fn create(server: &Server, path: &str, body: &str) -> (u16, Value) {
    ask(server, "POST", path, "application/json", body).await
}

const SERVICES: &str = "/api/v1/namespaces/default/services";
const PODS: &str = "/api/v1/namespaces/default/pods";
const POLICIES: &str = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies";
const EVENTS: &str = "/api/v1/namespaces/default/events";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const LEASES: &str = "/apis/coordination.k8s.io/v1/namespaces/default/leases";
const WIDGETS: &str = "/apis/example.x-k8s.io/v1/namespaces/default/widgets";

/// Bodies that Go's decoder rejects, with its messages.
const UNDECODABLE: [(&str, &str, &str); 10] = [
    (
        SERVICES,
        r#"{"metadata": {"name": "x"}, "spec": {"ports": [{"port": 80}], "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 3000000000}}}}"#,
        "Service in version \"v1\" cannot be handled as a Service: json: cannot unmarshal number 3000000000 into Go struct field ClientIPConfig.spec.sessionAffinityConfig.clientIP.timeoutSeconds of type int32",
    ),
    (
        POLICIES,
        r#"{"metadata": {"name": "x"}, "spec": {"podSelector": {}, "egress": [{"ports": [{"port": 1, "endPort": 3000000000}]}]}}"#,
        "NetworkPolicy in version \"v1\" cannot be handled as a NetworkPolicy: json: cannot unmarshal number 3000000000 into Go struct field NetworkPolicyPort.spec.egress.ports.endPort of type int32",
    ),
    (
        POLICIES,
        r#"{"metadata": {"name": "x"}, "spec": {"podSelector": {}, "egress": [{"ports": [{"port": 3000000000}]}]}}"#,
        "NetworkPolicy in version \"v1\" cannot be handled as a NetworkPolicy: json: cannot unmarshal number 3000000000 into Go struct field NetworkPolicyPort.spec.egress.ports.port of type int32",
    ),
    (
        PODS,
        r#"{"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "host", "livenessProbe": {"periodSeconds": 3000000000, "tcpSocket": {"port": 1}}}]}}"#,
        "Pod in version \"v1\" cannot be handled as a Pod: json: cannot unmarshal number 3000000000 into Go struct field Probe.spec.containers.livenessProbe.periodSeconds of type int32",
    ),
    (
        PODS,
        r#"{"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "host"}], "activeDeadlineSeconds": 99999999999999999999}}"#,
        "Pod in version \"v1\" cannot be handled as a Pod: json: cannot unmarshal number 100000000000000000000 into Go struct field PodSpec.spec.activeDeadlineSeconds of type int64",
    ),
    (
        EVENTS,
        r#"{"metadata": {"name": "x"}, "involvedObject": {"namespace": "default"}, "firstTimestamp": "soon"}"#,
        "Event in version \"v1\" cannot be handled as a Event: parsing time \"soon\" as \"2006-01-02T15:04:05Z07:00\": cannot parse \"soon\" as \"2006\"",
    ),
    (
        LEASES,
        r#"{"metadata": {"name": "x"}, "spec": {"renewTime": "2026-01-01T00:00:00Z"}}"#,
        "Lease in version \"v1\" cannot be handled as a Lease: parsing time \"2026-01-01T00:00:00Z\" as \"2006-01-02T15:04:05.000000Z07:00\": cannot parse \"Z\" as \".000000\"",
    ),
    (
        MAPS,
        r#"{"metadata": {"name": "x"}, "binaryData": {"a": "****"}}"#,
        "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: illegal base64 data at input byte 0",
    ),
    (
        MAPS,
        r#"{"metadata": {"name": "x", "finalizers": [1]}}"#,
        "ConfigMap in version \"v1\" cannot be handled as a ConfigMap: json: cannot unmarshal number into Go struct field ObjectMeta.metadata.finalizers of type string",
    ),
    (
        WIDGETS,
        r#"{"apiVersion": "example.x-k8s.io/v1", "kind": "Widget", "metadata": {"name": "x", "finalizers": [1]}, "spec": {"size": 1}}"#,
        "Widget in version \"v1\" cannot be handled as a Widget: json: cannot unmarshal number into Go struct field ObjectMeta.finalizers of type string",
    ),
];

#[tokio::test]
async fn an_object_that_typed_clients_cannot_decode_is_refused_on_create() {
    let server = server().await;
    define_widgets(&server.client()).await;
    for (path, body, message) in UNDECODABLE {
        let (code, answer) = create(&server, path, body).await;
        assert_eq!(
            (code, answer["message"].as_str()),
            (400, Some(message)),
            "{body}"
        );
        let yaml = serde_yaml_ng::to_string(&serde_json::from_str::<Value>(body).unwrap()).unwrap();
        let (code, answer) = ask(&server, "POST", path, "application/yaml", &yaml).await;
        assert_eq!(
            (code, answer["message"].as_str()),
            (400, Some(message)),
            "{yaml}"
        );
        let (code, _) = ask(&server, "GET", &format!("{path}/x"), "application/json", "").await;
        assert_eq!(code, 404, "{body}");
    }
    server.shutdown().await;
}

#[tokio::test]
async fn updates_patches_and_status_writes_refuse_undecodable_values_too() {
    let server = server().await;
    let pod =
        r#"{"metadata": {"name": "x"}, "spec": {"containers": [{"name": "c", "image": "host"}]}}"#;
    let (code, created) = create(&server, PODS, pod).await;
    assert_eq!(code, 201, "{created}");
    let at = format!("{PODS}/x");
    let mut put = created.clone();
    put["spec"]["activeDeadlineSeconds"] = json!(9_223_372_036_854_775_808_u64);
    let (code, answer) = ask(&server, "PUT", &at, "application/json", &put.to_string()).await;
    assert_eq!(code, 400, "{answer}");
    let patches = [
        (
            "application/merge-patch+json",
            r#"{"spec": {"activeDeadlineSeconds": 9223372036854775808}}"#,
        ),
        (
            "application/strategic-merge-patch+json",
            r#"{"spec": {"activeDeadlineSeconds": 9223372036854775808}}"#,
        ),
        (
            "application/json-patch+json",
            r#"[{"op": "add", "path": "/spec/activeDeadlineSeconds", "value": 9223372036854775808}]"#,
        ),
    ];
    for (kind, patch) in patches {
        let (code, answer) = ask(&server, "PATCH", &at, kind, patch).await;
        assert_eq!(code, 422, "{kind}: {answer}");
        assert_eq!(answer["details"]["causes"][0]["field"], "patch", "{kind}");
    }
    let applied = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"activeDeadlineSeconds": 9223372036854775808}}"#;
    let path = format!("{at}?fieldManager=me");
    let (code, answer) = ask(
        &server,
        "PATCH",
        &path,
        "application/apply-patch+yaml",
        applied,
    )
    .await;
    assert_eq!(code, 400, "{answer}");
    for status in [
        json!({"status": {"startTime": "soon"}}),
        json!({"status": {"containerStatuses": [{"name": "c", "restartCount": 3_000_000_000_u64}]}}),
        json!({"status": {"conditions": "none"}}),
    ] {
        let path = format!("{at}/status");
        let (code, answer) = ask(
            &server,
            "PATCH",
            &path,
            "application/merge-patch+json",
            &status.to_string(),
        )
        .await;
        assert_eq!(code, 422, "{status}: {answer}");
    }
    server.shutdown().await;
}

#[tokio::test]
async fn a_scale_is_a_32_bit_number() {
    let server = server().await;
    define_widgets(&server.client()).await;
    let widget = r#"{"apiVersion": "example.x-k8s.io/v1", "kind": "Widget", "metadata": {"name": "x"}, "spec": {"size": 1}}"#;
    assert_eq!(create(&server, WIDGETS, widget).await.0, 201);
    let at = format!("{WIDGETS}/x/scale");
    let scale = r#"{"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "x", "namespace": "default"}, "spec": {"replicas": 3000000000}}"#;
    let (code, answer) = ask(&server, "PUT", &at, "application/json", scale).await;
    assert_eq!(
        (code, answer["message"].as_str()),
        (
            400,
            Some(
                "Scale in version \"v1\" cannot be handled as a Scale: json: cannot unmarshal number 3000000000 into Go struct field ScaleSpec.spec.replicas of type int32"
            )
        )
    );
    let patch = r#"{"spec": {"replicas": 3000000000}}"#;
    let (code, answer) = ask(&server, "PATCH", &at, "application/merge-patch+json", patch).await;
    assert!(matches!(code, 400 | 422), "{answer}");
    let (_, widget) = ask(
        &server,
        "GET",
        &format!("{WIDGETS}/x"),
        "application/json",
        "",
    )
    .await;
    assert_eq!(widget["spec"].get("replicas"), None);
    server.shutdown().await;
}

#[tokio::test]
async fn a_float_without_fraction_is_stored_as_an_integer() {
    let server = server().await;
    define_widgets(&server.client()).await;
    let widget = r#"{"apiVersion": "example.x-k8s.io/v1", "kind": "Widget", "metadata": {"name": "x"}, "spec": {"size": 2.0}}"#;
    let (code, answer) = create(&server, WIDGETS, widget).await;
    assert_eq!(
        (code, answer["spec"]["size"].as_i64()),
        (201, Some(2)),
        "{answer}"
    );
    server.shutdown().await;
}

#[tokio::test]
async fn times_at_the_end_of_the_year_9999_are_stored() {
    let server = server().await;
    let event = r#"{"metadata": {"name": "x"}, "involvedObject": {"namespace": "default"}, "firstTimestamp": "9999-12-31T23:59:59Z"}"#;
    let (code, answer) = create(&server, EVENTS, event).await;
    assert_eq!(
        (code, answer["firstTimestamp"].as_str()),
        (201, Some("9999-12-31T23:59:59Z")),
        "{answer}"
    );
    server.shutdown().await;
}
