//! The task of one pod: feeds its [`PodMachine`] with events and carries out the machine's commands.
//!
//! Commands run as tasks of their own and come back as events, so that a slow start never delays a deletion. What is decided, and in
//! which order, is the machine's; this module knows only how.

mod commands;
mod preparing;
mod status_writer;

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures::FutureExt;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::commands::remove;
use crate::clock::Clock;
use crate::config::Config;
use crate::environment::Surroundings;
use crate::eviction::Evictions;
use crate::network::enforcer::Enforcer;
use crate::pod_images::PodImages;
use crate::pod_lifecycle::Verdict;
use crate::pod_machine::{Event, NodeFacts, PodMachine};
use crate::pod_uid::PodUid;
use crate::runtime::handlers::Handlers;
use crate::runtime::{RecoveredPod, Runtime};
use crate::volumes::Volumes;
use event_recorder::EventSink;

/// The parts of the node that all pods use.
pub struct Shared<R> {
    pub clock: Arc<dyn Clock>,
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
    /// The server accepts no strategic merge patches.
    pub plain_patches: AtomicBool,
}

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// Nothing is left of the pod, or the node stops.
    Gone,
    /// A task of the worker panicked, so that the machine may wait for an event that never comes.
    Panicked(String),
}

/// What a task of the worker reports.
#[derive(Debug)]
enum Report {
    Event(Event),
    /// A task panicked with a message.
    Panicked(String),
}

/// The tasks that carry out the commands of a pod.
struct Tasks {
    reports: mpsc::UnboundedSender<Report>,
    /// Actions. They go on to their end when the worker is lost: half of a sandbox would help no other worker.
    actions: TaskTracker,
    /// Observers. They end with the worker.
    observers: JoinSet<()>,
    probes: HashMap<String, Vec<JoinHandle<()>>>,
    /// Waits for objects without which a container, or the pod's sandbox (no name), cannot be created.
    awaiting: HashMap<Option<String>, JoinHandle<()>>,
    /// Each gives up the start of a container.
    starting: HashMap<String, CancellationToken>,
    /// Frees the pod's sandbox.
    freeing: Option<JoinHandle<()>>,
    /// Refreshes the pod's volumes…
    refreshing: Option<JoinHandle<()>>,
    /// … which may show fields of the pod itself.
    refreshed_pod: Option<watch::Sender<Pod>>,
}

/// One pod's task.
pub struct PodWorker<R> {
    shared: Arc<Shared<R>>,
    machine: PodMachine,
    tasks: Tasks,
    reports: mpsc::UnboundedReceiver<Report>,
}

impl<R> std::fmt::Debug for PodWorker<R> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("PodWorker")
            .field("uid", self.machine.uid())
            .finish_non_exhaustive()
    }
}

impl<R> Drop for PodWorker<R> {
    fn drop(&mut self) {
        self.shared.evictions.forget(self.machine.uid());
        let tasks = &self.tasks;
        tasks.probes.values().flatten().for_each(JoinHandle::abort);
        tasks.refreshing.iter().for_each(JoinHandle::abort);
        tasks.awaiting.values().for_each(JoinHandle::abort);
        let starting = tasks.starting.values();
        starting.for_each(CancellationToken::cancel);
    }
}

impl<R: Runtime> PodWorker<R> {
    /// Takes a pod on. A pod with a `refusal` ends before it begins.
    pub fn new(
        shared: Arc<Shared<R>>,
        uid: PodUid,
        pod: &Pod,
        recovered: Option<RecoveredPod>,
        refusal: Option<Verdict>,
        actions: TaskTracker,
    ) -> Self {
        let (sender, reports) = mpsc::unbounded_channel();
        let node = NodeFacts {
            address: shared.surroundings.node_address.clone(),
            cannot_freeze: shared.runtime.cannot_freeze(),
        };
        let now = shared.clock.now();
        let machine = PodMachine::new(uid, pod, node, recovered, refusal, now);
        let mut worker = Self {
            shared,
            machine,
            tasks: Tasks {
                reports: sender,
                actions,
                observers: JoinSet::new(),
                probes: HashMap::new(),
                awaiting: HashMap::new(),
                starting: HashMap::new(),
                freeing: None,
                refreshing: None,
                refreshed_pod: None,
            },
            reports,
        };
        worker.perform_commands();
        worker.watch_storage();
        worker
    }

