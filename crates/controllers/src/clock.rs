//! The clock and the random numbers of the controllers. No other module of this crate asks the operating system for either.

use std::fmt;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use k8s_openapi::jiff::Timestamp;

/// The wall clock. Delays are measured by the runtime's monotonic clock instead.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    /// A clock that returns the result of `now`.
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    pub fn now(&self) -> Timestamp {
        (self.0)()
    }

    /// The time as the API writes it: in whole seconds, so that a value read back equals the value written.
    pub fn api_time(&self) -> Time {
        let now = self.now();
        Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
    }

    pub fn micro_time(&self) -> MicroTime {
        MicroTime(self.now())
    }
}

impl Default for Clock {
    /// The system's clock.
    fn default() -> Self {
        Self::new(Timestamp::now)
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Clock")
    }
}

/// A source of numbers for jitter and identifiers. It need not be secret.
#[derive(Clone)]
pub struct Random(Arc<dyn Fn() -> u64 + Send + Sync>);

impl Random {
    pub fn new(next: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self(Arc::new(next))
    }

    pub fn number(&self) -> u64 {
        (self.0)()
    }

    /// A number from 0 up to, but not including, 1.
    #[expect(
        clippy::cast_precision_loss,
        reason = "the 53 bits that are left fit a double exactly"
    )]
    pub fn fraction(&self) -> f64 {
        (self.number() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

impl Default for Random {
    /// The thread's own generator, seeded by the operating system.
    fn default() -> Self {
        Self::new(rand::random)
    }
}

impl fmt::Debug for Random {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Random")
    }
}
