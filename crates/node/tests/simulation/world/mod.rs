//! A node, its runtime and the API, driven one step at a time.

mod checks;
mod settling;
mod tasks;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ::api::decoding::Decoded;
use agent_sandbox_node::pod_lifecycle::{FailureReason, Verdict};
use agent_sandbox_node::pod_machine::{
    Command, Event, NodeFacts, PodMachine, ProbeKind, ProbeStage, ProbeVerdict,
};
use agent_sandbox_node::pod_registry::{self, PodRegistry};
use agent_sandbox_node::pod_uid::PodUid;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher;

use self::tasks::{Answered, Operation, Task};
use crate::api::{Api, Change};
use crate::random::Random;
use crate::runtime::Runtime;

const NODE: &str = "node";

/// Whether things may go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Faults {
    Injected,
    Absent,
}

/// A pod's worker.
#[derive(Debug)]
struct Worker {
    number: u32,
    machine: PodMachine,
    events: VecDeque<Event>,
    /// The last change that the watch reported, if the worker has not looked at it yet.
    update: Option<Update>,
    wake_at: Option<Timestamp>,
    /// The probes that run, by container: the run, the stage, and whether they have passed.
    probes: BTreeMap<String, (u32, ProbeStage, bool)>,
}

/// What the watch reported of a pod.
#[derive(Debug)]
enum Update {
    Applied(Arc<Pod>),
    Deleted,
}

/// The node's process. A restart loses all of it.
#[derive(Debug)]
struct Node {
    registry: PodRegistry,
    workers: BTreeMap<PodUid, Worker>,
    operations: Vec<Operation>,
    /// The pods of a list that is being reported.
    listing: VecDeque<watcher::Event<Decoded<Pod>>>,
    /// How much of the API's changes the watch has reported.
    watched: usize,
}

#[derive(Debug)]
pub struct World {
    pub random: Random,
    pub now: Timestamp,
    pub api: Api,
    pub runtime: Runtime,
    node: Node,
    workers: u32,
    /// Pods whose network policies are enforced.
    attached: BTreeSet<PodUid>,
    /// Runs that a probe or hook failed for.
    unhealthy: BTreeSet<(PodUid, String, u32)>,
    /// Pods that the node was asked to end.
    condemned: BTreeSet<PodUid>,
    faults: Faults,
    is_traced: bool,
}

impl World {
    pub fn new(seed: u64, is_traced: bool) -> Self {
        let (api, runtime) = (Api::default(), Runtime::default());
        let node = Node::started(&api, &runtime);
        Self {
            random: Random::new(seed),
            now: Timestamp::from_second(1_800_000_000).unwrap(),
            api,
            runtime,
            node,
            workers: 0,
            attached: BTreeSet::new(),
            unhealthy: BTreeSet::new(),
            condemned: BTreeSet::new(),
            faults: Faults::Injected,
            is_traced,
        }
    }

    fn trace(&self, what: impl FnOnce() -> String) {
        if self.is_traced {
            eprintln!("{} {}", self.now, what());
        }
    }

    fn fails(&mut self, percent: usize) -> bool {
        self.faults == Faults::Injected && self.random.percent(percent)
    }

    /// The node is killed, and another is started.
    pub fn restart(&mut self) {
        self.trace(|| "the node restarts".to_owned());
        self.node = Node::started(&self.api, &self.runtime);
        self.attached.clear();
    }

    /// The watch expires and the node lists its pods again.
    pub fn relist(&mut self) {
        self.node.list(&self.api);
    }

    /// The task of a pod panics.
    pub fn panic(&mut self) {
        let uids: Vec<&PodUid> = self.node.workers.keys().collect();
        if let Some(uid) = self.random.choose(&uids).cloned() {
            self.trace(|| format!("the worker of {uid} panics"));
            self.drop_worker(&uid);
            self.node.registry.panicked(&uid, self.now);
            self.perform_of_registry();
        }
    }

