//! Faults that tests inject into a node. Nothing else sets them, and without one the check is a single relaxed load.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The faults to inject.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    worker_panics: Arc<AtomicU32>,
}

impl Faults {
    /// Makes this many decisions of pod workers panic.
    pub fn panic_in_workers(&self, times: u32) {
        self.worker_panics.store(times, Ordering::Relaxed);
    }

    /// The number of panics that are left.
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
