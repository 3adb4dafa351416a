//! Enforces network policies: watches policies, namespaces and pods, compiles them to nftables rules, and applies the difference.
//!
//! Another program may remove or change the table (`nft flush ruleset`). The [`table_monitor`](super::table_monitor) notices it, and
//! all rules are applied again; the node's condition and an event report it.
//!
//! A pod whose address is in no rule reaches nothing and is reached only by the node, so a late watch event does not open it. An
//! address is reused only when no rule names it any more.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::rbac::NODE_ROLE;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::runtime::watcher::Event;
use kube::{Client, ResourceExt};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::enforced_policy::EnforcedPolicy;
use super::firewall::{self, FirewallError, Surroundings};
use super::follow::follow;
use super::policy::{self, PodFacts, Rules, Unselected, World};
use super::table_monitor::{Change, Monitor};
use api::errors::chain;
use api::labels::is_mirror;
use event_recorder::{EventSink, Severity};
use object_watch::{Failure, Watched};

/// The pause after a failure before the rules are applied again.
const RETRY: Duration = Duration::from_secs(1);
/// The longest time for which the address of an ended pod stays reserved because rules still name it.
const FORGET: Duration = Duration::from_secs(10);

/// How often this process restored rules that another program had removed or changed.
static RESTORED: AtomicU64 = AtomicU64::new(0);

/// The metrics of the rules, in Prometheus' text format.
pub fn render_metrics() -> String {
    const NAME: &str = "agent_sandbox_network_rules_restored_total";
    let restored = RESTORED.load(Ordering::Relaxed);
    format!(
        "# HELP {NAME} How often nftables rules were restored that another program had removed or changed.\n# TYPE {NAME} counter\n{NAME} {restored}\n"
    )
}

/// A pod of the watch.
#[derive(Debug)]
struct SeenPod {
    facts: PodFacts,
    /// Whether it runs on this node, which knows its addresses better than the watch.
    own: bool,
}

impl SeenPod {
    fn of(pod: &Pod, node_name: &str) -> Self {
        let mut facts = PodFacts::of(pod);
        let spec = pod.spec.as_ref();
        let own =
            spec.and_then(|spec| spec.node_name.as_deref()) == Some(node_name) && !is_mirror(pod);
        let status = pod.status.as_ref();
        let over = status
            .and_then(|status| status.phase.as_deref())
            .is_some_and(|phase| phase == "Succeeded" || phase == "Failed");
        let is_machine = spec.and_then(|spec| spec.host_network) == Some(true);
        // The address of a pod that has ended may belong to another pod by now; a pod on the host network has the machine's.
        if !over && !is_machine {
            let listed = status
                .into_iter()
                .flat_map(|status| status.pod_ips.iter().flatten());
            facts.addresses = listed
                .filter_map(|address| address.ip.parse().ok())
                .collect();
        }
        Self { facts, own }
    }
}

#[derive(Debug)]
struct Attached {
    facts: PodFacts,
    addresses: Vec<IpAddr>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of changes so far, so that a caller can wait until its own is in force.
    wanted: u64,
    attached: HashMap<String, Attached>,
    /// Whether every pod of an earlier run has been attached.
    all_are_attached: bool,
    pods: Watched<SeenPod>,
    namespaces: Watched<(String, BTreeMap<String, String>)>,
    policies: Watched<NetworkPolicy>,
}

impl State {
    fn is_complete(&self) -> bool {
        self.pods.complete && self.namespaces.complete && self.policies.complete
    }
}

/// Why network policies are not enforced. The causes are kept as text, because an unchanged reason is reported only once.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotEnforced {
    /// nftables cannot be used, or refuses the rules.
    #[error("{cause}")]
    Firewall { cause: String },
    /// The API server does not let the node watch the objects.
    #[error("{cause}: bind the cluster role {NODE_ROLE} to this node's user")]
    NotAllowed { cause: String },
}

/// Whether policies are enforced on this node: how often the rules had to be restored since it started, or why they are not.
pub type Enforcement = Result<u64, NotEnforced>;

#[derive(Debug)]
pub struct Enforcer {
    node_name: String,
    surroundings: Surroundings,
    unselected: Unselected,
    state: Mutex<State>,
    changed: Notify,
    in_force: watch::Sender<u64>,
    enforcement: watch::Sender<Enforcement>,
    /// Markers of transactions that the kernel has not reported yet.
    unreported: Mutex<BTreeSet<u32>>,
    /// Whether another program has changed the table since the rules were last applied.
    disturbed: AtomicBool,
}

