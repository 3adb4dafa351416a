//! The handle of one sandbox, and its lifecycle.
//!
//! ```text
//!            open                      disconnect
//!   New ─────────────► Open ──────────────────────► Disconnected ──┐
//!    ▲ │                │ ▲                                        │ open
//!    │ │ cannot undo    │ └────────────────────────────────────────┤
//!    │ └──► Orphaned ◄──┤ terminate, and the claim cannot be       │
//!    │         │        │ deleted                                  │
//!    │         └────────┼──────────────────────────────────────────┘
//!    └──── open ──── Closed ◄── terminate
//! ```
//!
//! Opening, disconnecting and terminating exclude each other; the latter two cancel a running opening. The handle stays
//! valid whether the pod behind it runs, is suspended, or has been replaced.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::BoxFuture;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;
use tracing::{Instrument, Span};

use api::sandbox::SuspensionType;

use crate::claim::CreateOptions;
use crate::cluster::{Mode, Progress, kubernetes};
use crate::commands::Commands;
use crate::connector::{Access, Connector};
use crate::error::{Error, ErrorKind, Key};
use crate::files::Files;
use crate::options::Options;
use crate::process::Processes;
use crate::readiness::{self, Bound, Verdict};
use crate::rollback::Rollback;
use crate::route::RouterAddress;
use crate::status::{self, Status};
use crate::trace;
use crate::waiting::Waiting;

/// A sandbox. Clones share one handle. Dropping it leaves the sandbox unchanged: [`Sandbox::terminate`] deletes it, and
/// [`crate::Client::attach`] attaches to it again by its [`Sandbox::id`], from any process.
#[derive(Clone, Debug)]
pub struct Sandbox {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    access: Arc<Access>,
    key: Key,
    /// The options for the claim; `None` for a claim that another client created.
    request: Option<CreateOptions>,
    connector: Arc<Connector>,
    /// Held while the handle is opened, disconnected or terminated.
    lifecycle: tokio::sync::Mutex<()>,
    /// What the running opening waits for.
    progress: Progress,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    New,
    Open,
    Disconnected,
    Orphaned,
    Closed,
}

#[derive(Debug)]
struct State {
    stage: Stage,
    /// Cancels the running opening.
    opening: Option<CancellationToken>,
    /// The name of the Sandbox object.
    sandbox: Option<String>,
    /// Counts running operations; `None` while no operation may begin.
    operations: Option<TaskTracker>,
    span: Span,
}

impl Sandbox {
    /// A handle for a claim that is not created yet.
    pub(crate) fn new(access: Arc<Access>, key: Key, request: CreateOptions) -> Self {
        Self::with(access, key, Some(request), Stage::New)
    }

    /// A handle for a claim that exists.
    pub(crate) fn existing(access: Arc<Access>, key: Key) -> Self {
        Self::with(access, key, None, Stage::Disconnected)
    }

    fn with(access: Arc<Access>, key: Key, request: Option<CreateOptions>, stage: Stage) -> Self {
        Self {
            shared: Arc::new(Shared {
                connector: Arc::new(Connector::new(Arc::clone(&access), key.clone())),
                access,
                key,
                request,
                lifecycle: tokio::sync::Mutex::new(()),
                progress: Progress::new(None),
                state: Mutex::new(State {
                    stage,
                    opening: None,
                    sandbox: None,
                    operations: None,
                    span: Span::none(),
                }),
            }),
        }
    }

    /// The name of its claim, which [`crate::Client::attach`] takes.
    pub fn id(&self) -> &str {
        &self.shared.key.claim
    }

    pub fn namespace(&self) -> &str {
        &self.shared.key.namespace
    }

    /// Namespace and id together.
    pub fn key(&self) -> &Key {
        &self.shared.key
    }

    /// The name of the Sandbox object, which a warm pool may have chosen. Known once the handle has been open.
    pub fn sandbox_name(&self) -> Option<String> {
        self.state().sandbox.clone()
    }

