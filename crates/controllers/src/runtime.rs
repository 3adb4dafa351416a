//! Connects watches, caches, queues and reconcilers, and runs them.
//!
//! ```text
//!   API server ──watch──► cache ──change──► subscriber ──key──► queue ──► reconcile(object, context)
//! ```
//!
//! A controller joins by a function `register(&mut Runtime)` of its module, which adds it with [`Runtime::controller`], follows
//! the other kinds it reads, and subscribes to their caches to add the keys of its own objects to its queue.
//!
//! Watches start first; reconciling begins when every followed cache is complete and the process may act (it leads).

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use kube::Client;
pub use planner::pass::Action;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::field::Empty;
use tracing::{Instrument, Span, debug, error, info_span};

use crate::cache::{Cache, Change};
use crate::cached::Cached;
use crate::clock::{Clock, Random};
use crate::config::Config;
use crate::context::{Caches, Context};
use crate::events::Recorder;
use crate::initialise::{Initialise, OverHttp};
use crate::instrumentation::{Instrumentation, ReconcileResult, Silent};
use crate::key::ObjectKey;
use crate::queue::{NextRun, Queue, Settings, Urgency};
use crate::{trace, unreadable, watch};

/// How long a stop waits for running reconciles.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Reconciles every change at once.
pub fn at_once<K>(_: &Change<'_, K>) -> Urgency {
    Urgency::Now
}

/// The parts of a process that runs controllers, before they run.
pub struct Runtime {
    pub context: Arc<Context>,
    watches: Vec<Watch>,
    queues: Vec<Queue>,
    event_writer: BoxFuture<'static, ()>,
    abort: CancellationToken,
}

struct Watch {
    run: BoxFuture<'static, ()>,
    synced: BoxFuture<'static, ()>,
}

/// What a runtime is made with. Everything but the client and the configuration has a default that production uses.
pub struct Parts {
    pub client: Client,
    pub config: Config,
    pub clock: Clock,
    pub random: Random,
    pub instrumentation: Arc<dyn Instrumentation>,
    pub initialise: Arc<dyn Initialise>,
    /// What events name as the instance that reported them.
    pub instance: Arc<str>,
}

impl Parts {
    pub fn new(client: Client, config: Config) -> Self {
        Self {
            client,
            config,
            clock: Clock::default(),
            random: Random::default(),
            instrumentation: Arc::new(Silent),
            initialise: Arc::new(OverHttp::default()),
            instance: Arc::from("agent-sandbox"),
        }
    }
}

impl Runtime {
    pub fn new(parts: Parts) -> Self {
        let (events, event_writer) = Recorder::new(
            parts.client.clone(),
            parts.clock.clone(),
            parts.random.clone(),
            parts.instance,
        );
        let counted = events.clone();
        let count = Box::new(move || counted.remembered());
        parts
            .instrumentation
            .count_entries("event_series", "events", count);
        let context = Context {
            client: parts.client,
            caches: Caches::default(),
            clock: parts.clock,
            random: parts.random,
            events,
            instrumentation: parts.instrumentation,
            initialise: parts.initialise,
            config: Arc::new(parts.config),
        };
        Self {
            context: Arc::new(context),
            watches: Vec::new(),
            queues: Vec::new(),
            event_writer: event_writer.boxed(),
            abort: CancellationToken::new(),
        }
    }

    /// Starts a watch for a cache. Every controller requests the caches that it reads; a cache has one watch in any case.
    pub fn follow<K: Cached>(&mut self, cache: &Cache<K>) {
        if !cache.claim_watch() {
            return;
        }
        let counted = cache.clone();
        let count = Box::new(move || counted.len());
        self.context
            .instrumentation
            .count_entries("cache", &K::name_in_metrics(), count);
        let synced = cache.clone();
        self.watches.push(Watch {
            run: watch::follow(self.context.client.clone(), cache.clone()).boxed(),
            synced: async move { synced.synced().await }.boxed(),
        });
    }

