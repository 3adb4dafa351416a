//! Carries out what the pod lifecycle decides, for one pod: a task that observes, decides, acts and reports.
//!
//! Actions run as tasks of their own and come back as events, so that a slow start never delays a deletion.

mod actions;
mod news;
mod preparing;
mod publishing;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::config::Config;
use crate::environment::Surroundings;
use crate::events::{EventSink, Severity};
use crate::eviction::Evictions;
use crate::network::enforcer::Enforcer;
use crate::pod_images::PodImages;
use crate::pod_lifecycle::{self, ContainerState, Observed, Phase, Sandbox, Verdict};
use crate::probes;
use crate::runtime::handlers::Handlers;
use crate::runtime::{
    PodSandbox, RecoveredPod, Runtime, StartError, StartedContainer, Termination,
};
use crate::volumes::Volumes;

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

/// What became of an action, or of a container.
#[derive(Debug)]
enum Event {
    SandboxReady(PodSandbox),
    SandboxWaits {
        reason: String,
        message: String,
    },
    Started {
        container: String,
        run: u32,
        started: StartedContainer,
    },
    NotStarted {
        container: String,
        run: u32,
        error: StartError,
    },
    Ended {
        container: String,
        run: u32,
        termination: Termination,
    },
    Probed {
        container: String,
        run: u32,
        kind: probes::Kind,
        verdict: probes::Verdict,
    },
    HookFailed {
        container: String,
        run: u32,
        message: String,
    },
    Throttled {
        container: String,
        run: u32,
        throttled: bool,
    },
    Condemned(Verdict),
    Published(Box<Result<PodStatus, kube::Error>>),
    Finished(bool),
}

/// One pod's task.
pub struct PodWorker<R> {
    shared: Arc<Shared<R>>,
    pod: Pod,
    /// The pod is gone from the API; nothing is left to report to.
    gone: bool,
    sandbox: Sandbox,
    containers: BTreeMap<String, ContainerState>,
    verdict: Option<Verdict>,
    accepted_at: Timestamp,
    sender: mpsc::UnboundedSender<Event>,
    receiver: mpsc::UnboundedReceiver<Event>,
    probes: HashMap<String, Vec<JoinHandle<()>>>,
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
        let uid = self.pod.metadata.uid.as_deref().unwrap_or_default();
        self.shared.evictions.forget(uid);
        self.probes.values().flatten().for_each(JoinHandle::abort);
        self.refreshing.iter().for_each(JoinHandle::abort);
    }
}

const RETRY: Duration = Duration::from_secs(2);

