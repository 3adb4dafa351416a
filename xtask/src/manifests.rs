//! The static manifests for a cluster. What the controllers may do is derived from the rules beside their code.

use std::collections::{BTreeMap, BTreeSet};

use api::SYSTEM_NAMESPACE;
use api::rbac::{NODE, NODE_ROLE, NODE_RUNTIME_LABEL, Rule};
use controllers::rbac;
use serde_json::{Value, json};

use crate::router_manifests;

const CONTROLLER: &str = "agent-sandbox-controller";
const EXTENSIONS: &str = "agent-sandbox-controller-extensions";
const KRUISE: &str = "agent-sandbox-controller-kruise";

/// A file below `deploy/` and its documents.
#[derive(Clone, Debug)]
pub struct Manifest {
    pub file: &'static str,
    pub documents: Vec<Value>,
}

pub fn all() -> Vec<Manifest> {
    [controllers_manifests(), router_manifests::all()].concat()
}

fn controllers_manifests() -> Vec<Manifest> {
    vec![
        Manifest {
            file: "controller.yaml",
            documents: vec![
                namespace(),
                service_account(),
                cluster_role_binding(CONTROLLER),
                metrics_service(),
                deployment(&["--leader-elect=true"]),
            ],
        },
        Manifest {
            file: "rbac.generated.yaml",
            documents: vec![cluster_role(CONTROLLER, rbac::CORE)],
        },
        Manifest {
            file: "extensions.controller.yaml",
            documents: vec![deployment(&["--leader-elect=true", "--extensions"])],
        },
        Manifest {
            file: "extensions.yaml",
            documents: vec![cluster_role_binding(EXTENSIONS)],
        },
        Manifest {
            file: "extensions-rbac.generated.yaml",
            documents: vec![cluster_role(EXTENSIONS, rbac::EXTENSIONS)],
        },
        Manifest {
            file: "kruise/rbac.yaml",
            documents: vec![
                cluster_role(KRUISE, rbac::KRUISE),
                cluster_role_binding(KRUISE),
            ],
        },
        // Whom to bind it to, only the cluster's owner knows: every node has a user of its own.
        Manifest {
            file: "node/rbac.yaml",
            documents: vec![cluster_role(NODE_ROLE, &[NODE])],
        },
        Manifest {
            file: "node/runtime-class.yaml",
            documents: vec![runtime_class()],
        },
    ]
}

/// Pods of this class run on the nodes that were started with the label and, if they are to run nothing else, the taint.
fn runtime_class() -> Value {
    let (key, value) = NODE_RUNTIME_LABEL;
    let toleration =
        json!({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"});
    json!({
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": value},
        "handler": value,
        "scheduling": {"nodeSelector": {key: value}, "tolerations": [toleration]},
    })
}

fn namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM_NAMESPACE}})
}

fn service_account() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": CONTROLLER, "namespace": SYSTEM_NAMESPACE, "labels": app_labels()},
    })
}

fn metrics_service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": CONTROLLER, "namespace": SYSTEM_NAMESPACE, "labels": app_labels()},
        "spec": {
            "selector": app_labels(),
            "ports": [{"name": "metrics", "port": 8080, "targetPort": "metrics", "protocol": "TCP"}],
        },
    })
}

fn deployment(args: &[&str]) -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": CONTROLLER, "namespace": SYSTEM_NAMESPACE, "labels": app_labels()},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": app_labels()},
            "template": {
                "metadata": {"labels": app_labels()},
                "spec": {
                    "serviceAccountName": CONTROLLER,
                    "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
                    "containers": [{
                        "name": CONTROLLER,
                        "image": format!("{CONTROLLER}:latest"),
                        "args": args,
                        "ports": [
                            {"name": "metrics", "containerPort": 8080},
                            {"name": "healthz", "containerPort": 8081},
                        ],
                        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "healthz"}},
                        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "healthz"}},
                        "securityContext": {
                            "allowPrivilegeEscalation": false,
                            "readOnlyRootFilesystem": true,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }],
                },
            },
        },
    })
}

fn app_labels() -> Value {
    json!({"app": CONTROLLER})
}

fn cluster_role_binding(role: &str) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": role},
        "subjects": [{"kind": "ServiceAccount", "name": CONTROLLER, "namespace": SYSTEM_NAMESPACE}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
    })
}

pub fn cluster_role(name: &str, declared: &[&[Rule]]) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRole",
        "metadata": {"name": name},
        "rules": union(declared),
    })
}

/// The union of what controllers declare, with resources of equal verbs in one rule.
fn union(declared: &[&[Rule]]) -> Vec<Value> {
    let mut verbs_of: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
    for rule in declared.iter().copied().flatten() {
        for group in rule.groups {
            for resource in rule.resources {
                verbs_of
                    .entry((group, resource))
                    .or_default()
                    .extend(rule.verbs);
            }
        }
    }
    let mut resources_of: BTreeMap<(&str, BTreeSet<&str>), Vec<&str>> = BTreeMap::new();
    for ((group, resource), verbs) in verbs_of {
        resources_of
            .entry((group, verbs))
            .or_default()
            .push(resource);
    }
    resources_of
        .into_iter()
        .map(|((group, verbs), resources)| json!({"apiGroups": [group], "resources": resources, "verbs": verbs}))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_of_several_controllers_are_united() {
        let pods = Rule {
            groups: &[""],
            resources: &["pods", "services"],
            verbs: &["get", "list"],
        };
        let more = Rule {
            groups: &["", "events.k8s.io"],
            resources: &["pods"],
            verbs: &["list", "patch"],
        };
        assert_eq!(
            union(&[&[pods], &[more]]),
            [
                json!({"apiGroups": [""], "resources": ["services"], "verbs": ["get", "list"]}),
                json!({"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "patch"]}),
                json!({"apiGroups": ["events.k8s.io"], "resources": ["pods"], "verbs": ["list", "patch"]}),
            ]
        );
    }
}
