//! Counts the requests of a client's connection, to tell a connection that waits for a response from an idle one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The requests of one connection.
#[derive(Debug, Default)]
pub struct Activity {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// A request, from its head to the end of its response.
#[derive(Debug)]
pub struct InFlight(Arc<Activity>);

impl Activity {
    pub fn begin(self: &Arc<Self>) -> InFlight {
        self.begun.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    /// Completes when no request has been in flight for at least `timeout`, and for at most twice as long.
    pub async fn idle_for(&self, timeout: Duration) {
        loop {
            let before = self.begun.load(Ordering::Relaxed);
            let idle_before = self.ended.load(Ordering::Relaxed) == before;
            tokio::time::sleep(timeout).await;
            if idle_before && self.begun.load(Ordering::Relaxed) == before {
                return;
            }
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    const TIMEOUT: Duration = Duration::from_millis(30);

    #[tokio::test]
    async fn a_connection_without_requests_is_idle() {
        let started = Instant::now();
        Arc::new(Activity::default()).idle_for(TIMEOUT).await;
        assert!(started.elapsed() >= TIMEOUT);
    }

    #[tokio::test]
    async fn the_idle_time_starts_again_when_a_request_has_ended() {
        let activity = Arc::new(Activity::default());
        let request = activity.begin();
        let answering = async {
            tokio::time::sleep(TIMEOUT * 3).await;
            drop(request);
            Instant::now()
        };
        let ceasing = async {
            activity.idle_for(TIMEOUT).await;
            Instant::now()
        };
        let (ended, ceased) = tokio::join!(answering, ceasing);
        assert!(ceased - ended >= TIMEOUT);
    }
}