    /// The current name of its pod: that of the Sandbox object, unless an annotation of the object names another. Works
    /// once the handle has been open, and for a claim that is bound.
    pub async fn pod_name(&self) -> Result<String, Error> {
        let access = &self.shared.access;
        let asking = async {
            let name = self.bound_name().await?;
            let sandbox = access.cluster.sandbox(self.namespace(), &name).await?;
            let sandbox = sandbox.ok_or(ErrorKind::SandboxDeleted)?;
            let annotated = sandbox.annotations().get(api::labels::POD_NAME).cloned();
            Ok(annotated.filter(|pod| !pod.is_empty()).unwrap_or(name))
        };
        asking.await.map_err(|kind| self.error(kind))
    }

    /// The name of the Sandbox object, read from the claim if it is not known.
    async fn bound_name(&self) -> Result<String, ErrorKind> {
        if let Some(name) = self.sandbox_name() {
            return Ok(name);
        }
        let claim = self.shared.access.cluster.claim(self.key()).await?;
        let bound = readiness::bound(&claim).ok_or(ErrorKind::NotReady { cause: None })?;
        Ok(bound.sandbox)
    }

    /// Whether operations can be sent.
    pub fn is_open(&self) -> bool {
        self.state().stage == Stage::Open && self.shared.connector.is_open()
    }

    /// Whether `other` is a clone of this handle.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Whether it was never open, or is being opened for the first time.
    pub(crate) fn is_new(&self) -> bool {
        self.state().stage == Stage::New
    }

    /// Whether the claim could not be deleted and still exists.
    pub fn is_orphaned(&self) -> bool {
        self.state().stage == Stage::Orphaned
    }

    /// What the running opening waits for, as it changes: for programs that show why a sandbox takes long.
    pub fn waiting(&self) -> watch::Receiver<Option<Waiting>> {
        self.shared.progress.subscribe()
    }

    /// Runs commands.
    pub fn commands(&self) -> Commands {
        Commands::new(self.clone())
    }

    /// Copies files.
    pub fn files(&self) -> Files {
        Files::new(self.clone())
    }

    /// Starts interactive processes.
    pub fn process(&self) -> Processes {
        Processes::new(self.clone())
    }

    pub(crate) fn options(&self) -> &Options {
        &self.shared.access.options
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, kind: ErrorKind) -> Error {
        Error::of(&self.shared.key, kind)
    }

    /// Creates the claim and waits until the sandbox can be used; or, if the claim exists already, connects to it again.
    ///
    /// If it fails, the claim is deleted, unless [`CreateOptions::keep_on_failure`] keeps it. If it is kept, or cannot be deleted, the
    /// error is [`ErrorKind::OrphanedClaim`]: opening again attaches to the claim, terminating deletes it. If the future is dropped, the claim is deleted in the background.
    pub async fn open(&self) -> Result<(), Error> {
        let _lifecycle = self.shared.lifecycle.lock().await;
        let cancel = CancellationToken::new();
        let before = {
            let mut state = self.state();
            if state.stage == Stage::Open {
                return Err(self.error(ErrorKind::AlreadyOpen));
            }
            state.opening = Some(cancel.clone());
            state.stage
        };
        self.shared.progress.send_replace(None);
        let span = trace::lifecycle(&self.options().trace_service_name, self.key());
        let opening = async {
            match (&self.shared.request, before) {
                (Some(request), Stage::New | Stage::Closed) => self.create(request, &cancel).await,
                (owned, _) => self.reconnect(owned.is_some(), &cancel).await,
            }
        };
        let opened = Box::pin(opening.instrument(span.clone())).await;
        let mut state = self.state();
        state.opening = None;
        match opened {
            Ok(bound) => {
                span.record("sandbox.name", &bound.sandbox);
                state.stage = Stage::Open;
                state.sandbox = Some(bound.sandbox);
                state.operations = Some(TaskTracker::new());
                state.span = span;
                Ok(())
            }
            Err(kind) => {
                state.stage = match (&kind, before) {
                    (ErrorKind::OrphanedClaim { .. }, _) => Stage::Orphaned,
                    (ErrorKind::ClaimNotFound | ErrorKind::SandboxDeleted, _)
                        if self.shared.request.is_some() =>
                    {
                        Stage::New
                    }
                    (_, before) => before,
                };
                drop(state);
                trace::record(&span, Err(self.error(kind)))
            }
        }
    }

