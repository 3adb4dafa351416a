//! The router as clients of a cluster look for it: a service, and a pod behind it whose port 8080 is the router's.
//!
//! The router is no pod here, so the pod is a mirror: its port entry names the address that the router really listens on, and the
//! node forwards to that. Published clients look for the service in the system's namespace or in the one of their sandboxes, so it
//! is in every namespace in which a sandbox or a claim has been; it goes with its namespace.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use anyhow::Context;
use api::labels::ROUTER_APP;
use api::{Sandbox, SandboxClaim};
use futures::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::{NamespaceResourceScope, PartialObjectMeta};
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use node::kubelet::MIRROR_ANNOTATION;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// Both names are the published ones: manifests and clients hold them.
const SERVICE: &str = "sandbox-router-svc";
const POD: &str = "sandbox-router";
pub const PORT: u16 = 8080;

/// How long a namespace in which the service cannot be written is left alone.
const RETRY: Duration = Duration::from_secs(1);

/// Writes the service and its pod wherever they are looked for.
#[derive(Clone)]
pub struct RouterService {
    pub client: Client,
    pub node_name: String,
    /// Under which address pods see this machine.
    pub node_address: String,
    /// Where the router listens.
    pub router: SocketAddr,
}

/// What happened that concerns a namespace.
enum Change {
    /// It has a sandbox or a claim.
    InUse(String),
    /// Its mirror pod is gone.
    Lost(String),
}

impl RouterService {
    /// Brings the service and its pod in one namespace up to date.
    pub async fn publish(&self, namespace: &str) -> anyhow::Result<()> {
        self.publish_service(namespace)
            .await
            .with_context(|| format!("cannot write service {SERVICE} in {namespace}"))?;
        self.publish_pod(namespace)
            .await
            .with_context(|| format!("cannot write pod {POD} in {namespace}"))
    }

    async fn publish_service(&self, namespace: &str) -> kube::Result<()> {
        let services: Api<Service> = Api::namespaced(self.client.clone(), namespace);
        if services.get_opt(SERVICE).await?.is_some() {
            return Ok(());
        }
        let created = services.create(&PostParams::default(), &service()).await;
        unless(409, created)
    }

    /// A pod's ports cannot be changed, so one that names another address is replaced.
    async fn publish_pod(&self, namespace: &str) -> kube::Result<()> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let wanted = self.pod();
        if let Some(found) = pods.get_opt(POD).await? {
            let current = found.metadata.deletion_timestamp.is_none()
                && found.annotations().get(MIRROR_ANNOTATION)
                    == wanted.annotations().get(MIRROR_ANNOTATION);
            if !current {
                let parameters = DeleteParams {
                    preconditions: Some(Preconditions {
                        uid: found.uid(),
                        resource_version: None,
                    }),
                    ..DeleteParams::default().grace_period(0)
                };
                unless(404, pods.delete(POD, &parameters).await)?;
            }
        }
        unless(409, pods.create(&PostParams::default(), &wanted).await)?;
        let status = Patch::Merge(json!({"status": self.status()}));
        pods.patch_status(POD, &PatchParams::default(), &status)
            .await?;
        Ok(())
    }

    fn pod(&self) -> Pod {
        let (label, value) = ROUTER_APP;
        let port = json!({
            "name": "http",
            "containerPort": PORT,
            "hostIP": self.router.ip(),
            "hostPort": self.router.port(),
        });
        let pod = json!({
            "metadata": {
                "name": POD,
                "labels": {label: value},
                // Says what is mirrored, so that another is told from it.
                "annotations": {MIRROR_ANNOTATION: format!("{}@{}", self.router, self.node_name)},
            },
            "spec": {
                "nodeName": self.node_name,
                "containers": [{"name": POD, "image": "agent-sandbox", "ports": [port]}],
                "restartPolicy": "Always",
                // Nobody has to be waited for: the router does not end with the pod.
                "terminationGracePeriodSeconds": 0,
                "enableServiceLinks": false,
                "automountServiceAccountToken": false,
                "tolerations": [{"operator": "Exists"}],
            },
        });
        serde_json::from_value(pod).expect("the mirror is a pod")
    }

    fn status(&self) -> Value {
        let now = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let conditions = ["Initialized", "Ready", "ContainersReady", "PodScheduled"]
            .map(|kind| json!({"type": kind, "status": "True", "lastTransitionTime": now}));
        let address = if self.router.ip().is_loopback() || self.router.ip().is_unspecified() {
            self.node_address.clone()
        } else {
            self.router.ip().to_string()
        };
        json!({
            "phase": "Running",
            "conditions": conditions,
            "hostIP": self.node_address,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "startTime": now,
            "containerStatuses": [{
                "name": POD,
                "image": "agent-sandbox",
                "imageID": "",
                "ready": true,
                "started": true,
                "restartCount": 0,
                "state": {"running": {"startedAt": now}},
            }],
        })
    }

    /// Publishes the service in every namespace that comes into use, and again wherever its pod is lost, until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) {
        let in_use = stream::select(
            namespaces::<Sandbox>(&self.client),
            namespaces::<SandboxClaim>(&self.client),
        );
        let mut changes = pin!(stream::select(in_use, lost_pods(&self.client)));
        let mut published = HashSet::new();
        while let Some(Some(change)) = shutdown.run_until_cancelled(changes.next()).await {
            let namespace = match change {
                Change::InUse(namespace) if published.contains(&namespace) => continue,
                Change::InUse(namespace) => namespace,
                Change::Lost(namespace) => {
                    published.remove(&namespace);
                    namespace
                }
            };
            match self.publish(&namespace).await {
                Ok(()) => drop(published.insert(namespace)),
                // It is going or gone, and takes the service along.
                Err(error) if is_leaving(&error) => {}
                Err(error) => {
                    warn!(
                        namespace,
                        error = format!("{error:#}"),
                        "the router cannot be found there"
                    );
                    shutdown
                        .run_until_cancelled(tokio::time::sleep(RETRY))
                        .await;
                }
            }
        }
    }
}

