//! A keyed work queue: which object a controller reconciles next.
//!
//! # Guarantees
//! - An object is never worked on twice at once. Added while it is worked on, it is worked on once more afterwards.
//! - Adding an object any number of times before a worker takes it costs one piece of work.
//! - Work that failed is tried again after a delay that doubles each time, with jitter; an event cuts the delay short.
//! - Deferred work ([`Urgency::Later`]) begins after `DEFERRAL`, when nothing else is ready. While urgent work elsewhere is waiting
//!   ([`Queue::yield_to`]), at most `DEFERRED_WORKERS` workers do it, so that it is slowed but never starved.
//!
//! ```text
//!              add                   worker takes it
//!   (absent) ───────► ready ────────────────────────────► running ──add──► running, again
//!       ▲               ▲                                    │                   │
//!       │ done          │ due, or add                        ├─ requeue, retry   │ finished
//!       └───────────────┼──────────── waiting ◄──────────────┘                   │
//!                       └────────────────────────────────────────────────────────┘
//! ```
//!
//! There are no idle workers: an add that finds a free slot starts one on the spot, and a worker that finds nothing ready ends.
//! So an event costs a task spawn, and no timer, channel or poll stands between it and the reconcile. The queue does not know
//! what the work is, nor whether an object still exists.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use kube::Resource;
use saturating_time::SaturatingTime;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::clock::Random;
use crate::instrumentation::{Instrumentation, ReconcileResult};
use crate::key::ObjectKey;

/// The delay after the first failure.
const BASE_DELAY: Duration = Duration::from_millis(10);
/// The longest delay after a failure.
const MAX_DELAY: Duration = Duration::from_secs(60);

/// The minimum delay of deferred work.
const DEFERRAL: Duration = Duration::from_millis(25);
/// The number of workers that do deferred work while urgent work is waiting.
const DEFERRED_WORKERS: usize = 2;

/// How soon an object is to be worked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    Now,
    /// Deferred: no client waits for the result.
    Later,
}

/// When an object is worked on again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextRun {
    /// When it is added again.
    Done,
    /// After this time, or sooner if it is added.
    After(Duration),
    /// After a delay that doubles with every consecutive retry.
    Retry,
}

type IsUrgent = Box<dyn Fn() -> bool + Send + Sync>;
type Work = Box<dyn Fn(ObjectKey) -> BoxFuture<'static, NextRun> + Send + Sync>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting { due: Option<Instant> },
    Ready { since: Instant },
    Running,
    RunningAgain { since: Instant },
}

struct Entry {
    phase: Phase,
    urgency: Urgency,
    failures: u32,
}

impl Entry {
    fn new() -> Self {
        Self {
            phase: Phase::Waiting { due: None },
            urgency: Urgency::Now,
            failures: 0,
        }
    }

    /// Whether it is ready and still deferred.
    fn is_ready_for_later(&self) -> bool {
        self.urgency == Urgency::Later && matches!(self.phase, Phase::Ready { .. })
    }
}

#[derive(Default)]
struct State {
    entries: HashMap<ObjectKey, Entry>,
    ready: VecDeque<ObjectKey>,
    /// Ready and deferred. An object that has become urgent since is also in `ready`; [`Queue::next`] skips it here.
    later: VecDeque<ObjectKey>,
    waiting: BTreeSet<(Instant, ObjectKey)>,
    workers: usize,
    /// How many of the workers do deferred work.
    deferred_workers: usize,
    open: bool,
}

impl State {
    /// How many objects are ready for a worker, at most.
    fn depth(&self) -> usize {
        self.ready.len() + self.later.len()
    }
}

struct Inner {
    controller: &'static str,
    max_workers: usize,
    work: Work,
    state: Mutex<State>,
    earlier_due: Notify,
    is_urgent: OnceLock<IsUrgent>,
    random: Random,
    instrumentation: Arc<dyn Instrumentation>,
    tasks: TaskTracker,
    abort: CancellationToken,
}

/// A handle on the queue of one controller. Clones refer to the same queue.
#[derive(Clone)]
pub struct Queue(Arc<Inner>);

/// What a queue is made of.
pub struct Settings {
    pub controller: &'static str,
    pub max_workers: usize,
    pub random: Random,
    pub instrumentation: Arc<dyn Instrumentation>,
    /// Cancelled to abort all work.
    pub abort: CancellationToken,
}

impl Queue {
    /// A queue that collects objects, and works on none until [`Queue::open`].
    pub fn new<F, Fut>(settings: Settings, work: F) -> Self
    where
        F: Fn(ObjectKey) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = NextRun> + Send + 'static,
    {
        settings
            .instrumentation
            .controller_registered(settings.controller, settings.max_workers);
        Self(Arc::new(Inner {
            controller: settings.controller,
            max_workers: settings.max_workers.max(1),
            work: Box::new(move |key| work(key).boxed()),
            state: Mutex::new(State::default()),
            earlier_due: Notify::new(),
            is_urgent: OnceLock::new(),
            random: settings.random,
            instrumentation: settings.instrumentation,
            tasks: TaskTracker::new(),
            abort: settings.abort,
        }))
    }

