//! Keeps the registry in sync with the Kubernetes API: one watch on Sandboxes and one on their pods; `claim_watch` watches
//! claims. Only the few fields that routing needs are decoded; pod templates are skipped unparsed.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use api::addresses::is_a_pods;
use api::conditions::{self, ConditionType, Reason};
use api::decoding::Decoded;
use api::rbac::{FOLLOW, Rule};
use api::sandbox::{OperatingMode, Suspension};
use api::{Sandbox, SandboxClaim, SandboxSpec};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::Resource;
use kube::api::{Api, ApiResource, ListParams, ObjectMeta};
use kube::core::{DynamicResourceScope, Object};
use kube::runtime::watcher::{self, Event};
use object_watch::{Events, Failure};
use serde::Deserialize;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::claim_watch;
use crate::claims::ClaimOwner;
use crate::identify::SandboxKey;
use crate::registry::{Condition, Observed, Registry, Suspended};
use crate::resolve::Resolver;

/// How long to wait after a watch failed before testing whether the API responds.
const PROBE_DELAY: Duration = Duration::from_secs(2);

/// The permissions that the watches need.
pub const RBAC: &[Rule] = &[
    Rule {
        groups: &[api::CORE_GROUP],
        resources: &["sandboxes"],
        verbs: FOLLOW,
    },
    Rule {
        groups: &[api::EXTENSIONS_GROUP],
        resources: &["sandboxclaims"],
        verbs: FOLLOW,
    },
    Rule {
        groups: &[""],
        resources: &["pods"],
        verbs: FOLLOW,
    },
];

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct WatchedSpec {
    replicas: Option<i32>,
    operating_mode: Option<OperatingMode>,
}

type WatchedStatus = api::SandboxStatus;
type WatchedSandbox = Object<WatchedSpec, WatchedStatus>;

#[derive(Clone, Debug, Default, Deserialize)]
struct WatchedPodSpec {}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct WatchedPodStatus {
    phase: Option<String>,
    #[serde(rename = "podIPs")]
    pod_ips: Vec<PodAddress>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct PodAddress {
    ip: String,
}

type WatchedPod = Object<WatchedPodSpec, WatchedPodStatus>;

/// Watches until `stop`: all namespaces, or one.
pub async fn run(
    client: kube::Client,
    namespace: Option<String>,
    resolver: Arc<Resolver>,
    stop: CancellationToken,
) {
    let namespace = namespace.as_deref();
    let sandboxes = watched::<Sandbox, _>(&client, namespace);
    let pods = watched::<Pod, _>(&client, namespace);
    let claims = watched::<SandboxClaim, _>(&client, namespace);
    let (all_known, known) = oneshot::channel();
    let following_pods = async {
        // An event for the pod of a sandbox that is not known yet would be lost.
        let _ = known.await;
        watch_pods(pods, &resolver.registry).await;
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = watch_sandboxes(sandboxes, &resolver, all_known) => {}
        () = following_pods => {}
        () = claim_watch::run(claims, &resolver.registry) => {}
    }
}

/// The API of a kind, of which only the fields of `Fields` are decoded.
fn watched<Kind, Fields>(client: &kube::Client, namespace: Option<&str>) -> Api<Fields>
where
    Kind: Resource<DynamicType = ()>,
    Fields: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>,
{
    let kind = ApiResource::erase::<Kind>(&());
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &kind),
        None => Api::all_with(client.clone(), &kind),
    }
}

async fn watch_sandboxes(
    api: Api<Decoded<WatchedSandbox>>,
    resolver: &Resolver,
    all_known: oneshot::Sender<()>,
) {
    let mut all_known = Some(all_known);
    let registry = &resolver.registry;
    let mut listed = HashSet::new();
    let mut events = object_watch::watch(api.clone(), watcher::Config::default());
    while let Some(event) = next_event(&mut events, &api, resolver).await {
        // A list that has only begun does not show yet which sandboxes are missing.
        if matches!(
            event,
            Ok(Event::InitDone | Event::Apply(_) | Event::Delete(_))
        ) {
            in_step(resolver);
        }
        match event {
            Ok(Event::Init) => {
                // After the first list: events of the watch were missed.
                registry.set_in_step(false);
                listed.clear();
            }
            Ok(Event::InitApply(sandbox)) => {
                if let Some(key) = key_of(sandbox.meta()) {
                    listed.insert(key.as_str().to_owned());
                    registry.observe(&key, observe(&sandbox));
                }
            }
            Ok(Event::InitDone) => {
                registry.keep_only(&std::mem::take(&mut listed));
                registry.set_synced();
                if let Some(all_known) = all_known.take() {
                    let _ = all_known.send(());
                }
            }
            Ok(Event::Apply(sandbox)) => {
                if let Some(key) = key_of(sandbox.meta()) {
                    registry.observe(&key, observe(&sandbox));
                }
            }
            Ok(Event::Delete(sandbox)) => {
                if let Some(key) = key_of(sandbox.meta()) {
                    registry.forget(key.as_str());
                }
            }
            Err(failure) => {
                registry.set_in_step(false);
                if failure.is_refusal() && !resolver.is_by_name() {
                    tracing::warn!(
                        "sandboxes cannot be watched; unknown names are resolved by DNS"
                    );
                    resolver.set_by_name(true);
                }
            }
        }
    }
}

