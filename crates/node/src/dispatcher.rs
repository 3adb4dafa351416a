//! Hands every pod that is bound to the node to a worker of its own, and clears away what is left of those that are gone.
//!
//! ```text
//!  API: pod bound ──► worker ──► pod removed, worker ends
//!                     ▲    │ panics
//!                     │    ▼
//!                     └─ recovered from the API's pod and what the runtime finds running
//!
//!  every so often:  on this machine, but no worker's, twice in a row ──► processes ended, files removed
//! ```

mod unreadable;

use std::collections::{HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::decoding::Decoded;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Event};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::pod_lifecycle::{BACK_OFF_FORGET, EventReason, FailureReason, Verdict, back_off};
use crate::pod_uid::PodUid;
use crate::pod_worker::{self, End, PodWorker, Shared};
use crate::runtime::{RecoveredContainer, RecoveredPod, Runtime};
use api::errors::chain;
use event_recorder::Severity;

use unreadable::UnreadablePods;

/// How long a node that stops still clears away pods that are gone from the API.
const CLEARING_DEADLINE: Duration = Duration::from_secs(30);

/// How long actions of a worker that panicked may go on before the next one looks at what they left.
const ACTIONS_DEADLINE: Duration = Duration::from_secs(30);

/// How long to wait before the runtime is asked again what runs of a pod.
const RECOVERY_PAUSE: Duration = Duration::from_secs(2);

fn phase(pod: &Pod) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

/// Whether a pod has ended; its worker is needed only to delete it.
fn is_over(pod: &Pod) -> bool {
    matches!(phase(pod), Some("Succeeded" | "Failed"))
}

/// Whether nothing of a pod has run yet.
fn is_new(pod: &Pod) -> bool {
    matches!(phase(pod), None | Some("Pending")) && pod.metadata.deletion_timestamp.is_none()
}

/// The UID of an object, as a pod's.
fn uid_of(object: &impl ResourceExt) -> Option<PodUid> {
    PodUid::of(object.meta())
}

/// A pod's worker, as the dispatcher knows it.
struct Worker {
    updates: watch::Sender<Option<Pod>>,
    began: Instant,
    /// How often it panicked in a row, each time too soon to forget the time before.
    panics: u32,
}

/// How a task of the dispatcher ended.
enum Ended {
    /// Nothing is left of the pod.
    Gone(PodUid),
    /// The pod's worker, or the removal of the pod, panicked. Actions of the worker may still be under way.
    Panicked {
        /// Absent where a sweep panicked: the next one finds what it would have found.
        uid: Option<PodUid>,
        actions: TaskTracker,
        message: String,
    },
    /// What the runtime found of a pod whose worker had panicked.
    Recovered {
        uid: PodUid,
        pod: Option<RecoveredPod>,
    },
    /// The pods of which something is on this machine.
    Swept(Vec<PodUid>),
}

/// The workers of the node's pods.
pub struct Dispatcher<R> {
    shared: Arc<Shared<R>>,
    recovered: HashMap<PodUid, RecoveredPod>,
    workers: HashMap<PodUid, Worker>,
    /// Pods that are gone from the API, and that an earlier run left: they are being removed.
    strays: HashSet<PodUid>,
    /// What the last sweep found of pods without a worker. What the next one finds again is a stray.
    suspects: HashSet<PodUid>,
    running: JoinSet<Ended>,
    /// Pods seen since the last relist began.
    listed: Vec<PodUid>,
    /// Every pod of this node was seen at least once.
    is_complete: bool,
    unreadable: UnreadablePods,
}

impl<R: Runtime> Dispatcher<R> {
    pub fn new(shared: Arc<Shared<R>>, recovered: Vec<RecoveredPod>) -> Self {
        let recovered = recovered
            .into_iter()
            .filter_map(|pod| Some((PodUid::parse(&pod.identity.uid)?, pod)))
            .collect();
        Self {
            shared,
            recovered,
            workers: HashMap::new(),
            strays: HashSet::new(),
            suspects: HashSet::new(),
            running: JoinSet::new(),
            listed: Vec::new(),
            is_complete: false,
            unreadable: UnreadablePods::default(),
        }
    }

