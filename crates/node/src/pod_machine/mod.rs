//! One pod as a state machine without I/O: events come in, commands go out.
//!
//! ```text
//!   watch: pod changed ─┐                            ┌─► commands: create the sandbox, start, stop, kill,
//!   events of commands ─┼─► PodMachine ─► decide ────┤              publish the status, remove, delete
//!   time ───────────────┘    (pod_lifecycle)         └─► when to advance again
//! ```
//!
//! [`crate::pod_worker`] carries commands out and reports back with events; a simulation does the same with a fake runtime and API.
//! The machine performs no I/O and reads no clock.

mod event;
mod freezing;
pub mod publication;
mod recovery;
mod status_events;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use saturating_time::SaturatingTime;

pub use self::event::{Event, NotPrepared, StartFailure};
use self::publication::{Publication, RETRY};
use crate::awaited_objects::Awaited;
use crate::pod_lifecycle::{
    self, Action, ContainerState, EventReason, Freezer, KILL_AGAIN, Observed, Phase, Sandbox,
    Verdict, container_of,
};
use crate::pod_uid::PodUid;
pub use crate::probes::{Kind as ProbeKind, Verdict as ProbeVerdict};
use crate::runtime::{PodSandbox, RecoveredPod};
pub use event_recorder::Severity;

/// Something that the machine wants done. A command that says so is answered by an [`Event`].
#[derive(Debug)]
pub enum Command {
    /// Enforce the network policies of a pod whose sandbox was found.
    AttachNetwork(PodSandbox),
    /// Keep the pod's volumes equal to the API objects that they show.
    RefreshVolumes(PodSandbox),
    /// The pod has changed; its volumes may show fields of it.
    RefreshPod,
    /// Answered by [`Event::SandboxReady`] or [`Event::SandboxWaits`].
    CreateSandbox,
    /// Wait for a change of these objects, in place of earlier ones; `container` is absent for the pod's sandbox. Answered by
    /// [`Event::ObjectsChanged`].
    AwaitObjects {
        container: Option<String>,
        awaited: Option<Awaited>,
    },
    /// Answered by [`Event::Started`] or [`Event::NotStarted`].
    StartContainer {
        container: String,
        run: u32,
        crashes: u32,
        sandbox: PodSandbox,
    },
    /// Give up the start of a container. The start itself is answered.
    CancelStart {
        container: String,
    },
    /// Answered by [`Event::Ended`].
    WaitContainer {
        container: String,
        run: u32,
    },
    /// Answered by [`Event::Throttled`] on every change.
    WatchCpu {
        container: String,
        run: u32,
    },
    /// Answered by [`Event::HookFailed`] if it fails.
    RunPostStartHook {
        container: String,
        run: u32,
    },
    /// Run a container's startup probe, or the others. Answered by [`Event::Probed`] on every change.
    StartProbes {
        container: String,
        run: u32,
        stage: ProbeStage,
    },
    StopProbes {
        container: String,
    },
    /// Run the container's pre-stop hook for at most the grace period, then signal it.
    StopContainer {
        container: String,
        run: u32,
        grace: Duration,
    },
    KillContainer {
        container: String,
        run: u32,
    },
    /// Freeze all processes of the pod. Answered by [`Event::Frozen`].
    Freeze,
    /// Let all processes of the pod run again. Answered by [`Event::Thawed`].
    Thaw,
    /// Free what the pod holds of the machine, except for its logs. Answered by [`Event::SandboxFreed`].
    FreeSandbox,
    /// Answered by [`Event::Published`].
    PublishStatus(Box<PodStatus>),
    /// Remove everything of the pod from the machine. Answered by [`Event::Removed`].
    Remove,
    /// Delete the pod's object, unless another pod has its name by now. Answered by [`Event::ObjectDeleted`].
    DeleteObject,
    Emit(PodEvent),
}

/// Which probes of a container run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeStage {
    /// The startup probe, if there is one.
    Startup,
    /// Liveness and readiness.
    Running,
}

/// An event of the Kubernetes API about the pod.
#[derive(Debug, PartialEq, Eq)]
pub struct PodEvent {
    pub container: Option<String>,
    pub severity: Severity,
    pub reason: EventReason,
    pub note: String,
}