/// The next event. A resumed watch sends no event while nothing changes, so after a failure and a pause this
/// tests whether the API responds. The watch follows within its back-off.
async fn next_event(
    events: &mut Events<Decoded<WatchedSandbox>>,
    api: &Api<Decoded<WatchedSandbox>>,
    resolver: &Resolver,
) -> Option<Result<Event<Decoded<WatchedSandbox>>, Failure>> {
    let registry = &resolver.registry;
    while registry.is_synced() && !registry.is_in_step() {
        if let Ok(event) = tokio::time::timeout(PROBE_DELAY, events.next()).await {
            return event;
        }
        let one = ListParams::default().limit(1);
        let question = api.list(&one);
        if matches!(tokio::time::timeout(PROBE_DELAY, question).await, Ok(Ok(_))) {
            in_step(resolver);
        }
    }
    events.next().await
}

/// Records that the watch works: an unknown sandbox does not exist, so DNS is not needed.
fn in_step(resolver: &Resolver) {
    resolver.registry.set_in_step(true);
    resolver.set_by_name(false);
}

async fn watch_pods(api: Api<Decoded<WatchedPod>>, registry: &Registry) {
    let mut pods = KnownPods::default();
    let config = watcher::Config::default().labels(api::labels::SANDBOX_NAME_HASH);
    let mut events = object_watch::watch(api, config);
    while let Some(event) = events.next().await {
        // Without the watch on pods, the sandboxes' own status still has the addresses, a little later.
        if let Ok(event) = event {
            pods.take(event, registry);
        }
    }
}

/// Pods of sandboxes that have not ended, by UID, with their sandbox and addresses.
#[derive(Debug, Default)]
struct KnownPods {
    running: HashMap<String, (SandboxKey, Vec<IpAddr>)>,
    /// UIDs that the list in progress has contained so far.
    listed: HashSet<String>,
}

impl KnownPods {
    /// Processes an event. A pod that cannot be decoded keeps its last known state.
    fn take(&mut self, event: Event<Decoded<WatchedPod>>, registry: &Registry) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(pod) => {
                self.listed.extend(pod.meta().uid.clone());
                self.observe(pod, registry);
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                let gone = self.running.extract_if(|uid, _| !listed.contains(uid));
                for (key, mut addresses) in gone.map(|(_, pod)| pod).collect::<Vec<_>>() {
                    // The sandbox may already have another pod.
                    let others = self.running.values().filter(|(other, _)| *other == key);
                    let used: Vec<IpAddr> = others.flat_map(|(_, used)| used).copied().collect();
                    addresses.retain(|address| !used.contains(address));
                    registry.pod_ended(&key, &addresses);
                }
            }
            Event::Apply(pod) => self.observe(pod, registry),
            Event::Delete(pod) => {
                let metadata = pod.meta();
                if let Some((uid, key)) = metadata.uid.as_ref().zip(sandbox_of(metadata)) {
                    let known = self.running.remove(uid);
                    let known = known.map_or_else(Vec::new, |(_, addresses)| addresses);
                    let status = pod.readable().and_then(|pod| pod.status.as_ref());
                    registry.pod_ended(&key, &status.map_or(known, addresses_of));
                }
            }
        }
    }

    fn observe(&mut self, pod: Decoded<WatchedPod>, registry: &Registry) {
        if let Decoded::Readable(pod) = pod {
            self.changed(pod, registry);
        }
    }

    fn changed(&mut self, pod: WatchedPod, registry: &Registry) {
        let Some((uid, key)) = pod.metadata.uid.clone().zip(sandbox_of(&pod.metadata)) else {
            return;
        };
        let status = pod.status.unwrap_or_default();
        let addresses = addresses_of(&status);
        if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
            self.running.remove(&uid);
            registry.pod_ended(&key, &addresses);
        } else {
            registry.pod_runs(&key, &addresses);
            self.running.insert(uid, (key, addresses));
        }
    }
}

