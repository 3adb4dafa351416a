//! The endpoint slice controller: writes the addresses of the pods of each service with a selector.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, Service, ServicePort};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::api::PostParams;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource, ResourceExt};
use tokio_util::sync::CancellationToken;

use crate::object_uid::object_uid;
use api::errors::chain;

const MANAGED_BY: &str = "endpointslice-controller.k8s.io";
/// The delay that batches changes which arrive together.
const GATHER: Duration = Duration::from_millis(5);

type Key = (String, String);

#[derive(Default)]
struct Index {
    services: HashMap<Key, Service>,
    pods: HashMap<Key, Pod>,
    dirty: BTreeSet<Key>,
    listed_services: Listing,
    listed_pods: Listing,
}

/// The progress of the list with which a watch starts.
#[derive(Default)]
struct Listing {
    seen: HashSet<Key>,
    /// Whether the first list is complete.
    complete: bool,
}

impl Listing {
    /// Completes a list. Returns the known objects that it did not contain.
    fn end<V>(&mut self, known: &HashMap<Key, V>) -> Vec<Key> {
        self.complete = true;
        let seen = std::mem::take(&mut self.seen);
        known
            .keys()
            .filter(|key| !seen.contains(*key))
            .cloned()
            .collect()
    }
}

fn key(object: &impl ResourceExt) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

fn selects(service: &Service, pod: &Pod) -> bool {
    let Some(selector) = service
        .spec
        .as_ref()
        .and_then(|spec| spec.selector.as_ref())
        .filter(|map| !map.is_empty())
    else {
        return false;
    };
    service.namespace() == pod.namespace()
        && selector
            .iter()
            .all(|(key, value)| pod.labels().get(key) == Some(value))
}

fn has_selector(service: &Service) -> bool {
    service
        .spec
        .as_ref()
        .and_then(|spec| spec.selector.as_ref())
        .is_some_and(|selector| !selector.is_empty())
}

impl Index {
    /// The services whose slices must be written. Empty until all first lists are complete: a slice without the pods that are not yet
    /// listed would make clients fail.
    fn take_due(&mut self) -> BTreeSet<Key> {
        if self.is_due() {
            std::mem::take(&mut self.dirty)
        } else {
            BTreeSet::new()
        }
    }

    fn is_due(&self) -> bool {
        self.listed_services.complete && self.listed_pods.complete && !self.dirty.is_empty()
    }

    fn take_service(&mut self, event: Event<Service>) {
        match event {
            Event::Init => self.listed_services.seen.clear(),
            Event::InitApply(service) => {
                self.listed_services.seen.insert(key(&service));
                self.service_changed(service);
            }
            Event::InitDone => {
                for gone in self.listed_services.end(&self.services) {
                    self.services.remove(&gone);
                }
            }
            Event::Apply(service) => self.service_changed(service),
            // Garbage collection deletes its slice, through the owner reference.
            Event::Delete(service) => drop(self.services.remove(&key(&service))),
        }
    }

    fn take_pod(&mut self, event: Event<Pod>) {
        match event {
            Event::Init => self.listed_pods.seen.clear(),
            Event::InitApply(pod) => {
                self.listed_pods.seen.insert(key(&pod));
                self.pod_changed(pod);
            }
            Event::InitDone => {
                for gone in self.listed_pods.end(&self.pods) {
                    self.pod_gone(&gone);
                }
            }
            Event::Apply(pod) => self.pod_changed(pod),
            Event::Delete(pod) => self.pod_gone(&key(&pod)),
        }
    }

    fn touch_selecting(&mut self, pod: &Pod) {
        let selecting = self
            .services
            .iter()
            .filter(|(_, service)| selects(service, pod));
        self.dirty.extend(selecting.map(|(key, _)| key.clone()));
    }

    fn pod_changed(&mut self, pod: Pod) {
        self.touch_selecting(&pod);
        if let Some(before) = self.pods.insert(key(&pod), pod) {
            self.touch_selecting(&before);
        }
    }

    fn pod_gone(&mut self, key: &Key) {
        if let Some(before) = self.pods.remove(key) {
            self.touch_selecting(&before);
        }
    }

