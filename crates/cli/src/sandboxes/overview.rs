//! Counts of running and warm sandboxes, and the stuck objects, from lists of objects. Pure.

mod stuck;

use api::conditions::{self, ConditionType, Reason};
use api::decoding::Unreadable;
use api::{Sandbox, SandboxClaim, SandboxWarmPool};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::{Deserialize, Serialize};

use super::columns::holder;
pub use stuck::Stuck;

/// Conditions of a node that report a problem when they are true.
const PRESSURES: [&str; 4] = [
    "MemoryPressure",
    "DiskPressure",
    "PIDPressure",
    "NetworkUnavailable",
];
/// Annotation of our nodes: which runtime handlers work there, and why others do not, as JSON.
const RUNTIME_HANDLERS: &str = "node.agents.x-k8s.io/runtime-handlers";

/// The objects that the overview is made from.
#[derive(Debug, Default)]
pub struct ObservedObjects {
    pub claims: Vec<SandboxClaim>,
    pub sandboxes: Vec<Sandbox>,
    pub pools: Vec<SandboxWarmPool>,
    pub pods: Vec<Pod>,
    pub nodes: Vec<Node>,
    pub runtime_classes: Vec<RuntimeClass>,
    /// Claims, sandboxes and pools that cannot be decoded, with the name of the kind.
    pub unreadable: Vec<(&'static str, Unreadable)>,
}

/// What `agent-sandbox status` shows.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Overview {
    pub claims: Claims,
    pub sandboxes: Sandboxes,
    pub pools: Vec<Pool>,
    pub nodes: Vec<NodeState>,
    pub runtime_handlers: Vec<RuntimeHandler>,
    pub throttled: Vec<Throttled>,
    pub stuck: Vec<Stuck>,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Claims {
    pub ready: usize,
    pub waiting: usize,
}

#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sandboxes {
    /// Ready, and not in a pool.
    pub running: usize,
    /// Ready, and waiting in a pool.
    pub warm: usize,
    pub starting: usize,
    pub suspended: usize,
    /// Those of the suspended whose pod is frozen.
    pub frozen: usize,
    pub ended: usize,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Pool {
    pub namespace: String,
    pub name: String,
    pub desired: i32,
    pub ready: i32,
    pub template: String,
}

#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct NodeState {
    pub name: String,
    pub ready: bool,
    pub problems: Vec<String>,
}

/// What a runtime class may name as its handler.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct RuntimeHandler {
    pub name: String,
    pub node: String,
    /// The classes that name it.
    pub classes: Vec<String>,
    pub works: bool,
    /// The version of a working handler, or why it does not work.
    pub detail: String,
}

/// A handler as the node's annotation reports it.
#[derive(Deserialize)]
struct Finding {
    handler: String,
    works: bool,
    #[serde(default)]
    detail: String,
}

/// A pod that is throttled at its CPU limit.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Throttled {
    pub namespace: String,
    pub pod: String,
    pub why: String,
}

