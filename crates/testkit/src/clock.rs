//! A fake clock that only a test advances.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

/// A fake clock. Clones show the same time.
#[derive(Clone, Debug)]
pub struct FakeClock {
    microseconds: Arc<AtomicI64>,
}

impl FakeClock {
    /// A clock set to the given time.
    pub fn at(now: Timestamp) -> Self {
        Self {
            microseconds: Arc::new(AtomicI64::new(now.as_microsecond())),
        }
    }

    pub fn now(&self) -> Timestamp {
        Timestamp::from_microsecond(self.microseconds.load(Ordering::SeqCst))
            .expect("the time is within the range of a timestamp")
    }

    pub fn advance(&self, span: Duration) {
        let span =
            i64::try_from(span.as_micros()).expect("the span fits into 64 bits of microseconds");
        self.microseconds.fetch_add(span, Ordering::SeqCst);
    }
}