    async fn create(
        &self,
        request: &CreateOptions,
        cancel: &CancellationToken,
    ) -> Result<Bound, ErrorKind> {
        let access = &self.shared.access;
        let now = Timestamp::now();
        let trace = trace::carrier(access.options.propagator.as_deref());
        let claim = request.claim(self.key(), &trace, now)?;
        let cleanup = access.options.cleanup_timeout;
        let mut rollback = Rollback::new(
            access.cluster.clone(),
            self.key().clone(),
            cleanup,
            now.to_string(),
        );
        let creating = access.cluster.create_claim(&claim);
        let created = match trace::within(self.step("create_claim"), creating).await {
            Ok(created) => created,
            Err(kube::Error::Api(status)) if status.code == 409 && request.adopt_existing => {
                rollback.keep();
                return Box::pin(self.reconnect(false, cancel)).await;
            }
            Err(cause) => {
                // A response with a client error is a refusal; otherwise the claim may exist.
                if matches!(&cause, kube::Error::Api(status) if status.code < 500) {
                    rollback.keep();
                } else if let Err(error) = rollback.undo().await {
                    tracing::warn!(claim = %self.key(), error, "the claim may exist and was not deleted");
                }
                return Err(ErrorKind::ClaimFailed { cause });
            }
        };
        rollback.created(created.uid());
        let limit = request
            .ready_timeout
            .unwrap_or(access.options.sandbox_ready_timeout);
        let waiting = self.wait_ready(created.resource_version(), limit);
        match self.connect(Box::pin(waiting), cancel).await {
            Ok(bound) => {
                rollback.keep();
                Ok(bound)
            }
            Err(cause) if request.keep_on_failure && !matches!(cause, ErrorKind::Cancelled) => {
                rollback.keep();
                Err(ErrorKind::OrphanedClaim {
                    cause: Box::new(cause),
                    cleanup: None,
                })
            }
            Err(cause) => match rollback.undo().await {
                Ok(()) => Err(cause),
                Err(cleanup) => Err(ErrorKind::OrphanedClaim {
                    cause: Box::new(cause),
                    cleanup: Some(cleanup),
                }),
            },
        }
    }

    async fn reconnect(&self, owned: bool, cancel: &CancellationToken) -> Result<Bound, ErrorKind> {
        let connecting = self.connect(Box::pin(self.verify()), cancel).await;
        connecting.map_err(|cause| match cause {
            ErrorKind::ClaimNotFound | ErrorKind::SandboxDeleted => cause,
            cause if owned => ErrorKind::OrphanedClaim {
                cause: Box::new(cause),
                cleanup: None,
            },
            cause => cause,
        })
    }

    /// Discovers the router while `waiting` waits for the sandbox, then opens the connection.
    async fn connect(
        &self,
        waiting: BoxFuture<'_, Result<Bound, ErrorKind>>,
        cancel: &CancellationToken,
    ) -> Result<Bound, ErrorKind> {
        let access = &self.shared.access;
        let discovering = async {
            let began = Instant::now();
            let route = &access.route;
            let found = route.discover(&access.cluster, &access.options, self.namespace());
            let found = found.await;
            if let Some(mode) = route.discovery_mode() {
                access.metrics.discovered(mode, began.elapsed(), &found);
            }
            found
        };
        let both = async { tokio::try_join!(waiting, Box::pin(discovering)) };
        let (bound, router): (Bound, RouterAddress) = tokio::select! {
            biased;
            () = cancel.cancelled() => return Err(ErrorKind::Cancelled),
            result = both => result?,
        };
        self.shared.connector.open(&router, &bound);
        Ok(bound)
    }

