//! Doing what was decided.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod};
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use saturating_time::SaturatingTime;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::preparing::{NotRequested, container_of, container_request, prepare, refresh_volumes};
use super::{Audience, Event, PodWorker, Progress, Shared};
use crate::awaited_objects::Awaited;
use crate::pod_lifecycle::{Action, EventReason, KILL_AGAIN, Phase, Sandbox};
use crate::pod_uid::PodUid;
use crate::probes::{self, Kind, ProbeError};
use crate::runtime::{
    ContainerId, ContainerSpec, PodSandbox, Runtime, RuntimeError, StartError, StartedContainer,
};
use crate::trace;
use crate::volumes::{VolumeError, Volumes};
use api::errors::chain;
use container_runtime::signals;
use container_runtime::throttling;
use event_recorder::Severity;

impl<R: Runtime> PodWorker<R> {
    fn id(&self, container: &str, run: u32) -> ContainerId {
        self.uid.container(container, run)
    }

    pub(super) fn perform(&mut self, action: Action, now: Timestamp) {
        match action {
            Action::CreateSandbox => self.create_sandbox(),
            Action::Start {
                container,
                run,
                crashes,
            } => self.start(&container, run, crashes),
            Action::Stop {
                container,
                grace,
                why,
            } => self.stop(&container, grace, &why, now),
            Action::Kill { container } => self.kill(&container, now),
            Action::StopSandbox => self.stop_sandbox(),
            Action::Finish => self.finish(),
        }
    }

    fn create_sandbox(&mut self) {
        self.sandbox = Sandbox::Creating;
        let (shared, pod, sender) = (self.shared.clone(), self.pod.clone(), self.sender.clone());
        let uid = self.uid.clone();
        let span = trace::step(&pod, "PreparePod");
        let prepared = async move {
            let event = match prepare(&shared, &uid, &pod).await {
                Ok(sandbox) => Event::SandboxReady(sandbox),
                Err(not_prepared) => {
                    if not_prepared.event.is_some() {
                        trace::failed(&not_prepared.message);
                    }
                    Event::SandboxWaits(not_prepared)
                }
            };
            let _ = sender.send(event);
        };
        self.act(prepared.instrument(span));
    }

    /// Follows the objects that the pod's volumes show, from now until the pod has ended.
    pub(super) fn keep_volumes_fresh(&mut self, sandbox: &PodSandbox) {
        if !Volumes::follows_objects(&self.pod) {
            return;
        }
        let (shown, pod) = watch::channel(self.pod.clone());
        self.shown = Some(shown);
        let (shared, uid, sandbox) = (self.shared.clone(), self.uid.clone(), sandbox.clone());
        let refresh = async move { refresh_volumes(&shared, &uid, &pod, &sandbox).await };
        let task = tokio::spawn(super::guarded(self.sender.clone(), refresh));
        if let Some(earlier) = self.refreshing.replace(task) {
            earlier.abort();
        }
    }

    /// Has the next attempt begin when one of these objects changes. `container` is none for the pod's sandbox.
    pub(super) fn await_objects(&mut self, container: Option<&str>, awaited: Option<Awaited>) {
        let container = container.map(str::to_owned);
        if let Some(earlier) = self.awaiting.remove(&container) {
            earlier.abort();
        }
        let Some(awaited) = awaited.filter(|awaited| !awaited.is_empty()) else {
            return;
        };
        let (client, sender) = (self.shared.client.clone(), self.sender.clone());
        let whose = container.clone();
        let changed = async move {
            awaited.changed(&client).await;
            let _ = sender.send(Event::ObjectsChanged(whose));
        };
        let task = tokio::spawn(super::guarded(self.sender.clone(), changed));
        self.awaiting.insert(container, task);
    }

