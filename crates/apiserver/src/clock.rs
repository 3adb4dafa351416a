//! The source of the current time. A program that embeds the server can replace it.

use std::{fmt, sync::Arc};

use jiff::Timestamp;

/// The source of the current time.
#[derive(Clone)]
pub struct Clock(pub Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    /// The current time.
    pub fn now(&self) -> Timestamp {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Clock")
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self(Arc::new(Timestamp::now))
    }
}