    fn drop_worker(&mut self, uid: &PodUid) {
        let Some(worker) = self.node.workers.remove(uid) else {
            return;
        };
        let is_of_worker = |operation: &Operation| {
            operation.uid.as_ref() == Some(uid) && operation.worker == worker.number
        };
        let operations = &mut self.node.operations;
        operations.retain(|operation| !is_of_worker(operation) || operation.is_action());
        for operation in operations.iter_mut().filter(|one| is_of_worker(one)) {
            if let Task::Start { is_cancelled, .. } = &mut operation.task {
                *is_cancelled = true;
            }
        }
    }

    /// A container ends by itself.
    pub fn exit(&mut self) {
        let mut running: Vec<(PodUid, String, u32)> = self.runtime.running();
        running.retain(|(uid, ..)| !self.runtime.is_frozen(uid));
        if running.is_empty() {
            return;
        }
        let (uid, container, run) = &running[self.random.below(running.len())];
        let code = i32::from(self.random.percent(50));
        self.trace(|| format!("{uid}/{container}/{run} exits with {code}"));
        self.runtime.end(uid, container, *run, code, self.now);
    }

    /// A probe, a hook, the CPU limit or an object reports something of a worker's container, or the node evicts the pod.
    pub fn report(&mut self) {
        let numbers: Vec<PodUid> = self.node.workers.keys().cloned().collect();
        if numbers.is_empty() {
            return;
        }
        let uid = &numbers[self.random.below(numbers.len())];
        if self.random.percent(5) {
            self.condemned.insert(uid.clone());
            let verdict = Verdict {
                reason: FailureReason::Evicted,
                message: "too much".to_owned(),
            };
            self.push_report(uid, Event::Condemned(verdict));
            return;
        }
        let running = self.runtime.pods.get(uid).map(|pod| {
            let running = pod.running();
            running
                .map(|(name, run)| (name.clone(), run.attempt))
                .collect::<Vec<_>>()
        });
        let running = running.unwrap_or_default();
        if running.is_empty() {
            self.push_report(uid, Event::ObjectsChanged(None));
            return;
        }
        let (container, run) = running[self.random.below(running.len())].clone();
        let probed = self.node.workers[uid].probes.get(&container).copied();
        let throttled = self.random.percent(50);
        let event = match (self.random.below(4), probed) {
            (0, _) => Event::Throttled {
                container,
                run,
                throttled,
            },
            (1, _) => Event::ObjectsChanged(Some(container)),
            (2, Some((run, stage, _))) => return self.probe(uid, container, run, stage, true),
            (_, Some((run, stage, _))) => return self.probe(uid, container, run, stage, false),
            _ => return,
        };
        self.push_report(uid, event);
    }

    fn probe(&mut self, uid: &PodUid, container: String, run: u32, stage: ProbeStage, pass: bool) {
        let kinds: &[ProbeKind] = match stage {
            ProbeStage::Startup => &[ProbeKind::Startup],
            ProbeStage::Running if pass => &[ProbeKind::Readiness],
            ProbeStage::Running => &[ProbeKind::Readiness, ProbeKind::Liveness],
        };
        let kind = self.random.choose(kinds).unwrap();
        let verdict = if pass {
            ProbeVerdict::Passing
        } else {
            ProbeVerdict::Failing("no answer".to_owned())
        };
        if !pass && kind != ProbeKind::Readiness {
            let failed = (uid.clone(), container.clone(), run);
            self.unhealthy.insert(failed);
        }
        self.push_report(
            uid,
            Event::Probed {
                container,
                run,
                kind,
                verdict,
            },
        );
    }

    fn push_report(&mut self, uid: &PodUid, event: Event) {
        let Some(worker) = self.node.workers.get(uid) else {
            return;
        };
        self.node.operations.push(Operation {
            uid: Some(uid.clone()),
            worker: worker.number,
            task: Task::Report,
            answer: Some(Answered::Event(event)),
        });
    }

    /// The node looks for pods without a worker.
    pub fn sweep(&mut self) {
        if self.node.registry.is_complete() {
            self.node.operations.push(Operation {
                uid: None,
                worker: 0,
                task: Task::Sweep,
                answer: None,
            });
        }
    }