fn service() -> Service {
    let (label, value) = ROUTER_APP;
    let service = json!({
        "metadata": {"name": SERVICE, "labels": {label: value}},
        "spec": {
            "type": "ClusterIP",
            "selector": {label: value},
            "ports": [{"name": "http", "port": PORT, "targetPort": PORT, "protocol": "TCP"}],
        },
    });
    serde_json::from_value(service).expect("the router's service is a service")
}

/// Takes one answer of the server for success.
fn unless<T>(code: u16, result: kube::Result<T>) -> kube::Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == code => Ok(()),
        result => result.map(drop),
    }
}

fn is_leaving(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if matches!(status.code, 403 | 404))
}

/// The namespaces of all objects of a kind, again with each change of one.
fn namespaces<Kind>(client: &Client) -> impl futures::Stream<Item = Change> + use<Kind>
where
    Kind: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + std::fmt::Debug
        + Send
        + 'static,
{
    let objects = Api::<PartialObjectMeta<Kind>>::all(client.clone());
    watcher(objects, watcher::Config::default()).filter_map(|event| async {
        match event {
            Ok(watcher::Event::Apply(object) | watcher::Event::InitApply(object)) => {
                object.namespace().map(Change::InUse)
            }
            Ok(_) => None,
            Err(error) => {
                warn!(%error, "a watch for namespaces with sandboxes failed and is retried");
                tokio::time::sleep(RETRY).await;
                None
            }
        }
    })
}

/// The namespaces in which a mirror pod was deleted.
fn lost_pods(client: &Client) -> impl futures::Stream<Item = Change> + use<> {
    let (label, value) = ROUTER_APP;
    let ours = watcher::Config::default().labels(&format!("{label}={value}"));
    let pods = Api::<PartialObjectMeta<Pod>>::all(client.clone());
    watcher(pods, ours).filter_map(|event| async {
        match event {
            Ok(watcher::Event::Delete(pod)) if pod.name_any() == POD => {
                pod.namespace().map(Change::Lost)
            }
            // Whoever deletes it with a grace period of their own waits for a node that does not know it.
            Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod))
                if pod.name_any() == POD && pod.metadata.deletion_timestamp.is_some() =>
            {
                pod.namespace().map(Change::Lost)
            }
            Ok(_) => None,
            Err(error) => {
                warn!(%error, "the watch of the router's pods failed and is retried");
                tokio::time::sleep(RETRY).await;
                None
            }
        }
    })
}
