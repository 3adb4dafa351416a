//! Watches the node's pods and carries out the commands of the [`PodRegistry`]: a task for every pod, and one for every removal.

mod unreadable;

use std::collections::{BTreeSet, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use api::decoding::Decoded;
use futures::{FutureExt, StreamExt};
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher;
use kube::{Api, Resource};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::pod_lifecycle::{EventReason, Verdict};
use crate::pod_registry::{Command, PodRegistry};
use crate::pod_uid::PodUid;
use crate::pod_worker::{self, End, PodWorker, Shared};
use crate::runtime::{RecoveredContainer, RecoveredPod, Runtime};
use api::errors::chain;
use event_recorder::Severity;

/// How long a node that stops still removes pods that are gone from the API.
const CLEARING_DEADLINE: Duration = Duration::from_secs(30);

/// How long actions of a worker that panicked may go on before the next one looks at what they left.
const ACTIONS_DEADLINE: Duration = Duration::from_secs(30);

/// How long to wait before the runtime is asked again what runs of a pod.
const RECOVERY_PAUSE: Duration = Duration::from_secs(2);

/// How a task of the dispatcher ended.
enum Ended {
    /// Nothing is left of the pod.
    Gone(PodUid),
    Panicked {
        /// Absent where a sweep panicked: the next one finds what it would have found.
        uid: Option<PodUid>,
        message: String,
    },
    /// What the API and the runtime have of a pod whose worker had panicked.
    Recovered {
        uid: PodUid,
        status: Option<Box<PodStatus>>,
        pod: Option<RecoveredPod>,
    },
    /// The pods of which something is on this machine.
    Swept(Vec<PodUid>),
}

/// The channels to a pod's worker.
struct Worker {
    updates: watch::Sender<Option<Arc<Pod>>>,
    /// Actions of the worker. They may go on when it has panicked.
    actions: TaskTracker,
}

/// The tasks of the node's pods.
pub struct Dispatcher<R> {
    shared: Arc<Shared<R>>,
    registry: PodRegistry,
    workers: HashMap<PodUid, Worker>,
    running: JoinSet<Ended>,
}

impl<R: Runtime> Dispatcher<R> {
    pub fn new(shared: Arc<Shared<R>>, recovered: Vec<RecoveredPod>) -> Self {
        let capacity = usize::try_from(shared.config.maximum_pods).unwrap_or(usize::MAX);
        let registry = PodRegistry::new(&shared.config.node_name, capacity, recovered);
        Self {
            shared,
            registry,
            workers: HashMap::new(),
            running: JoinSet::new(),
        }
    }

    pub async fn run(mut self, shutdown: CancellationToken) {
        let pods = Api::<Decoded<Pod>>::all(self.shared.client.clone());
        let own = watcher::Config::default()
            .fields(&format!("spec.nodeName={}", self.shared.config.node_name));
        let mut events = object_watch::watch(pods, own);
        let mut sweeps = tokio::time::interval(self.shared.config.stray_check);
        sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return self.clear_departed().await,
                Some(event) = events.next() => {
                    // The pods run on while the watch fails.
                    if let Ok(event) = event {
                        let volumes = &self.shared.volumes;
                        let now = self.shared.clock.now();
                        self.registry.observe(event, || volumes.pods_in_memory(), now);
                    }
                }
                Some(Ok(ended)) = self.running.join_next() => self.ended(ended),
                _ = sweeps.tick(), if self.registry.is_complete() => self.sweep(),
            }
            self.perform_commands();
        }
    }

    fn perform_commands(&mut self) {
        for command in self.registry.take_commands() {
            self.perform(command);
        }
    }

    fn perform(&mut self, command: Command) {
        match command {
            Command::StartWorker {
                uid,
                pod,
                recovered,
                refusal,
            } => self.start_worker(uid, &pod, recovered, refusal),
            Command::UpdateWorker { uid, pod } => {
                if let Some(worker) = self.workers.get(&uid) {
                    worker.updates.send_replace(pod);
                }
            }
            Command::Recover { uid, pod, pause } => self.recover(uid, pod, pause),
            Command::RemoveOrphan { uid, containers } => self.remove_orphan(uid, containers),
            Command::EndUnreadable {
                uid,
                recovered,
                object,
            } => self.end_unreadable(uid, recovered, *object),
            Command::ReportUnreadable(object) => self.report_unreadable(*object),
            Command::AllAttached => self.shared.enforcer.all_are_attached(),
        }
    }

    fn ended(&mut self, ended: Ended) {
        match ended {
            Ended::Gone(uid) => {
                self.workers.remove(&uid);
                self.registry.worker_ended(&uid);
            }
            Ended::Panicked { uid, message } => {
                tracing::error!(
                    uid = uid.as_ref().map(PodUid::as_str),
                    panic = message,
                    "the task of a pod panicked; this is a bug, please report it"
                );
                if let Some(uid) = uid {
                    self.registry.panicked(&uid, self.shared.clock.now());
                }
            }
            Ended::Recovered { uid, status, pod } => {
                self.workers.remove(&uid);
                let (status, now) = (status.map(|status| *status), self.shared.clock.now());
                self.registry.recovered(uid, status, pod, now);
            }
            Ended::Swept(found) => self.registry.swept(found),
        }
    }

    /// Runs a task for a pod. A panic in it ends nothing but itself, and is reported.
    fn spawn(&mut self, uid: Option<PodUid>, task: impl Future<Output = Ended> + Send + 'static) {
        let guarded = AssertUnwindSafe(task).catch_unwind();
        self.running.spawn(async move {
            guarded.await.unwrap_or_else(|panic| Ended::Panicked {
                uid,
                message: telemetry::panics::message(&*panic).to_owned(),
            })
        });
    }

    fn start_worker(
        &mut self,
        uid: PodUid,
        pod: &Arc<Pod>,
        recovered: Option<RecoveredPod>,
        refusal: Option<Verdict>,
    ) {
        let (sender, updates) = watch::channel(Some(pod.clone()));
        let actions = TaskTracker::new();
        let worker = Worker {
            updates: sender,
            actions: actions.clone(),
        };
        self.workers.insert(uid.clone(), worker);
        let (shared, of_worker) = (self.shared.clone(), uid.clone());
        // Here and not in the task: the pod is attached to the network's rules when this returns.
        let new = || PodWorker::new(shared, of_worker, pod, recovered, refusal, actions);
        let made = std::panic::catch_unwind(AssertUnwindSafe(new));
        self.spawn(Some(uid.clone()), async move {
            let worker = made.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            match worker.run(updates).await {
                End::Gone => Ended::Gone(uid),
                End::Panicked(message) => Ended::Panicked {
                    uid: Some(uid),
                    message,
                },
            }
        });
    }

    fn recover(&mut self, uid: PodUid, pod: Option<Arc<Pod>>, pause: Duration) {
        telemetry::panics::worker_restarted();
        if let Some(pod) = &pod {
            let note = "The node failed while it worked on this pod, and goes on from what runs of it. Its log says why".to_owned();
            let (events, reason) = (&self.shared.events, EventReason::PodWorkerPanicked);
            events.tell(pod, None, Severity::Warning, reason, note);
        }
        let worker = self.workers.get(&uid);
        let actions = worker.map(|worker| worker.actions.clone());
        let shared = self.shared.clone();
        self.spawn(Some(uid.clone()), async move {
            tokio::time::sleep(pause).await;
            if let Some(actions) = actions {
                actions.close();
                let _ = tokio::time::timeout(ACTIONS_DEADLINE, actions.wait()).await;
            }
            let status = match pod {
                Some(pod) => reported_status(&shared, &uid, &pod).await.map(Box::new),
                None => None,
            };
            let pod = recover_pod(&shared, &uid).await;
            Ended::Recovered { uid, status, pod }
        });
    }

    /// Looks for what is on this machine of pods that have no worker.
    fn sweep(&mut self) {
        let shared = self.shared.clone();
        self.spawn(None, async move {
            let found = shared.runtime.sweep().await;
            Ended::Swept(found.iter().filter_map(|uid| PodUid::parse(uid)).collect())
        });
    }

    fn remove_orphan(&mut self, uid: PodUid, containers: Option<Vec<RecoveredContainer>>) {
        let shared = self.shared.clone();
        self.spawn(Some(uid.clone()), async move {
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

    /// Removes pods that the API does not have, whether the watch has reported their deletion or not: after the last of them the node
    /// may be dismantled. All other pods go on without the node.
    async fn clear_departed(mut self) {
        let pods = Api::<Decoded<PartialObjectMeta<Pod>>>::all(self.shared.client.clone());
        let own = ListParams::default()
            .fields(&format!("spec.nodeName={}", self.shared.config.node_name));
        let Ok(listed) = pods.list(&own).await else {
            return;
        };
        let listed = listed.iter().filter_map(|pod| PodUid::of(pod.meta()));
        let listed: BTreeSet<PodUid> = listed.collect();
        let mut departed = self.registry.remove_departed(&listed);
        self.perform_commands();
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
}

/// A pod's status in the API, as soon as the API answers; absent if the API has no such pod any more.
async fn reported_status<R: Runtime>(
    shared: &Shared<R>,
    uid: &PodUid,
    pod: &Pod,
) -> Option<PodStatus> {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let pods = Api::<Decoded<Pod>>::namespaced(shared.client.clone(), namespace);
    loop {
        match pods.get_opt(name).await {
            Ok(Some(Decoded::Readable(pod))) if PodUid::of(&pod.metadata).as_ref() == Some(uid) => {
                return pod.status;
            }
            Ok(_) => return None,
            Err(error) => {
                tracing::warn!(%uid, error = %chain(&error), "cannot read the status of a pod");
                tokio::time::sleep(RECOVERY_PAUSE).await;
            }
        }
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