    fn service_changed(&mut self, service: Service) {
        let service_key = key(&service);
        self.dirty.insert(service_key.clone());
        self.services.insert(service_key, service);
    }
}

/// The slice of a service with this UID over pods. Pure.
fn slice(service: &Service, uid: String, pods: &[&Pod]) -> EndpointSlice {
    let name = service.name_any();
    let tolerate = service
        .spec
        .as_ref()
        .and_then(|spec| spec.publish_not_ready_addresses)
        == Some(true);
    let mut endpoints: Vec<Endpoint> = pods
        .iter()
        .filter_map(|pod| endpoint(service, pod, tolerate))
        .collect();
    endpoints.sort_by(|left, right| left.addresses.cmp(&right.addresses));
    let ports = service
        .spec
        .iter()
        .flat_map(|spec| spec.ports.iter().flatten());
    let labels = [
        ("kubernetes.io/service-name", name.as_str()),
        ("endpointslice.kubernetes.io/managed-by", MANAGED_BY),
    ];
    EndpointSlice {
        metadata: ObjectMeta {
            name: Some(format!("{name}-ipv4")),
            namespace: service.namespace(),
            labels: Some(
                labels
                    .into_iter()
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .collect::<BTreeMap<_, _>>(),
            ),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Service".to_owned(),
                name: name.clone(),
                uid,
                controller: Some(true),
                block_owner_deletion: Some(true),
            }]),
            ..ObjectMeta::default()
        },
        address_type: "IPv4".to_owned(),
        endpoints,
        ports: Some(ports.filter_map(|port| endpoint_port(port, pods)).collect()),
    }
}

fn endpoint_port(port: &ServicePort, pods: &[&Pod]) -> Option<EndpointPort> {
    let number = match &port.target_port {
        None => port.port,
        Some(IntOrString::Int(number)) => *number,
        Some(IntOrString::String(name)) => pods.iter().find_map(|pod| {
            let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
            let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
            ports
                .find(|port| port.name.as_ref() == Some(name))
                .map(|port| port.container_port)
        })?,
    };
    Some(EndpointPort {
        name: Some(port.name.clone().unwrap_or_default()),
        port: Some(number),
        protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".to_owned())),
        app_protocol: port.app_protocol.clone(),
    })
}

fn endpoint(service: &Service, pod: &Pod, tolerate_unready: bool) -> Option<Endpoint> {
    let status = pod.status.as_ref()?;
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return None;
    }
    let address = status
        .pod_ip
        .clone()
        .filter(|address| !address.is_empty())?;
    let conditions = status.conditions.iter().flatten();
    let serving = conditions
        .into_iter()
        .any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let terminating = pod.metadata.deletion_timestamp.is_some();
    let mut target: ObjectReference = pod.object_ref(&());
    target.resource_version = None;
    target.api_version = None;
    let spec = pod.spec.as_ref();
    let in_domain = spec
        .and_then(|spec| spec.subdomain.as_ref())
        .is_some_and(|domain| *domain == service.name_any());
    Some(Endpoint {
        addresses: vec![address],
        conditions: Some(EndpointConditions {
            ready: Some(tolerate_unready || (serving && !terminating)),
            serving: Some(serving),
            terminating: Some(terminating),
        }),
        hostname: spec
            .and_then(|spec| spec.hostname.clone())
            .filter(|_| in_domain),
        node_name: spec.and_then(|spec| spec.node_name.clone()),
        target_ref: Some(target),
        ..Endpoint::default()
    })
}

/// Writes endpoint slices until `shutdown`.
pub async fn run(client: Client, shutdown: CancellationToken) {
    let all = watcher::Config::default();
    let mut services =
        object_watch::watch_readable::<Service>(Api::all(client.clone()), all.clone());
    let mut pods = object_watch::watch_readable::<Pod>(Api::all(client.clone()), all);
    let mut index = Index::default();
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            // What fails is logged and tried again by the watch.
            Some(event) = services.next() => if let Ok(event) = event { index.take_service(event) },
            Some(event) = pods.next() => if let Ok(event) = event { index.take_pod(event) },
            () = tokio::time::sleep(GATHER), if index.is_due() => {
                for key in index.take_due() {
                    if let Err(error) = write(&client, &index, &key).await {
                        tracing::warn!(service = key.1, error = %chain(&error), "cannot write a service's endpoints");
                        index.dirty.insert(key);
                        tokio::time::sleep(Duration::from_millis(200)).await;
                    }
                }
            }
        }
    }
}

