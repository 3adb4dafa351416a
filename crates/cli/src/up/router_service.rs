//! The router as clients of a cluster look for it: a service, and a pod behind it whose port 8080 is the router's.
//!
//! The router is no pod here, so the pod is a mirror: its port entry names the address that the router really listens on, and the
//! node forwards to that. Published clients look for the service in the system's namespace or in the one of their sandboxes, so it
//! is in every namespace in which a sandbox or a claim has been; it goes with its namespace.

use std::collections::HashSet;
use std::future::ready;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use anyhow::Context;
use api::decoding::Decoded;
use api::labels::ROUTER_APP;
use api::{Sandbox, SandboxClaim};
use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher;
use kube::{Api, Client, Resource, ResourceExt};
use serde_json::{Value, json};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::sandboxes::Known;

/// Both names are the published ones: manifests and clients hold them.
const SERVICE: &str = "sandbox-router-svc";
const POD: &str = "sandbox-router";
pub const PORT: u16 = 8080;

/// The delay before publishing is retried in a namespace.
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

/// A change in a namespace.
enum Change {
    /// It has a sandbox or a claim.
    InUse(String),
    /// Its service or its mirror pod is gone.
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
                && found.annotations().get(api::labels::MIRROR)
                    == wanted.annotations().get(api::labels::MIRROR);
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
                // Names the router, to recognize mirror pods of another one.
                "annotations": {api::labels::MIRROR: format!("{}@{}", self.router, self.node_name)},
            },
            "spec": {
                "nodeName": self.node_name,
                "containers": [{"name": POD, "image": "agent-sandbox", "ports": [port]}],
                "restartPolicy": "Always",
                // No grace period: the router keeps running when its mirror pod is deleted.
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

    /// Publishes the service in every namespace with a sandbox or a claim, and again where it or its pod is deleted, until `shutdown`.
    /// Failures are retried.
    pub async fn run(self, shutdown: CancellationToken) {
        let in_use = stream::select(
            namespaces::<Sandbox>(&self.client),
            namespaces::<SandboxClaim>(&self.client),
        );
        let lost = stream::select(
            lost::<Pod>(&self.client, POD),
            lost::<Service>(&self.client, SERVICE),
        );
        let mut changes = pin!(stream::select(in_use, lost));
        let mut retries = tokio::time::interval(RETRY);
        retries.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut namespaces = Namespaces::default();
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                change = changes.next() => match change {
                    Some(Change::InUse(namespace)) if namespaces.published.contains(&namespace) => {}
                    Some(Change::InUse(namespace) | Change::Lost(namespace)) => {
                        self.publish_or_remember(namespace, &mut namespaces).await;
                    }
                    None => return,
                },
                _ = retries.tick(), if !namespaces.failed.is_empty() => {
                    for namespace in std::mem::take(&mut namespaces.failed) {
                        self.publish_or_remember(namespace, &mut namespaces).await;
                    }
                }
            }
        }
    }

    async fn publish_or_remember(&self, namespace: String, namespaces: &mut Namespaces) {
        namespaces.published.remove(&namespace);
        namespaces.failed.remove(&namespace);
        match self.publish(&namespace).await {
            Ok(()) => drop(namespaces.published.insert(namespace)),
            // The namespace is being deleted, and the service with it.
            Err(error) if is_leaving(&error) => {}
            Err(error) => {
                warn!(
                    namespace,
                    error = format!("{error:#}"),
                    "the router cannot be found there, for now"
                );
                namespaces.failed.insert(namespace);
            }
        }
    }
}

