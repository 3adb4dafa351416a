//! A node, its runtime and the API, driven one step at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ::api::decoding::Decoded;
use agent_sandbox_node::pod_lifecycle::{EventReason, FailureReason, Verdict, WaitingReason};
use agent_sandbox_node::pod_machine::publication::Answer;
use agent_sandbox_node::pod_machine::{
    Command, Event, NotPrepared, PodMachine, ProbeKind, ProbeStage, ProbeVerdict, StartFailure,
};
use agent_sandbox_node::pod_registry::{self, PodRegistry};
use agent_sandbox_node::pod_uid::PodUid;
use agent_sandbox_node::runtime::{RecoveredContainer, StartError, Termination};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::runtime::watcher;

use crate::api::{Api, Change, is_over, uid_of};
use crate::random::Random;
use crate::runtime::Runtime;

const NODE: &str = "node";

/// The name of every init container.
const INIT: &str = "i";

/// Whether things may go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Faults {
    Injected,
    Absent,
}

/// What a task of the node does. It takes effect at one time and is answered at another, with anything in between.
#[derive(Debug)]
enum Task {
    CreateSandbox,
    Start {
        container: String,
        run: u32,
        crashes: u32,
        is_cancelled: bool,
    },
    Wait {
        container: String,
        run: u32,
    },
    Signal {
        container: String,
        run: u32,
    },
    Kill {
        container: String,
        run: u32,
    },
    Free,
    Publish(Box<PodStatus>),
    Remove,
    DeleteObject,
    Recover {
        not_before: Timestamp,
    },
    RemoveOrphan {
        containers: Option<Vec<RecoveredContainer>>,
    },
    Sweep,
    /// A report that is under way.
    Report,
}

/// What a task answers.
#[derive(Debug)]
enum Answered {
    Event(Event),
    Nothing,
    Recovered,
    Orphan,
    Swept(Vec<PodUid>),
}

#[derive(Debug)]
struct Operation {
    uid: Option<PodUid>,
    /// Which worker asked for it.
    worker: u32,
    task: Task,
    answer: Option<Answered>,
}

impl Operation {
    /// Whether it goes on when its worker is lost.
    fn is_action(&self) -> bool {
        !matches!(
            self.task,
            Task::Wait { .. } | Task::Signal { .. } | Task::Report
        )
    }
}

/// A pod's worker.
#[derive(Debug)]
struct Worker {
    number: u32,
    machine: PodMachine,
    events: VecDeque<Event>,
    /// The last change that the watch reported, if the worker has not looked at it yet.
    update: Option<Option<Arc<Pod>>>,
    wake_at: Option<Timestamp>,
    /// The probes that run, by container: the run, the stage, and whether they have passed.
    probes: BTreeMap<String, (u32, ProbeStage, bool)>,
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
    /// Pods that the node was told to end.
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
        let running: Vec<(PodUid, String, u32)> = self.runtime.running();
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
            worker.machine.observe(update.as_deref(), now);
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
                    let address = "10.0.0.1".to_owned();
                    let now = self.now;
                    let machine =
                        PodMachine::new(uid.clone(), &pod, address, recovered, refusal, now);
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
                        worker.update = Some(pod);
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