impl Overview {
    pub fn of(observed: &ObservedObjects, now: Timestamp) -> Self {
        let mut overview = Self::default();
        for claim in &observed.claims {
            if is_ready(conditions_of_claim(claim)) {
                overview.claims.ready += 1;
            } else {
                overview.claims.waiting += 1;
            }
        }
        for sandbox in &observed.sandboxes {
            *overview.sandboxes.counter(state(sandbox)) += 1;
            overview.sandboxes.frozen += usize::from(is_frozen(sandbox));
        }
        overview.pools = observed.pools.iter().map(pool).collect();
        overview.nodes = observed.nodes.iter().map(node).collect();
        overview.runtime_handlers = observed
            .nodes
            .iter()
            .flat_map(|node| runtime_handlers(node, &observed.runtime_classes))
            .collect();
        overview.runtime_handlers.sort();
        overview.throttled = observed.pods.iter().filter_map(throttled).collect();
        overview.stuck = stuck::stuck(observed, now);
        overview
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Warm,
    Starting,
    Suspended,
    Ended,
}

impl Sandboxes {
    fn counter(&mut self, state: State) -> &mut usize {
        match state {
            State::Running => &mut self.running,
            State::Warm => &mut self.warm,
            State::Starting => &mut self.starting,
            State::Suspended => &mut self.suspended,
            State::Ended => &mut self.ended,
        }
    }
}

fn state(sandbox: &Sandbox) -> State {
    let conditions = conditions_of_sandbox(sandbox);
    if sandbox.spec.suspension().is_requested() {
        State::Suspended
    } else if conditions::find(conditions, ConditionType::Finished)
        .is_some_and(|finished| finished.status == "True")
    {
        State::Ended
    } else if !is_ready(conditions) {
        State::Starting
    } else if holder(sandbox)
        .is_some_and(|holder| holder.starts_with("pool/") || holder.starts_with("set/"))
    {
        State::Warm
    } else {
        State::Running
    }
}

fn is_frozen(sandbox: &Sandbox) -> bool {
    let suspended = conditions::find(conditions_of_sandbox(sandbox), ConditionType::Suspended);
    suspended.is_some_and(|suspended| {
        suspended.status == "True" && suspended.reason == Reason::Frozen.as_str()
    })
}

fn conditions_of_claim(claim: &SandboxClaim) -> &[Condition] {
    claim
        .status
        .as_ref()
        .map_or(&[], |status| &status.conditions)
}

fn conditions_of_sandbox(sandbox: &Sandbox) -> &[Condition] {
    sandbox
        .status
        .as_ref()
        .map_or(&[], |status| &status.conditions)
}

fn is_ready(conditions: &[Condition]) -> bool {
    conditions::find(conditions, ConditionType::Ready).is_some_and(|ready| ready.status == "True")
}

fn pool(pool: &SandboxWarmPool) -> Pool {
    Pool {
        namespace: pool.namespace().unwrap_or_default(),
        name: pool.name_any(),
        desired: pool.spec.desired_replicas(),
        ready: pool
            .status
            .as_ref()
            .map_or(0, |status| status.ready_replicas),
        template: pool.spec.sandbox_template_ref.name.clone(),
    }
}

fn node(node: &Node) -> NodeState {
    let conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let mut state = NodeState {
        name: node.name_any(),
        ready: false,
        problems: Vec::new(),
    };
    for condition in conditions {
        let holds = condition.status == "True";
        let reason = condition.reason.as_deref().unwrap_or_default();
        let well = if condition.type_ == "Ready" {
            state.ready = holds;
            holds
        } else if PRESSURES.contains(&condition.type_.as_str()) {
            // A node that lost part of what it needs sets this reason, and goes on.
            !holds && reason != "Degraded"
        } else {
            holds
        };
        if !well {
            let message = condition
                .message
                .as_deref()
                .filter(|message| !message.is_empty());
            state.problems.push(format!(
                "{}: {}",
                condition.type_,
                message.unwrap_or(reason)
            ));
        }
    }
    if node
        .spec
        .as_ref()
        .is_some_and(|spec| spec.unschedulable == Some(true))
    {
        state
            .problems
            .push("it takes no new pods (cordoned)".to_owned());
    }
    state
}

/// The runtime handlers of a node. Empty for a node without the annotation, and for one whose annotation cannot be parsed.
fn runtime_handlers(node: &Node, classes: &[RuntimeClass]) -> Vec<RuntimeHandler> {
    let reported = node.annotations().get(RUNTIME_HANDLERS);
    let findings: Vec<Finding> = reported
        .and_then(|json| serde_json::from_str(json).ok())
        .unwrap_or_default();
    let named_by = |handler: &str| {
        let named = classes.iter().filter(|class| class.handler == handler);
        named.map(ResourceExt::name_any).collect()
    };
    let handler = |finding: Finding| RuntimeHandler {
        classes: named_by(&finding.handler),
        name: finding.handler,
        node: node.name_any(),
        works: finding.works,
        detail: finding.detail,
    };
    findings.into_iter().map(handler).collect()
}

fn throttled(pod: &Pod) -> Option<Throttled> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let condition = conditions
        .iter()
        .find(|condition| condition.type_ == "CPUThrottled" && condition.status == "True")?;
    Some(Throttled {
        namespace: pod.namespace().unwrap_or_default(),
        pod: pod.name_any(),
        why: condition.message.clone().unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const NOW: &str = "2026-11-16T00:01:00Z";

    fn parse<T: serde::de::DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    fn claim(name: &str, created: &str, status: &str, reason: &str) -> SandboxClaim {
        parse(json!({
            "apiVersion": "extensions.agents.x-k8s.io/v1beta1", "kind": "SandboxClaim",
            "metadata": {"name": name, "namespace": "d", "creationTimestamp": created},
            "spec": {"warmPoolRef": {"name": "p"}},
            "status": {
                "sandbox": {"name": format!("{name}-box")},
                "conditions": [{"type": "Ready", "status": status, "reason": reason, "message": "m", "lastTransitionTime": created}],
            },
        }))
    }

    fn sandbox(name: &str, owner: Option<(&str, &str)>, mode: &str, ready: &str) -> Sandbox {
        let owners: Vec<Value> = owner
            .iter()
            .map(|(kind, name)| json!({"apiVersion": "x/v1", "kind": kind, "name": name, "uid": "u"}))
            .collect();
        parse(json!({
            "apiVersion": "agents.x-k8s.io/v1beta1", "kind": "Sandbox",
            "metadata": {"name": name, "namespace": "d", "creationTimestamp": "2026-11-16T00:00:00Z", "ownerReferences": owners},
            "spec": {"podTemplate": {"spec": {"containers": []}}, "operatingMode": mode},
            "status": {"conditions": [{"type": "Ready", "status": ready, "reason": "DependenciesNotReady", "message": "m", "lastTransitionTime": "2026-11-16T00:00:00Z"}]},
        }))
    }

    fn overview(observed: &ObservedObjects) -> Overview {
        Overview::of(observed, NOW.parse().unwrap())
    }

    fn with_suspended(mut sandbox: Sandbox, status: &str, reason: &str) -> Sandbox {
        let condition = parse(json!({
            "type": "Suspended", "status": status, "reason": reason, "message": "why", "lastTransitionTime": "2026-11-16T00:00:00Z",
        }));
        sandbox.status.as_mut().unwrap().conditions.push(condition);
        sandbox
    }

    #[test]
    fn a_sandbox_that_cannot_be_suspended_is_stuck() {
        let boxed = |name: &str| sandbox(name, None, "Suspended", "False");
        let observed = ObservedObjects {
            sandboxes: vec![
                with_suspended(boxed("frozen"), "True", "Frozen"),
                with_suspended(boxed("freezing"), "False", "Freezing"),
                with_suspended(boxed("cannot"), "False", "FreezeNotSupported"),
            ],
            ..ObservedObjects::default()
        };
        let stuck = overview(&observed).stuck;
        let reported: Vec<_> = stuck.iter().map(|one| (&*one.name, &*one.why)).collect();
        assert_eq!(reported, [("cannot", "FreezeNotSupported: why")]);
    }

    #[test]
    fn sandboxes_are_counted_by_what_they_do() {
        let observed = ObservedObjects {
            sandboxes: vec![
                sandbox("a", Some(("SandboxClaim", "c")), "Running", "True"),
                sandbox("b", Some(("SandboxWarmPool", "p")), "Running", "True"),
                sandbox("c", None, "Running", "True"),
                sandbox("d", None, "Suspended", "False"),
                with_suspended(sandbox("f", None, "Suspended", "False"), "True", "Frozen"),
                sandbox("e", Some(("SandboxWarmPool", "p")), "Running", "False"),
            ],
            ..ObservedObjects::default()
        };
        let counted = overview(&observed).sandboxes;
        let expected = Sandboxes {
            running: 2,
            warm: 1,
            starting: 1,
            suspended: 2,
            frozen: 1,
            ended: 0,
        };
        assert_eq!(counted, expected);
    }

    #[test]
    fn a_stuck_object_is_listed_once_with_the_pods_reason() {
        let pod = parse(json!({
            "metadata": {"name": "old-box", "namespace": "d"},
            "status": {"containerStatuses": [{
                "name": "main", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
            }]},
        }));
        let observed = ObservedObjects {
            claims: vec![
                claim("old", "2026-11-16T00:00:00Z", "False", "SandboxNotReady"),
                claim("young", "2026-11-16T00:00:55Z", "False", "SandboxNotReady"),
                claim(
                    "hopeless",
                    "2026-11-16T00:00:59Z",
                    "False",
                    "InvalidConfiguration",
                ),
                claim("asleep", "2026-11-16T00:00:00Z", "False", "SandboxNotReady"),
                claim("fine", "2026-11-16T00:00:00Z", "True", "DependenciesReady"),
            ],
            sandboxes: vec![
                sandbox("old-box", Some(("SandboxClaim", "old")), "Running", "False"),
                sandbox(
                    "asleep-box",
                    Some(("SandboxClaim", "asleep")),
                    "Suspended",
                    "False",
                ),
                sandbox("alone", None, "Running", "False"),
            ],
            pods: vec![pod],
            ..ObservedObjects::default()
        };
        let overview = overview(&observed);
        let names: Vec<&str> = overview
            .stuck
            .iter()
            .map(|stuck| stuck.name.as_str())
            .collect();
        assert_eq!(names, ["old", "hopeless", "alone"]);
        assert!(
            overview.stuck[0]
                .why
                .contains("ImagePullBackOff: no such image")
        );
        assert_eq!((overview.claims.ready, overview.claims.waiting), (1, 4));
    }

    #[test]
    fn a_node_tells_its_problems_and_its_runtime_handlers() {
        let reported = json!([
            {"handler": "runsc", "works": false, "detail": "runsc is not installed"},
            {"handler": "runc", "works": true, "detail": "1.1.5"},
        ]);
        let node = parse(json!({
            "metadata": {"name": "n", "annotations": {RUNTIME_HANDLERS: reported.to_string()}},
            "status": {"conditions": [
                {"type": "Ready", "status": "True"},
                {"type": "DiskPressure", "status": "True", "reason": "Full", "message": "no disk"},
                {"type": "NetworkUnavailable", "status": "False", "reason": "Degraded", "message": "nft is missing"},
                {"type": "PIDPressure", "status": "False", "reason": "Enough"},
            ]},
        }));
        let pod = |name: &str, status: &str| {
            parse(json!({"metadata": {"name": name},
                "status": {"conditions": [{"type": "CPUThrottled", "status": status, "message": "m"}]}}))
        };
        let observed = ObservedObjects {
            pods: vec![pod("hot", "True"), pod("cold", "False")],
            runtime_classes: vec![parse(
                json!({"metadata": {"name": "gvisor"}, "handler": "runsc"}),
            )],
            nodes: vec![node],
            ..ObservedObjects::default()
        };
        let overview = overview(&observed);
        assert!(overview.nodes[0].ready);
        assert_eq!(
            overview.nodes[0].problems,
            [
                "DiskPressure: no disk",
                "NetworkUnavailable: nft is missing"
            ]
        );
        let [works, broken] = &overview.runtime_handlers[..] else {
            panic!("{:?}", overview.runtime_handlers)
        };
        assert_eq!(
            (works.name.as_str(), works.works, works.detail.as_str()),
            ("runc", true, "1.1.5")
        );
        assert_eq!(
            (broken.name.as_str(), broken.works, broken.detail.as_str()),
            ("runsc", false, "runsc is not installed")
        );
        assert_eq!(broken.classes, ["gvisor"]);
        let pods: Vec<&str> = overview
            .throttled
            .iter()
            .map(|throttled| throttled.pod.as_str())
            .collect();
        assert_eq!(pods, ["hot"]);
    }
}