    /// The watch reports the next change, if there is one.
    pub fn watch(&mut self) -> bool {
        let event = if let Some(event) = self.node.listing.pop_front() {
            event
        } else if let Some(change) = self.api.changes.get(self.node.watched) {
            self.node.watched += 1;
            match change {
                Change::Applied(pod) => watcher::Event::Apply(Decoded::Readable((**pod).clone())),
                Change::Deleted(pod) => watcher::Event::Delete(Decoded::Readable((**pod).clone())),
            }
        } else {
            return false;
        };
        self.trace(|| format!("watch: {}", summary(&event)));
        self.node.registry.observe(event, Vec::new, self.now);
        self.perform_of_registry();
        true
    }

    /// A worker looks at its events, or its time has come.
    pub fn work(&mut self) -> bool {
        let now = self.now;
        let due: Vec<PodUid> = self
            .node
            .workers
            .iter()
            .filter(|(_, worker)| {
                worker.update.is_some()
                    || !worker.events.is_empty()
                    || worker.wake_at.is_some_and(|at| at <= now)
            })
            .map(|(uid, _)| uid.clone())
            .collect();
        if due.is_empty() {
            return false;
        }
        let uid = due[self.random.below(due.len())].clone();
        let updates_first = self.random.percent(50);
        let worker = self.node.workers.get_mut(&uid).unwrap();
        if (updates_first || worker.events.is_empty())
            && let Some(update) = worker.update.take()
        {
            let pod = match &update {
                Update::Applied(pod) => Some(&**pod),
                Update::Deleted => None,
            };
            worker.machine.observe(pod, now);
        }
        while let Some(event) = worker.events.pop_front() {
            worker.machine.handle(event, now);
            if worker.machine.is_gone() {
                self.drop_worker(&uid);
                self.node.registry.worker_ended(&uid);
                return true;
            }
        }
        self.advance(&uid);
        true
    }

    fn advance(&mut self, uid: &PodUid) {
        let worker = self.node.workers.get_mut(uid).unwrap();
        worker.wake_at = worker.machine.advance(self.now);
        // A wake-up in the past that nothing comes of would never end.
        let commands = worker.machine.take_commands();
        assert!(
            !commands.is_empty() || worker.wake_at.is_none_or(|at| at > self.now),
            "{uid} wakes up at once, and for nothing"
        );
        for command in commands {
            self.perform(uid, command);
        }
    }

    fn perform_of_registry(&mut self) {
        use pod_registry::Command;
        for command in self.node.registry.take_commands() {
            match command {
                Command::StartWorker {
                    uid,
                    pod,
                    recovered,
                    refusal,
                } => {
                    self.workers += 1;
                    let node = NodeFacts {
                        address: "10.0.0.1".to_owned(),
                        cannot_freeze: None,
                    };
                    let now = self.now;
                    let machine = PodMachine::new(uid.clone(), &pod, node, recovered, refusal, now);
                    let worker = Worker {
                        number: self.workers,
                        machine,
                        events: VecDeque::new(),
                        update: None,
                        wake_at: None,
                        probes: BTreeMap::new(),
                    };
                    let earlier = self.node.workers.insert(uid.clone(), worker);
                    assert!(earlier.is_none(), "{uid} has two workers");
                    self.advance(&uid);
                }
                Command::UpdateWorker { uid, pod } => {
                    if let Some(worker) = self.node.workers.get_mut(&uid) {
                        worker.update = Some(pod.map_or(Update::Deleted, Update::Applied));
                    }
                }
                Command::Recover { uid, pause, .. } => {
                    let not_before = self.now + pause;
                    self.node.push(Some(uid), 0, Task::Recover { not_before });
                }
                Command::RemoveOrphan { uid, containers } => {
                    let task = Task::RemoveOrphan { containers };
                    self.node.push(Some(uid), 0, task);
                }
                Command::AllAttached => {}
                Command::EndUnreadable { .. } | Command::ReportUnreadable(_) => {
                    unreachable!("every pod can be read")
                }
            }
        }
    }

