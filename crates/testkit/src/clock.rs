//! A clock that stands still until a test moves it.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

/// Clones show the same time.
#[derive(Clone, Debug)]
pub struct FakeClock {
    microseconds: Arc<AtomicI64>,
}

impl FakeClock {
    /// A clock that shows the given time.
    pub fn at(now: Timestamp) -> Self {
        Self {
            microseconds: Arc::new(AtomicI64::new(now.as_microsecond())),
        }
    }

    pub fn now(&self) -> Timestamp {
        Timestamp::from_microsecond(self.microseconds.load(Ordering::SeqCst))
            .expect("a clock is only moved by spans that tests use")
    }

    pub fn advance(&self, span: Duration) {
        let span =
            i64::try_from(span.as_micros()).expect("a test moves a clock by less than an age");
        self.microseconds.fetch_add(span, Ordering::SeqCst);
    }
}
