//! Faults that tests inject into a node. Nothing else sets them, and without one the check is a single relaxed load.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// What is to go wrong.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    worker_panics: Arc<AtomicU32>,
}

impl Faults {
    /// Has workers of pods panic as often as this, each when it is about to decide.
    pub fn panic_in_workers(&self, times: u32) {
        self.worker_panics.store(times, Ordering::Relaxed);
    }

    /// How many of those panics are still to come.
    pub fn panics_left(&self) -> u32 {
        self.worker_panics.load(Ordering::Relaxed)
    }

    pub(crate) fn strike(&self) {
        if self.panics_left() == 0 {
            return;
        }
        let taken = self
            .worker_panics
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
                left.checked_sub(1)
            });
        assert!(taken.is_err(), "a fault that a test asked for");
    }
}
