//! The pods of the node and who works on each, as a state machine without I/O: events come in, commands go out.
//!
//! ```text
//!  API: pod bound ──► worker ──► pod removed, worker ends
//!                     ▲    │ panics
//!                     │    ▼
//!                     └─ recovered from the API's pod and what the runtime finds running
//!
//!  every so often:  on this machine, but without a worker, twice in a row ──► processes ended, files removed
//! ```
//!
//! [`crate::dispatcher`] carries commands out and reports back; a simulation does the same. The registry performs no I/O and reads no
//! clock.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use api::decoding::{Decoded, Problem, Unreadable};
use api::labels::is_mirror;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::Resource;
use kube::runtime::watcher::Event;
use saturating_time::SaturatingTime;

use crate::pod_lifecycle::{BACK_OFF_FORGET, FailureReason, Verdict, back_off};
use crate::pod_uid::PodUid;
use crate::runtime::{RecoveredContainer, RecoveredPod};
use api::readable::{shell, warn};

/// Something that the registry wants done.
#[derive(Debug)]
pub enum Command {
    /// Answered by [`PodRegistry::worker_ended`] or [`PodRegistry::panicked`].
    StartWorker {
        uid: PodUid,
        pod: Arc<Pod>,
        recovered: Option<RecoveredPod>,
        refusal: Option<Verdict>,
    },
    /// The pod has changed in the API; absent if it was deleted.
    UpdateWorker { uid: PodUid, pod: Option<Arc<Pod>> },
    /// Find out, after a pause, what runs of a pod whose worker panicked, and its status in the API. Answered by [`PodRegistry::recovered`].
    Recover {
        uid: PodUid,
        pod: Option<Arc<Pod>>,
        pause: Duration,
    },
    /// End and remove everything of a pod that the API does not have. The runtime knows its containers unless they are given. Answered
    /// by [`PodRegistry::worker_ended`].
    RemoveOrphan {
        uid: PodUid,
        containers: Option<Vec<RecoveredContainer>>,
    },
    /// End and remove everything of a pod that is being deleted and cannot be decoded, then delete its object. Answered by
    /// [`PodRegistry::worker_ended`].
    EndUnreadable {
        uid: PodUid,
        recovered: Option<RecoveredPod>,
        object: Box<Unreadable>,
    },
    /// Report to its owner that a pod cannot be decoded.
    ReportUnreadable(Box<Unreadable>),
    /// Every pod of the node is attached to the network, so that rules for others can go.
    AllAttached,
}

/// A pod with a worker.
#[derive(Debug)]
struct Worker {
    /// The pod as last observed; absent once it is deleted.
    pod: Option<Arc<Pod>>,
    began: Timestamp,
    /// How often the worker panicked in a row, each time too soon to forget the time before.
    panics: u32,
}

/// The pods of the node.
#[derive(Debug)]
pub struct PodRegistry {
    node_name: String,
    capacity: usize,
    recovered: BTreeMap<PodUid, RecoveredPod>,
    workers: BTreeMap<PodUid, Worker>,
    /// Pods that the API does not have and an earlier run left: they are being removed.
    orphans: BTreeSet<PodUid>,
    /// What the last sweep found of pods without a worker. What the next sweep finds again is an orphan.
    suspects: BTreeSet<PodUid>,
    /// Pods observed since the last relist began.
    listed: BTreeSet<PodUid>,
    /// Every pod of this node was observed at least once.
    is_complete: bool,
    /// Pods that cannot be decoded, and what was reported of each.
    unreadable: BTreeMap<PodUid, Problem>,
    commands: Vec<Command>,
}

impl PodRegistry {
    /// The registry of a node that takes this many pods, with what an earlier run of the node left.
    pub fn new(node_name: &str, capacity: usize, recovered: Vec<RecoveredPod>) -> Self {
        let recovered = recovered
            .into_iter()
            .filter_map(|pod| Some((PodUid::parse(&pod.identity.uid)?, pod)))
            .collect();
        Self {
            node_name: node_name.to_owned(),
            capacity,
            recovered,
            workers: BTreeMap::new(),
            orphans: BTreeSet::new(),
            suspects: BTreeSet::new(),
            listed: BTreeSet::new(),
            is_complete: false,
            unreadable: BTreeMap::new(),
            commands: Vec::new(),
        }
    }