    /// Adds a controller for a kind. An object is reconciled when it changes, with the urgency that `urgency` returns, and when it is
    /// added to the returned queue. An object that is gone from the cache is not reconciled; one that cannot be decoded is reported.
    pub fn controller<K, F, Fut, E>(
        &mut self,
        name: &'static str,
        workers: usize,
        primary: &Cache<K>,
        urgency: fn(&Change<'_, K>) -> Urgency,
        reconcile: F,
    ) -> Queue
    where
        K: Cached,
        F: Fn(Arc<K>, Arc<Context>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Action, E>> + Send + 'static,
        E: std::error::Error + Send + 'static,
    {
        self.follow(primary);
        let settings = Settings {
            controller: name,
            max_workers: workers,
            random: self.context.random.clone(),
            instrumentation: Arc::clone(&self.context.instrumentation),
            abort: self.abort.clone(),
        };
        let context = Arc::clone(&self.context);
        let objects = primary.clone();
        let reconcile = Arc::new(reconcile);
        let queue = Queue::new(settings, move |key| {
            let object = objects.get(&key);
            let objects = objects.clone();
            let context = Arc::clone(&context);
            let reconcile = Arc::clone(&reconcile);
            async move {
                let Some(object) = object else {
                    if let Some(left) = objects.unreadable(&key) {
                        let span = info_span!("reconcile", controller = name, object = %key);
                        let report = unreadable::report(&context, name, &objects, &key, &left);
                        return supervise(name, &context, span, report).await;
                    }
                    let (took, result) = (Duration::ZERO, ReconcileResult::Success);
                    context
                        .instrumentation
                        .reconcile_finished(name, took, result);
                    return NextRun::Done;
                };
                let span = span(name, &key, &context, object.as_ref());
                let future = reconcile(object, Arc::clone(&context));
                supervise(name, &context, span, future).await
            }
        });
        let counted = queue.clone();
        self.context
            .instrumentation
            .count_entries("queue", name, Box::new(move || counted.len()));
        let own = queue.clone();
        primary.subscribe(move |change| {
            let key = ObjectKey::of(change.latest().as_ref());
            match urgency(change) {
                Urgency::Now => own.add(key),
                Urgency::Later => own.add_later(key),
            }
        });
        let own = queue.clone();
        primary.subscribe_unreadable(move |key| own.add(key.clone()));
        self.queues.push(queue.clone());
        queue
    }

    /// Runs until `shutdown`, then lets running reconciles end. `synced` is called once all caches are complete, and nothing is
    /// reconciled before `lead` resolves. Cancelling `abort` instead aborts everything.
    pub async fn run(
        self,
        shutdown: CancellationToken,
        abort: CancellationToken,
        synced: impl FnOnce(),
        lead: impl Future<Output = ()>,
    ) {
        let Self {
            context,
            watches,
            queues,
            event_writer,
            abort: abort_queues,
        } = self;
        let mut background = JoinSet::new();
        let mut complete = futures::stream::FuturesUnordered::new();
        for watch in watches {
            background.spawn(watch.run);
            complete.push(watch.synced);
        }
        background.spawn(event_writer);
        let work = async {
            while complete.next().await.is_some() {}
            synced();
            lead.await;
            for queue in &queues {
                queue.open();
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = work => {}
            () = shutdown.cancelled() => {
                let drain = futures::future::join_all(queues.iter().map(Queue::close));
                tokio::select! {
                    _ = drain => {}
                    () = tokio::time::sleep(DRAIN_TIMEOUT) => {}
                    () = abort.cancelled() => {}
                }
            }
            () = abort.cancelled() => {}
        }
        abort_queues.cancel();
        background.shutdown().await;
        drop(context);
    }
}

/// The fields that identify a reconcile in logs and traces.
fn span<K: Cached>(
    controller: &'static str,
    key: &ObjectKey,
    context: &Context,
    object: &K,
) -> Span {
    let id = context.random.number();
    let span = info_span!(
        "reconcile",
        controller,
        object = %key,
        reconcile_id = format_args!("{id:016x}"),
        trace_id = Empty,
        otel.name = Empty,
    );
    if telemetry::spans::are_exported() {
        let parent = trace::context_of(object);
        trace::begin(&span, &K::kind(&()), parent.as_ref());
    }
    span
}

/// Runs one reconcile in its span, reports how it ended, and logs why it failed.
async fn supervise<E: std::error::Error>(
    controller: &'static str,
    context: &Context,
    span: Span,
    reconcile: impl Future<Output = Result<Action, E>>,
) -> NextRun {
    let started = Instant::now();
    let outcome = async {
        let outcome = reconcile.await;
        if let Err(error) = &outcome {
            error!(%error, cause = causes(error), "reconcile failed");
        } else {
            debug!("reconciled");
        }
        outcome
    }
    .instrument(span)
    .await;
    let (next_run, result) = match outcome {
        Ok(Action::AwaitChange) => (NextRun::Done, ReconcileResult::Success),
        Ok(Action::RequeueAfter(delay)) => (NextRun::After(delay), ReconcileResult::RequeueAfter),
        Ok(Action::Retry) => (NextRun::Retry, ReconcileResult::Requeue),
        Err(_) => (NextRun::Retry, ReconcileResult::Error),
    };
    context
        .instrumentation
        .reconcile_finished(controller, started.elapsed(), result);
    next_run
}

/// The causes of an error, each once, outermost first.
fn causes(error: &dyn std::error::Error) -> String {
    error_chain::join(error_chain::causes(error).map(ToString::to_string))
}

impl fmt::Debug for Parts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Parts")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Runtime")
            .field("queues", &self.queues)
            .finish_non_exhaustive()
    }
}
