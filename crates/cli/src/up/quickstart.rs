//! The objects that make a fresh system useful at once: a Python template with a small warm pool, and a hardened template to build on.

use api::template::NetworkPolicyManagement;
use api::{SandboxTemplate, SandboxWarmPool};
use kube::api::PostParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::runtime_flags::RuntimeFlags;

pub const NAMESPACE: &str = "default";
pub const TEMPLATE: &str = "python-runtime-template";
pub const WARM_POOL: &str = "python-warmpool";
/// The template to build on: it fits the restricted Pod Security profile.
pub const SECURE_TEMPLATE: &str = "secure-runtime-template";

/// The containers of the two templates.
const CONTAINER: &str = "python-runtime";
const SECURE_CONTAINER: &str = "runtime";

/// Where the sandboxes serve the newer runtime API beside that of port 8888, for clients of either generation.
const NEWER_API: [(&str, &str, u16); 2] = [
    ("SANDBOX_REST_LISTEN", "0.0.0.0:8080", 8080),
    ("SANDBOX_GRPC_LISTEN", "0.0.0.0:9090", 9090),
];

/// The user `sandbox` of the image `host`.
const SANDBOX_USER: u32 = 1000;

const WARM_SANDBOXES: u32 = 2;

/// How much of the quickstart to install.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quickstart {
    Nothing,
    /// The template alone: each sandbox is started on demand, also where network policies cannot be enforced. For systems whose
    /// only user is the one who starts them.
    Template,
    TemplateAndPool,
}

impl Quickstart {
    pub fn template(self) -> Option<String> {
        (self != Self::Nothing).then(|| TEMPLATE.to_owned())
    }

    pub fn warm_pool(self) -> Option<String> {
        (self == Self::TemplateAndPool).then(|| WARM_POOL.to_owned())
    }
}

/// Whether network policies hold on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    Works,
    Missing,
}

/// Creates the missing objects, and applies the flags for the runtime. Other changes by a user stay.
pub async fn install(
    client: &Client,
    quickstart: Quickstart,
    enforcement: Enforcement,
    runtime: &RuntimeFlags,
) -> anyhow::Result<()> {
    if quickstart != Quickstart::Nothing {
        create_if_missing(client, &template(network_policy(quickstart, enforcement))).await?;
    }
    if quickstart == Quickstart::TemplateAndPool {
        create_if_missing(client, &secure_template()).await?;
        for (template, container) in [(TEMPLATE, CONTAINER), (SECURE_TEMPLATE, SECURE_CONTAINER)] {
            runtime
                .apply(client, NAMESPACE, template, container)
                .await?;
        }
        create_if_missing(client, &warm_pool()).await?;
    }
    Ok(())
}

/// A template that outlives this process keeps its policy: sandboxes wait until it can be enforced, rather than run without.
fn network_policy(quickstart: Quickstart, enforcement: Enforcement) -> NetworkPolicyManagement {
    match (quickstart, enforcement) {
        (Quickstart::Template, Enforcement::Missing) => NetworkPolicyManagement::Unmanaged,
        _ => NetworkPolicyManagement::Managed,
    }
}

fn template(network_policy: NetworkPolicyManagement) -> SandboxTemplate {
    let template = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": TEMPLATE, "namespace": NAMESPACE},
        "spec": {
            // The user of the quickstart owns its sandboxes.
            "envVarsInjectionPolicy": "Allowed",
            "networkPolicyManagement": network_policy,
            "podTemplate": {
                "spec": {
                    "containers": [{
                        "name": CONTAINER,
                        "image": "host",
                        "env": runtime_environment(),
                        "ports": runtime_ports(),
                        "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1},
                    }],
                },
            },
        },
    });
    serde_json::from_value(template).expect("the quickstart's template is a SandboxTemplate")
}

