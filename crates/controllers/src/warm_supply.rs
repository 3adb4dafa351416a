//! The warm queue of the process: fed by the sandbox cache, drawn on by claims, and asked by pools whom they may delete.
//!
//! The order of the queue is [`planner::warm_queue`]'s; this module only keeps it true to the cache and safe to share.

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
pub struct WarmSupply(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    queue: Mutex<WarmQueue>,
    sandboxes: Cache<Sandbox>,
    /// What the queue is to know of a sandbox, if claims may take it.
    candidate: fn(&Sandbox) -> Option<Candidate>,
    /// Claims that are getting their sandbox at this moment.
    acquiring: AtomicUsize,
    /// When the last of them was done with.
    served_at: Mutex<Option<Timestamp>>,
    /// Where claims wait for a worker.
    claims: OnceLock<Queue>,
}

impl WarmSupply {
    /// A queue that follows these caches from now on.
    pub fn new(
        sandboxes: &Cache<Sandbox>,
        templates: &Cache<SandboxTemplate>,
        pools: &Cache<SandboxWarmPool>,
    ) -> Self {
        let supply = Self::of(sandboxes, planner::claim::candidate);
        let follower = supply.clone();
        templates.subscribe(move |change| follower.template_changed(change));
        let follower = supply.clone();
        pools.subscribe(move |change| {
            if change.after.is_none() {
                follower.pool_gone(change.latest());
            }
        });
        supply
    }

    /// A queue of the sandboxes that `candidate` recognises, from now on. Whoever makes it says which revisions are current.
    pub fn of(sandboxes: &Cache<Sandbox>, candidate: fn(&Sandbox) -> Option<Candidate>) -> Self {
        let supply = Self(Arc::new(Inner {
            queue: Mutex::default(),
            sandboxes: sandboxes.clone(),
            candidate,
            acquiring: AtomicUsize::new(0),
            served_at: Mutex::default(),
            claims: OnceLock::new(),
        }));
        let follower = supply.clone();
        sandboxes.subscribe(move |change| follower.refresh(change.latest()));
        supply
    }

    /// Says which revision of a pool that is known by its UID is current.
    pub fn set_current_revision(&self, namespace: &str, uid: &str, revision: &str) {
        self.queue().set_current_revision(namespace, uid, revision);
    }

    /// Forgets a pool that is known by its UID, and is gone.
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
                        supply: self.clone(),
                        key: Some(taken.key),
                        sandbox,
                    });
                }
                // A ghost: the cache moved on before the queue did.
                None => self.queue().withdraw(&taken.key),
            }
        }
    }

    /// Keeps claims from a sandbox that is to be deleted. False if one is claiming it at this moment.
    pub fn set_aside(&self, key: &SandboxKey) -> bool {
        let mut queue = self.queue();
        if queue.is_taken(key) {
            return false;
        }
        queue.take_exactly(key);
        true
    }

    /// Lets claims have a sandbox again.
    pub fn put_back(&self, key: &SandboxKey) {
        self.queue().release(key);
    }

    /// Whether a claim is getting this sandbox at this moment.
    pub fn is_spoken_for(&self, key: &SandboxKey) -> bool {
        self.queue().is_taken(key)
    }

    /// Says where claims wait for a worker.
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
            supply: self.clone(),
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

    /// Has the queue's sandboxes counted, by the name of the controller that keeps it.
    pub fn count(&self, context: &Context, controller: &'static str) {
        let supply = self.clone();
        let count = move || {
            let depth = supply.depth();
            depth.waiting + depth.taken
        };
        let instrumentation = &context.instrumentation;
        instrumentation.keeps("warm_queue", controller, Box::new(count));
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
    supply: WarmSupply,
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
            self.supply.put_back(&key);
        }
    }
}

/// See [`WarmSupply::acquiring`].
#[derive(Debug)]
pub struct Acquiring {
    supply: WarmSupply,
    clock: Clock,
}

impl Drop for Acquiring {
    fn drop(&mut self) {
        *self.supply.served_at() = Some(self.clock.now());
        self.supply.0.acquiring.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_counts_as_waiting_until_it_is_served_and_leaves_when_it_was() {
        let supply = WarmSupply::of(&Cache::new(None), |_| None);
        let noon = Timestamp::from_second(43_200).unwrap();
        let clock = Clock::new(move || noon);
        assert_eq!(supply.demand(), Demand::default());
        let acquiring = supply.acquiring(&clock);
        let waiting = Demand {
            waiting: 1,
            served_at: None,
        };
        assert_eq!(supply.demand(), waiting);
        drop(acquiring);
        let served = Demand {
            waiting: 0,
            served_at: Some(noon),
        };
        assert_eq!(supply.demand(), served);
    }
}