    fn start(&mut self, container: &str, run: u32, crashes: u32) {
        let Sandbox::Ready(sandbox) = self.sandbox.clone() else {
            return;
        };
        let state = self.containers.entry(container.to_owned()).or_default();
        if let Phase::Ended(termination) = &state.phase {
            state.previous = Some(termination.clone());
        }
        state.phase = Phase::Starting;
        state.runs = run + 1;
        let give_up = CancellationToken::new();
        self.starting.insert(container.to_owned(), give_up.clone());
        let (shared, pod, sender) = (self.shared.clone(), self.pod.clone(), self.sender.clone());
        let (id, name) = (self.id(container, run), container.to_owned());
        let uid = self.uid.clone();
        let span = trace::step(&pod, "StartContainer");
        span.record("container", container);
        let started = async move {
            let request = container_request(&shared, &uid, &pod, &name, run, crashes, &sandbox);
            let started = match give_up.run_until_cancelled(request).await {
                Some(Ok(spec)) => start_unless(&give_up, &*shared.runtime, &id, spec)
                    .await
                    .map_err(NotRequested::from),
                Some(Err(error)) => Err(error),
                None => Err(StartError::GivenUp.into()),
            };
            let event = match started {
                Ok(started) => Event::Started {
                    container: name,
                    run,
                    started,
                },
                Err(NotRequested { failure, awaits }) => {
                    trace::failed(&failure.message());
                    Event::NotStarted {
                        container: name,
                        run,
                        failure,
                        awaits,
                    }
                }
            };
            let _ = sender.send(event);
        };
        self.act(started.instrument(span));
    }

    /// A container has come to run: follow its end, run its hook, ask its probes. One that was `found` running is not new: its hook
    /// was run, and what it had passed it need not pass again.
    pub(super) fn container_runs(&mut self, container: &str, run: u32, found: Option<Progress>) {
        let id = self.id(container, run);
        let (shared, sender, name) = (
            self.shared.clone(),
            self.sender.clone(),
            container.to_owned(),
        );
        let waited = id.clone();
        // It ends with the container and not with the worker: it reaps the container's first process.
        let ended = async move {
            let termination = shared.runtime.wait(&waited).await;
            let _ = sender.send(Event::Ended {
                container: name,
                run,
                termination,
            });
        };
        tokio::spawn(super::guarded(self.sender.clone(), ended));
        let Some(definition) = container_of(&self.pod, container) else {
            return;
        };
        let known = found.unwrap_or_default();
        let started = known.started || definition.startup_probe.is_none();
        if let Some(state) = self.containers.get_mut(container) {
            state.started = started;
            state.ready = known.ready || definition.readiness_probe.is_none();
        }
        if let Some(resources) = &definition.resources
            && let Some(limits) = &resources.limits
            && limits.contains_key("cpu")
        {
            self.watch_processor(&id, run);
        }
        if let Some(hook) = definition
            .lifecycle
            .as_ref()
            .and_then(|lifecycle| lifecycle.post_start.clone())
            .filter(|_| found.is_none())
        {
            let (shared, sender, name) = (
                self.shared.clone(),
                self.sender.clone(),
                container.to_owned(),
            );
            let address = self.address();
            self.follow(async move {
                let ran = run_hook(&*shared.runtime, &id, &definition, &hook, address, None);
                if let Err(error) = ran.await {
                    let message = chain(&error);
                    let _ = sender.send(Event::HookFailed {
                        container: name,
                        run,
                        message,
                    });
                }
            });
        }
        self.start_probes(container, run, !started);
    }

    /// Follows whether a container is held back by its limit on processor time, until it has ended.
    fn watch_processor(&mut self, id: &ContainerId, run: u32) {
        let (shared, sender, id) = (self.shared.clone(), self.sender.clone(), id.clone());
        self.follow(async move {
            let interval = shared.config.processor_check;
            let tell = |throttled| {
                let container = id.container.clone();
                let event = Event::Throttled {
                    container,
                    run,
                    throttled,
                };
                sender.send(event).is_ok()
            };
            throttling::watch(&*shared.runtime, &id, interval, tell).await;
        });
    }

    fn address(&self) -> std::net::IpAddr {
        match &self.sandbox {
            Sandbox::Ready(sandbox) => sandbox.address.into(),
            _ => std::net::Ipv4Addr::UNSPECIFIED.into(),
        }
    }

    /// Starts a container's probes; while its startup probe has not passed, only that one.
    pub(super) fn start_probes(&mut self, container: &str, run: u32, starting: bool) {
        let Some(definition) = container_of(&self.pod, container) else {
            return;
        };
        let wanted = match (&definition.startup_probe, starting) {
            (Some(startup), true) => vec![(Kind::Startup, startup.clone())],
            _ => [
                (Kind::Liveness, &definition.liveness_probe),
                (Kind::Readiness, &definition.readiness_probe),
            ]
            .into_iter()
            .filter_map(|(kind, probe)| Some((kind, probe.clone()?)))
            .collect(),
        };
        let tasks = self.probes.entry(container.to_owned()).or_default();
        tasks.drain(..).for_each(|task| task.abort());
        let (id, address) = (self.id(container, run), self.address());
        for (kind, probe) in wanted {
            let (shared, sender) = (self.shared.clone(), self.sender.clone());
            let (id, definition, name) = (id.clone(), definition.clone(), container.to_owned());
            let events = self.sender.clone();
            let task = tokio::spawn(super::guarded(events, async move {
                probes::watch(
                    &*shared.runtime,
                    &id,
                    &definition,
                    &probe,
                    address,
                    |verdict| {
                        let _ = sender.send(Event::Probed {
                            container: name.clone(),
                            run,
                            kind,
                            verdict,
                        });
                    },
                )
                .await;
            }));
            self.probes
                .entry(container.to_owned())
                .or_default()
                .push(task);
        }
    }