/// How far the removal of the pod has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Removal {
    NotBegun,
    Removing,
    DeletingObject,
    RetryAt(Timestamp),
    Done,
}

/// What every pod of a node needs to know of the node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFacts {
    pub address: String,
    /// Why the node cannot freeze pods, if it cannot.
    pub cannot_freeze: Option<String>,
}

/// One pod of the node.
#[derive(Debug)]
pub struct PodMachine {
    uid: PodUid,
    pod: Pod,
    node: NodeFacts,
    accepted_at: Timestamp,
    sandbox: Sandbox,
    freezer: Freezer,
    containers: BTreeMap<String, ContainerState>,
    verdict: Option<Verdict>,
    publication: Publication,
    /// When the pod's sandbox is freed again, after it could not be.
    free_again_at: Option<Timestamp>,
    removal: Removal,
    commands: Vec<Command>,
}

impl PodMachine {
    /// Takes a pod on, with what an earlier run of the node left of it. A pod with a `refusal` ends before it begins.
    pub fn new(
        uid: PodUid,
        pod: &Pod,
        node: NodeFacts,
        recovered: Option<RecoveredPod>,
        refusal: Option<Verdict>,
        now: Timestamp,
    ) -> Self {
        let status = pod.status.as_ref();
        let started = status.and_then(|status| status.start_time.as_ref());
        let accepted_at = started.map_or(now, |time| time.0);
        let mut machine = Self {
            uid,
            pod: pod.clone(),
            node,
            accepted_at,
            sandbox: Sandbox::Missing,
            freezer: Freezer::Thawed,
            containers: BTreeMap::new(),
            verdict: None,
            publication: Publication::new(pod.status.clone(), accepted_at),
            free_again_at: None,
            removal: Removal::NotBegun,
            commands: Vec::new(),
        };
        match recovered {
            Some(recovered) => machine.adopt(recovered, now),
            None => machine.warn_of_unsupported(None, &crate::unsupported::unsupported(pod)),
        }
        if let Some(refusal) = refusal {
            machine.end_pod(refusal);
        }
        machine
    }

    pub fn uid(&self) -> &PodUid {
        &self.uid
    }

    /// The pod as last observed, with the status that this node gives it.
    pub fn pod(&self) -> &Pod {
        &self.pod
    }

    /// The pod's first address; unspecified while it has no sandbox.
    pub fn address(&self) -> IpAddr {
        match &self.sandbox {
            Sandbox::Ready(sandbox) => sandbox.address.into(),
            _ => Ipv4Addr::UNSPECIFIED.into(),
        }
    }

    /// Whether nothing is left of the pod, here and in the API.
    pub fn is_gone(&self) -> bool {
        self.removal == Removal::Done
    }

    /// The commands since the last call, in order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// Takes in another state of the pod in the API; absent if the pod was deleted.
    pub fn observe(&mut self, pod: Option<&Pod>, now: Timestamp) {
        let Some(pod) = pod else {
            self.publication.pod_is_gone();
            self.pod.metadata.deletion_timestamp = Some(Time(now));
            self.pod.metadata.deletion_grace_period_seconds = Some(0);
            return;
        };
        let mut pod = pod.clone();
        pod.status = self.publication.merged(pod.status);
        let before = std::mem::replace(&mut self.pod, pod);
        self.commands.push(Command::RefreshPod);
        for added in crate::unsupported::added(&before, &self.pod) {
            let unsupported = crate::unsupported::in_added(&self.pod, &added);
            self.warn_of_unsupported(Some(&added.name), &unsupported);
        }
    }

