//! An in-memory API server in the test's process.

use std::fmt::Debug;
use std::path::{Path, PathBuf};

use api::{Sandbox, SandboxSpec};
use k8s_openapi::api::core::v1::{Container, Namespace, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::PostParams;
use kube::core::NamespaceResourceScope;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::wait::eventually;

/// Any namespaced resource type.
pub trait Kind:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
{
}

impl<K> Kind for K where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned
{
}

/// An API server with our CRDs installed from `deploy/crds`. Tests use the namespace `default` or create their own.
#[derive(Debug)]
pub struct Cluster {
    server: apiserver::Server,
}

impl Cluster {
    pub async fn start() -> Self {
        Self::start_with(apiserver::Config::in_memory()).await
    }

    /// Starts a server with the given configuration.
    pub async fn start_with(config: apiserver::Config) -> Self {
        let server = apiserver::Server::open(config)
            .await
            .expect("the API server starts");
        let cluster = Self { server };
        for file in ["deploy/crds", "deploy/kruise/crds.yaml"] {
            cluster.install(&repository().join(file)).await;
        }
        cluster
    }

    pub fn client(&self) -> Client {
        self.server.client()
    }

    /// A typed client for the objects in `default`.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::default_namespaced(self.client())
    }

    pub async fn create_namespace(&self, name: &str) {
        let namespace: Namespace = object(serde_json::json!({ "metadata": { "name": name } }));
        Api::<Namespace>::all(self.client())
            .create(&PostParams::default(), &namespace)
            .await
            .expect("the namespace is created");
    }

    /// Creates a sandbox in `default` with one container and otherwise the given spec.
    pub async fn create_sandbox(&self, name: &str, spec: SandboxSpec) -> Sandbox {
        let sandbox = sandbox(name, spec);
        self.api::<Sandbox>()
            .create(&PostParams::default(), &sandbox)
            .await
            .expect("the sandbox is created")
    }

    /// Waits until an object in `default` satisfies `is_so`, and returns it.
    pub async fn until<K: Kind>(&self, name: &str, what: &str, is_so: impl Fn(&K) -> bool) -> K {
        let api = self.api::<K>();
        let what = format!("{} {name}: {what}", K::kind(&()));
        eventually(&what, async || {
            let object = api.get_opt(name).await.expect("the object can be read");
            object.filter(|object| is_so(object))
        })
        .await
    }

    /// Waits until an object in `default` is deleted.
    pub async fn until_gone<K: Kind>(&self, name: &str) {
        let api = self.api::<K>();
        eventually(&format!("{} {name} to be gone", K::kind(&())), async || {
            let found = api.get_opt(name).await.expect("the object can be read");
            found.is_none().then_some(())
        })
        .await;
    }

    /// Stops the server.
    pub async fn stop(self) {
        self.server.shutdown().await;
    }

    async fn install(&self, path: &Path) {
        let definitions = Api::<CustomResourceDefinition>::all(self.client());
        for file in files(path) {
            let text = std::fs::read_to_string(&file).expect("the CRD file is readable");
            for document in serde_yaml_ng::Deserializer::from_str(&text) {
                let definition = CustomResourceDefinition::deserialize(document)
                    .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
                definitions
                    .create(&PostParams::default(), &definition)
                    .await
                    .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            }
        }
    }
}

/// A sandbox with one container.
pub fn sandbox(name: &str, mut spec: SandboxSpec) -> Sandbox {
    if spec.pod_template.spec.containers.is_empty() {
        spec.pod_template.spec_mut().containers = vec![Container {
            name: "main".to_owned(),
            image: Some("host".to_owned()),
            ..Container::default()
        }];
    }
    Sandbox::new(name, spec)
}

/// Deserializes a typed object from JSON.
pub fn object<K: DeserializeOwned>(value: serde_json::Value) -> K {
    serde_json::from_value(value).expect("the JSON matches the type")
}

/// A pod with one container. It is not created in the cluster.
pub fn pod(name: &str) -> Pod {
    object(serde_json::json!({
        "metadata": { "name": name },
        "spec": { "containers": [{ "name": "main", "image": "host" }] },
    }))
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn files(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let mut files: Vec<PathBuf> = std::fs::read_dir(path)
        .expect("the CRD files exist")
        .map(|entry| entry.expect("the directory is readable").path())
        .collect();
    files.sort();
    files
}