    fn stop(&mut self, container: &str, grace: Duration, why: &str, now: Timestamp) {
        let address = self.address();
        let Some(state) = self.containers.get_mut(container) else {
            return;
        };
        let Phase::Running { started_at } = state.phase else {
            return;
        };
        state.phase = Phase::Stopping {
            started_at,
            kill_at: now.later_by(grace),
        };
        let run = state.runs - 1;
        if self.pod.metadata.deletion_timestamp.is_some() {
            state.ready = false;
        }
        self.probes
            .remove(container)
            .into_iter()
            .flatten()
            .for_each(|task| task.abort());
        let note = format!("Stopping container {container}: {why}");
        self.shared.events.tell(
            &self.pod,
            Some(container),
            Severity::Normal,
            EventReason::Killing,
            note,
        );
        let id = self.id(container, run);
        let definition = container_of(&self.pod, container);
        let lifecycle = definition
            .as_ref()
            .and_then(|definition| definition.lifecycle.clone())
            .unwrap_or_default();
        let hook = definition.zip(lifecycle.pre_stop);
        let signal = lifecycle
            .stop_signal
            .as_deref()
            .and_then(signals::number)
            .unwrap_or(libc::SIGTERM);
        let (shared, pod) = (self.shared.clone(), self.pod.clone());
        self.follow(async move {
            if let Some((definition, hook)) = hook {
                let hook = run_hook(
                    &*shared.runtime,
                    &id,
                    &definition,
                    &hook,
                    address,
                    Some(grace),
                );
                if let Err(error) = hook.await {
                    shared.events.tell(
                        &pod,
                        Some(&definition.name),
                        Severity::Warning,
                        EventReason::FailedPreStopHook,
                        chain(&error),
                    );
                }
            }
            if let Err(error) = shared.runtime.signal(&id, signal).await {
                tracing::warn!(container = id.container, error = %chain(&error), "cannot signal a container");
            }
        });
    }

    fn kill(&mut self, container: &str, now: Timestamp) {
        let Some(state) = self.containers.get_mut(container) else {
            return;
        };
        if state.phase == Phase::Starting {
            // What comes of it is told by the start itself.
            if let Some(give_up) = self.starting.get(container) {
                give_up.cancel();
            }
            return;
        }
        if let Phase::Running { started_at } | Phase::Stopping { started_at, .. } = state.phase {
            state.phase = Phase::Stopping {
                started_at,
                kill_at: now.later_by(KILL_AGAIN),
            };
        }
        let run = state.runs - 1;
        let (shared, id) = (self.shared.clone(), self.id(container, run));
        self.act(async move {
            if let Err(error) = shared.runtime.kill(&id).await {
                tracing::warn!(container = id.container, error = %chain(&error), "cannot kill a container");
            }
        });
    }

    fn stop_sandbox(&mut self) {
        let address = match &self.sandbox {
            Sandbox::Ready(sandbox) => Some(sandbox.clone()),
            _ => None,
        };
        let refreshing = self.refreshing.take();
        // What it still has is its logs; its end would free nothing.
        self.shared.evictions.forget(&self.uid);
        self.sandbox = Sandbox::Stopped { address };
        let (shared, uid, pod) = (self.shared.clone(), self.uid.clone(), self.pod.clone());
        self.stopping = Some(self.act(async move {
            end(refreshing).await;
            shared.enforcer.detach(uid.as_str()).await;
            if let Err(error) = shared.volumes.release(&uid).await {
                tracing::warn!(pod = pod.metadata.name, error = %chain(&error), "cannot free a pod's volumes");
            }
            if let Err(error) = shared.runtime.stop_sandbox(uid.as_str()).await {
                tracing::warn!(pod = pod.metadata.name, error = %chain(&error), "cannot free a pod's sandbox");
            }
        }));
    }

