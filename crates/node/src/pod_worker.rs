//! Carries out what the pod lifecycle decides, for one pod: a task that observes, decides, acts and reports.
//!
//! Actions run as tasks of their own and come back as events, so that a slow start never delays a deletion.

mod actions;
mod happenings;
mod news;
mod preparing;
mod publishing;

use std::collections::{BTreeMap, HashMap};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures::FutureExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::actions::remove;
use self::happenings::Event;
use crate::config::Config;
use crate::environment::Surroundings;
use crate::eviction::Evictions;
use crate::network::enforcer::Enforcer;
use crate::pod_images::PodImages;
use crate::pod_lifecycle::{
    self, Action, ContainerState, EventReason, Observed, Phase, Sandbox, Verdict,
};
use crate::pod_uid::PodUid;
use crate::runtime::handlers::Handlers;
use crate::runtime::{RecoveredPod, Runtime};
use crate::volumes::Volumes;
use event_recorder::{EventSink, Severity};

/// What all pods of a node share.
pub struct Shared<R> {
    pub runtime: Arc<R>,
    pub images: PodImages,
    pub handlers: Handlers,
    pub client: Client,
    pub config: Config,
    pub events: EventSink,
    pub volumes: Volumes,
    pub surroundings: Surroundings,
    pub enforcer: Arc<Enforcer>,
    pub evictions: Evictions,
    /// The server takes no strategic merge patches.
    pub plain_patches: AtomicBool,
}

impl<R> std::fmt::Debug for PodWorker<R> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("PodWorker")
            .field("pod", &self.pod.metadata.name)
            .finish_non_exhaustive()
    }
}

/// How far a run of a container had come.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    /// Its startup probe had passed.
    started: bool,
    /// Its readiness probe passed.
    ready: bool,
}

/// Who there is to tell of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Audience {
    Watching,
    /// The API has refused the last report: it knows no such pod any more, though it has not said so yet.
    Leaving,
    /// The pod is gone from the API.
    Gone,
}

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// Nothing is left of the pod, or the node stops.
    Gone,
    /// A task of the worker panicked, so that what the worker knows may not be so.
    Panicked(String),
}

/// One pod's task.
pub struct PodWorker<R> {
    shared: Arc<Shared<R>>,
    uid: PodUid,
    pod: Pod,
    audience: Audience,
    sandbox: Sandbox,
    containers: BTreeMap<String, ContainerState>,
    verdict: Option<Verdict>,
    accepted_at: Timestamp,
    sender: mpsc::UnboundedSender<Event>,
    receiver: mpsc::UnboundedReceiver<Event>,
    /// What is being done. It goes on to its end when the worker is lost: half of a sandbox would help no other worker.
    actions: TaskTracker,
    /// What only looks on. It ends with the worker.
    followers: JoinSet<()>,
    probes: HashMap<String, Vec<JoinHandle<()>>>,
    /// Waits for objects that a container, or without one the pod's sandbox, cannot be made without.
    awaiting: HashMap<Option<String>, JoinHandle<()>>,
    /// Each gives up the start of a container.
    starting: HashMap<String, CancellationToken>,
    decided: Option<PodStatus>,
    published: Option<PodStatus>,
    publishing: bool,
    publish_after: Option<Timestamp>,
    /// Until when nothing is said of a pod that is starting.
    untold_until: Option<Timestamp>,
    finishing: bool,
    /// Frees the pod's sandbox.
    stopping: Option<JoinHandle<()>>,
    /// Follows what the pod's volumes show…
    refreshing: Option<JoinHandle<()>>,
    /// … of the pod itself among other things.
    shown: Option<watch::Sender<Pod>>,
}

impl<R> Drop for PodWorker<R> {
    fn drop(&mut self) {
        self.shared.evictions.forget(&self.uid);
        self.probes.values().flatten().for_each(JoinHandle::abort);
        self.refreshing.iter().for_each(JoinHandle::abort);
        self.awaiting.values().for_each(JoinHandle::abort);
        self.starting.values().for_each(CancellationToken::cancel);
    }
}

const RETRY: Duration = Duration::from_secs(2);

