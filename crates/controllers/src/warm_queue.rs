//! The warm queue of the process, shared by the controllers of claims and pools: it follows the sandbox cache, claims reserve sandboxes in
//! it, and pools withhold the sandboxes that they delete.
//!
//! [`planner::warm_queue`] decides the order; this module keeps the queue in line with the cache and safe to share.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use api::names::name_hash;
use api::{Sandbox, SandboxTemplate, SandboxWarmPool};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use planner::blueprint::Blueprint;
use planner::pacing::Demand;
use planner::warm_queue::{Candidate, Depth, Request, SandboxKey, WarmQueue};

use crate::cache::{Cache, Change};
use crate::clock::Clock;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::queue::Queue;

/// A handle on the queue. Clones refer to the same queue.
#[derive(Clone, Debug)]
pub struct SharedWarmQueue(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    queue: Mutex<WarmQueue>,
    sandboxes: Cache<Sandbox>,
    /// The queue's entry for a sandbox, if claims may take it.
    candidate: fn(&Sandbox) -> Option<Candidate>,
    /// How many claims are getting their sandbox.
    acquiring: AtomicUsize,
    /// When the last of them was finished.
    served_at: Mutex<Option<Timestamp>>,
    /// The work queue of the claim controller.
    claims: OnceLock<Queue>,
}

impl SharedWarmQueue {
    /// A queue that follows these caches from now on.
    pub fn new(
        sandboxes: &Cache<Sandbox>,
        templates: &Cache<SandboxTemplate>,
        pools: &Cache<SandboxWarmPool>,
    ) -> Self {
        let warm_queue = Self::of(sandboxes, planner::claim::candidate);
        let follower = warm_queue.clone();
        templates.subscribe(move |change| follower.template_changed(change));
        let follower = warm_queue.clone();
        pools.subscribe(move |change| {
            if change.after.is_none() {
                follower.pool_gone(change.latest());
            }
        });
        warm_queue
    }

    /// A queue of the sandboxes that `candidate` recognises, from now on. The caller sets the current revisions.
    pub fn of(sandboxes: &Cache<Sandbox>, candidate: fn(&Sandbox) -> Option<Candidate>) -> Self {
        let warm_queue = Self(Arc::new(Inner {
            queue: Mutex::default(),
            sandboxes: sandboxes.clone(),
            candidate,
            acquiring: AtomicUsize::new(0),
            served_at: Mutex::default(),
            claims: OnceLock::new(),
        }));
        let follower = warm_queue.clone();
        sandboxes.subscribe(move |change| follower.refresh(change.latest()));
        warm_queue
    }

    /// Sets the current revision of a pool that is known by its UID.
    pub fn set_current_revision(&self, namespace: &str, uid: &str, revision: &str) {
        self.queue().set_current_revision(namespace, uid, revision);
    }

    /// Forgets a deleted pool that is known by its UID.
    pub fn forget(&self, namespace: &str, uid: &str) {
        let mut queue = self.queue();
        queue.forget_pool(namespace, uid);
        queue.forget_template(namespace, uid);
    }

    /// The best sandbox for a claim, set aside for it until the reservation is dropped or kept.
    pub fn reserve(&self, request: &Request) -> Option<Reservation> {
        loop {
            let taken = self.queue().take(request)?;
            let key = ObjectKey::new(&taken.key.namespace, &taken.key.name);
            let current = self.0.sandboxes.get(&key).filter(|sandbox| {
                (self.0.candidate)(sandbox).is_some_and(|current| current.uid == taken.uid)
            });
            match current {
                Some(sandbox) => {
                    return Some(Reservation {
                        warm_queue: self.clone(),
                        key: Some(taken.key),
                        sandbox,
                    });
                }
                // The cache no longer shows it as a candidate; the queue follows later.
                None => self.queue().withdraw(&taken.key),
            }
        }
    }

    /// Withholds a sandbox from claims because it is to be deleted. False if a claim has reserved it.
    pub fn withhold(&self, key: &SandboxKey) -> bool {
        let mut queue = self.queue();
        if queue.is_taken(key) {
            return false;
        }
        queue.take_exactly(key);
        true
    }

    /// Offers a sandbox to claims again.
    pub fn put_back(&self, key: &SandboxKey) {
        self.queue().release(key);
    }

    /// Whether a claim has reserved this sandbox, or a pool withholds it.
    pub fn is_reserved(&self, key: &SandboxKey) -> bool {
        self.queue().is_taken(key)
    }

    /// Sets the queue in which claims wait for a worker.
    pub fn watch_claims(&self, claims: Queue) {
        // There is one claim controller, registered once.
        let _ = self.0.claims.set(claims);
    }