    pub async fn run(mut self, shutdown: CancellationToken) {
        let pods = Api::<Decoded<Pod>>::all(self.shared.client.clone());
        let own = watcher::Config::default()
            .fields(&format!("spec.nodeName={}", self.shared.config.node_name));
        let mut events = std::pin::pin!(watcher::watcher(pods, own));
        let mut sweeps = tokio::time::interval(self.shared.config.stray_check);
        sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return self.clear_departed().await,
                event = events.next() => match event {
                    None => return,
                    Some(Ok(event)) => self.handle(event),
                    Some(Err(error)) => {
                        tracing::warn!(error = %chain(&error), "the watch of this node's pods failed and is retried");
                        tokio::time::sleep(Duration::from_millis(200)).await;
                    }
                },
                Some(Ok(ended)) = self.running.join_next() => self.ended(ended),
                _ = sweeps.tick(), if self.is_complete => self.sweep(),
            }
        }
    }

    fn ended(&mut self, ended: Ended) {
        match ended {
            Ended::Gone(uid) => {
                self.workers.remove(&uid);
                self.strays.remove(&uid);
            }
            Ended::Panicked {
                uid,
                actions,
                message,
            } => {
                tracing::error!(
                    uid = uid.as_ref().map(PodUid::as_str),
                    panic = message,
                    "the task of a pod panicked; this is a bug, please report it"
                );
                if let Some(uid) = uid {
                    // The next sweep finds a stray again.
                    self.strays.remove(&uid);
                    self.recover(uid, actions);
                }
            }
            Ended::Recovered { uid, pod } => self.resume(uid, pod),
            Ended::Swept(found) => self.swept(found),
        }
    }

    /// Runs a task for a pod. A panic in it ends nothing but itself, and does not go unnoticed.
    fn spawn(
        &mut self,
        uid: Option<PodUid>,
        actions: TaskTracker,
        task: impl Future<Output = Ended> + Send + 'static,
    ) {
        let guarded = AssertUnwindSafe(task).catch_unwind();
        self.running.spawn(async move {
            guarded.await.unwrap_or_else(|panic| Ended::Panicked {
                uid,
                actions,
                message: telemetry::panics::message(&*panic).to_owned(),
            })
        });
    }

    /// Finds out what runs of a pod whose worker has panicked, for another worker to go on with. One that panics again and again
    /// is tried as seldom as a container that crashes.
    fn recover(&mut self, uid: PodUid, actions: TaskTracker) {
        let Some(worker) = self.workers.get_mut(&uid) else {
            return;
        };
        if worker.began.elapsed() >= BACK_OFF_FORGET {
            worker.panics = 0;
        }
        worker.panics = worker.panics.saturating_add(1);
        let pause = back_off(worker.panics);
        telemetry::panics::worker_restarted();
        if let Some(pod) = &*worker.updates.borrow() {
            let note = "The node failed while it worked on this pod, and goes on from what runs of it. Its log says why".to_owned();
            let events = &self.shared.events;
            events.tell(
                pod,
                None,
                Severity::Warning,
                EventReason::PodWorkerPanicked,
                note,
            );
        }
        let (shared, of_pod) = (self.shared.clone(), uid.clone());
        self.spawn(Some(of_pod), TaskTracker::new(), async move {
            tokio::time::sleep(pause).await;
            actions.close();
            let _ = tokio::time::timeout(ACTIONS_DEADLINE, actions.wait()).await;
            let pod = recover_pod(&shared, &uid).await;
            Ended::Recovered { uid, pod }
        });
    }

    /// Gives a pod another worker, or removes the pod if it is gone from the API by now.
    fn resume(&mut self, uid: PodUid, recovered: Option<RecoveredPod>) {
        let Some(worker) = self.workers.get(&uid) else {
            return;
        };
        let pod = worker.updates.borrow().clone();
        if let Some(pod) = pod {
            self.start(&uid, &pod, recovered, None);
        } else {
            self.workers.remove(&uid);
            self.remove_stray(uid, recovered.map(|pod| pod.containers));
        }
    }

    /// Looks for what is on this machine of pods that have no worker.
    fn sweep(&mut self) {
        let shared = self.shared.clone();
        self.spawn(None, TaskTracker::new(), async move {
            let found = shared.runtime.sweep().await;
            Ended::Swept(found.iter().filter_map(|uid| PodUid::parse(uid)).collect())
        });
    }

    /// A pod may have been removed while the sweep looked, so it takes two sweeps to find a stray.
    fn swept(&mut self, found: Vec<PodUid>) {
        let mut unknown: HashSet<PodUid> = found.into_iter().collect();
        unknown.retain(|uid| !self.is_known(uid) && !self.strays.contains(uid));
        let before = std::mem::replace(&mut self.suspects, unknown.clone());
        for uid in unknown.into_iter().filter(|uid| before.contains(uid)) {
            tracing::warn!(%uid, "ending processes and removing files of no known pod");
            self.remove_stray(uid, None);
        }
    }

    /// Whether the API has this pod, whether it can be read or not.
    fn is_known(&self, uid: &PodUid) -> bool {
        self.workers.contains_key(uid) || self.unreadable.contains(uid)
    }

    fn handle(&mut self, event: Event<Decoded<Pod>>) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(pod) => {
                self.listed.extend(uid_of(&pod));
                self.observe(pod);
            }
            Event::InitDone => {
                let gone: Vec<PodUid> = self
                    .workers
                    .keys()
                    .filter(|uid| !self.listed.contains(uid))
                    .cloned()
                    .collect();
                for uid in gone {
                    self.forget(&uid);
                }
                self.shared.enforcer.all_are_attached();
                self.remove_strays();
                self.is_complete = true;
            }
            Event::Apply(pod) => self.observe(pod),
            Event::Delete(pod) => {
                if let Some(uid) = uid_of(&pod) {
                    self.forget(&uid);
                }
            }
        }
    }

    fn observe(&mut self, pod: Decoded<Pod>) {
        match pod {
            Decoded::Readable(pod) => self.apply(pod),
            Decoded::Unreadable(left) => self.apply_unreadable(*left),
        }
    }

    fn apply(&mut self, pod: Pod) {
        // The field selector is a wish; what is not bound here is not ours.
        let Some(uid) = PodUid::of(&pod.metadata) else {
            return;
        };
        if pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref())
            != Some(&self.shared.config.node_name)
        {
            return;
        }
        self.unreadable.forget(&uid);
        // Stands for something that is not the node's to run or to end.
        if api::labels::is_mirror(&pod) {
            return;
        }
        if let Some(worker) = self.workers.get(&uid) {
            worker.updates.send_replace(Some(pod));
            return;
        }
        let recovered = self.recovered.remove(&uid);
        let refusal = if recovered.is_none() && is_new(&pod) {
            self.refusal()
        } else {
            None
        };
        let worker = Worker {
            updates: watch::Sender::new(Some(pod.clone())),
            began: Instant::now(),
            panics: 0,
        };
        self.workers.insert(uid.clone(), worker);
        self.start(&uid, &pod, recovered, refusal);
    }

    /// Starts the worker of a pod.
    fn start(
        &mut self,
        uid: &PodUid,
        pod: &Pod,
        recovered: Option<RecoveredPod>,
        refusal: Option<Verdict>,
    ) {
        let Some(known) = self.workers.get_mut(uid) else {
            return;
        };
        known.began = Instant::now();
        let updates = known.updates.subscribe();
        let (shared, actions) = (self.shared.clone(), TaskTracker::new());
        let of_worker = actions.clone();
        // Here and not in the task: the pod is attached to the network's rules when this returns.
        let of_pod = uid.clone();
        let new = || PodWorker::new(shared, of_pod, pod, recovered, refusal, of_worker);
        let made = std::panic::catch_unwind(AssertUnwindSafe(new));
        let (uid, lost) = (uid.clone(), actions.clone());
        self.spawn(Some(uid.clone()), actions, async move {
            let worker = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            match worker.run(updates).await {
                End::Gone => Ended::Gone(uid),
                End::Panicked(message) => Ended::Panicked {
                    uid: Some(uid),
                    actions: lost,
                    message,
                },
            }
        });
    }

    /// Why the node takes no other pod, when it has as many as it takes; in a kubelet's words.
    fn refusal(&self) -> Option<Verdict> {
        let capacity = usize::try_from(self.shared.config.maximum_pods).unwrap_or(usize::MAX);
        if self.workers.len() < capacity {
            return None;
        }
        let used = self.workers.values().filter(|worker| {
            let pod = worker.updates.borrow();
            pod.as_ref().is_some_and(|pod| !is_over(pod))
        });
        let used = used.count();
        (used >= capacity).then(|| Verdict {
            reason: FailureReason::OutOfPods,
            message: format!(
                "Pod was rejected: Node didn't have enough resource: pods, requested: 1, used: {used}, capacity: {capacity}"
            ),
        })
    }

    /// Finishes with pods that the API has forgotten, whether the watch has said so yet or not: after the last of them the node
    /// may be told to give everything back. All others go on without it.
    async fn clear_departed(mut self) {
        let pods = Api::<Decoded<PartialObjectMeta<Pod>>>::all(self.shared.client.clone());
        let own = ListParams::default()
            .fields(&format!("spec.nodeName={}", self.shared.config.node_name));
        let Ok(listed) = pods.list(&own).await else {
            return;
        };
        let there: HashSet<PodUid> = listed.iter().filter_map(uid_of).collect();
        let mut departed: HashSet<PodUid> = self.workers.keys().cloned().collect();
        departed.retain(|uid| !there.contains(uid));
        for uid in &departed {
            self.forget(uid);
        }
        departed.extend(self.strays.drain());
        let cleared = async {
            while !departed.is_empty()
                && let Some(ended) = self.running.join_next().await
            {
                match ended {
                    Ok(Ended::Gone(uid) | Ended::Panicked { uid: Some(uid), .. }) => {
                        departed.remove(&uid)
                    }
                    _ => false,
                };
            }
        };
        if tokio::time::timeout(CLEARING_DEADLINE, cleared)
            .await
            .is_err()
        {
            tracing::warn!("pods that are gone from the API are left for the next start to remove");
        }
    }

    fn forget(&mut self, uid: &PodUid) {
        self.unreadable.forget(uid);
        if let Some(worker) = self.workers.get(uid) {
            worker.updates.send_replace(None);
        }
    }

    /// Removes what an earlier run left of pods that are gone from the API.
    fn remove_strays(&mut self) {
        let mut left: HashMap<PodUid, Vec<RecoveredContainer>> = HashMap::new();
        for uid in self.shared.volumes.pods_in_memory() {
            if !self.is_known(&uid) && !self.strays.contains(&uid) {
                left.insert(uid, Vec::new());
            }
        }
        let unreadable = &self.unreadable;
        for (uid, pod) in self
            .recovered
            .extract_if(|uid, _| !unreadable.contains(uid))
        {
            left.insert(uid, pod.containers);
        }
        for (uid, containers) in left {
            tracing::info!(
                %uid,
                "removing what is left of a pod that is gone from the API"
            );
            self.remove_stray(uid, Some(containers));
        }
    }

    /// Ends and removes a pod that is gone from the API; which containers it has is for the runtime to find out, unless that is known.
    fn remove_stray(&mut self, uid: PodUid, containers: Option<Vec<RecoveredContainer>>) {
        self.strays.insert(uid.clone());
        let shared = self.shared.clone();
        self.spawn(Some(uid.clone()), TaskTracker::new(), async move {
            let containers = match containers {
                Some(containers) => containers,
                None => recover_pod(&shared, &uid)
                    .await
                    .map_or_else(Vec::new, |pod| pod.containers),
            };
            end_and_remove(&shared, &uid, containers).await;
            Ended::Gone(uid)
        });
    }
}

/// What the runtime knows of a pod, as soon as it can tell.
async fn recover_pod<R: Runtime>(shared: &Shared<R>, uid: &PodUid) -> Option<RecoveredPod> {
    loop {
        match shared.runtime.recover_pod(uid.as_str()).await {
            Ok(pod) => return pod,
            Err(error) => {
                tracing::warn!(%uid, error = %chain(&error), "cannot find out what runs of a pod");
                tokio::time::sleep(RECOVERY_PAUSE).await;
            }
        }
    }
}

async fn end_and_remove<R: Runtime>(
    shared: &Shared<R>,
    uid: &PodUid,
    containers: Vec<RecoveredContainer>,
) {
    for container in containers {
        if container.termination.is_none() {
            let _ = shared.runtime.kill(&container.id).await;
            shared.runtime.wait(&container.id).await;
        }
    }
    if let Err(error) = pod_worker::remove(shared, uid).await {
        tracing::warn!(%uid, error = %chain(&error), "cannot remove a pod that is gone");
    }
}