/// The namespaces that have the service, and those in which publishing failed.
#[derive(Default)]
struct Namespaces {
    published: HashSet<String>,
    failed: HashSet<String>,
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
fn namespaces<Kind: Known>(client: &Client) -> impl Stream<Item = Change> + use<Kind> {
    let all = watcher::Config::default();
    changes::<Kind, _>(client, all, |event| match event {
        watcher::Event::Apply(object) | watcher::Event::InitApply(object) => {
            object.namespace().map(Change::InUse)
        }
        _ => None,
    })
}

/// The namespaces in which our object of this name, recognized by its label, was deleted.
fn lost<Kind: Known>(
    client: &Client,
    name: &'static str,
) -> impl Stream<Item = Change> + use<Kind> {
    let (label, value) = ROUTER_APP;
    let ours = watcher::Config::default().labels(&format!("{label}={value}"));
    changes::<Kind, _>(client, ours, move |event| match event {
        watcher::Event::Delete(object) if object.name_any() == name => {
            object.namespace().map(Change::Lost)
        }
        // Deleted with a grace period: no node runs the mirror pod, so none would ever finish the deletion.
        watcher::Event::Apply(object) | watcher::Event::InitApply(object)
            if object.name_any() == name && object.meta().deletion_timestamp.is_some() =>
        {
            object.namespace().map(Change::Lost)
        }
        _ => None,
    })
}

/// What `concerns` reads out of a watch.
fn changes<Kind, Concerns>(
    client: &Client,
    which: watcher::Config,
    concerns: Concerns,
) -> impl Stream<Item = Change> + use<Kind, Concerns>
where
    Kind: Known,
    Concerns: Fn(watcher::Event<Decoded<PartialObjectMeta<Kind>>>) -> Option<Change>,
{
    let objects = Api::<Decoded<PartialObjectMeta<Kind>>>::all(client.clone());
    let events = object_watch::watch(objects, which);
    events.filter_map(move |event| ready(event.ok().and_then(&concerns)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use apiserver::{Admission, AdmissionRequest, Operation, Status};
    use k8s_openapi::api::core::v1::Namespace;
    use testkit::eventually;

    use super::*;

    /// Refuses the first services of a namespace, as a server in trouble would.
    struct Trouble(AtomicU32);

    impl Admission for Trouble {
        fn admit(&self, request: &mut AdmissionRequest) -> Result<(), Status> {
            let concerns = request.operation == Operation::Create
                && request.gvr.resource == "services"
                && request.namespace == "team";
            let left = |left: u32| left.checked_sub(1);
            let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
            if concerns && self.0.fetch_update(set, fetch, left).is_ok() {
                return Err(Status::internal("in trouble"));
            }
            Ok(())
        }
    }

    /// A server with a sandbox in the namespace `team`, where the service is being published.
    async fn publishing(refusals: u32) -> (apiserver::Server, CancellationToken) {
        let server = apiserver::Server::open(apiserver::Config {
            admission: vec![Arc::new(Trouble(refusals.into()))],
            ..apiserver::Config::in_memory()
        });
        let server = server.await.unwrap();
        let client = server.client();
        crate::up::installation::install(&client).await.unwrap();
        let shutdown = CancellationToken::new();
        let service = RouterService {
            client: client.clone(),
            node_name: "node".to_owned(),
            node_address: "10.0.0.1".to_owned(),
            router: ([127, 0, 0, 1], 8080).into(),
        };
        tokio::spawn(service.run(shutdown.clone()));
        let parameters = PostParams::default();
        let mut namespace = Namespace::default();
        namespace.metadata.name = Some("team".to_owned());
        let namespaces = Api::<Namespace>::all(client.clone());
        namespaces.create(&parameters, &namespace).await.unwrap();
        let sandbox = serde_json::from_value(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "metadata": {"name": "one"},
            "spec": {"podTemplate": {"spec": {"containers": [{"name": "main", "image": "host"}]}}},
        }));
        let sandboxes = Api::<Sandbox>::namespaced(client, "team");
        let created = sandboxes.create(&parameters, &sandbox.unwrap()).await;
        created.unwrap();
        (server, shutdown)
    }

    #[tokio::test]
    async fn a_service_that_could_not_be_written_is_written_later() {
        let (server, shutdown) = publishing(2).await;
        let pods = Api::<Pod>::namespaced(server.client(), "team");
        eventually("the router's pod", async || {
            pods.get_opt(POD).await.unwrap()
        })
        .await;
        shutdown.cancel();
    }

    #[tokio::test]
    async fn what_is_deleted_comes_back() {
        let (server, shutdown) = publishing(0).await;
        let pods = Api::<Pod>::namespaced(server.client(), "team");
        let services = Api::<Service>::namespaced(server.client(), "team");
        let pod = eventually("the pod", async || pods.get_opt(POD).await.unwrap()).await;
        let service = services.get(SERVICE).await.unwrap();
        let parameters = DeleteParams::default();
        services.delete(SERVICE, &parameters).await.unwrap();
        eventually("another service", async || {
            let found = services.get_opt(SERVICE).await.unwrap()?;
            (found.uid() != service.uid()).then_some(())
        })
        .await;
        pods.delete(POD, &parameters).await.unwrap();
        eventually("another pod", async || {
            let found = pods.get_opt(POD).await.unwrap()?;
            (found.uid() != pod.uid()).then_some(())
        })
        .await;
        shutdown.cancel();
    }
}