    /// How many claims wait for a sandbox or are getting one, and when the last of them got one.
    pub fn demand(&self) -> Demand {
        let queued = self.0.claims.get().map_or(0, Queue::depth);
        Demand {
            waiting: queued + self.0.acquiring.load(Ordering::Relaxed),
            served_at: *self.served_at(),
        }
    }

    /// Counts a claim as getting its sandbox for as long as the guard lives.
    pub fn acquiring(&self, clock: &Clock) -> Acquiring {
        self.0.acquiring.fetch_add(1, Ordering::Relaxed);
        Acquiring {
            warm_queue: self.clone(),
            clock: clock.clone(),
        }
    }

    fn served_at(&self) -> MutexGuard<'_, Option<Timestamp>> {
        let served_at = self.0.served_at.lock();
        served_at.unwrap_or_else(PoisonError::into_inner)
    }

    pub fn depth(&self) -> Depth {
        self.queue().depth()
    }

    /// Registers a gauge of the queue's sandboxes, labelled with the controller.
    pub fn count(&self, context: &Context, controller: &'static str) {
        let warm_queue = self.clone();
        let count = move || {
            let depth = warm_queue.depth();
            depth.waiting + depth.taken
        };
        let instrumentation = &context.instrumentation;
        instrumentation.count_entries("warm_queue", controller, Box::new(count));
    }

    /// Brings the queue in line with the cache. The queue is locked before the cache is read, so that of two changes reported
    /// out of order the later one counts.
    fn refresh(&self, changed: &Arc<Sandbox>) {
        let key = ObjectKey::of(changed.as_ref());
        let mut queue = self.queue();
        let current = self.0.sandboxes.get(&key);
        match current.as_deref().and_then(self.0.candidate) {
            Some(candidate) => queue.observe(candidate),
            None => queue.withdraw(&sandbox_key(changed)),
        }
    }

    fn template_changed(&self, change: &Change<'_, SandboxTemplate>) {
        let template = change.latest();
        let namespace = template.namespace().unwrap_or_default();
        let hash = name_hash(&template.name_any());
        match change.after {
            None => self.queue().forget_template(&namespace, &hash),
            Some(template) => {
                if let Some(revision) = Blueprint::new(template).revision {
                    self.queue()
                        .set_current_revision(&namespace, &hash, &revision);
                }
            }
        }
    }

    fn pool_gone(&self, pool: &SandboxWarmPool) {
        let namespace = pool.namespace().unwrap_or_default();
        self.queue()
            .forget_pool(&namespace, &name_hash(&pool.name_any()));
    }

    fn queue(&self) -> MutexGuard<'_, WarmQueue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The queue's name for a sandbox.
pub fn sandbox_key(sandbox: &Sandbox) -> SandboxKey {
    SandboxKey {
        namespace: sandbox.namespace().unwrap_or_default(),
        name: sandbox.name_any(),
    }
}

/// A sandbox set aside for one claim. Dropped, it goes back to the queue.
#[derive(Debug)]
pub struct Reservation {
    warm_queue: SharedWarmQueue,
    key: Option<SandboxKey>,
    pub sandbox: Arc<Sandbox>,
}

impl planner::warm_queue::Reservation for Reservation {
    fn sandbox(&self) -> &Arc<Sandbox> {
        &self.sandbox
    }

    fn keep(mut self) {
        self.key = None;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            self.warm_queue.put_back(&key);
        }
    }
}

/// See [`SharedWarmQueue::acquiring`].
#[derive(Debug)]
pub struct Acquiring {
    warm_queue: SharedWarmQueue,
    clock: Clock,
}

impl Drop for Acquiring {
    fn drop(&mut self) {
        *self.warm_queue.served_at() = Some(self.clock.now());
        self.warm_queue.0.acquiring.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_counts_as_waiting_until_it_is_served_and_leaves_when_it_was() {
        let warm_queue = SharedWarmQueue::of(&Cache::new(None), |_| None);
        let noon = Timestamp::from_second(43_200).unwrap();
        let clock = Clock::new(move || noon);
        assert_eq!(warm_queue.demand(), Demand::default());
        let acquiring = warm_queue.acquiring(&clock);
        let waiting = Demand {
            waiting: 1,
            served_at: None,
        };
        assert_eq!(warm_queue.demand(), waiting);
        drop(acquiring);
        let served = Demand {
            waiting: 0,
            served_at: Some(noon),
        };
        assert_eq!(warm_queue.demand(), served);
    }
}