    /// Slows deferred work while `is_urgent` returns true. The function must not block. Only the first call has an effect.
    pub fn yield_to(&self, is_urgent: impl Fn() -> bool + Send + Sync + 'static) {
        let _ = self.0.is_urgent.set(Box::new(is_urgent));
    }

    /// Adds an object. A worker takes it as soon as one is free.
    pub fn add(&self, key: ObjectKey) {
        let mut state = self.state();
        let now = Instant::now();
        let State {
            entries, waiting, ..
        } = &mut *state;
        let entry = entries.entry(key.clone()).or_insert_with(Entry::new);
        match entry.phase {
            Phase::RunningAgain { .. } => return,
            Phase::Ready { .. } if entry.urgency == Urgency::Now => return,
            Phase::Ready { .. } => {
                entry.urgency = Urgency::Now;
                state.ready.push_back(key);
            }
            Phase::Running => {
                entry.phase = Phase::RunningAgain { since: now };
                return;
            }
            Phase::Waiting { due } => {
                if let Some(due) = due {
                    waiting.remove(&(due, key.clone()));
                }
                entry.phase = Phase::Ready { since: now };
                entry.urgency = Urgency::Now;
                state.ready.push_back(key);
            }
        }
        self.0
            .instrumentation
            .queue_added(self.0.controller, state.depth());
        self.start_workers(&mut state, 1);
    }

    /// Adds an object as deferred work. An object that is already due sooner keeps its time.
    pub fn add_later(&self, key: ObjectKey) {
        self.add_for(key, DEFERRAL, Urgency::Later);
    }

    /// Adds objects. Workers take them as soon as they are free.
    pub fn add_all<K: Resource>(&self, objects: impl IntoIterator<Item = Arc<K>>) {
        for object in objects {
            self.add(ObjectKey::of(object.as_ref()));
        }
    }

    /// Adds an object after a delay, or sooner if it already waits for less or is added again.
    pub fn add_after(&self, key: ObjectKey, delay: Duration) {
        self.add_for(key, delay, Urgency::Now);
    }

    fn add_for(&self, key: ObjectKey, delay: Duration, urgency: Urgency) {
        let mut state = self.state();
        let due = Instant::now().later_by(delay);
        match state.entries.get(&key).map(|entry| entry.phase) {
            Some(Phase::Waiting {
                due: Some(existing),
            }) if existing <= due => {}
            Some(Phase::Ready { .. } | Phase::RunningAgain { .. }) => {}
            Some(Phase::Running) => {
                drop(state);
                self.add(key);
            }
            Some(Phase::Waiting { .. }) | None => self.wait_until(&mut state, key, due, urgency),
        }
    }

    /// Lets workers begin.
    pub fn open(&self) {
        {
            let mut state = self.state();
            state.open = true;
            let ready = state.ready.len();
            self.start_workers(&mut state, ready);
        }
        let queue = self.clone();
        self.0.tasks.spawn(async move {
            let abort = queue.0.abort.clone();
            abort.run_until_cancelled(queue.release_due()).await;
        });
    }

    /// Starts no more work, and resolves when the running work has ended.
    pub async fn close(&self) {
        self.state().open = false;
        self.0.earlier_due.notify_one();
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }

    /// How many objects are ready for a worker.
    pub fn depth(&self) -> usize {
        self.state().depth()
    }