    fn perform(&mut self, uid: &PodUid, command: Command) {
        let task = match command {
            Command::AttachNetwork(_) => {
                self.attached.insert(uid.clone());
                return;
            }
            Command::CreateSandbox => Task::CreateSandbox,
            Command::StartContainer {
                container,
                run,
                crashes,
                ..
            } => Task::Start {
                container,
                run,
                crashes,
                is_cancelled: false,
            },
            Command::CancelStart { container } => return self.cancel_start(uid, &container),
            Command::WaitContainer { container, run } => Task::Wait { container, run },
            Command::StartProbes {
                container,
                run,
                stage,
            } => {
                let worker = self.node.workers.get_mut(uid).unwrap();
                worker.probes.insert(container, (run, stage, false));
                return;
            }
            Command::StopProbes { container } => {
                let worker = self.node.workers.get_mut(uid).unwrap();
                worker.probes.remove(&container);
                return;
            }
            Command::StopContainer { container, run, .. } => {
                self.check_stop(uid, &container, run);
                Task::Signal { container, run }
            }
            Command::KillContainer { container, run } => Task::Kill { container, run },
            Command::Freeze => Task::Freeze,
            Command::Thaw => Task::Thaw,
            Command::FreeSandbox => Task::Free,
            Command::PublishStatus(status) => Task::Publish(status),
            Command::Remove => Task::Remove,
            Command::DeleteObject => Task::DeleteObject,
            Command::RefreshVolumes(_)
            | Command::RefreshPod
            | Command::AwaitObjects { .. }
            | Command::WatchCpu { .. }
            | Command::RunPostStartHook { .. }
            | Command::Emit(_) => return,
        };
        let worker = self.node.workers[uid].number;
        self.node.push(Some(uid.clone()), worker, task);
    }

    fn cancel_start(&mut self, uid: &PodUid, cancelled: &str) {
        let number = self.node.workers[uid].number;
        for operation in &mut self.node.operations {
            if let Task::Start {
                container,
                is_cancelled,
                ..
            } = &mut operation.task
                && operation.worker == number
                && container == cancelled
            {
                *is_cancelled = true;
            }
        }
    }

    /// Some time passes.
    pub fn wait(&mut self) {
        let milliseconds = [1, 60, 200, 2_000, 12_000, 310_000, 700_000];
        let milliseconds = self.random.choose(&milliseconds).unwrap();
        self.now += Duration::from_millis(milliseconds);
    }
}

fn summary(event: &watcher::Event<Decoded<Pod>>) -> String {
    use kube::ResourceExt;
    let about = |pod: &Decoded<Pod>| match pod {
        Decoded::Readable(pod) => {
            let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
            let deleted = pod.metadata.deletion_timestamp.is_some();
            format!("{:?} {phase:?} deleted: {deleted}", pod.uid())
        }
        Decoded::Unreadable(_) => String::new(),
    };
    match event {
        watcher::Event::Init => "list".to_owned(),
        watcher::Event::InitDone => "list complete".to_owned(),
        watcher::Event::InitApply(pod) => format!("listed {}", about(pod)),
        watcher::Event::Apply(pod) => format!("applied {}", about(pod)),
        watcher::Event::Delete(pod) => format!("deleted {}", about(pod)),
    }
}

impl Node {
    /// A node that has just started, and finds what an earlier one left.
    fn started(api: &Api, runtime: &Runtime) -> Self {
        let mut node = Self {
            registry: PodRegistry::new(NODE, 3, runtime.recover()),
            workers: BTreeMap::new(),
            operations: Vec::new(),
            listing: VecDeque::new(),
            watched: 0,
        };
        node.list(api);
        node
    }

    fn list(&mut self, api: &Api) {
        self.listing.clear();
        self.listing.push_back(watcher::Event::Init);
        for pod in api.pods.values() {
            let pod = Decoded::Readable((**pod).clone());
            self.listing.push_back(watcher::Event::InitApply(pod));
        }
        self.listing.push_back(watcher::Event::InitDone);
        self.watched = api.changes.len();
    }

    fn push(&mut self, uid: Option<PodUid>, worker: u32, task: Task) {
        self.operations.push(Operation {
            uid,
            worker,
            task,
            answer: None,
        });
    }
}