    /// A container is stopped only if its pod ends, or if a probe of this very run failed.
    fn check_stop(&self, uid: &PodUid, container: &str, run: u32) {
        let pod = self.node.workers[uid].machine.pod();
        let spec = pod.spec.as_ref().unwrap();
        let failed = (uid.clone(), container.to_owned(), run);
        assert!(
            pod.metadata.deletion_timestamp.is_some()
                || spec.active_deadline_seconds.is_some()
                || is_over(pod)
                || self.condemned.contains(uid)
                || spec.restart_policy.as_deref() != Some("Always")
                || self.unhealthy.contains(&failed),
            "{uid}/{container}/{run} is stopped for no reason"
        );
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

    /// A task goes on: it takes effect, or its answer arrives. False if none can.
    pub fn operate(&mut self) -> bool {
        let ready: Vec<usize> = (0..self.node.operations.len())
            .filter(|index| self.is_ready(&self.node.operations[*index]))
            .collect();
        let Some(index) = self.random.choose(&ready) else {
            return false;
        };
        if self.node.operations[index].answer.is_some() {
            let operation = self.node.operations.remove(index);
            self.answered(operation);
        } else {
            let answer = self.carry_out(index);
            self.node.operations[index].answer = Some(answer);
        }
        true
    }

    fn is_ready(&self, operation: &Operation) -> bool {
        let is_before = |other: &&Operation| {
            other.uid == operation.uid && other.answer.is_none() && other.is_action()
        };
        let mut others = self.node.operations.iter().filter(is_before);
        match (&operation.task, &operation.uid) {
            _ if operation.answer.is_some() => true,
            (Task::Wait { container, run }, Some(uid)) => {
                let run = self.runtime.run(uid, container, *run);
                run.is_none_or(|run| run.termination.is_some())
            }
            // Freed and removed one after the other.
            (Task::Remove, _) => !others.any(|other| matches!(other.task, Task::Free)),
            // Actions of the worker that was lost end first.
            (Task::Recover { not_before }, _) => {
                *not_before <= self.now
                    && !others.any(|other| !matches!(other.task, Task::Recover { .. }))
            }
            _ => true,
        }
    }

    fn carry_out(&mut self, index: usize) -> Answered {
        let uid = self.node.operations[index].uid.clone();
        let task = std::mem::replace(&mut self.node.operations[index].task, Task::Report);
        let Some(uid) = uid else {
            let found = self.runtime.pods.keys().cloned().collect();
            self.node.operations[index].task = task;
            return Answered::Swept(found);
        };
        let answer = self.effect(&uid, &task);
        self.trace(|| format!("{uid}: {} -> {}", brief(&task), brief(&answer)));
        self.node.operations[index].task = task;
        answer
    }

    fn effect(&mut self, uid: &PodUid, task: &Task) -> Answered {
        let now = self.now;
        match task {
            Task::CreateSandbox => {
                if self.fails(20) {
                    if self.random.percent(50) {
                        self.runtime.create_sandbox(uid);
                    }
                    return Answered::Event(Event::SandboxWaits(NotPrepared {
                        event: Some(EventReason::FailedCreatePodSandBox),
                        reason: WaitingReason::FailedCreatePodSandBox,
                        message: "no address".to_owned(),
                        awaits: None,
                    }));
                }
                let sandbox = self.runtime.create_sandbox(uid);
                self.attached.insert(uid.clone());
                Answered::Event(Event::SandboxReady(sandbox))
            }
            Task::Start {
                container,
                run,
                crashes,
                is_cancelled,
            } => {
                let event = self.start(uid, container, *run, *crashes, *is_cancelled);
                Answered::Event(event)
            }
            Task::Wait { container, run } => {
                let found = self.runtime.run(uid, container, *run);
                let termination = found.and_then(|run| run.termination.clone());
                let termination = termination
                    .unwrap_or_else(|| Termination::not_started("unknown".to_owned(), now));
                Answered::Event(Event::Ended {
                    container: container.clone(),
                    run: *run,
                    termination,
                })
            }
            Task::Signal { container, run } => {
                if !self.fails(30) {
                    self.runtime.end(uid, container, *run, 143, now);
                }
                Answered::Nothing
            }
            Task::Kill { container, run } => {
                if !self.fails(30) {
                    self.runtime.end(uid, container, *run, 137, now);
                }
                Answered::Nothing
            }
            Task::Free => {
                let succeeded = !self.fails(20);
                if succeeded {
                    self.runtime.free(uid);
                    self.attached.remove(uid);
                }
                Answered::Event(Event::SandboxFreed { succeeded })
            }
            Task::Publish(status) => Answered::Event(Event::Published(self.publish(uid, status))),
            Task::Remove => {
                let succeeded = !self.fails(20);
                if succeeded {
                    self.remove(uid);
                }
                Answered::Event(Event::Removed { succeeded })
            }
            Task::DeleteObject => {
                let succeeded = self.delete_object(uid);
                Answered::Event(Event::ObjectDeleted { succeeded })
            }
            Task::Recover { .. } => Answered::Recovered,
            Task::RemoveOrphan { containers } => {
                let found = self.runtime.recover_pod(uid);
                let found = found.map_or_else(Vec::new, |pod| pod.containers);
                for container in containers.as_ref().unwrap_or(&found) {
                    let id = &container.id;
                    self.runtime.end(uid, &id.container, id.attempt, 137, now);
                }
                if !self.fails(20) {
                    self.remove(uid);
                }
                Answered::Orphan
            }
            Task::Sweep | Task::Report => Answered::Nothing,
        }
    }

    fn start(
        &mut self,
        uid: &PodUid,
        container: &str,
        run: u32,
        crashes: u32,
        is_cancelled: bool,
    ) -> Event {
        let now = self.now;
        let error = if is_cancelled && self.random.percent(70) {
            Some(StartError::GivenUp)
        } else if self.fails(10) {
            Some(StartError::Configuration("no such secret".to_owned()))
        } else {
            None
        };
        let not_started = |failure| Event::NotStarted {
            container: container.to_owned(),
            run,
            failure,
            awaits: None,
        };
        if let Some(error) = error {
            return not_started(StartFailure::Start(error));
        }
        if self.fails(10) {
            return not_started(StartFailure::Image {
                reason: WaitingReason::ErrImagePull,
                message: "no such image".to_owned(),
            });
        }
        let message = "no such command".to_owned();
        let failed = self
            .fails(5)
            .then(|| Termination::not_started(message.clone(), now));
        let is_failed = failed.is_some();
        let runtime = &mut self.runtime;
        let started = runtime.start(uid, container, run, crashes, failed, now);
        if is_failed {
            let error = StartError::Command { message, code: 127 };
            return not_started(StartFailure::Start(error));
        }
        Event::Started {
            container: container.to_owned(),
            run,
            started,
        }
    }

    fn publish(&mut self, uid: &PodUid, status: &PodStatus) -> Answer {
        if self.fails(10) {
            return Answer::Failed;
        }
        if let Some(pod) = self.api.find(uid)
            && is_over(pod)
        {
            let phase = pod.status.as_ref().and_then(|before| before.phase.clone());
            assert_eq!(status.phase, phase, "{uid}: an end does not stand");
        }
        if !self.api.write_status(uid, status) {
            return Answer::NoSuchPod;
        }
        if self.fails(10) {
            // The write was done; its answer is lost.
            return Answer::Failed;
        }
        Answer::Written
    }

    fn remove(&mut self, uid: &PodUid) {
        if let Some(pod) = self.api.find(uid) {
            let is_deleted = pod.metadata.deletion_timestamp.is_some();
            assert!(is_deleted, "{uid} is removed while the API has it");
        }
        self.runtime.remove(uid);
        self.attached.remove(uid);
    }

    fn delete_object(&mut self, uid: &PodUid) -> bool {
        if self.fails(10) {
            return false;
        }
        let Some(pod) = self.api.find(uid).cloned() else {
            return true;
        };
        self.check_ends_are_published(uid, &pod);
        assert!(!self.runtime.pods.contains_key(uid), "{uid} is left behind");
        self.api.remove(pod.metadata.name.as_ref().unwrap());
        !self.fails(10)
    }

    /// When the node deletes a pod's object, the API has the end of every container.
    fn check_ends_are_published(&self, uid: &PodUid, pod: &Pod) {
        let status = pod.status.clone().unwrap_or_default();
        let statuses = [
            status.container_statuses,
            status.init_container_statuses,
            status.ephemeral_container_statuses,
        ];
        let statuses: Vec<_> = statuses.into_iter().flatten().flatten().collect();
        for ((_, container), code) in self.runtime.ends.iter().filter(|((of, _), _)| of == uid) {
            let published = statuses.iter().find(|status| status.name == *container);
            let published = published.unwrap_or_else(|| panic!("{uid}/{container} has no status"));
            let states = [&published.state, &published.last_state];
            let codes = states.into_iter().flatten();
            let codes = codes.filter_map(|state| Some(state.terminated.as_ref()?.exit_code));
            let codes: Vec<i32> = codes.collect();
            assert!(
                codes.contains(code),
                "{uid}/{container} ended with {code}, and the API has {codes:?}"
            );
        }
    }

    fn answered(&mut self, operation: Operation) {
        let (uid, answer) = (operation.uid, operation.answer);
        match (answer, uid) {
            (Some(Answered::Event(event)), Some(uid)) => {
                let worker = self.node.workers.get_mut(&uid);
                if let Some(worker) = worker.filter(|one| one.number == operation.worker) {
                    worker.events.push_back(event);
                }
            }
            (Some(Answered::Recovered), Some(uid)) => {
                let found = self.runtime.recover_pod(&uid);
                let reported = self.api.find(&uid).and_then(|pod| pod.status.clone());
                let registry = &mut self.node.registry;
                registry.recovered(uid, reported, found, self.now);
                self.perform_of_registry();
            }
            (Some(Answered::Orphan), Some(uid)) => self.node.registry.worker_ended(&uid),
            (Some(Answered::Swept(found)), None) => {
                self.node.registry.swept(found);
                self.perform_of_registry();
            }
            _ => {}
        }
    }

    /// Lets everything come to rest, without faults and without anything new.
    pub fn settle(&mut self) {
        self.faults = Faults::Absent;
        for _ in 0..3 {
            self.rest();
            self.sweep();
        }
        self.rest();
    }

    fn rest(&mut self) {
        for _ in 0..2000 {
            let is_moving = self.operate() || self.watch() || self.work();
            if is_moving || self.pass_probes() || self.complete_init() {
                continue;
            }
            let wakes = self.node.workers.values().filter_map(|one| one.wake_at);
            let recoveries = self.node.operations.iter();
            let recoveries = recoveries.filter_map(|operation| match operation.task {
                Task::Recover { not_before } => Some(not_before),
                _ => None,
            });
            let Some(next) = wakes.chain(recoveries).min() else {
                return;
            };
            self.now = self.now.max(next);
        }
        panic!("the node does not come to rest");
    }

    /// Init containers that run complete. False if there are none.
    fn complete_init(&mut self) -> bool {
        let running = self.runtime.running().into_iter();
        let init: Vec<_> = running.filter(|(_, name, _)| name == INIT).collect();
        for (uid, container, run) in &init {
            self.runtime.end(uid, container, *run, 0, self.now);
        }
        !init.is_empty()
    }

    /// Every probe that has not passed yet passes. False if there is none.
    fn pass_probes(&mut self) -> bool {
        let mut passing = Vec::new();
        for (uid, worker) in &mut self.node.workers {
            for (container, (run, stage, passed)) in &mut worker.probes {
                if !*passed {
                    *passed = true;
                    passing.push((uid.clone(), container.clone(), *run, *stage));
                }
            }
        }
        let is_any = !passing.is_empty();
        for (uid, container, run, stage) in passing {
            self.probe(&uid, container, run, stage, true);
        }
        is_any
    }

    /// What holds once everything has come to rest.
    pub fn check_settled(&self) {
        for pod in self.api.pods.values() {
            let uid = uid_of(pod);
            assert!(pod.metadata.deletion_timestamp.is_none(), "{uid} stays");
            self.check_pod(&uid, pod);
        }
        let known: BTreeSet<PodUid> = self.api.pods.values().map(|pod| uid_of(pod)).collect();
        for uid in self.runtime.pods.keys() {
            assert!(known.contains(uid), "{uid} is left on the machine");
        }
        for uid in &self.attached {
            assert!(known.contains(uid), "{uid} is left in the network's rules");
        }
        let workers: BTreeSet<PodUid> = self.node.workers.keys().cloned().collect();
        assert_eq!(workers, known, "a worker for every pod");
    }

    /// The API's status of a pod is the runtime's truth, and what should run runs.
    fn check_pod(&self, uid: &PodUid, pod: &Pod) {
        let status = pod.status.clone().unwrap_or_default();
        let spec = pod.spec.as_ref().unwrap();
        let machine = self.runtime.pods.get(uid);
        for published in status.container_statuses.iter().flatten() {
            let container = &published.name;
            let Some(run) = machine.and_then(|pod| pod.last_run(container)) else {
                assert!(is_over(pod), "{uid}/{container} never ran: {status:?}");
                continue;
            };
            let state = published.state.as_ref().unwrap();
            let attempt = u32::try_from(published.restart_count).unwrap();
            assert_eq!(attempt, run.attempt, "{uid}/{container} counts its runs");
            match &run.termination {
                None => assert!(state.running.is_some(), "{uid}/{container} runs: {state:?}"),
                Some(end) => {
                    // The next run of a container whose pod ended meanwhile may have been refused.
                    let last = published.last_state.as_ref().filter(|_| is_over(pod));
                    let state = Some(state).filter(|state| state.waiting.is_none()).or(last);
                    let ended = state.and_then(|state| state.terminated.as_ref());
                    let code = ended.map(|ended| ended.exit_code);
                    assert_eq!(code, Some(end.exit_code), "{uid}/{container}: {state:?}");
                    let restarts = match spec.restart_policy.as_deref() {
                        Some("Never") => false,
                        Some("OnFailure") => end.exit_code != 0,
                        _ => true,
                    };
                    assert!(
                        !restarts || is_over(pod),
                        "{uid}/{container} is not restarted"
                    );
                }
            }
        }
        let running = machine.map_or(0, |pod| pod.running().count());
        if is_over(pod) {
            assert_eq!(running, 0, "{uid} is over and runs");
            let is_freed = machine.is_none_or(|pod| pod.sandbox.is_none());
            assert!(is_freed, "{uid} is over and holds its sandbox");
            assert!(
                !self.attached.contains(uid),
                "{uid} is over and in the rules"
            );
        } else {
            assert!(running > 0, "{uid} does not run: {status:?}");
            assert!(self.attached.contains(uid), "{uid} runs without its rules");
            let is_all_running = running
                == spec.containers.len()
                    + spec
                        .init_containers
                        .iter()
                        .flatten()
                        .filter(|init| init.restart_policy.is_some())
                        .count();
            let is_ready = status
                .conditions
                .iter()
                .flatten()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True");
            assert!(
                is_ready || !is_all_running,
                "{uid} is not ready: {status:?}"
            );
        }
    }

    /// Some time passes.
    pub fn wait(&mut self) {
        let milliseconds = [1, 60, 200, 2_000, 12_000, 310_000, 700_000];
        let milliseconds = self.random.choose(&milliseconds).unwrap();
        self.now += Duration::from_millis(milliseconds);
    }
}

/// One line of what may be a whole status.
fn brief(what: &impl std::fmt::Debug) -> String {
    let text = format!("{what:?}");
    let phase = text
        .find(" phase: ")
        .map(|at| &text[at..text.len().min(at + 24)]);
    format!(
        "{}{}",
        &text[..text.len().min(120)],
        phase.unwrap_or_default()
    )
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