    /// Checks that the claim exists and is usable, at once or after a resume.
    async fn verify(&self) -> Result<Bound, ErrorKind> {
        let access = &self.shared.access;
        let claim = access.cluster.claim(self.key()).await?;
        if claim.metadata.deletion_timestamp.is_some() {
            return Err(ErrorKind::SandboxDeleted);
        }
        match readiness::of_claim(&claim) {
            Verdict::Done(bound) => return Ok(bound),
            Verdict::Refused { reason, message } => {
                return Err(ErrorKind::Refused { reason, message });
            }
            Verdict::Wait => {}
        }
        if let Some(bound) = readiness::bound(&claim) {
            let sandbox = access
                .cluster
                .sandbox(self.namespace(), &bound.sandbox)
                .await?;
            if sandbox.is_some_and(|sandbox| sandbox.spec.suspension().is_requested()) {
                return Ok(bound);
            }
        }
        let limit = access.options.sandbox_ready_timeout;
        self.wait_ready(claim.resource_version(), limit).await
    }

    async fn wait_ready(&self, seen: Option<String>, limit: Duration) -> Result<Bound, ErrorKind> {
        let cluster = &self.shared.access.cluster;
        let progress = &self.shared.progress;
        let waiting = cluster.wait_ready(self.key(), seen, limit, progress);
        trace::within(self.step("wait_for_sandbox_ready"), waiting).await
    }

    /// The span of one step of opening.
    fn step(&self, name: &'static str) -> Span {
        let span = trace::step(&self.options().trace_service_name, name);
        span.record("sandbox.claim.name", self.id());
        span
    }

    /// Closes the connection and leaves the sandbox unchanged. [`Sandbox::open`] connects again.
    pub async fn disconnect(&self) -> Result<(), Error> {
        let limit = self.options().cleanup_timeout;
        // Only with the lock: the connection may be one that a concurrent opening has just created.
        let _lifecycle = self.interrupt(limit).await?;
        let mut state = self.state();
        if state.stage == Stage::Open {
            self.shared.connector.close();
            state.operations = None;
            state.span = Span::none();
            state.stage = Stage::Disconnected;
        }
        Ok(())
    }

    /// Deletes the sandbox: waits a limited time for running operations, then deletes the claim.
    pub async fn terminate(&self) -> Result<(), Error> {
        let cleanup = self.options().cleanup_timeout;
        let half = cleanup.checked_div(2).unwrap_or_default();
        let _lifecycle = self.interrupt(cleanup.saturating_mul(2)).await?;
        if matches!(self.state().stage, Stage::New | Stage::Closed) {
            // This handle created nothing: a claim of the same name belongs to another client.
            return Ok(());
        }
        let (operations, span) = {
            // The connection is closed first, so that no uncounted operation can still be sent.
            let mut state = self.state();
            self.shared.connector.close();
            (
                state.operations.take(),
                std::mem::replace(&mut state.span, Span::none()),
            )
        };
        if let Some(operations) = operations {
            operations.close();
            if tokio::time::timeout(half, operations.wait()).await.is_err() {
                tracing::warn!(sandbox = %self.key(), running = operations.len(), "terminating while operations still run");
            }
        }
        let deleting = self.shared.access.cluster.delete_claim(self.key(), None);
        let deleted = match tokio::time::timeout(half, deleting).await {
            Ok(result) => result.map_err(|cause| kubernetes("delete the claim", cause)),
            Err(_) => Err(ErrorKind::Timeout {
                what: "deleting the claim",
                limit: half,
            }),
        };
        self.state().stage = if deleted.is_ok() {
            Stage::Closed
        } else {
            Stage::Orphaned
        };
        trace::record(&span, deleted.map_err(|kind| self.error(kind)))
    }

