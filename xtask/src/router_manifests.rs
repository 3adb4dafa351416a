//! The manifests of the data plane: the router itself, and the ways to put a Gateway in front of it.

use api::SYSTEM_NAMESPACE;
use api::labels::ROUTER_APP;
use serde_json::{Value, json};

use crate::manifests::{Manifest, cluster_role};

/// The name of what belongs to the router.
const APP: &str = ROUTER_APP.1;
const ROLE: &str = "agent-sandbox-router";
/// Where published clients look for the router.
const SERVICE: &str = "sandbox-router-svc";
const PROXY_PORT: u16 = 8080;
const HEALTH_PORT: u16 = 8081;
const METRICS_PORT: u16 = 9090;
/// What load balancers get to notice that a router stops.
const SHUTDOWN_DELAY_SECONDS: u32 = 5;
/// Longer than that and the router's own `--shutdown-timeout`, so that requests in flight are not cut by the kubelet.
const GRACE_PERIOD_SECONDS: u32 = 45;

pub fn all() -> Vec<Manifest> {
    vec![
        Manifest {
            file: "router/router.yaml",
            documents: vec![
                service_account(),
                labelled(cluster_role(ROLE, router::RBAC)),
                cluster_role_binding(),
                service(),
                deployment(),
                disruption_budget(),
            ],
        },
        Manifest {
            file: "router/gateway-gke.yaml",
            documents: vec![
                gateway(
                    "external-http-gateway",
                    "gke-l7-global-external-managed",
                    None,
                ),
                route("external-http-gateway"),
                health_check_policy(),
            ],
        },
        Manifest {
            file: "router/gateway-kind.yaml",
            documents: vec![
                gateway("kind-gateway", "cloud-provider-kind", Some("All")),
                route("kind-gateway"),
            ],
        },
    ]
}

/// By which network policies admit the router.
fn labels() -> Value {
    let (key, value) = ROUTER_APP;
    json!({key: value})
}

fn labelled(mut document: Value) -> Value {
    document["metadata"]["labels"] = labels();
    document
}

fn metadata(name: &str) -> Value {
    json!({"name": name, "namespace": SYSTEM_NAMESPACE, "labels": labels()})
}

fn service_account() -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(APP)})
}

fn cluster_role_binding() -> Value {
    labelled(json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": ROLE},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ROLE},
        "subjects": [{"kind": "ServiceAccount", "name": APP, "namespace": SYSTEM_NAMESPACE}],
    }))
}

fn service() -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(SERVICE),
        "spec": {
            "type": "ClusterIP",
            "selector": labels(),
            "ports": [{"name": "http", "protocol": "TCP", "port": PROXY_PORT, "targetPort": PROXY_PORT}],
        },
    })
}

fn deployment() -> Value {
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata("sandbox-router-deployment"),
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": labels()},
            "template": {
                "metadata": {"labels": labels()},
                "spec": {
                    "serviceAccountName": APP,
                    "terminationGracePeriodSeconds": GRACE_PERIOD_SECONDS,
                    "topologySpreadConstraints": [
                        spread("topology.kubernetes.io/zone"),
                        spread("kubernetes.io/hostname"),
                    ],
                    "securityContext": {
                        "runAsNonRoot": true,
                        "runAsUser": 1000,
                        "runAsGroup": 1000,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [container()],
                },
            },
        },
    })
}

/// Spreads as far as there are places, and runs all the same where there is only one.
fn spread(over: &str) -> Value {
    json!({
        "maxSkew": 1,
        "topologyKey": over,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels()},
    })
}

fn container() -> Value {
    json!({
        "name": "router",
        "image": format!("{ROLE}:latest"),
        "args": [
            format!("--http-bind-address=:{PROXY_PORT}"),
            format!("--health-probe-bind-address=:{HEALTH_PORT}"),
            format!("--metrics-bind-address=:{METRICS_PORT}"),
            format!("--shutdown-delay={SHUTDOWN_DELAY_SECONDS}s"),
        ],
        "env": [
            {"name": "PROXY_TIMEOUT_SECONDS", "value": "180"},
            {"name": "CLUSTER_DOMAIN", "value": "cluster.local"},
        ],
        "ports": [
            {"name": "http", "containerPort": PROXY_PORT},
            {"name": "health", "containerPort": HEALTH_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 5},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10},
        "resources": {
            "requests": {"cpu": "250m", "memory": "64Mi"},
            "limits": {"memory": "512Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
        },
    })
}

fn disruption_budget() -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(APP),
        "spec": {"minAvailable": 1, "selector": {"matchLabels": labels()}},
    })
}

/// One address for all sandboxes: every request goes to the router, which finds the sandbox by its headers.
fn gateway(name: &str, class: &str, routes_from: Option<&str>) -> Value {
    let mut listener = json!({"name": "http", "protocol": "HTTP", "port": 80});
    if let Some(namespaces) = routes_from {
        listener["allowedRoutes"] = json!({"namespaces": {"from": namespaces}});
    }
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": metadata(name),
        "spec": {"gatewayClassName": class, "listeners": [listener]},
    })
}

fn route(gateway: &str) -> Value {
    json!({
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": metadata("sandbox-router-route"),
        "spec": {
            "parentRefs": [{"name": gateway}],
            "rules": [{
                "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                "backendRefs": [{"name": SERVICE, "port": PROXY_PORT}],
            }],
        },
    })
}

/// GKE would otherwise ask `/`, which without a sandbox is a 400.
fn health_check_policy() -> Value {
    json!({
        "apiVersion": "networking.gke.io/v1",
        "kind": "HealthCheckPolicy",
        "metadata": metadata("sandbox-router-health"),
        "spec": {
            "default": {"config": {
                "type": "HTTP",
                "httpHealthCheck": {"port": PROXY_PORT, "requestPath": "/healthz"},
            }},
            "targetRef": {"group": "", "kind": "Service", "name": SERVICE},
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::time::Duration;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: router::Args,
    }

    #[test]
    fn the_router_understands_what_its_deployment_tells_it() {
        let container = container();
        let words = container["args"].as_array().into_iter().flatten();
        let words = words.filter_map(Value::as_str);
        let line = Line::try_parse_from(std::iter::once("router").chain(words))
            .unwrap_or_else(|error| panic!("{error}"));
        let variables = container["env"].as_array().cloned().unwrap_or_default();
        let variable = |wanted: &str| {
            let found = variables.iter().find(|variable| variable["name"] == wanted);
            found.and_then(|variable| variable["value"].as_str().map(str::to_owned))
        };
        let config = line
            .args
            .into_config(variable)
            .unwrap_or_else(|error| panic!("{error}"));
        let expected = router::Config {
            shutdown_delay: Duration::from_secs(SHUTDOWN_DELAY_SECONDS.into()),
            ..router::Config::default()
        };
        assert_eq!(config, expected, "what is said are the defaults, in words");
        let stopping = config.shutdown_delay + config.shutdown_timeout;
        assert!(stopping < Duration::from_secs(GRACE_PERIOD_SECONDS.into()));
    }
}