    /// Decides what to do now, and returns when to decide again if nothing happens before.
    pub fn advance(&mut self, now: Timestamp) -> Option<Timestamp> {
        let plan = self.decide(now);
        let (last, others): (Vec<_>, Vec<_>) = plan
            .actions
            .into_iter()
            .partition(|action| *action == Action::Finish);
        for action in others {
            self.perform(action, now);
        }
        self.free_again(now);
        let before = self.publication.newest();
        let events = status_events::between(&self.uid, &self.pod, before, &plan.status);
        self.commands.extend(events.into_iter().map(Command::Emit));
        self.publication.decide(plan.status);
        self.publish(now);
        for action in last {
            self.perform(action, now);
        }
        let removal = match self.removal {
            // A removal that is due waits for the publication.
            Removal::RetryAt(at) if at > now => Some(at),
            _ => None,
        };
        let mut wakes = [plan.wake_at, removal, None, None];
        if !self.is_removing() {
            wakes[2] = self.publication.wake_at();
            wakes[3] = self.free_again_at;
        }
        wakes.into_iter().flatten().min()
    }

    fn decide(&self, now: Timestamp) -> pod_lifecycle::Plan {
        let observed = Observed {
            uid: &self.uid,
            pod: &self.pod,
            sandbox: &self.sandbox,
            containers: &self.containers,
            verdict: self.verdict.as_ref(),
            accepted_at: self.accepted_at,
            node_address: self.node.address.clone(),
            freezer: &self.freezer,
            cannot_freeze: self.node.cannot_freeze.as_deref(),
        };
        pod_lifecycle::decide(&observed, now)
    }

    fn free_again(&mut self, now: Timestamp) {
        if !self.is_removing() && self.free_again_at.is_some_and(|at| at <= now) {
            self.free_again_at = None;
            self.commands.push(Command::FreeSandbox);
        }
    }

    fn is_removing(&self) -> bool {
        matches!(self.removal, Removal::Removing | Removal::DeletingObject)
    }

    fn publish(&mut self, now: Timestamp) {
        if self.is_removing() {
            return;
        }
        if let Some(status) = self.publication.next(now) {
            // The next decision starts from what is being published, which keeps the transition times of conditions.
            self.pod.status = Some(status.clone());
            self.commands.push(Command::PublishStatus(Box::new(status)));
        }
    }

    fn perform(&mut self, action: Action, now: Timestamp) {
        match action {
            Action::CreateSandbox => {
                self.sandbox = Sandbox::Creating;
                self.commands.push(Command::CreateSandbox);
            }
            Action::Start {
                container,
                run,
                crashes,
            } => self.start(container, run, crashes),
            Action::Stop {
                container,
                grace,
                why,
            } => self.stop(container, grace, &why, now),
            Action::Kill { container } => self.kill(container, now),
            Action::Freeze => self.freeze(),
            Action::Thaw => {
                self.freezer = Freezer::Thawing;
                self.commands.push(Command::Thaw);
            }
            Action::StopSandbox => {
                let address = match &self.sandbox {
                    Sandbox::Ready(sandbox) => Some(sandbox.clone()),
                    _ => None,
                };
                self.sandbox = Sandbox::Stopped { address };
                // No process is left that could be frozen.
                self.freezer = Freezer::Thawed;
                self.commands.push(Command::FreeSandbox);
            }
            Action::Finish => self.remove(now),
        }
    }

    fn start(&mut self, container: String, run: u32, crashes: u32) {
        let Sandbox::Ready(sandbox) = self.sandbox.clone() else {
            return;
        };
        let state = self.containers.entry(container.clone()).or_default();
        if let Phase::Ended(termination) = &state.phase {
            state.previous = Some(termination.clone());
        }
        state.phase = Phase::Starting;
        state.runs = run + 1;
        self.commands.push(Command::StartContainer {
            container,
            run,
            crashes,
            sandbox,
        });
    }

    fn stop(&mut self, container: String, grace: Duration, why: &str, now: Timestamp) {
        let Some(state) = self.containers.get_mut(&container) else {
            return;
        };
        let Phase::Running { started_at } = state.phase else {
            return;
        };
        state.phase = Phase::Stopping {
            started_at,
            kill_at: now.later_by(grace),
        };
        let run = state.runs.saturating_sub(1);
        if self.pod.metadata.deletion_timestamp.is_some() {
            state.ready = false;
        }
        self.commands.push(Command::StopProbes {
            container: container.clone(),
        });
        let note = format!("Stopping container {container}: {why}");
        self.emit(
            Some(&container),
            Severity::Normal,
            EventReason::Killing,
            note,
        );
        self.commands.push(Command::StopContainer {
            container,
            run,
            grace,
        });
    }