    /// Cancels a running opening and waits for its end.
    async fn interrupt(&self, limit: Duration) -> Result<tokio::sync::MutexGuard<'_, ()>, Error> {
        if let Some(opening) = &self.state().opening {
            opening.cancel();
        }
        let waiting = tokio::time::timeout(limit, self.shared.lifecycle.lock());
        waiting.await.map_err(|_| {
            self.error(ErrorKind::Timeout {
                what: "waiting for another opening or closing",
                limit,
            })
        })
    }

    /// The sandbox's current status in the cluster.
    pub async fn status(&self) -> Result<Status, Error> {
        let access = &self.shared.access;
        let asking = async {
            let claim = access.cluster.claim(self.key()).await?;
            let sandbox = match readiness::bound(&claim) {
                Some(bound) => {
                    access
                        .cluster
                        .sandbox(self.namespace(), &bound.sandbox)
                        .await?
                }
                None => None,
            };
            Ok(status::of(&claim, sandbox.as_ref()))
        };
        asking.await.map_err(|kind| self.error(kind))
    }

    /// Suspends the sandbox with the strategy of its template or claim, which is [`SuspensionType::Stop`] unless they say otherwise:
    /// the pod is deleted, and its volumes stay. Returns when the sandbox is suspended.
    pub async fn suspend(&self) -> Result<(), Error> {
        let mode = Mode::Suspended(None);
        self.change_mode("suspend", mode).await.map(drop)
    }

    /// Suspends the sandbox with this strategy, which later suspensions keep. [`SuspensionType::Freeze`] stops all processes where they
    /// are and keeps the pod with its memory. Fails if the pod's node cannot do it: nothing less is done instead.
    pub async fn suspend_with(&self, strategy: SuspensionType) -> Result<(), Error> {
        let mode = Mode::Suspended(Some(strategy));
        self.change_mode("suspend", mode).await.map(drop)
    }

    /// Lets a suspended sandbox run again: its pod is started, or thawed. Returns when it is ready.
    pub async fn resume(&self) -> Result<(), Error> {
        let bound = self.change_mode("resume", Mode::Running).await?;
        self.shared.connector.moved(&bound.pod_ips);
        Ok(())
    }

    async fn change_mode(&self, operation: &'static str, mode: Mode) -> Result<Bound, Error> {
        let access = &self.shared.access;
        let span = trace::operation(
            &self.state().span,
            &access.options.trace_service_name,
            operation,
        );
        let changing = async {
            let name = self.bound_name().await?;
            let limit = access.options.sandbox_ready_timeout;
            access
                .cluster
                .set_mode(self.namespace(), &name, mode, limit)
                .await
        };
        let began = Instant::now();
        let changed = changing.instrument(span.clone()).await;
        access.metrics.changed(operation, began.elapsed(), &changed);
        trace::record(&span, changed.map_err(|kind| self.error(kind)))
    }

    /// Runs one operation of an engine: counted, in its own span, and with the sandbox's name in its error.
    pub(crate) async fn operate<T, F, W>(&self, name: &'static str, work: W) -> Result<T, Error>
    where
        W: FnOnce(Arc<Connector>) -> F,
        F: Future<Output = Result<T, ErrorKind>>,
    {
        let operated = self.operate_on(name, work).await;
        operated.map(|(result, _running)| result)
    }

    /// As `operate`, for an operation that continues after it returns: it counts as running until the token is dropped.
    pub(crate) async fn operate_on<T, F, W>(
        &self,
        name: &'static str,
        work: W,
    ) -> Result<(T, TaskTrackerToken), Error>
    where
        W: FnOnce(Arc<Connector>) -> F,
        F: Future<Output = Result<T, ErrorKind>>,
    {
        let (running, parent) = self.begin()?;
        let span = trace::operation(&parent, &self.options().trace_service_name, name);
        let began = Instant::now();
        let result = work(Arc::clone(&self.shared.connector))
            .instrument(span.clone())
            .await;
        let metrics = &self.shared.access.metrics;
        metrics.operated(name, began.elapsed(), &result);
        let result = result.map(|value| (value, running));
        trace::record(&span, result.map_err(|kind| self.error(kind)))
    }

    /// Counts an operation as running, if operations may begin.
    fn begin(&self) -> Result<(TaskTrackerToken, Span), Error> {
        let state = self.state();
        match &state.operations {
            Some(operations) => Ok((operations.token(), state.span.clone())),
            None => Err(self.error(ErrorKind::NotReady { cause: None })),
        }
    }
}