impl<R: Runtime> PodWorker<R> {
    /// Takes a pod on. One that the node has a `refusal` for ends before it begins.
    pub fn new(
        shared: Arc<Shared<R>>,
        uid: PodUid,
        pod: &Pod,
        recovered: Option<RecoveredPod>,
        refusal: Option<Verdict>,
        actions: TaskTracker,
    ) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let started = pod
            .status
            .as_ref()
            .and_then(|status| status.start_time.as_ref())
            .map(|time| time.0);
        let mut worker = Self {
            shared,
            uid,
            pod: pod.clone(),
            audience: Audience::Watching,
            sandbox: Sandbox::Missing,
            containers: BTreeMap::new(),
            verdict: None,
            accepted_at: started.unwrap_or_else(Timestamp::now),
            sender,
            receiver,
            actions,
            followers: JoinSet::new(),
            probes: HashMap::new(),
            awaiting: HashMap::new(),
            starting: HashMap::new(),
            decided: None,
            published: pod.status.clone(),
            publishing: false,
            publish_after: None,
            untold_until: None,
            finishing: false,
            stopping: None,
            refreshing: None,
            shown: None,
        };
        if let Some(recovered) = recovered {
            worker.adopt(recovered);
        } else {
            worker.warn(None, &crate::unsupported::unsupported(pod));
        }
        if let Some(refusal) = refusal {
            worker.condemn(refusal);
        }
        worker.watch_storage();
        worker
    }

    /// Tells the user what the pod, or a container that was added to it, asks for in vain.
    fn warn(&self, container: Option<&str>, ignored: &[String]) {
        if ignored.is_empty() {
            return;
        }
        // One event for all of it: events of one reason are counted as one, whatever else they say.
        let (events, note) = (&self.shared.events, ignored.join("; "));
        events.tell(
            &self.pod,
            container,
            Severity::Warning,
            EventReason::Unsupported,
            note,
        );
    }

    /// Lets the node say when the pod holds too much of the disk.
    fn watch_storage(&mut self) {
        let (sender, mut verdicts) = mpsc::unbounded_channel();
        self.shared.evictions.watch(&self.uid, &self.pod, sender);
        let events = self.sender.clone();
        self.follow(async move {
            while let Some(verdict) = verdicts.recv().await {
                let _ = events.send(Event::Condemned(verdict));
            }
        });
    }

    /// Does something that has to come to an end, also without this worker.
    fn act(&self, action: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.actions.spawn(guarded(self.sender.clone(), action))
    }

    /// Looks on until the worker ends.
    fn follow(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        while self.followers.try_join_next().is_some() {}
        self.followers.spawn(guarded(self.sender.clone(), task));
    }

    /// Takes over what an earlier run of the node left.
    fn adopt(&mut self, recovered: RecoveredPod) {
        // Without its namespaces a pod starts over, as after a reboot; what ran has ended. So does one that no container was
        // started in: the node may have died before its files and volumes were there. What is there is used again.
        let mut containers = recovered.containers.iter();
        let was_prepared = containers.any(|container| !container.is_of_lost_sandbox);
        if let Some(sandbox) = recovered.sandbox.filter(|_| was_prepared) {
            self.shared.enforcer.attach(&self.pod, sandbox.addresses());
            self.keep_volumes_fresh(&sandbox);
            self.sandbox = Sandbox::Ready(sandbox);
        }
        for found in recovered.containers {
            let name = found.id.container.clone();
            let runs = found.id.attempt + 1;
            let mut state = ContainerState {
                runs,
                lost_runs: if found.is_of_lost_sandbox { runs } else { 0 },
                crashes: found.crashes,
                previous: found.previous,
                image_id: Some(found.started.image_id.clone()),
                ..ContainerState::default()
            };
            let running = found.termination.is_none();
            match found.termination {
                // What it prepared may be gone.
                Some(termination) if found.is_of_lost_sandbox && self.is_init(&name) => {
                    state.previous = Some(termination);
                }
                Some(termination) => state.end(termination),
                None => {
                    state.phase = Phase::Running {
                        started_at: found.started.started_at,
                    }
                }
            }
            self.containers.insert(name.clone(), state);
            if running {
                let known = self.last_said(&name, found.id.attempt);
                self.container_runs(&name, found.id.attempt, Some(known));
            }
        }
    }

    fn is_init(&self, container: &str) -> bool {
        let spec = self.pod.spec.iter();
        let mut init = spec.flat_map(|spec| spec.init_containers.iter().flatten());
        init.any(|init| init.name == container && !pod_lifecycle::is_sidecar(init))
    }

    /// How far a run of a container had come when the node stopped. It is taken to be so until a probe says otherwise.
    fn last_said(&self, container: &str, run: u32) -> Progress {
        let status = self.pod.status.as_ref();
        let mut statuses = status.into_iter().flat_map(|status| {
            status
                .container_statuses
                .iter()
                .flatten()
                .chain(status.init_container_statuses.iter().flatten())
        });
        let known = statuses
            .find(|known| known.name == container && u32::try_from(known.restart_count) == Ok(run));
        known.map_or_else(Progress::default, |known| Progress {
            started: known.started == Some(true),
            ready: known.ready,
        })
    }

    /// Runs until the pod is gone.
    pub async fn run(mut self, mut updates: watch::Receiver<Option<Pod>>) -> End {
        loop {
            self.shared.config.faults.strike();
            let now = Timestamp::now();
            let plan = self.decide(now);
            let (last, others): (Vec<_>, Vec<_>) = plan
                .actions
                .into_iter()
                .partition(|action| *action == Action::Finish);
            for action in others {
                self.perform(action, now);
            }
            let before = self.decided.as_ref().or(self.published.as_ref());
            for news in news::between(&self.uid, &self.pod, before, &plan.status) {
                let container = news.container.as_deref();
                let events = &self.shared.events;
                events.tell(&self.pod, container, news.severity, news.reason, news.note);
            }
            self.decided = Some(plan.status);
            self.publish(now);
            for action in last {
                self.perform(action, now);
            }
            let wake_at = [plan.wake_at, self.publish_after, self.untold_until]
                .into_iter()
                .flatten()
                .min();
            let pause = wake_at
                .map(|at| Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO));
            tokio::select! {
                event = self.receiver.recv() => {
                    let Some(event) = event else { return End::Gone };
                    if let Some(end) = self.take(event) {
                        return end;
                    }
                }
                changed = updates.changed() => {
                    if changed.is_err() {
                        return End::Gone;
                    }
                    let update = updates.borrow_and_update().clone();
                    self.update(update);
                }
                () = sleep_for(pause) => {}
            }
            while let Ok(event) = self.receiver.try_recv() {
                if let Some(end) = self.take(event) {
                    return end;
                }
            }
        }
    }

    fn decide(&self, now: Timestamp) -> pod_lifecycle::Plan {
        let observed = Observed {
            uid: &self.uid,
            pod: &self.pod,
            sandbox: &self.sandbox,
            containers: &self.containers,
            verdict: self.verdict.as_ref(),
            accepted_at: self.accepted_at,
            node_address: self.shared.surroundings.node_address.clone(),
        };
        pod_lifecycle::decide(&observed, now)
    }

    fn update(&mut self, update: Option<Pod>) {
        if let Some(mut pod) = update {
            // A watch may lag behind what this task has said already; only others' conditions are news.
            if let Some(decided) = &self.decided {
                pod.status = Some(publishing::overlay(decided, pod.status.as_ref()));
            }
            if let Some(shown) = &self.shown {
                shown.send_replace(pod.clone());
            }
            let before = std::mem::replace(&mut self.pod, pod);
            for added in crate::unsupported::added(&before, &self.pod) {
                let ignored = crate::unsupported::in_added(&self.pod, &added);
                self.warn(Some(&added.name), &ignored);
            }
        } else {
            self.audience = Audience::Gone;
            self.pod.metadata.deletion_timestamp = Some(Time(Timestamp::now()));
            self.pod.metadata.deletion_grace_period_seconds = Some(0);
        }
    }
}

/// Tells the worker of a panic in one of its tasks, for whose result it would wait forever.
async fn guarded(events: mpsc::UnboundedSender<Event>, task: impl Future<Output = ()> + Send) {
    if let Err(panic) = AssertUnwindSafe(task).catch_unwind().await {
        let message = telemetry::panics::message(&*panic).to_owned();
        let _ = events.send(Event::Panicked(message));
    }
}

async fn sleep_for(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}