    fn kill(&mut self, container: String, now: Timestamp) {
        let Some(state) = self.containers.get_mut(&container) else {
            return;
        };
        if state.phase == Phase::Starting {
            self.commands.push(Command::CancelStart { container });
            return;
        }
        if let Phase::Running { started_at } | Phase::Stopping { started_at, .. } = state.phase {
            state.phase = Phase::Stopping {
                started_at,
                kill_at: now.later_by(KILL_AGAIN),
            };
        }
        let run = state.runs.saturating_sub(1);
        self.commands
            .push(Command::KillContainer { container, run });
    }

    /// Begins to remove the pod once its end is published. A failure is retried by deciding again.
    fn remove(&mut self, now: Timestamp) {
        let is_due = match self.removal {
            Removal::NotBegun => true,
            Removal::RetryAt(at) => at <= now,
            Removal::Removing | Removal::DeletingObject | Removal::Done => false,
        };
        if is_due && self.publication.is_complete() {
            self.removal = Removal::Removing;
            self.commands.push(Command::Remove);
        }
    }

    /// Takes in how the current step of the removal ended.
    fn removal_went_on(&mut self, succeeded: bool, now: Timestamp) {
        self.removal = match self.removal {
            _ if !succeeded => Removal::RetryAt(now.later_by(RETRY)),
            Removal::Removing if !self.publication.is_gone() => {
                self.commands.push(Command::DeleteObject);
                Removal::DeletingObject
            }
            _ => Removal::Done,
        };
    }

    /// Ends the pod for a reason of the node's.
    fn end_pod(&mut self, verdict: Verdict) {
        if self.verdict.is_some() || self.pod.metadata.deletion_timestamp.is_some() {
            return;
        }
        let (reason, message) = (verdict.reason.event(), verdict.message.clone());
        self.emit(None, Severity::Warning, reason, message);
        self.verdict = Some(verdict);
    }

    /// A container runs: waits for its end, runs its hook and its probes. A container that was `found` running is not new: its hook
    /// has run, and it keeps what its probes had passed.
    fn container_runs(&mut self, container: &str, run: u32, found: Option<ProbeResults>) {
        let name = || container.to_owned();
        self.commands.push(Command::WaitContainer {
            container: name(),
            run,
        });
        let Some(definition) = container_of(&self.pod, container) else {
            return;
        };
        let passed = found.unwrap_or_default();
        let started = passed.started || definition.startup_probe.is_none();
        if let Some(state) = self.containers.get_mut(container) {
            state.started = started;
            state.ready = passed.ready || definition.readiness_probe.is_none();
        }
        let resources = definition.resources.as_ref();
        let limits = resources.and_then(|resources| resources.limits.as_ref());
        if limits.is_some_and(|limits| limits.contains_key("cpu")) {
            self.commands.push(Command::WatchCpu {
                container: name(),
                run,
            });
        }
        let lifecycle = definition.lifecycle.as_ref();
        let hook = lifecycle.and_then(|lifecycle| lifecycle.post_start.as_ref());
        if hook.is_some() && found.is_none() {
            self.commands.push(Command::RunPostStartHook {
                container: name(),
                run,
            });
        }
        self.start_probes(container);
    }

    /// Warns the user of fields of the pod, or of a container that was added to it, that have no effect.
    fn warn_of_unsupported(&mut self, container: Option<&str>, fields: &[String]) {
        if !fields.is_empty() {
            // One event for all of them: events of one reason are counted as one, whatever their notes.
            let note = fields.join("; ");
            self.emit(container, Severity::Warning, EventReason::Unsupported, note);
        }
    }

    fn emit(
        &mut self,
        container: Option<&str>,
        severity: Severity,
        reason: EventReason,
        note: String,
    ) {
        self.commands.push(Command::Emit(PodEvent {
            container: container.map(str::to_owned),
            severity,
            reason,
            note,
        }));
    }
}

/// Which probes a run of a container had passed.
#[derive(Debug, Clone, Copy, Default)]
struct ProbeResults {
    /// Its startup probe had passed.
    started: bool,
    /// Its readiness probe passed.
    ready: bool,
}
