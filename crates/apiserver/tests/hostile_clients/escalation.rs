//! Privilege escalation through bindings, aggregation, and updates of existing roles. The conformance suite (`escalation.yaml`)
//! records the responses of kube-apiserver to the same requests.

use apiserver::Server;
use http::Method;
use kube::Client;
use serde_json::{Value, json};

use super::{RBAC, create, grant, mallory, send};
use crate::support::server;

const GROUP: &str = "rbac.authorization.k8s.io";

/// A server where `mallory` may write all kinds of roles and bindings, and otherwise only read configmaps in `default`.
async fn rbac_writer(more: Value) -> (Server, Client) {
    let server = server().await;
    let writes = json!({"verbs": ["create", "update", "patch", "get"], "apiGroups": [GROUP],
        "resources": ["roles", "rolebindings", "clusterroles", "clusterrolebindings"]});
    let mut everywhere = vec![writes];
    everywhere.extend(more.as_array().expect("rules").iter().cloned());
    let reads = json!([{"verbs": ["get"], "apiGroups": [""], "resources": ["configmaps"]}]);
    grant(&server.client(), reads, Value::from(everywhere)).await;
    let client = server.client_as(mallory());
    (server, client)
}

fn binding(kind: &str, name: &str) -> Value {
    json!({"metadata": {"name": "up"}, "subjects": [{"kind": "User", "name": "mallory"}],
        "roleRef": {"apiGroup": GROUP, "kind": kind, "name": name}})
}

fn aggregating() -> Value {
    json!({"metadata": {"name": "collects"}, "rules": [],
        "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"comes": "later"}}]}})
}

fn message(answer: &Value) -> &str {
    answer["message"].as_str().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_binding_to_a_missing_role_is_refused() {
    let (server, client) = rbac_writer(json!([])).await;
    for (path, kind, plural) in [
        ("/namespaces/default/rolebindings", "Role", "rolebindings"),
        (
            "/namespaces/default/rolebindings",
            "ClusterRole",
            "rolebindings",
        ),
        ("/clusterrolebindings", "ClusterRole", "clusterrolebindings"),
    ] {
        let target = format!("{RBAC}{path}");
        let (code, answer) = create(&client, &target, &binding(kind, "absent")).await;
        assert_eq!(code, 404, "{answer}");
        assert_eq!(
            message(&answer),
            format!("{plural}.{GROUP} \"absent\" not found")
        );
    }
    // The administrator may create a binding before its role.
    let target = format!("{RBAC}/clusterrolebindings");
    let (code, _) = create(&server.client(), &target, &binding("ClusterRole", "absent")).await;
    assert_eq!(code, 201);
    drop(client);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_bind_verb_on_a_role_covers_no_other_role() {
    let (server, client) = rbac_writer(json!([{"verbs": ["bind"], "apiGroups": [GROUP],
        "resources": ["clusterroles"], "resourceNames": ["view", "later"]}]))
    .await;
    let target = format!("{RBAC}/namespaces/default/rolebindings");
    let named = |role: &str| {
        let mut binding = binding("ClusterRole", role);
        binding["metadata"]["name"] = json!(role);
        binding
    };
    for (role, expected) in [("view", 201), ("later", 201), ("edit", 403)] {
        let (code, answer) = create(&client, &target, &named(role)).await;
        assert_eq!(code, expected, "{role}: {answer}");
    }
    let (_, answer) = create(&client, &target, &named("edit")).await;
    assert!(
        message(&answer).starts_with(&format!("rolebindings.{GROUP} \"edit\" is forbidden: user \"mallory\" (groups=[\"system:authenticated\"]) is attempting to grant RBAC permissions not currently held:\n")),
        "{answer}"
    );
    drop(client);
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_aggregation_rule_needs_all_permissions() {
    let (server, client) = rbac_writer(json!([])).await;
    let target = format!("{RBAC}/clusterroles");
    let (code, answer) = create(&client, &target, &aggregating()).await;
    assert_eq!(code, 403, "{answer}");
    assert_eq!(
        message(&answer),
        format!(
            "clusterroles.{GROUP} \"collects\" is forbidden: must have cluster-admin privileges to use the aggregationRule"
        )
    );
    // An existing aggregated role cannot be changed, and a role cannot get an aggregation rule later.
    let admin = server.client();
    assert_eq!(create(&admin, &target, &aggregating()).await.0, 201);
    let plain = json!({"metadata": {"name": "plain"}, "rules": []});
    assert_eq!(create(&client, &target, &plain).await.0, 201);
    let merge = "application/merge-patch+json";
    for (name, patch) in [
        ("collects", json!({"metadata": {"labels": {"a": "b"}}})),
        ("collects", json!({"aggregationRule": null})),
        (
            "plain",
            json!({"aggregationRule": aggregating()["aggregationRule"]}),
        ),
    ] {
        let target = format!("{target}/{name}");
        let (code, answer) = send(&client, Method::PATCH, &target, merge, patch.to_string()).await;
        assert_eq!(code, 403, "{name} {patch}: {answer}");
    }
    drop((client, admin));
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_role_with_permissions_that_the_writer_lacks_allows_only_garbage_collector_changes() {
    let (server, client) = rbac_writer(json!([])).await;
    let admin = server.client();
    let target = format!("{RBAC}/namespaces/default/roles");
    let role = json!({"metadata": {"name": "strong", "finalizers": ["example.io/hold"]},
        "rules": [{"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"]}]});
    assert_eq!(create(&admin, &target, &role).await.0, 201);
    let target = format!("{target}/strong");
    let merge = "application/merge-patch+json";
    for (patch, expected) in [
        (json!({"metadata": {"labels": {"a": "b"}}}), 403),
        (json!({"metadata": {"finalizers": []}}), 200),
    ] {
        let (code, answer) = send(&client, Method::PATCH, &target, merge, patch.to_string()).await;
        assert_eq!(code, expected, "{patch}: {answer}");
    }
    drop((client, admin));
    server.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_escalate_verb_on_a_named_role_does_not_allow_creating_it() {
    let (server, client) = rbac_writer(json!([{"verbs": ["escalate"], "apiGroups": [GROUP],
        "resources": ["roles"], "resourceNames": ["mine"]}]))
    .await;
    let target = format!("{RBAC}/namespaces/default/roles");
    let rules = json!([{"verbs": ["get"], "apiGroups": [""], "resources": ["secrets"]}]);
    let strong = json!({"metadata": {"name": "mine"}, "rules": rules});
    // A create request has no name, so a permission for a named role does not apply to it.
    assert_eq!(create(&client, &target, &strong).await.0, 403);
    let weak = json!({"metadata": {"name": "mine"}, "rules": []});
    assert_eq!(create(&client, &target, &weak).await.0, 201);
    let patch = json!({"rules": rules}).to_string();
    let target = format!("{target}/mine");
    let (code, answer) = send(
        &client,
        Method::PATCH,
        &target,
        "application/merge-patch+json",
        patch,
    )
    .await;
    assert_eq!(code, 200, "{answer}");
    drop(client);
    server.shutdown().await;
}
