//! The default roles of Kubernetes, reduced to the resources that are served here.

use serde_json::{Value, json};

const RBAC: &str = "rbac.authorization.k8s.io/v1";
const READ: [&str; 3] = ["get", "list", "watch"];
const WRITE: [&str; 5] = ["create", "delete", "deletecollection", "patch", "update"];

fn role(name: &str, labels: &Value, content: Value) -> Value {
    let mut labels = labels.clone();
    labels["kubernetes.io/bootstrapping"] = Value::from("rbac-defaults");
    let mut role = json!({"apiVersion": RBAC, "kind": "ClusterRole", "metadata": {"name": name, "labels": labels,
        "annotations": {"rbac.authorization.kubernetes.io/autoupdate": "true"}}});
    if let (Some(role), Value::Object(content)) = (role.as_object_mut(), content) {
        role.extend(content);
    }
    role
}

fn binding(name: &str, groups: &[&str]) -> Value {
    let subjects: Vec<Value> = groups.iter().map(|group| json!({"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": group})).collect();
    json!({"apiVersion": RBAC, "kind": "ClusterRoleBinding",
        "metadata": {"name": name, "labels": {"kubernetes.io/bootstrapping": "rbac-defaults"}},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}, "subjects": subjects})
}

/// The default cluster roles.
pub fn cluster_roles() -> Vec<Value> {
    let aggregate = |to: &str| json!({"aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {format!("rbac.authorization.k8s.io/aggregate-to-{to}"): "true"}}]}, "rules": []});
    let label = |to: &str| json!({format!("rbac.authorization.k8s.io/aggregate-to-{to}"): "true"});
    let every = [READ.as_slice(), &WRITE].concat();
    let core = [
        "configmaps",
        "endpoints",
        "events",
        "persistentvolumeclaims",
        "pods",
        "serviceaccounts",
        "services",
    ];
    let viewed: Vec<&str> = core
        .iter()
        .copied()
        .chain([
            "namespaces",
            "pods/log",
            "pods/status",
            "services/status",
            "persistentvolumeclaims/status",
        ])
        .collect();
    let edited = [
        "configmaps",
        "endpoints",
        "events",
        "persistentvolumeclaims",
        "pods",
        "pods/attach",
        "pods/exec",
        "pods/portforward",
        "pods/eviction",
        "secrets",
        "serviceaccounts",
        "services",
    ];
    vec![
        role(
            "cluster-admin",
            &json!({}),
            json!({"rules": [
            {"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}, {"nonResourceURLs": ["*"], "verbs": ["*"]}]}),
        ),
        role("admin", &json!({}), aggregate("admin")),
        role("edit", &label("admin"), aggregate("edit")),
        role("view", &label("edit"), aggregate("view")),
        role(
            "system:aggregate-to-admin",
            &label("admin"),
            json!({"rules": [
            {"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["roles", "rolebindings"], "verbs": every},
            {"apiGroups": ["authorization.k8s.io"], "resources": ["localsubjectaccessreviews"], "verbs": ["create"]}]}),
        ),
        role(
            "system:aggregate-to-edit",
            &label("edit"),
            json!({"rules": [
            {"apiGroups": [""], "resources": edited, "verbs": WRITE},
            {"apiGroups": [""], "resources": ["secrets", "pods/attach", "pods/exec", "pods/portforward"], "verbs": READ},
            {"apiGroups": [""], "resources": ["serviceaccounts/token"], "verbs": ["create"]},
            {"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": ["impersonate"]},
            {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": every},
            {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": WRITE}]}),
        ),
        role(
            "system:aggregate-to-view",
            &label("view"),
            json!({"rules": [
            {"apiGroups": [""], "resources": viewed, "verbs": READ},
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": READ},
            {"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": READ},
            {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": READ}]}),
        ),
        role(
            "system:discovery",
            &json!({}),
            json!({"rules": [
            {"nonResourceURLs": ["/api", "/api/*", "/apis", "/apis/*", "/healthz", "/livez", "/openapi", "/openapi/*", "/readyz", "/version", "/version/"], "verbs": ["get"]}]}),
        ),
        role(
            "system:basic-user",
            &json!({}),
            json!({"rules": [
            {"apiGroups": ["authorization.k8s.io"], "resources": ["selfsubjectaccessreviews", "selfsubjectrulesreviews"], "verbs": ["create"]},
            {"apiGroups": ["authentication.k8s.io"], "resources": ["selfsubjectreviews"], "verbs": ["create"]}]}),
        ),
        role(
            "system:auth-delegator",
            &json!({}),
            json!({"rules": [
            {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
            {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]}]}),
        ),
    ]
}

/// The default bindings of cluster roles.
pub fn cluster_role_bindings() -> Vec<Value> {
    vec![
        binding("cluster-admin", &["system:masters"]),
        binding("system:discovery", &["system:authenticated"]),
        binding("system:basic-user", &["system:authenticated"]),
    ]
}