/// A sandbox's state for routing. Pure.
fn observe(sandbox: &Decoded<WatchedSandbox>) -> Observed {
    let metadata = sandbox.meta();
    Observed {
        uid: metadata.uid.clone().unwrap_or_default(),
        condition: match sandbox {
            Decoded::Readable(sandbox) => condition_of(sandbox),
            Decoded::Unreadable(left) => {
                Condition::NotReady(format!("It cannot be read: {}", left.problem))
            }
        },
        claim: claim_of(metadata),
        trace: telemetry::spans::are_exported()
            .then(|| carried_trace(metadata))
            .flatten(),
    }
}

/// The claim that owns a sandbox.
fn claim_of(metadata: &ObjectMeta) -> Option<ClaimOwner> {
    let mut owners = metadata.owner_references.iter().flatten();
    let owner = owners.find(|owner| {
        let group = owner.api_version.split('/').next();
        owner.controller == Some(true)
            && owner.kind == "SandboxClaim"
            && group == Some(api::EXTENSIONS_GROUP)
    })?;
    Some(ClaimOwner {
        name: owner.name.clone(),
        uid: owner.uid.clone(),
    })
}

fn carried_trace(metadata: &ObjectMeta) -> Option<String> {
    let annotations = metadata.annotations.as_ref()?;
    annotations.get(api::labels::TRACE_CONTEXT).cloned()
}

fn condition_of(sandbox: &WatchedSandbox) -> Condition {
    let empty = BTreeMap::new();
    let labels = sandbox.metadata.labels.as_ref().unwrap_or(&empty);
    let in_batch_pool = labels
        .get(api::labels::kruise::SANDBOX_CLAIMED)
        .is_some_and(|claimed| claimed == "false");
    if labels.contains_key(api::labels::WARM_POOL_SANDBOX) || in_batch_pool {
        return Condition::Unclaimed;
    }
    let spec = SandboxSpec {
        replicas: sandbox.spec.replicas,
        operating_mode: sandbox.spec.operating_mode,
        ..SandboxSpec::default()
    };
    if spec.suspension() != Suspension::None {
        let conditions = sandbox.status.iter().flat_map(|status| &status.conditions);
        let is_frozen = conditions.into_iter().any(|condition| {
            condition.type_ == ConditionType::Suspended.as_str()
                && condition.status == "True"
                && condition.reason == Reason::Frozen.as_str()
        });
        return Condition::Suspended(if is_frozen {
            Suspended::Frozen
        } else {
            Suspended::Stopped
        });
    }
    let Some(status) = &sandbox.status else {
        return Condition::NotReady("It has just been created".into());
    };
    if conditions::is_true(&status.conditions, ConditionType::Finished) {
        let finished = conditions::find(&status.conditions, ConditionType::Finished);
        return Condition::Finished(
            finished
                .map(|finished| finished.message.clone())
                .unwrap_or_default(),
        );
    }
    let addresses: Vec<IpAddr> = status
        .pod_ips
        .iter()
        .filter_map(|text| text.parse().ok())
        .filter(|&address| is_a_pods(address))
        .collect();
    if !addresses.is_empty() {
        return Condition::At(addresses);
    }
    let ready = conditions::find(&status.conditions, ConditionType::Ready);
    let message = ready
        .map(|ready| ready.message.clone())
        .filter(|message| !message.is_empty());
    Condition::NotReady(message.unwrap_or_else(|| "Its pod has no address yet".into()))
}

pub(crate) fn key_of(metadata: &ObjectMeta) -> Option<SandboxKey> {
    Some(SandboxKey::new(
        metadata.namespace.as_deref()?,
        metadata.name.as_deref()?,
    ))
}

/// The sandbox that owns a pod.
fn sandbox_of(metadata: &ObjectMeta) -> Option<SandboxKey> {
    let mut owners = metadata.owner_references.iter().flatten();
    let owner = owners
        .find(|owner| owner.kind == "Sandbox" && owner.api_version.starts_with(api::CORE_GROUP))?;
    Some(SandboxKey::new(metadata.namespace.as_deref()?, &owner.name))
}

