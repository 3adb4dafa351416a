//! Whether a client's connection is being used: what tells one that waits for an answer from one that only holds its place.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The requests of one connection.
#[derive(Debug, Default)]
pub struct Activity {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// A request, from its head to the end of its answer.
#[derive(Debug)]
pub struct InFlight(Arc<Activity>);

impl Activity {
    pub fn begin(self: &Arc<Self>) -> InFlight {
        self.begun.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    /// Completes when no request has been in flight for at least `patience`, and for at most twice as long.
    pub async fn ceased_for(&self, patience: Duration) {
        loop {
            let before = self.begun.load(Ordering::Relaxed);
            let idle_before = self.ended.load(Ordering::Relaxed) == before;
            tokio::time::sleep(patience).await;
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

    const PATIENCE: Duration = Duration::from_millis(30);

    #[tokio::test]
    async fn a_connection_without_requests_is_found_out() {
        let started = Instant::now();
        Arc::new(Activity::default()).ceased_for(PATIENCE).await;
        assert!(started.elapsed() >= PATIENCE);
    }

    #[tokio::test]
    async fn time_begins_anew_when_a_request_has_ended() {
        let activity = Arc::new(Activity::default());
        let request = activity.begin();
        let answering = async {
            tokio::time::sleep(PATIENCE * 3).await;
            drop(request);
            Instant::now()
        };
        let ceasing = async {
            activity.ceased_for(PATIENCE).await;
            Instant::now()
        };
        let (ended, ceased) = tokio::join!(answering, ceasing);
        assert!(ceased - ended >= PATIENCE);
    }
}