fn random_number() -> u32 {
    let mut bytes = [0; 4];
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u32::from_ne_bytes(bytes)
}

impl Enforcer {
    /// `usable` says whether the rules of `surroundings` could be opened.
    pub fn new(
        node_name: String,
        surroundings: Surroundings,
        unselected: Unselected,
        usable: Enforcement,
    ) -> Self {
        Self {
            node_name,
            surroundings,
            unselected,
            state: Mutex::default(),
            changed: Notify::new(),
            in_force: watch::Sender::new(0),
            enforcement: watch::Sender::new(usable),
            unreported: Mutex::default(),
            disturbed: AtomicBool::new(false),
        }
    }

    /// Whether policies are enforced, now and on every change.
    pub fn enforcement(&self) -> watch::Receiver<Enforcement> {
        self.enforcement.subscribe()
    }

    fn change<T>(&self, work: impl FnOnce(&mut State) -> T) -> (u64, T) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let answer = work(&mut state);
        state.wanted += 1;
        let number = state.wanted;
        drop(state);
        self.changed.notify_one();
        (number, answer)
    }

    /// Reports that the pod of this node with this UID has these addresses.
    pub fn attach(&self, uid: &str, pod: &Pod, addresses: Vec<IpAddr>) {
        let facts = PodFacts::of(pod);
        let uid = uid.to_owned();
        self.change(|state| state.attached.insert(uid, Attached { facts, addresses }));
    }

    /// Reports that a pod of this node has no address any more. When this returns, no rule names the address, so it can be reused.
    pub async fn detach(&self, uid: &str) {
        let (number, known) = self.change(|state| state.attached.remove(uid).is_some());
        // The rules of an earlier run may name a pod that this run does not know.
        let is_first = *self.in_force.borrow() == 0;
        if (known || is_first) && !self.settles(number).await {
            tracing::warn!(uid, "rules still name the address of a pod that is gone");
        }
    }

    /// Reports that every surviving pod of an earlier run is attached. Until then the rules of that run stay, because new rules would
    /// cut off the pods that are not attached yet.
    pub fn all_are_attached(&self) {
        self.change(|state| state.all_are_attached = true);
    }

    /// Waits until a change is in force. Returns false if that takes too long. Does not wait if rules cannot be applied at all.
    async fn settles(&self, number: u64) -> bool {
        if self.enforcement.borrow().is_err() {
            return true;
        }
        let mut in_force = self.in_force.subscribe();
        let applied = in_force.wait_for(|applied| *applied >= number);
        tokio::time::timeout(FORGET, applied).await.is_ok()
    }

    /// The reason why a pod must not run: the policies that select it cannot be enforced.
    pub fn refusal(&self, pod: &Pod) -> Option<String> {
        let reason = self.enforcement.borrow().clone().err()?;
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // The rules of an earlier run may still name the address that the pod would get.
        if !state.is_complete() {
            return Some(format!(
                "what network policies select is not known, and they cannot be enforced: {reason}"
            ));
        }
        let selecting = policy::selecting(&PodFacts::of(pod), state.policies.objects.values());
        (!selecting.is_empty()).then(|| {
            format!(
                "network policy {} selects the pod and cannot be enforced on this node: {reason}",
                selecting.join(", ")
            )
        })
    }

    /// Watches and enforces until `shutdown`. The rules stay in force after that, because the pods continue.
    pub async fn run(self: Arc<Self>, client: Client, shutdown: CancellationToken) {
        // Checked before the watches start. If the table could not be created, forwarding is off in this run and no rules are needed.
        let rules_can_be_opened = self.enforcement.borrow().is_ok();
        let watching = self.clone().watch(client.clone());
        let enforcing = async {
            if !rules_can_be_opened {
                std::future::pending::<()>().await;
            }
            let events = EventSink::new(client, "kubelet", &self.node_name);
            tokio::join!(self.enforce(&events), self.monitor());
        };
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = watching => {}
            () = enforcing => {}
        }
    }

    /// Requests that all rules are replaced whenever another program has changed the table.
    async fn monitor(&self) {
        loop {
            match Monitor::open(&self.surroundings.table) {
                Ok(mut monitor) => {
                    // Changes before the socket was opened were missed.
                    if *self.in_force.borrow() > 0 {
                        self.disturb();
                    }
                    let error = loop {
                        match monitor.next().await {
                            Ok(change) if self.is_own(&change) => {}
                            Ok(_) => self.disturb(),
                            Err(error) => break error,
                        }
                    };
                    tracing::warn!(%error, "missed some changes of nftables by other programs");
                }
                Err(error) => {
                    tracing::warn!(%error, "changes of nftables by other programs are not noticed");
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    fn is_own(&self, change: &Change) -> bool {
        let mut unreported = self
            .unreported
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        matches!(change, Change::Marked(marker) if unreported.remove(marker))
    }

    fn disturb(&self) {
        self.disturbed.store(true, Ordering::Release);
        self.changed.notify_one();
    }

    /// A marker for the next transaction, which no recent transaction of this or another process has.
    fn next_marker(&self) -> u32 {
        let marker = random_number();
        self.unreported
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(marker);
        marker
    }

    async fn watch(self: Arc<Self>, client: Client) {
        let own = |news| {
            let node = &self.node_name;
            self.take(news, |state, event| {
                state.pods.take(event, |pod: Pod| SeenPod::of(&pod, node))
            });
        };
        let pods = follow::<Pod>(&client, own);
        let namespaces = follow::<Namespace>(&client, |news| {
            self.take(news, |state, event| {
                state.namespaces.take(event, |namespace: Namespace| {
                    (namespace.name_any(), namespace.labels().clone())
                })
            });
        });
        let policies = follow::<EnforcedPolicy>(&client, |news| {
            self.take(news, |state, event| {
                state.policies.take(event, |EnforcedPolicy(policy)| policy)
            });
        });
        tokio::join!(pods, namespaces, policies);
    }

    fn take<K>(
        &self,
        news: Result<Event<K>, Failure>,
        take: impl FnOnce(&mut State, Event<K>) -> bool,
    ) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match news {
            Ok(event) => {
                if take(&mut state, event) {
                    state.wanted += 1;
                    drop(state);
                    self.changed.notify_one();
                }
            }
            // Rules are applied once everything was listed, and stay in force.
            Err(_) if state.is_complete() => {}
            Err(Failure::Forbidden { message: cause }) => {
                drop(state);
                if self.enforcement.borrow().is_ok() {
                    self.report(&Err(NotEnforced::NotAllowed { cause }));
                }
            }
            // It is logged, and tried again.
            Err(_) => {}
        }
    }

    /// The input of the compiler, and the number of the last change in it. `None` until everything was listed.
    fn world(&self) -> Option<(u64, World)> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.is_complete() || !state.all_are_attached {
            return None;
        }
        let judged = |attached: &Attached, facts: &PodFacts| PodFacts {
            addresses: attached.addresses.clone(),
            judged: true,
            ..facts.clone()
        };
        let unseen = state
            .attached
            .iter()
            .filter(|(uid, _)| !state.pods.objects.contains_key(*uid))
            .map(|(_, attached)| judged(attached, &attached.facts));
        let seen =
            state
                .pods
                .objects
                .iter()
                .filter_map(|(uid, seen)| match state.attached.get(uid) {
                    Some(attached) => Some(judged(attached, &seen.facts)),
                    None if seen.own => None,
                    None => Some(seen.facts.clone()),
                });
        let world = World {
            pods: seen.chain(unseen).collect(),
            namespaces: state.namespaces.objects.values().cloned().collect(),
            policies: state.policies.objects.values().cloned().collect(),
            unselected: self.unselected,
            resolver: self.surroundings.resolver.clone(),
        };
        Some((state.wanted, world))
    }

    async fn enforce(&self, events: &EventSink) {
        let mut in_force: Option<Rules> = None;
        let mut restored = 0_u64;
        let mut known_problems = std::collections::BTreeSet::new();
        loop {
            self.changed.notified().await;
            let Some((number, world)) = self.world() else {
                continue;
            };
            let compiled = policy::compile(&world);
            for problem in compiled.problems.difference(&known_problems) {
                tracing::warn!("{problem}");
            }
            known_problems = compiled.problems;
            let disturbed = self.disturbed.swap(false, Ordering::AcqRel) && in_force.is_some();
            if disturbed {
                tracing::warn!(
                    table = self.surroundings.table,
                    "another program removed or changed the nftables table; it is restored"
                );
                in_force = None;
            }
            match self.apply(in_force.take(), compiled.rules).await {
                Ok(applied) => {
                    in_force = Some(applied);
                    self.in_force.send_replace(number);
                    if disturbed {
                        restored += 1;
                        RESTORED.fetch_add(1, Ordering::Relaxed);
                        let note = format!(
                            "another program removed or changed the nftables table {}; it was restored",
                            self.surroundings.table
                        );
                        events.tell_of_node(
                            &self.node_name,
                            Severity::Warning,
                            "NetworkRulesRestored",
                            note,
                        );
                    }
                    self.report(&Ok(restored));
                }
                Err(error) => {
                    in_force = None;
                    let cause = chain(&error);
                    self.report(&Err(NotEnforced::Firewall { cause }));
                    tokio::time::sleep(RETRY).await;
                    self.changed.notify_one();
                }
            }
        }
    }

    /// Applies rules: the difference to those in force, or all of them if those are not known or the difference is refused.
    async fn apply(&self, in_force: Option<Rules>, rules: Rules) -> Result<Rules, FirewallError> {
        let surroundings = &self.surroundings;
        let change = match in_force {
            None => None,
            Some(in_force) => match surroundings.change(&in_force, &rules) {
                None => return Ok(rules),
                change => change,
            },
        };
        let marker = self.next_marker();
        let mark = surroundings.mark(marker);
        let change = change.map(|change| change + &mark);
        let whole = surroundings.whole(&rules) + &mark;
        if let Err(error) = run(surroundings, change, whole).await {
            self.is_own(&Change::Marked(marker));
            return Err(error);
        }
        Ok(rules)
    }

    /// Publishes and logs whether policies are enforced, if that has changed.
    fn report(&self, enforcement: &Enforcement) {
        self.enforcement.send_if_modified(|known| {
            if *known == *enforcement {
                return false;
            }
            match enforcement {
                Ok(_) => tracing::info!("network policies are enforced"),
                Err(reason) => tracing::error!(%reason, "network policies cannot be enforced"),
            }
            known.clone_from(enforcement);
            true
        });
    }
}

/// Runs one of two transactions: the difference, or all rules if there is no difference or it is refused.
async fn run(
    surroundings: &Surroundings,
    change: Option<String>,
    whole: String,
) -> Result<(), FirewallError> {
    let program = surroundings.program.clone();
    let work = move || {
        if let Some(change) = change {
            match firewall::run(&program, &change) {
                Ok(()) => return Ok(()),
                Err(error) => {
                    tracing::warn!(error = %chain(&error), "a change of rules was refused; all of them are replaced");
                }
            }
        }
        firewall::run(&program, &whole)
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(FirewallError::Refused(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address_block::AddressBlock;
    use serde_json::json;

    fn enforcer() -> Enforcer {
        let range: AddressBlock = "10.200.0.0/16".parse().unwrap();
        let surroundings = Surroundings {
            program: "nft".into(),
            table: "t".to_owned(),
            links: "as1".to_owned(),
            ranges: vec![range],
            resolver: Vec::new(),
            local_users: None,
        };
        Enforcer::new("here".to_owned(), surroundings, Unselected::Isolated, Ok(0))
    }

    #[test]
    fn rules_of_an_earlier_run_stay_until_its_pods_are_attached() {
        let enforcer = enforcer();
        let address: IpAddr = "10.200.0.2".parse().unwrap();
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "t", "uid": "u"}, "spec": {"nodeName": "here", "containers": []},
            "status": {"phase": "Running", "podIPs": [{"ip": address.to_string()}]}}))
        .unwrap();
        for event in [Event::InitApply(pod.clone()), Event::InitDone] {
            enforcer.take(Ok(event), |state, event| {
                state.pods.take(event, |pod| SeenPod::of(&pod, "here"))
            });
        }
        enforcer.take(Ok(Event::InitDone), |state, event: Event<Namespace>| {
            state.namespaces.take(event, |_| Default::default())
        });
        enforcer.take(Ok(Event::InitDone), |state, event| {
            state.policies.take(event, |policy: NetworkPolicy| policy)
        });
        assert!(enforcer.world().is_none(), "the pod is not attached yet");
        enforcer.attach("u", &pod, vec![address]);
        enforcer.all_are_attached();
        let (_, world) = enforcer.world().unwrap();
        assert_eq!(world.pods.len(), 1);
        assert_eq!(world.pods[0].addresses, [address]);
    }
}