fn addresses_of(status: &WatchedPodStatus) -> Vec<IpAddr> {
    status
        .pod_ips
        .iter()
        .filter_map(|address| address.ip.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn sandbox(labels: &Value, spec: &Value, status: &Value) -> Condition {
        let object = json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": "abc", "namespace": "default", "uid": "1", "labels": labels},
            "spec": spec, "status": status
        });
        condition_of(&serde_json::from_value(object).unwrap())
    }

    fn running() -> Value {
        json!({"podIPs": ["10.0.0.1", "fd00::1"], "conditions": []})
    }

    #[test]
    fn a_running_sandbox_is_at_its_pods_addresses() {
        let expected = Condition::At(vec![
            "10.0.0.1".parse().unwrap(),
            "fd00::1".parse().unwrap(),
        ]);
        let spec = json!({"podTemplate": {"spec": {"containers": [{"name": "x"}]}}, "replicas": 1});
        assert_eq!(sandbox(&json!({}), &spec, &running()), expected);
    }

    fn pod(uid: &str, phase: &str, address: &str) -> WatchedPod {
        let object = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "abc", "namespace": "default", "uid": uid, "ownerReferences": [
                {"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "abc", "uid": "1"}]},
            "spec": {}, "status": {"phase": phase, "podIPs": [{"ip": address}]}
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_pod_that_a_later_list_lacks_has_ended() {
        let registry = Registry::default();
        let key = SandboxKey::new("default", "abc");
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let observed = Observed {
            uid: "1".into(),
            condition: Condition::At(vec![address]),
            claim: None,
            trace: None,
        };
        registry.observe(&key, observed);
        let is_routable = || matches!(registry.lookup(&key), crate::registry::Lookup::Routable(_));
        let mut pods = KnownPods::default();
        let mut list = |found: Vec<WatchedPod>| {
            pods.take(Event::Init, &registry);
            for pod in found {
                pods.take(Event::InitApply(Decoded::Readable(pod)), &registry);
            }
            pods.take(Event::InitDone, &registry);
        };
        list(vec![pod("1", "Running", "10.0.0.1")]);
        assert!(is_routable());
        list(vec![pod("2", "Running", "10.0.0.1")]);
        assert!(is_routable(), "another of its pods has the address");
        list(vec![]);
        assert!(!is_routable());
    }

    #[test]
    fn a_sandbox_that_cannot_be_decoded_is_not_ready_and_names_the_field() {
        let object = r#"{"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": "abc", "namespace": "default", "uid": "1"}, "spec": {"replicas": 3000000000}}"#;
        let observed = observe(&Decoded::from_json(object));
        assert_eq!(observed.uid, "1");
        let Condition::NotReady(why) = observed.condition else {
            panic!("it has no address");
        };
        assert!(why.starts_with("It cannot be read: spec"), "{why}");
    }

    #[test]
    fn a_sandbox_in_a_pool_is_not_routable() {
        for labels in [
            json!({"agents.x-k8s.io/warm-pool-sandbox": "h"}),
            json!({"agents.kruise.io/sandbox-claimed": "false"}),
        ] {
            assert_eq!(
                sandbox(&labels, &json!({}), &running()),
                Condition::Unclaimed
            );
        }
        let claimed = json!({"agents.kruise.io/sandbox-claimed": "true"});
        assert!(matches!(
            sandbox(&claimed, &json!({}), &running()),
            Condition::At(_)
        ));
    }

    #[test]
    fn a_suspended_sandbox_is_suspended_even_while_its_pod_lingers() {
        for spec in [
            json!({"replicas": 0}),
            json!({"operatingMode": "Suspended"}),
        ] {
            assert_eq!(
                sandbox(&json!({}), &spec, &running()),
                Condition::Suspended(Suspended::Stopped)
            );
            let frozen = json!({"conditions": [{"type": "Suspended", "status": "True", "reason": "Frozen", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"}]});
            assert_eq!(
                sandbox(&json!({}), &spec, &frozen),
                Condition::Suspended(Suspended::Frozen)
            );
        }
    }

    #[test]
    fn a_sandbox_without_a_usable_address_reports_the_reason() {
        let ready = json!([{"type": "Ready", "status": "False", "reason": "DependenciesNotReady", "message": "Pod is pending",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        let status =
            json!({"podIPs": ["127.0.0.1", "169.254.169.254", "junk"], "conditions": ready});
        assert_eq!(
            sandbox(&json!({}), &json!({}), &status),
            Condition::NotReady("Pod is pending".into())
        );
        assert!(matches!(
            sandbox(&json!({}), &json!({}), &Value::Null),
            Condition::NotReady(_)
        ));
        let finished = json!([{"type": "Finished", "status": "True", "reason": "PodFailed", "message": "Pod failed",
            "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        let status = json!({"podIPs": ["10.0.0.1"], "conditions": finished});
        assert_eq!(
            sandbox(&json!({}), &json!({}), &status),
            Condition::Finished("Pod failed".into())
        );
    }

    #[test]
    fn a_pods_owner_is_its_sandbox() {
        let metadata: ObjectMeta = serde_json::from_value(json!({
            "name": "pod", "namespace": "team",
            "ownerReferences": [{"apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox", "name": "abc", "uid": "1"}]
        }))
        .unwrap();
        assert_eq!(sandbox_of(&metadata).unwrap().as_str(), "team/abc");
    }
}
