//! What the controller remembers of each pool between two passes. All of it can be lost without harm.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use planner::expectations::Expectations;
use saturating_time::SaturatingTime;
use tokio::time::Instant;

use crate::context::Context;
use crate::key::ObjectKey;

/// A pass may take this part of a pool's time, so that a large pool under a stream of changes does not fill a core.
const DUTY: u32 = 8;
/// The longest a busy pool rests between two passes.
const LONGEST_REST: Duration = Duration::from_millis(250);

/// One pool's memory.
#[derive(Debug)]
pub(super) struct Memory {
    pub expectations: Expectations,
    pub held_back_since: Option<Timestamp>,
    /// Nothing can be made there any more. Every sandbox that goes would have the pool try again, so it must not.
    pub namespace_is_ending: bool,
    rest_until: Option<Instant>,
}

impl Default for Memory {
    /// Nothing is remembered, so that others may have made what the cache does not show yet: who led before, say.
    fn default() -> Self {
        let mut expectations = Expectations::default();
        expectations.doubt();
        Self {
            expectations,
            held_back_since: None,
            namespace_is_ending: false,
            rest_until: None,
        }
    }
}

impl Memory {
    /// How long the pool rests yet, if it does.
    pub fn rest(&self) -> Option<Duration> {
        let left = self.rest_until?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Has the pool rest after a pass, by how long deciding took.
    pub fn worked(&mut self, took: Duration) {
        let rest = took.saturating_mul(DUTY).min(LONGEST_REST);
        self.rest_until = Some(Instant::now().later_by(rest));
    }
}

type Shared = Arc<tokio::sync::Mutex<Memory>>;

/// A pool's memory, and the UID of the pool it is of.
#[derive(Debug, Default)]
struct Entry {
    uid: Option<String>,
    memory: Shared,
}

/// The memories of all pools. Clones refer to the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Memories(Arc<Mutex<HashMap<ObjectKey, Entry>>>);

impl Memories {
    /// The memory of a pool. A pool of another UID is another pool, and starts anew.
    pub fn of(&self, key: &ObjectKey, uid: Option<&str>) -> Shared {
        let mut memories = self.lock();
        let entry = memories.entry(key.clone()).or_default();
        if entry.uid.as_deref() != uid {
            *entry = Entry {
                uid: uid.map(str::to_owned),
                memory: Shared::default(),
            };
        }
        Arc::clone(&entry.memory)
    }

    pub fn forget(&self, key: &ObjectKey) {
        self.lock().remove(key);
    }

    /// Has what is remembered counted, by the name of the controller that remembers it.
    pub fn count(&self, context: &Context, controller: &'static str) {
        let keeps = |structure, count: fn(&Self) -> usize| {
            let memories = self.clone();
            let count = Box::new(move || count(&memories));
            context.instrumentation.keeps(structure, controller, count);
        };
        keeps("memory", |memories| memories.lock().len());
        keeps("expectation", Self::expected);
    }

    /// How much all pools have done and not yet seen. A pool that is being worked on is left out, since counting must not wait.
    fn expected(&self) -> usize {
        let memories = self.lock();
        let expected = memories.values().map(|entry| {
            let memory = entry.memory.try_lock();
            memory.map_or(0, |memory| memory.expectations.len())
        });
        expected.sum()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectKey, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