    /// Has evictions report when the pod holds too much of the disk.
    fn watch_storage(&mut self) {
        let (sender, mut verdicts) = mpsc::unbounded_channel();
        let (uid, pod) = (self.machine.uid(), self.machine.pod());
        self.shared.evictions.watch(uid, pod, sender);
        let reports = self.tasks.reports.clone();
        self.tasks.observe(async move {
            while let Some(verdict) = verdicts.recv().await {
                let _ = reports.send(Report::Event(Event::Condemned(verdict)));
            }
        });
    }

    /// Runs until the pod is gone.
    pub async fn run(mut self, mut updates: watch::Receiver<Option<Arc<Pod>>>) -> End {
        loop {
            self.shared.config.faults.strike();
            let now = self.shared.clock.now();
            let wake_at = self.machine.advance(now);
            self.perform_commands();
            let pause = wake_at
                .map(|at| Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO));
            tokio::select! {
                report = self.reports.recv() => {
                    let Some(report) = report else { return End::Gone };
                    if let Some(end) = self.take(report) {
                        return end;
                    }
                }
                changed = updates.changed() => {
                    if changed.is_err() {
                        return End::Gone;
                    }
                    let pod = updates.borrow_and_update().clone();
                    self.machine.observe(pod.as_deref(), self.shared.clock.now());
                    self.perform_commands();
                }
                () = sleep_for(pause) => {}
            }
            while let Ok(report) = self.reports.try_recv() {
                if let Some(end) = self.take(report) {
                    return end;
                }
            }
        }
    }

    /// Takes a report in. The worker ends when the pod is gone, and when one of its tasks was lost.
    fn take(&mut self, report: Report) -> Option<End> {
        let event = match report {
            Report::Event(event) => event,
            Report::Panicked(message) => return Some(End::Panicked(message)),
        };
        if let Event::Started { container, .. } | Event::NotStarted { container, .. } = &event {
            self.tasks.starting.remove(container);
        }
        self.machine.handle(event, self.shared.clock.now());
        self.perform_commands();
        self.machine.is_gone().then_some(End::Gone)
    }

    fn perform_commands(&mut self) {
        for command in self.machine.take_commands() {
            self.perform(command);
        }
    }
}

impl Tasks {
    /// Runs an action to its end, also without this worker, and reports its outcome.
    fn act(&self, action: impl Future<Output = Event> + Send + 'static) -> JoinHandle<()> {
        let reports = self.reports.clone();
        self.act_silently(async move {
            let event = action.await;
            let _ = reports.send(Report::Event(event));
        })
    }

    /// Runs an action without an outcome to its end, also without this worker.
    fn act_silently(&self, action: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.actions.spawn(guarded(self.reports.clone(), action))
    }

    /// Runs a task until the worker ends.
    fn observe(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        while self.observers.try_join_next().is_some() {}
        let guarded = guarded(self.reports.clone(), task);
        self.observers.spawn(guarded);
    }

    /// Runs a task that is aborted by its handle, at the latest when the worker ends.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        tokio::spawn(guarded(self.reports.clone(), task))
    }
}

/// Reports a panic in a task, for whose outcome the worker would wait forever.
async fn guarded(reports: mpsc::UnboundedSender<Report>, task: impl Future<Output = ()> + Send) {
    if let Err(panic) = AssertUnwindSafe(task).catch_unwind().await {
        let message = telemetry::panics::message(&*panic).to_owned();
        let _ = reports.send(Report::Panicked(message));
    }
}

async fn sleep_for(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}