impl<R: Runtime> PodWorker<R> {
    pub fn new(shared: Arc<Shared<R>>, pod: &Pod, recovered: Option<RecoveredPod>) -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        let started = pod
            .status
            .as_ref()
            .and_then(|status| status.start_time.as_ref())
            .map(|time| time.0);
        let mut worker = Self {
            shared,
            pod: pod.clone(),
            gone: false,
            sandbox: Sandbox::Missing,
            containers: BTreeMap::new(),
            verdict: None,
            accepted_at: started.unwrap_or_else(Timestamp::now),
            sender,
            receiver,
            probes: HashMap::new(),
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
            // One event for all of it: events of one reason are counted as one, whatever else they say.
            let ignored = crate::unsupported::unsupported(pod);
            if !ignored.is_empty() {
                let note = ignored.join("; ");
                let events = &worker.shared.events;
                events.tell(pod, None, Severity::Warning, "Unsupported", note);
            }
        }
        worker.watch_storage();
        worker
    }

    /// Lets the node say when the pod holds too much of the disk.
    fn watch_storage(&self) {
        let (sender, mut verdicts) = mpsc::unbounded_channel();
        let uid = self.pod.metadata.uid.as_deref().unwrap_or_default();
        self.shared.evictions.watch(uid, &self.pod, sender);
        let events = self.sender.clone();
        tokio::spawn(async move {
            while let Some(verdict) = verdicts.recv().await {
                let _ = events.send(Event::Condemned(verdict));
            }
        });
    }

    /// Takes over what an earlier run of the node left.
    fn adopt(&mut self, recovered: RecoveredPod) {
        // Without its namespaces a pod starts over, as after a reboot; what ran has ended. So does one that no container was
        // started in: the node may have died before its files and volumes were there. What is there is used again.
        let was_prepared = !recovered.containers.is_empty();
        if let Some(sandbox) = recovered.sandbox.filter(|_| was_prepared) {
            self.shared.enforcer.attach(&self.pod, sandbox.addresses());
            self.keep_volumes_fresh(&sandbox);
            self.sandbox = Sandbox::Ready(sandbox);
        }
        for found in recovered.containers {
            let name = found.id.container.clone();
            let mut state = ContainerState {
                runs: found.id.attempt + 1,
                crashes: found.crashes,
                previous: found.previous,
                image_id: Some(found.started.image_id.clone()),
                ..ContainerState::default()
            };
            let running = found.termination.is_none();
            match found.termination {
                Some(termination) => state.end(termination),
                None => {
                    state.phase = Phase::Running {
                        started_at: found.started.started_at,
                    }
                }
            }
            self.containers.insert(name.clone(), state);
            if running {
                self.container_runs(&name, found.id.attempt);
                self.keep_readiness(&name);
            }
        }
    }

    /// A container that was ready when the node stopped is taken to be so until a probe says otherwise.
    fn keep_readiness(&mut self, container: &str) {
        let status = self.pod.status.as_ref();
        let statuses = status.into_iter().flat_map(|status| {
            status
                .container_statuses
                .iter()
                .flatten()
                .chain(status.init_container_statuses.iter().flatten())
        });
        let Some(known) = statuses.into_iter().find(|status| status.name == container) else {
            return;
        };
        if let Some(state) = self.containers.get_mut(container)
            && i32::try_from(state.runs).is_ok_and(|runs| runs == known.restart_count + 1)
        {
            state.started |= known.started == Some(true);
            state.ready |= known.ready;
        }
    }

    /// Runs until the pod is gone.
    pub async fn run(mut self, mut updates: watch::Receiver<Option<Pod>>) {
        loop {
            let now = Timestamp::now();
            let plan = self.decide(now);
            for action in plan.actions {
                self.perform(action, now);
            }
            let before = self.decided.as_ref().or(self.published.as_ref());
            for news in news::between(&self.pod, before, &plan.status) {
                let container = news.container.as_deref();
                let events = &self.shared.events;
                events.tell(&self.pod, container, news.severity, news.reason, news.note);
            }
            self.decided = Some(plan.status);
            self.publish(now);
            let wake_at = [plan.wake_at, self.publish_after, self.untold_until]
                .into_iter()
                .flatten()
                .min();
            let pause = wake_at
                .map(|at| Duration::try_from(at.duration_since(now)).unwrap_or(Duration::ZERO));
            tokio::select! {
                event = self.receiver.recv() => {
                    let Some(event) = event else { return };
                    if self.take(event) {
                        return;
                    }
                }
                changed = updates.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let update = updates.borrow_and_update().clone();
                    self.update(update);
                }
                () = sleep_for(pause) => {}
            }
            while let Ok(event) = self.receiver.try_recv() {
                if self.take(event) {
                    return;
                }
            }
        }
    }

    fn decide(&self, now: Timestamp) -> pod_lifecycle::Plan {
        let observed = Observed {
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
            self.pod = pod;
        } else {
            self.gone = true;
            self.pod.metadata.deletion_timestamp = Some(Time(Timestamp::now()));
            self.pod.metadata.deletion_grace_period_seconds = Some(0);
        }
    }

    fn current(&mut self, container: &str, run: u32) -> Option<&mut ContainerState> {
        self.containers
            .get_mut(container)
            .filter(|state| state.runs == run + 1)
    }

    /// Takes an event in; true when the pod is gone for good.
    fn take(&mut self, event: Event) -> bool {
        match event {
            Event::SandboxReady(sandbox) => {
                self.keep_volumes_fresh(&sandbox);
                self.sandbox = Sandbox::Ready(sandbox);
            }
            Event::SandboxWaits { reason, message } => {
                self.shared.events.tell(
                    &self.pod,
                    None,
                    Severity::Warning,
                    &reason,
                    message.clone(),
                );
                let waiting = if reason == "FailedMount" {
                    "ContainerCreating".to_owned()
                } else {
                    reason
                };
                self.sandbox = Sandbox::Waiting {
                    reason: waiting,
                    message,
                    retry_at: Timestamp::now() + RETRY,
                };
            }
            Event::Started {
                container,
                run,
                started,
            } => self.started(&container, run, started),
            Event::NotStarted {
                container,
                run,
                error,
            } => self.not_started(&container, run, &error),
            Event::Ended {
                container,
                run,
                termination,
            } => {
                if let Some(state) = self.current(&container, run) {
                    state.end(termination);
                    self.probes
                        .remove(&container)
                        .into_iter()
                        .flatten()
                        .for_each(|task| task.abort());
                }
            }
            Event::Probed {
                container,
                run,
                kind,
                verdict,
            } => self.probed(&container, run, kind, verdict),
            Event::HookFailed {
                container,
                run,
                message,
            } => {
                self.shared.events.tell(
                    &self.pod,
                    Some(&container),
                    Severity::Warning,
                    "FailedPostStartHook",
                    message.clone(),
                );
                if let Some(state) = self.current(&container, run) {
                    state.unhealthy = Some(message);
                }
            }
            Event::Throttled {
                container,
                run,
                throttled,
            } => {
                if let Some(state) = self.current(&container, run) {
                    state.throttled = throttled && state.is_live();
                }
            }
            Event::Condemned(verdict) => self.condemn(verdict),
            Event::Published(result) => self.status_published(*result),
            Event::Finished(done) => {
                self.finishing = false;
                return done;
            }
        }
        false
    }

    /// The node ends the pod on its own account.
    fn condemn(&mut self, verdict: Verdict) {
        if self.verdict.is_some() || self.pod.metadata.deletion_timestamp.is_some() {
            return;
        }
        self.shared.events.tell(
            &self.pod,
            None,
            Severity::Warning,
            &verdict.reason,
            verdict.message.clone(),
        );
        self.verdict = Some(verdict);
    }

    fn started(&mut self, container: &str, run: u32, started: StartedContainer) {
        let Some(state) = self.current(container, run) else {
            return;
        };
        state.phase = Phase::Running {
            started_at: started.started_at,
        };
        state.image_id = Some(started.image_id);
        state.failed_pulls = 0;
        let note = format!("Started container {container}");
        self.shared.events.tell(
            &self.pod,
            Some(container),
            Severity::Normal,
            "Started",
            note,
        );
        self.container_runs(container, run);
    }

    fn not_started(&mut self, container: &str, run: u32, error: &StartError) {
        let now = Timestamp::now();
        let message = crate::errors::chain(error);
        let Some(state) = self.current(container, run) else {
            return;
        };
        let reason = match error {
            StartError::Command { .. } => {
                const START_FAILED: i32 = 128;
                state.end(Termination {
                    exit_code: START_FAILED,
                    signal: None,
                    reason: "StartError".to_owned(),
                    message: Some(message.clone()),
                    started_at: Some(now),
                    finished_at: now,
                });
                "Failed"
            }
            other => {
                let reason = match other {
                    StartError::Image { reason, .. } => reason,
                    StartError::Configuration(_) => &"CreateContainerConfigError",
                    _ => &"CreateContainerError",
                };
                // It never ran, so it is the same run that is tried again.
                state.runs -= 1;
                let delay = if matches!(other, StartError::Image { .. }) {
                    state.failed_pulls += 1;
                    pod_lifecycle::pull_back_off(state.failed_pulls)
                } else {
                    state.crashes += 1;
                    pod_lifecycle::back_off(state.crashes).max(RETRY)
                };
                state.phase = Phase::Refused {
                    reason: (*reason).to_owned(),
                    message: message.clone(),
                    since: now,
                    retry_at: now + delay,
                };
                "Failed"
            }
        };
        self.shared.events.tell(
            &self.pod,
            Some(container),
            Severity::Warning,
            reason,
            format!("Error: {message}"),
        );
    }

    fn probed(&mut self, container: &str, run: u32, kind: probes::Kind, verdict: probes::Verdict) {
        if let probes::Verdict::Failing(message) = &verdict {
            let note = format!("{} probe failed: {message}", kind.name());
            self.shared.events.tell(
                &self.pod,
                Some(container),
                Severity::Warning,
                "Unhealthy",
                note,
            );
        }
        let Some(state) = self.current(container, run) else {
            return;
        };
        match (kind, verdict) {
            (probes::Kind::Readiness, verdict) => state.ready = verdict == probes::Verdict::Passing,
            (probes::Kind::Startup, probes::Verdict::Passing) => {
                state.started = true;
                self.start_probes(container, run, false);
            }
            (probes::Kind::Liveness, probes::Verdict::Passing) => {}
            (kind, probes::Verdict::Failing(_)) => {
                let name = kind.name().to_lowercase();
                state.unhealthy = Some(format!(
                    "Container {container} failed {name} probe, will be restarted"
                ));
            }
        }
    }
}

async fn sleep_for(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}
