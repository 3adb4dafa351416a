//! Carrying out a machine's commands with the runtime, the API and the rest of the node.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod, PodStatus};
use kube::Api;
use kube::api::{DeleteParams, Preconditions};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use super::preparing::{NotRequested, container_request, prepare, refresh_volumes};
use super::status_writer::publish;
use super::{PodWorker, Report, Shared};
use crate::awaited_objects::Awaited;
use crate::pod_lifecycle::{EventReason, container_of};
use crate::pod_machine::{Command, Event, PodEvent, ProbeKind, ProbeStage};
use crate::pod_uid::PodUid;
use crate::probes::{self, ProbeError};
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
        self.machine.uid().container(container, run)
    }

    pub(super) fn perform(&mut self, command: Command) {
        match command {
            Command::AttachNetwork(sandbox) => {
                let enforcer = &self.shared.enforcer;
                enforcer.attach(
                    self.machine.uid().as_str(),
                    self.machine.pod(),
                    sandbox.addresses(),
                );
            }
            Command::RefreshVolumes(sandbox) => self.refresh_volumes(sandbox),
            Command::RefreshPod => {
                if let Some(pod) = &self.tasks.refreshed_pod {
                    pod.send_replace(self.machine.pod().clone());
                }
            }
            Command::CreateSandbox => self.create_sandbox(),
            Command::AwaitObjects { container, awaited } => self.await_objects(container, awaited),
            Command::StartContainer {
                container,
                run,
                crashes,
                sandbox,
            } => self.start_container(container, run, crashes, sandbox),
            Command::CancelStart { container } => {
                if let Some(cancel) = self.tasks.starting.get(&container) {
                    cancel.cancel();
                }
            }
            Command::WaitContainer { container, run } => self.wait_container(container, run),
            Command::WatchCpu { container, run } => self.watch_cpu(&container, run),
            Command::RunPostStartHook { container, run } => {
                self.run_post_start_hook(container, run);
            }
            Command::StartProbes {
                container,
                run,
                stage,
            } => self.start_probes(&container, run, stage),
            Command::StopProbes { container } => self.stop_probes(&container),
            Command::StopContainer {
                container,
                run,
                grace,
            } => self.stop_container(&container, run, grace),
            Command::KillContainer { container, run } => self.kill_container(&container, run),
            Command::Freeze => self.freeze(),
            Command::Thaw => self.thaw(),
            Command::FreeSandbox => self.free_sandbox(),
            Command::PublishStatus(status) => self.publish_status(*status),
            Command::Remove => self.remove(),
            Command::DeleteObject => self.delete_object(),
            Command::Emit(event) => self.emit(event),
        }
    }

    fn emit(&self, event: PodEvent) {
        let PodEvent {
            container,
            severity,
            reason,
            note,
        } = event;
        let pod = self.machine.pod();
        let events = &self.shared.events;
        events.tell(pod, container.as_deref(), severity, reason, note);
    }

    fn create_sandbox(&self) {
        let (shared, pod) = (self.shared.clone(), self.machine.pod().clone());
        let uid = self.machine.uid().clone();
        let span = trace::step(&pod, "PreparePod");
        let prepared = async move {
            match prepare(&shared, &uid, &pod).await {
                Ok(sandbox) => Event::SandboxReady(sandbox),
                Err(not_prepared) => {
                    if not_prepared.event.is_some() {
                        trace::failed(&not_prepared.message);
                    }
                    Event::SandboxWaits(not_prepared)
                }
            }
        };
        self.tasks.act(prepared.instrument(span));
    }

    /// Follows the objects that the pod's volumes show, from now until the pod has ended.
    fn refresh_volumes(&mut self, sandbox: PodSandbox) {
        if !Volumes::follows_objects(self.machine.pod()) {
            return;
        }
        let (sender, pod) = watch::channel(self.machine.pod().clone());
        self.tasks.refreshed_pod = Some(sender);
        let (shared, uid) = (self.shared.clone(), self.machine.uid().clone());
        let refresh = async move { refresh_volumes(&shared, &uid, &pod, &sandbox).await };
        let task = self.tasks.spawn(refresh);
        if let Some(earlier) = self.tasks.refreshing.replace(task) {
            earlier.abort();
        }
    }

    fn await_objects(&mut self, container: Option<String>, awaited: Option<Awaited>) {
        if let Some(earlier) = self.tasks.awaiting.remove(&container) {
            earlier.abort();
        }
        let Some(awaited) = awaited.filter(|awaited| !awaited.is_empty()) else {
            return;
        };
        let (client, reports) = (self.shared.client.clone(), self.tasks.reports.clone());
        let awaits = container.clone();
        let task = self.tasks.spawn(async move {
            awaited.changed(&client).await;
            let _ = reports.send(Report::Event(Event::ObjectsChanged(awaits)));
        });
        self.tasks.awaiting.insert(container, task);
    }

    fn start_container(&mut self, container: String, run: u32, crashes: u32, sandbox: PodSandbox) {
        let cancel = CancellationToken::new();
        let starting = &mut self.tasks.starting;
        starting.insert(container.clone(), cancel.clone());
        let (shared, pod) = (self.shared.clone(), self.machine.pod().clone());
        let (id, uid) = (self.id(&container, run), self.machine.uid().clone());
        let span = trace::step(&pod, "StartContainer");
        span.record("container", &container);
        let started = async move {
            let request =
                container_request(&shared, &uid, &pod, &container, run, crashes, &sandbox);
            let started = match cancel.run_until_cancelled(request).await {
                Some(Ok(spec)) => start_unless(&cancel, &*shared.runtime, &id, spec)
                    .await
                    .map_err(NotRequested::from),
                Some(Err(error)) => Err(error),
                None => Err(StartError::GivenUp.into()),
            };
            match started {
                Ok(started) => Event::Started {
                    container,
                    run,
                    started,
                },
                Err(NotRequested { failure, awaits }) => {
                    trace::failed(&failure.message());
                    Event::NotStarted {
                        container,
                        run,
                        failure,
                        awaits,
                    }
                }
            }
        };
        self.tasks.act(started.instrument(span));
    }

    fn wait_container(&self, container: String, run: u32) {
        let id = self.id(&container, run);
        let (shared, reports) = (self.shared.clone(), self.tasks.reports.clone());
        // The task ends with the container and not with the worker: it reaps the container's first process.
        self.tasks.spawn(async move {
            let termination = shared.runtime.wait(&id).await;
            let _ = reports.send(Report::Event(Event::Ended {
                container,
                run,
                termination,
            }));
        });
    }

    fn run_post_start_hook(&mut self, container: String, run: u32) {
        let Some(definition) = container_of(self.machine.pod(), &container) else {
            return;
        };
        let lifecycle = definition.lifecycle.as_ref();
        let Some(hook) = lifecycle.and_then(|lifecycle| lifecycle.post_start.clone()) else {
            return;
        };
        let (shared, reports) = (self.shared.clone(), self.tasks.reports.clone());
        let (id, address) = (self.id(&container, run), self.machine.address());
        self.tasks.observe(async move {
            let ran = run_hook(&*shared.runtime, &id, &definition, &hook, address, None);
            if let Err(error) = ran.await {
                let _ = reports.send(Report::Event(Event::HookFailed {
                    container,
                    run,
                    message: chain(&error),
                }));
            }
        });
    }

    /// Reports whether a container is throttled by its CPU limit, until it has ended.
    fn watch_cpu(&mut self, container: &str, run: u32) {
        let (shared, reports) = (self.shared.clone(), self.tasks.reports.clone());
        let id = self.id(container, run);
        self.tasks.observe(async move {
            let interval = shared.config.cpu_throttling_interval;
            let report = |throttled| {
                let event = Event::Throttled {
                    container: id.container.clone(),
                    run,
                    throttled,
                };
                reports.send(Report::Event(event)).is_ok()
            };
            throttling::watch(&*shared.runtime, &id, interval, report).await;
        });
    }

    fn start_probes(&mut self, container: &str, run: u32, stage: ProbeStage) {
        self.stop_probes(container);
        let Some(definition) = container_of(self.machine.pod(), container) else {
            return;
        };
        let wanted = match (&definition.startup_probe, stage) {
            (Some(startup), ProbeStage::Startup) => vec![(ProbeKind::Startup, startup.clone())],
            _ => [
                (ProbeKind::Liveness, &definition.liveness_probe),
                (ProbeKind::Readiness, &definition.readiness_probe),
            ]
            .into_iter()
            .filter_map(|(kind, probe)| Some((kind, probe.clone()?)))
            .collect(),
        };
        let (id, address) = (self.id(container, run), self.machine.address());
        let tasks = wanted.into_iter().map(|(kind, probe)| {
            let (shared, reports) = (self.shared.clone(), self.tasks.reports.clone());
            let (id, definition) = (id.clone(), definition.clone());
            self.tasks.spawn(async move {
                let report = |verdict| {
                    let _ = reports.send(Report::Event(Event::Probed {
                        container: id.container.clone(),
                        run,
                        kind,
                        verdict,
                    }));
                };
                probes::watch(&*shared.runtime, &id, &definition, &probe, address, report).await;
            })
        });
        let tasks = tasks.collect();
        self.tasks.probes.insert(container.to_owned(), tasks);
    }

    fn stop_probes(&mut self, container: &str) {
        let probes = self.tasks.probes.remove(container);
        probes.into_iter().flatten().for_each(|probe| probe.abort());
    }

    fn stop_container(&mut self, container: &str, run: u32, grace: Duration) {
        let (id, address) = (self.id(container, run), self.machine.address());
        let definition = container_of(self.machine.pod(), container);
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
        let (shared, pod) = (self.shared.clone(), self.machine.pod().clone());
        self.tasks.observe(async move {
            if let Some((definition, hook)) = hook {
                let limit = Some(grace);
                let hook = run_hook(&*shared.runtime, &id, &definition, &hook, address, limit);
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

    fn kill_container(&self, container: &str, run: u32) {
        let (shared, id) = (self.shared.clone(), self.id(container, run));
        self.tasks.act_silently(async move {
            if let Err(error) = shared.runtime.kill(&id).await {
                tracing::warn!(container = id.container, error = %chain(&error), "cannot kill a container");
            }
        });
    }

    fn freeze(&self) {
        let (shared, uid) = (self.shared.clone(), self.machine.uid().clone());
        let reports = self.tasks.reports.clone();
        self.tasks.act_silently(async move {
            let frozen = shared.runtime.freeze(uid.as_str()).await;
            let frozen = frozen.map_err(|error| chain(&error));
            let is_frozen = frozen.is_ok();
            let _ = reports.send(Report::Event(Event::Frozen(frozen)));
            if is_frozen && let Some(note) = shared.runtime.page_out(uid.as_str()).await {
                let _ = reports.send(Report::Event(Event::PagedOut(note)));
            }
        });
    }

    fn thaw(&self) {
        let (shared, uid) = (self.shared.clone(), self.machine.uid().clone());
        self.tasks.act(async move {
            let thawed = shared.runtime.thaw(uid.as_str()).await;
            Event::Thawed(thawed.map_err(|error| chain(&error)))
        });
    }

    fn free_sandbox(&mut self) {
        let refreshing = self.tasks.refreshing.take();
        // Only its logs remain; an eviction would free nothing.
        self.shared.evictions.forget(self.machine.uid());
        let (shared, uid) = (self.shared.clone(), self.machine.uid().clone());
        let freed = self.tasks.act(async move {
            end(refreshing).await;
            shared.enforcer.detach(uid.as_str()).await;
            let volumes = shared.volumes.release(&uid).await;
            if let Err(error) = &volumes {
                tracing::warn!(%uid, error = %chain(error), "cannot free a pod's volumes");
            }
            let sandbox = shared.runtime.stop_sandbox(uid.as_str()).await;
            if let Err(error) = &sandbox {
                tracing::warn!(%uid, error = %chain(error), "cannot free a pod's sandbox");
            }
            Event::SandboxFreed {
                succeeded: volumes.is_ok() && sandbox.is_ok(),
            }
        });
        self.tasks.freeing = Some(freed);
    }

    fn publish_status(&self, status: PodStatus) {
        let (shared, pod) = (self.shared.clone(), self.machine.pod().metadata.clone());
        let publish = async move { Event::Published(publish(&shared, &pod, &status).await) };
        self.tasks.act(publish);
    }

    fn remove(&mut self) {
        let (freeing, refreshing) = (self.tasks.freeing.take(), self.tasks.refreshing.take());
        let (shared, uid) = (self.shared.clone(), self.machine.uid().clone());
        self.tasks.act(async move {
            end(refreshing).await;
            // One after the other: both free the same things.
            if let Some(freeing) = freeing {
                let _ = freeing.await;
            }
            let removed = remove(&shared, &uid).await;
            if let Err(error) = &removed {
                tracing::warn!(%uid, error = %chain(error), "cannot remove a pod");
            }
            Event::Removed {
                succeeded: removed.is_ok(),
            }
        });
    }

    fn delete_object(&self) {
        let (shared, uid) = (self.shared.clone(), self.machine.uid().clone());
        let pod = self.machine.pod().clone();
        self.tasks.act(async move {
            Event::ObjectDeleted {
                succeeded: delete_object(&shared, &pod, &uid).await,
            }
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

/// Removes everything of a pod whose containers have ended.
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
        // Gone, or replaced by another pod of its name: either way this pod is deleted.
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => true,
        Err(error) => {
            tracing::warn!(pod = name, error = %chain(&error), "cannot finish deleting a pod");
            false
        }
    }
}

/// Starts a container, unless the start is cancelled meanwhile.
async fn start_unless<R: Runtime>(
    cancel: &CancellationToken,
    runtime: &R,
    id: &ContainerId,
    spec: ContainerSpec,
) -> Result<StartedContainer, StartError> {
    let mut starting = std::pin::pin!(runtime.start(spec));
    tokio::select! {
        // The start begins before it can be given up.
        biased;
        started = &mut starting => return started,
        () = cancel.cancelled() => {}
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