async fn write(client: &Client, index: &Index, key: &Key) -> Result<(), kube::Error> {
    let Some(service) = index
        .services
        .get(key)
        .filter(|service| has_selector(service))
    else {
        return Ok(());
    };
    let pods: Vec<&Pod> = index
        .pods
        .values()
        .filter(|pod| selects(service, pod))
        .collect();
    let Some(uid) = object_uid(service) else {
        return Ok(());
    };
    let wanted = slice(service, uid, &pods);
    let api = Api::<EndpointSlice>::namespaced(client.clone(), &key.0);
    match api.get_opt(&wanted.name_any()).await? {
        None => match api.create(&PostParams::default(), &wanted).await {
            // The service is being deleted, or another writer was first: the next event resolves it.
            Err(kube::Error::Api(status))
                if status.code == 409 || status.code == 404 || status.code == 403 =>
            {
                Ok(())
            }
            other => other.map(drop),
        },
        Some(found) if found.endpoints == wanted.endpoints && found.ports == wanted.ports => Ok(()),
        Some(found) => {
            let mut updated = wanted;
            updated.metadata.resource_version = found.metadata.resource_version;
            match api
                .replace(&updated.name_any(), &PostParams::default(), &updated)
                .await
            {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                other => other.map(drop),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn slices_wait_for_the_first_lists_and_drop_pods_that_a_relist_lacks() {
        let service: Service = serde_json::from_value(
            json!({"metadata": {"name": "s", "namespace": "n"}, "spec": {"selector": {"a": "b"}}}),
        )
        .unwrap();
        let pod: Pod = serde_json::from_value(
            json!({"metadata": {"name": "p", "namespace": "n", "labels": {"a": "b"}}}),
        )
        .unwrap();
        let due = BTreeSet::from([key(&service)]);
        let mut index = Index::default();
        for event in [Event::Init, Event::InitApply(service), Event::InitDone] {
            index.take_service(event);
        }
        assert!(!index.is_due(), "its pods are not known yet");
        for event in [Event::Init, Event::InitApply(pod), Event::InitDone] {
            index.take_pod(event);
        }
        assert_eq!(index.take_due(), due);
        // The watch was interrupted, and the pod was deleted meanwhile.
        for event in [Event::Init, Event::InitDone] {
            index.take_pod(event);
        }
        assert_eq!(index.take_due(), due);
        assert!(index.pods.is_empty());
    }

    #[test]
    fn a_slice_has_the_addresses_of_live_pods_and_says_which_are_ready() {
        let service: Service = serde_json::from_value(
            json!({"metadata": {"name": "s", "namespace": "n", "uid": "u"},
            "spec": {"selector": {"a": "b"}, "ports": [{"port": 80, "targetPort": "web"}]}}),
        )
        .unwrap();
        let pod = |name: &str, address: &str, phase: &str, ready: &str| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": name, "namespace": "n", "labels": {"a": "b"}},
                "spec": {"containers": [{"name": "c", "ports": [{"name": "web", "containerPort": 8888}]}]},
                "status": {"podIP": address, "phase": phase, "conditions": [{"type": "Ready", "status": ready}]}}))
            .unwrap()
        };
        let pods = [
            pod("x", "10.0.0.2", "Running", "True"),
            pod("y", "10.0.0.1", "Running", "False"),
            pod("z", "10.0.0.3", "Failed", "False"),
        ];
        assert!(pods.iter().all(|pod| selects(&service, pod)));
        let made = slice(&service, "u".to_owned(), &pods.iter().collect::<Vec<_>>());
        let seen: Vec<(String, bool)> = made
            .endpoints
            .iter()
            .map(|endpoint| {
                (
                    endpoint.addresses[0].clone(),
                    endpoint.conditions.as_ref().unwrap().ready.unwrap(),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("10.0.0.1".to_owned(), false),
                ("10.0.0.2".to_owned(), true)
            ]
        );
        assert_eq!(made.ports.unwrap()[0].port, Some(8888));
    }
}
