//! What tasks of the node do to the runtime and the API, and how their answers come back.

use agent_sandbox_node::pod_lifecycle::{EventReason, WaitingReason};
use agent_sandbox_node::pod_machine::publication::Answer;
use agent_sandbox_node::pod_machine::{Event, NotPrepared, StartFailure};
use agent_sandbox_node::pod_uid::PodUid;
use agent_sandbox_node::runtime::{FreezerState, RecoveredContainer, StartError, Termination};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::PodStatus;

use super::World;
use crate::api::is_over;

/// What a task of the node does. It takes effect at one time and is answered at another, with anything in between.
#[derive(Debug)]
pub(super) enum Task {
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
    Freeze,
    Thaw,
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
pub(super) enum Answered {
    Event(Event),
    Nothing,
    Recovered,
    Orphan,
    Swept(Vec<PodUid>),
}

#[derive(Debug)]
pub(super) struct Operation {
    pub uid: Option<PodUid>,
    /// Which worker asked for it.
    pub worker: u32,
    pub task: Task,
    pub answer: Option<Answered>,
}

impl Operation {
    /// Whether it goes on when its worker is lost.
    pub fn is_action(&self) -> bool {
        !matches!(
            self.task,
            Task::Wait { .. } | Task::Signal { .. } | Task::Report
        )
    }
}

impl World {
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
                // A frozen process does not notice a signal.
                if !self.runtime.is_frozen(uid) && !self.fails(30) {
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
            Task::Freeze => Answered::Event(Event::Frozen(self.freeze(uid))),
            Task::Thaw => {
                if self.fails(20) {
                    return Answered::Event(Event::Thawed(Err("no such file".to_owned())));
                }
                self.runtime.set_freezer(uid, FreezerState::Thawed);
                Answered::Event(Event::Thawed(Ok(())))
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

    fn freeze(&mut self, uid: &PodUid) -> Result<(), String> {
        self.check_probes_are_paused(uid);
        if self.fails(20) {
            let left = [FreezerState::Thawed, FreezerState::Partly];
            let left = self.random.choose(&left).unwrap();
            self.runtime.set_freezer(uid, left);
            return Err("a process waits for the disk".to_owned());
        }
        self.runtime.set_freezer(uid, FreezerState::Frozen);
        Ok(())
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