    /// The commands since the last call, in order.
    pub fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// Whether every pod of the node was observed. Until then, a pod without a worker may still be a pod of the API.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Takes in an event of the watch of this node's pods. `in_memory` are pods that have volumes in memory, asked for when the list
    /// is complete.
    pub fn observe(
        &mut self,
        event: Event<Decoded<Pod>>,
        in_memory: impl FnOnce() -> Vec<PodUid>,
        now: Timestamp,
    ) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(pod) => {
                self.listed.extend(PodUid::of(pod.meta()));
                self.apply(pod, now);
            }
            Event::InitDone => {
                let listed = std::mem::take(&mut self.listed);
                self.forget_all_but(&listed);
                self.commands.push(Command::AllAttached);
                self.remove_orphans(in_memory());
                self.is_complete = true;
            }
            Event::Apply(pod) => self.apply(pod, now),
            Event::Delete(pod) => {
                if let Some(uid) = PodUid::of(pod.meta()) {
                    self.forget(&uid);
                }
            }
        }
    }

    fn apply(&mut self, pod: Decoded<Pod>, now: Timestamp) {
        match pod {
            Decoded::Readable(pod) => self.apply_readable(pod, now),
            Decoded::Unreadable(object) => self.apply_unreadable(object),
        }
    }

    fn apply_readable(&mut self, pod: Pod, now: Timestamp) {
        let Some(uid) = PodUid::of(&pod.metadata) else {
            return;
        };
        // A server may ignore the field selector of the watch.
        let spec = pod.spec.as_ref();
        if spec.and_then(|spec| spec.node_name.as_ref()) != Some(&self.node_name) {
            return;
        }
        self.unreadable.remove(&uid);
        // A mirror pod represents something that the node neither starts nor ends.
        if is_mirror(&pod) {
            return;
        }
        let pod = Arc::new(pod);
        if let Some(worker) = self.workers.get_mut(&uid) {
            worker.pod = Some(pod.clone());
            let pod = Some(pod);
            self.commands.push(Command::UpdateWorker { uid, pod });
            return;
        }
        let recovered = self.recovered.remove(&uid);
        let is_new = recovered.is_none() && is_new(&pod);
        let refusal = if is_new { self.refusal() } else { None };
        let worker = Worker {
            pod: Some(pod.clone()),
            began: now,
            panics: 0,
        };
        self.workers.insert(uid.clone(), worker);
        self.commands.push(Command::StartWorker {
            uid,
            pod,
            recovered,
            refusal,
        });
    }

    fn apply_unreadable(&mut self, object: Box<Unreadable>) {
        let Some(uid) = PodUid::of(&object.metadata) else {
            return;
        };
        if is_mirror(&shell::<Pod>((*object).clone())) {
            return;
        }
        let problem = object.problem.clone();
        let reported = self.unreadable.insert(uid.clone(), problem);
        let is_new = reported.as_ref() != Some(&object.problem);
        if is_new {
            warn::<Pod>(&object);
        }
        // A worker goes on with the pod that it knows. A deletion is in the metadata, which can be decoded.
        if let Some(worker) = self.workers.get_mut(&uid) {
            if let Some(known) = &mut worker.pod {
                Arc::make_mut(known).metadata = object.metadata;
                let pod = Some(known.clone());
                self.commands.push(Command::UpdateWorker { uid, pod });
            }
            return;
        }
        if object.metadata.deletion_timestamp.is_some() {
            if self.orphans.insert(uid.clone()) {
                let recovered = self.recovered.remove(&uid);
                self.commands.push(Command::EndUnreadable {
                    uid,
                    recovered,
                    object,
                });
            }
        } else if is_new {
            self.commands.push(Command::ReportUnreadable(object));
        }
    }

    /// Why the node takes no other pod, when it has as many as it takes; in a kubelet's words.
    fn refusal(&self) -> Option<Verdict> {
        let capacity = self.capacity;
        if self.workers.len() < capacity {
            return None;
        }
        let pods = self
            .workers
            .values()
            .filter_map(|worker| worker.pod.as_ref());
        let used = pods.filter(|pod| !is_over(pod)).count();
        (used >= capacity).then(|| Verdict {
            reason: FailureReason::OutOfPods,
            message: format!(
                "Pod was rejected: Node didn't have enough resource: pods, requested: 1, used: {used}, capacity: {capacity}"
            ),
        })
    }

    /// The API does not have a pod any more.
    fn forget(&mut self, uid: &PodUid) {
        self.unreadable.remove(uid);
        if let Some(worker) = self.workers.get_mut(uid) {
            worker.pod = None;
            self.commands.push(Command::UpdateWorker {
                uid: uid.clone(),
                pod: None,
            });
        }
    }

    fn forget_all_but(&mut self, listed: &BTreeSet<PodUid>) -> BTreeSet<PodUid> {
        let mut gone: BTreeSet<PodUid> = self.workers.keys().cloned().collect();
        gone.retain(|uid| !listed.contains(uid));
        for uid in &gone {
            self.forget(uid);
        }
        gone
    }

    /// Begins to remove every pod that the API does not have, and returns all pods that are being removed for it. The node stops.
    pub fn remove_departed(&mut self, listed: &BTreeSet<PodUid>) -> BTreeSet<PodUid> {
        let mut departed = self.forget_all_but(listed);
        departed.append(&mut self.orphans);
        departed
    }

    /// Whether the API has this pod, readable or not.
    fn is_known(&self, uid: &PodUid) -> bool {
        self.workers.contains_key(uid) || self.unreadable.contains_key(uid)
    }

    /// Removes what an earlier run left of pods that the API does not have.
    fn remove_orphans(&mut self, in_memory: Vec<PodUid>) {
        let mut left: BTreeMap<PodUid, Vec<RecoveredContainer>> = BTreeMap::new();
        for uid in in_memory {
            if !self.is_known(&uid) && !self.orphans.contains(&uid) {
                left.insert(uid, Vec::new());
            }
        }
        let recovered = std::mem::take(&mut self.recovered).into_iter();
        let (unreadable, gone): (Vec<_>, Vec<_>) =
            recovered.partition(|(uid, _)| self.unreadable.contains_key(uid));
        self.recovered.extend(unreadable);
        let gone = gone.into_iter();
        left.extend(gone.map(|(uid, pod)| (uid, pod.containers)));
        for (uid, containers) in left {
            tracing::info!(
                %uid,
                "removing what is left of a pod that is gone from the API"
            );
            self.remove_orphan(uid, Some(containers));
        }
    }

    fn remove_orphan(&mut self, uid: PodUid, containers: Option<Vec<RecoveredContainer>>) {
        self.orphans.insert(uid.clone());
        self.commands
            .push(Command::RemoveOrphan { uid, containers });
    }

    /// A sweep found something of these pods on the machine. A pod may have been removed during the sweep, so it takes two sweeps in a
    /// row to find an orphan.
    pub fn swept(&mut self, found: Vec<PodUid>) {
        let mut unknown: BTreeSet<PodUid> = found.into_iter().collect();
        unknown.retain(|uid| !self.is_known(uid) && !self.orphans.contains(uid));
        let before = std::mem::replace(&mut self.suspects, unknown.clone());
        for uid in unknown.into_iter().filter(|uid| before.contains(uid)) {
            tracing::warn!(%uid, "ending processes and removing files of no known pod");
            self.remove_orphan(uid, None);
        }
    }

    /// Nothing is left of a pod.
    pub fn worker_ended(&mut self, uid: &PodUid) {
        self.workers.remove(uid);
        self.orphans.remove(uid);
    }

    /// A pod's worker, or the removal of an orphan, panicked. What runs of the pod is found out, for another worker to go on with.
    /// A worker that panics again and again is restarted as seldom as a container that crashes.
    pub fn panicked(&mut self, uid: &PodUid, now: Timestamp) {
        // The next sweep finds an orphan again.
        self.orphans.remove(uid);
        let Some(worker) = self.workers.get_mut(uid) else {
            return;
        };
        if worker.began.later_by(BACK_OFF_FORGET) <= now {
            worker.panics = 0;
        }
        worker.panics = worker.panics.saturating_add(1);
        self.commands.push(Command::Recover {
            uid: uid.clone(),
            pod: worker.pod.clone(),
            pause: back_off(worker.panics),
        });
    }

    /// Gives a pod whose worker panicked another worker, or removes the pod if the API does not have it any more. `reported` is the
    /// pod's status in the API: the watch may lag behind what the lost worker has written, and an end once reported stands.
    pub fn recovered(
        &mut self,
        uid: PodUid,
        reported: Option<PodStatus>,
        recovered: Option<RecoveredPod>,
        now: Timestamp,
    ) {
        let Some(worker) = self.workers.get_mut(&uid) else {
            return;
        };
        if let Some(mut pod) = worker.pod.clone() {
            if reported.is_some() {
                Arc::make_mut(&mut pod).status = reported;
            }
            worker.began = now;
            self.commands.push(Command::StartWorker {
                uid,
                pod,
                recovered,
                refusal: None,
            });
        } else {
            self.workers.remove(&uid);
            self.remove_orphan(uid, recovered.map(|pod| pod.containers));
        }
    }
}

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

/// Whether a pod has ended; its worker is needed only to delete it.
fn is_over(pod: &Pod) -> bool {
    matches!(phase(pod), Some("Succeeded" | "Failed"))
}

/// Whether no container of a pod has run yet.
fn is_new(pod: &Pod) -> bool {
    matches!(phase(pod), None | Some("Pending")) && pod.metadata.deletion_timestamp.is_none()
}
