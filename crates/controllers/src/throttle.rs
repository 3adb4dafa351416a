//! A rate limit on requests to the API server.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::Client;
use saturating_time::SaturatingTime;
use tokio::time::Instant;
use tower::service_fn;

use crate::config::RequestLimit;

/// A client that delays requests beyond the limit.
pub fn throttled(client: Client, limit: RequestLimit) -> Client {
    let bucket = Arc::new(Bucket::new(limit));
    let namespace = client.default_namespace().to_owned();
    let service = service_fn(move |request| {
        let client = client.clone();
        let bucket = Arc::clone(&bucket);
        async move {
            tokio::time::sleep_until(bucket.take(Instant::now())).await;
            client.send(request).await
        }
    });
    Client::new(service, namespace)
}

/// A token bucket, stored as the time at which it will be full again.
struct Bucket {
    interval: Duration,
    /// The time from empty to full.
    capacity: Duration,
    full_at: Mutex<Option<Instant>>,
}

impl Bucket {
    fn new(limit: RequestLimit) -> Self {
        let interval = Duration::from_secs_f64(limit.per_second.recip());
        let burst = u32::try_from(limit.burst.get()).unwrap_or(u32::MAX);
        Self {
            interval,
            capacity: interval.saturating_mul(burst),
            full_at: Mutex::new(None),
        }
    }

    /// Takes a token, and returns when it may be used.
    fn take(&self, now: Instant) -> Instant {
        let mut full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        let after = full_at.map_or(now, |full_at| full_at.max(now));
        let after = after.later_by(self.interval);
        *full_at = Some(after);
        after
            .checked_sub(self.capacity)
            .map_or(now, |due| due.max(now))
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;

    #[test]
    fn a_burst_passes_and_the_rest_is_spread_out() {
        let bucket = Bucket::new(RequestLimit {
            per_second: 10.0,
            burst: NonZeroUsize::new(3).unwrap(),
        });
        let start = Instant::now();
        let waits: Vec<u128> = (0..5)
            .map(|_| (bucket.take(start) - start).as_millis())
            .collect();
        assert_eq!(waits, [0, 0, 0, 100, 200]);

        let rested = start + Duration::from_secs(5);
        assert_eq!(bucket.take(rested), rested);
    }
}