/// Runs without root, capabilities or a writable root file system. Programs write to volumes with a size limit.
fn secure_template() -> SandboxTemplate {
    let template = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxTemplate",
        "metadata": {"name": SECURE_TEMPLATE, "namespace": NAMESPACE},
        "spec": {
            "podTemplate": {
                "spec": {
                    "automountServiceAccountToken": false,
                    "securityContext": {
                        "runAsNonRoot": true,
                        "runAsUser": SANDBOX_USER,
                        "runAsGroup": SANDBOX_USER,
                        "fsGroup": SANDBOX_USER,
                        "seccompProfile": {"type": "RuntimeDefault"},
                    },
                    "containers": [{
                        "name": SECURE_CONTAINER,
                        "image": "host",
                        "env": runtime_environment(),
                        "ports": runtime_ports(),
                        "readinessProbe": {"httpGet": {"path": "/", "port": 8888}, "periodSeconds": 1},
                        "resources": {"limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "2Gi"}},
                        "securityContext": {
                            "allowPrivilegeEscalation": false,
                            "capabilities": {"drop": ["ALL"]},
                            "readOnlyRootFilesystem": true,
                        },
                        "volumeMounts": [
                            {"name": "work", "mountPath": "/app"},
                            {"name": "temporary", "mountPath": "/tmp"},
                        ],
                    }],
                    "volumes": [
                        {"name": "work", "emptyDir": {"sizeLimit": "1Gi"}},
                        {"name": "temporary", "emptyDir": {"sizeLimit": "1Gi"}},
                    ],
                },
            },
        },
    });
    serde_json::from_value(template).expect("the secure template is a SandboxTemplate")
}

/// The environment variables that enable the newer API.
fn runtime_environment() -> Value {
    let variables = NEWER_API.map(|(name, address, _)| json!({"name": name, "value": address}));
    json!(variables)
}

fn runtime_ports() -> Value {
    let ports = std::iter::once(8888).chain(NEWER_API.map(|(_, _, port)| port));
    ports
        .map(|port| json!({"containerPort": port, "protocol": "TCP"}))
        .collect()
}

fn warm_pool() -> SandboxWarmPool {
    let pool = json!({
        "apiVersion": "extensions.agents.x-k8s.io/v1beta1",
        "kind": "SandboxWarmPool",
        "metadata": {"name": WARM_POOL, "namespace": NAMESPACE},
        "spec": {"replicas": WARM_SANDBOXES, "sandboxTemplateRef": {"name": TEMPLATE}},
    });
    serde_json::from_value(pool).expect("the quickstart's pool is a SandboxWarmPool")
}

async fn create_if_missing<Kind>(client: &Client, object: &Kind) -> anyhow::Result<()>
where
    Kind: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Serialize
        + DeserializeOwned
        + std::fmt::Debug,
{
    let objects: Api<Kind> = Api::namespaced(client.clone(), NAMESPACE);
    if objects.get_opt(&object.name_any()).await?.is_none() {
        objects.create(&PostParams::default(), object).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sandboxes_of_the_quickstart_serve_both_generations_of_the_runtime_api() {
        for template in [
            template(NetworkPolicyManagement::Managed),
            secure_template(),
        ] {
            let template = serde_json::to_value(&template).unwrap();
            let container = &template["spec"]["podTemplate"]["spec"]["containers"][0];
            let variables = container["env"].as_array().unwrap();
            let variable = |wanted: &str| {
                let found = variables.iter().find(|variable| variable["name"] == wanted);
                found.and_then(|variable| variable["value"].as_str().map(str::to_owned))
            };
            let runtime = sandboxd::Config::from_environment(variable).unwrap();
            let mut served: Vec<u16> = runtime
                .listen
                .iter()
                .chain(&runtime.rest_listen)
                .chain(&runtime.grpc_listen)
                .map(std::net::SocketAddr::port)
                .collect();
            served.sort_unstable();
            assert_eq!(served, [8080, 8888, 9090]);
            let ports = container["ports"].as_array().unwrap().iter();
            let mut declared: Vec<_> = ports.map(|port| port["containerPort"].clone()).collect();
            declared.sort_by_key(Value::as_u64);
            assert_eq!(declared, [8080, 8888, 9090]);
        }
    }
}