    /// Removes everything of the pod, then the pod, once it is told how it ended. A failure is retried by deciding again.
    fn finish(&mut self) {
        if self.finishing || self.publishing || !self.has_said_all() {
            return;
        }
        self.finishing = true;
        let (stopping, refreshing) = (self.stopping.take(), self.refreshing.take());
        let (shared, pod, sender, gone) = (
            self.shared.clone(),
            self.pod.clone(),
            self.sender.clone(),
            self.audience == Audience::Gone,
        );
        let uid = self.uid.clone();
        self.act(async move {
            let mut done = true;
            end(refreshing).await;
            // One after the other: both free the same things.
            if let Some(stopping) = stopping {
                let _ = stopping.await;
            }
            if let Err(error) = remove(&shared, &uid).await {
                tracing::warn!(pod = pod.metadata.name, error = %chain(&error), "cannot remove a pod");
                done = false;
            } else if !gone {
                done = delete_object(&shared, &pod, &uid).await;
            }
            if !done {
                tokio::time::sleep(super::RETRY).await;
            }
            let _ = sender.send(Event::Finished(done));
        });
    }
}

/// Ends a task that may be writing what is to be removed.
async fn end(task: Option<JoinHandle<()>>) {
    if let Some(task) = task {
        task.abort();
        let _ = task.await;
    }
}

/// Removes everything of a pod that nothing runs of any more.
pub async fn remove<R: Runtime>(shared: &Shared<R>, uid: &PodUid) -> Result<(), RemoveError> {
    shared.volumes.release(uid).await?;
    shared.enforcer.detach(uid.as_str()).await;
    Ok(shared.runtime.remove_sandbox(uid.as_str()).await?)
}

/// Why something of a pod is left.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error(transparent)]
    Volumes(#[from] VolumeError),
    #[error(transparent)]
    Runtime(#[from] RuntimeError),
}

async fn delete_object<R: Runtime>(shared: &Shared<R>, pod: &Pod, uid: &PodUid) -> bool {
    let (name, namespace) = (
        pod.metadata.name.clone().unwrap_or_default(),
        pod.metadata.namespace.clone().unwrap_or_default(),
    );
    let parameters = DeleteParams {
        grace_period_seconds: Some(0),
        preconditions: Some(Preconditions {
            uid: Some(uid.to_string()),
            resource_version: None,
        }),
        ..DeleteParams::default()
    };
    match Api::<Pod>::namespaced(shared.client.clone(), &namespace)
        .delete(&name, &parameters)
        .await
    {
        Ok(_) => true,
        // Gone, or replaced by another of its name: either way this one is no more.
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => true,
        Err(error) => {
            tracing::warn!(pod = name, error = %chain(&error), "cannot finish deleting a pod");
            false
        }
    }
}

/// Starts a container, unless that is given up meanwhile.
async fn start_unless<R: Runtime>(
    give_up: &CancellationToken,
    runtime: &R,
    id: &ContainerId,
    spec: ContainerSpec,
) -> Result<StartedContainer, StartError> {
    let mut starting = std::pin::pin!(runtime.start(spec));
    tokio::select! {
        // It begins before it can be given up.
        biased;
        started = &mut starting => return started,
        () = give_up.cancelled() => {}
    }
    if let Err(error) = runtime.kill(id).await {
        tracing::warn!(container = id.container, error = %chain(&error), "cannot give up a start");
    }
    starting.await
}

/// Why a lifecycle hook failed.
#[derive(Debug, thiserror::Error)]
enum HookError {
    #[error("the hook outlasted the grace period")]
    OutlastedGracePeriod,
    #[error(transparent)]
    Failed(#[from] ProbeError),
}

/// Runs a hook, for no longer than `limit`.
async fn run_hook<R: Runtime>(
    runtime: &R,
    id: &ContainerId,
    container: &Container,
    hook: &LifecycleHandler,
    address: std::net::IpAddr,
    limit: Option<Duration>,
) -> Result<(), HookError> {
    if let Some(action) = &hook.exec {
        let command = action.command.clone().unwrap_or_default();
        return Ok(probes::exec(runtime, id, command, limit).await?);
    }
    let other = async {
        if let Some(action) = &hook.http_get {
            return Ok(probes::http_get(runtime, id, action, container, address).await?);
        }
        if let Some(action) = &hook.sleep {
            tokio::time::sleep(Duration::from_secs(action.seconds.unsigned_abs())).await;
        }
        Ok(())
    };
    probes::within(limit, other)
        .await
        .unwrap_or(Err(HookError::OutlastedGracePeriod))
}
