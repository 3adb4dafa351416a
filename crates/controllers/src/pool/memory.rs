//! The memory of each pool between two passes. All of it can be lost without harm.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use saturating_time::SaturatingTime;
use tokio::time::Instant;

use crate::context::Context;
use crate::key::ObjectKey;

/// After a decision a pool pauses this many times as long as the decision took, so that a large pool under a stream of changes does not
/// occupy a CPU.
const DUTY: u32 = 8;
/// The longest pause between two passes.
const LONGEST_REST: Duration = Duration::from_millis(250);

/// One pool's memory.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// What the pass over the pool remembers.
    pub planner: planner::pool::Memory,
    pub rest: Rest,
}

/// The end of a pool's pause after its last decision.
#[derive(Debug, Default)]
pub(super) struct Rest(Option<Instant>);

impl Rest {
    /// The rest of the pause, if any.
    pub fn left(&self) -> Option<Duration> {
        let left = self.0?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }

    /// Starts the pause after a decision, from the decision's duration.
    pub fn begin(&mut self, took: Duration) {
        let rest = took.saturating_mul(DUTY).min(LONGEST_REST);
        self.0 = Some(Instant::now().later_by(rest));
    }
}

type Shared = Arc<tokio::sync::Mutex<Memory>>;

/// The memory of a pool and the pool's UID.
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

    /// Registers gauges of the memories and the expectations of a controller.
    pub fn count(&self, context: &Context, controller: &'static str) {
        let count_entries = |structure, count: fn(&Self) -> usize| {
            let memories = self.clone();
            let count = Box::new(move || count(&memories));
            context
                .instrumentation
                .count_entries(structure, controller, count);
        };
        count_entries("memory", |memories| memories.lock().len());
        count_entries("expectation", Self::expected);
    }

    /// The expectations of all pools. A pool with a running pass is left out, since counting must not wait.
    fn expected(&self) -> usize {
        let memories = self.lock();
        let expected = memories.values().map(|entry| {
            let memory = entry.memory.try_lock();
            memory.map_or(0, |memory| memory.planner.expectations.len())
        });
        expected.sum()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ObjectKey, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