    /// How many objects are ready, running or waiting for their time.
    pub fn len(&self) -> usize {
        self.state().entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether nothing is ready, running or waiting for a retry. Objects that wait for a known time do not count.
    pub fn is_settled(&self) -> bool {
        self.state().entries.values().all(|entry| {
            entry.failures == 0
                && entry.urgency == Urgency::Now
                && matches!(entry.phase, Phase::Waiting { due: Some(_) })
        })
    }

    /// Starts a worker for each of this many objects that have just become ready, as far as the limit allows. Workers that
    /// are already there take the rest.
    fn start_workers(&self, state: &mut State, newly_ready: usize) {
        if !state.open {
            return;
        }
        let free = self.0.max_workers.saturating_sub(state.workers);
        for _ in 0..newly_ready.min(free) {
            state.workers += 1;
            let queue = self.clone();
            self.0.tasks.spawn(async move {
                let abort = queue.0.abort.clone();
                abort.run_until_cancelled(queue.work()).await;
            });
        }
    }

    async fn work(&self) {
        while let Some(key) = self.take() {
            let began = Instant::now();
            let started = (self.0.work)(key.clone());
            // A panic is a bug in one reconcile; it must neither stop the others nor leave the object marked as running.
            let next_run = AssertUnwindSafe(started)
                .catch_unwind()
                .await
                .unwrap_or_else(|_| {
                    tracing::error!(controller = self.0.controller, object = %key, "reconcile panicked; this is a bug, please report it");
                    self.0.instrumentation.reconcile_finished(
                        self.0.controller,
                        began.elapsed(),
                        ReconcileResult::Panic,
                    );
                    NextRun::Retry
                });
            self.finish(key, next_run);
        }
    }

    fn take(&self) -> Option<ObjectKey> {
        let mut state = self.state();
        let Some(key) = self.next(&mut state) else {
            state.workers -= 1;
            return None;
        };
        let depth = state.depth();
        let entry = state.entries.get_mut(&key)?;
        let waited = match entry.phase {
            Phase::Ready { since } => since.elapsed(),
            _ => Duration::ZERO,
        };
        entry.phase = Phase::Running;
        drop(state);
        self.0
            .instrumentation
            .reconcile_started(self.0.controller, waited, depth);
        Some(key)
    }

    /// The object that is to be worked on next, if a worker may take one.
    fn next(&self, state: &mut State) -> Option<ObjectKey> {
        if !state.open {
            return None;
        }
        if let Some(key) = state.ready.pop_front() {
            return Some(key);
        }
        let is_urgent =
            !state.later.is_empty() && self.0.is_urgent.get().is_some_and(|is_urgent| is_urgent());
        if is_urgent && state.deferred_workers >= DEFERRED_WORKERS {
            return None;
        }
        while let Some(key) = state.later.pop_front() {
            let entry = state.entries.get(&key);
            if entry.is_some_and(Entry::is_ready_for_later) {
                state.deferred_workers += 1;
                if !is_urgent {
                    self.start_workers(state, state.later.len());
                }
                return Some(key);
            }
        }
        None
    }

    fn finish(&self, key: ObjectKey, next_run: NextRun) {
        let mut state = self.state();
        let Some(entry) = state.entries.get_mut(&key) else {
            return;
        };
        let was_deferred = entry.urgency == Urgency::Later;
        entry.urgency = Urgency::Now;
        entry.failures = match next_run {
            NextRun::Retry => entry.failures.saturating_add(1),
            NextRun::Done | NextRun::After(_) => 0,
        };
        let failures = entry.failures;
        let again = match entry.phase {
            Phase::RunningAgain { since } => {
                entry.phase = Phase::Ready { since };
                true
            }
            _ => false,
        };
        state.deferred_workers -= usize::from(was_deferred);
        if again {
            state.ready.push_back(key);
            return;
        }
        match next_run {
            NextRun::Done => {
                state.entries.remove(&key);
            }
            NextRun::After(delay) => {
                self.wait_until(
                    &mut state,
                    key,
                    Instant::now().later_by(delay),
                    Urgency::Now,
                );
            }
            NextRun::Retry => {
                let delay = self.retry_delay(failures);
                self.wait_until(
                    &mut state,
                    key,
                    Instant::now().later_by(delay),
                    Urgency::Now,
                );
            }
        }
    }

    fn wait_until(&self, state: &mut State, key: ObjectKey, due: Instant, urgency: Urgency) {
        let entry = state.entries.entry(key.clone()).or_insert_with(Entry::new);
        if let Phase::Waiting {
            due: Some(existing),
        } = entry.phase
        {
            state.waiting.remove(&(existing, key.clone()));
        }
        entry.phase = Phase::Waiting { due: Some(due) };
        entry.urgency = urgency;
        state.waiting.insert((due, key));
        if state
            .waiting
            .first()
            .is_some_and(|(first, _)| *first == due)
        {
            self.0.earlier_due.notify_one();
        }
    }

    /// Half to one and a half times the doubled delay, so that objects that failed together are not retried together.
    fn retry_delay(&self, failures: u32) -> Duration {
        let exponent = failures.saturating_sub(1).min(20);
        let delay = BASE_DELAY.saturating_mul(1 << exponent).min(MAX_DELAY);
        delay.mul_f64(0.5 + self.0.random.fraction())
    }

    /// Moves objects whose time has come to the ready list, until the queue is closed.
    async fn release_due(&self) {
        loop {
            let next = {
                let mut state = self.state();
                if !state.open {
                    return;
                }
                self.release(&mut state);
                state.waiting.first().map(|(due, _)| *due)
            };
            let earlier_due = self.0.earlier_due.notified();
            match next {
                Some(due) => {
                    let _ = tokio::time::timeout_at(due, earlier_due).await;
                }
                None => earlier_due.await,
            }
        }
    }

    fn release(&self, state: &mut State) {
        let now = Instant::now();
        let mut released = 0;
        while let Some((due, _)) = state.waiting.first()
            && *due <= now
            && let Some((_, key)) = state.waiting.pop_first()
        {
            if let Some(entry) = state.entries.get_mut(&key) {
                entry.phase = Phase::Ready { since: now };
                match entry.urgency {
                    Urgency::Now => state.ready.push_back(key),
                    Urgency::Later => state.later.push_back(key),
                }
                released += 1;
            }
        }
        self.start_workers(state, released);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Queue")
            .field("controller", &self.0.controller)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Settings")
            .field("controller", &self.controller)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
