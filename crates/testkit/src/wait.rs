//! Waits for a condition. A test never sleeps to let something happen; it names the condition that it waits for.

use std::time::Duration;

use tokio::time::Instant;

/// The default deadline of a wait. It is generous, because it costs time only if the test fails, and a busy machine may stall a
/// process for seconds.
const DEADLINE: Duration = Duration::from_secs(120);
/// The polling interval.
const INTERVAL: Duration = Duration::from_millis(5);

/// Polls `probe` until it returns `Some`, and returns that value. Panics with `what` when the deadline has passed.
#[track_caller]
pub fn eventually<T, F>(what: &str, probe: F) -> impl Future<Output = T>
where
    F: AsyncFnMut() -> Option<T>,
{
    eventually_within(DEADLINE, what, probe)
}

/// Like [`eventually`], with an explicit deadline.
pub async fn eventually_within<T, F>(deadline: Duration, what: &str, mut probe: F) -> T
where
    F: AsyncFnMut() -> Option<T>,
{
    let started = Instant::now();
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(
            started.elapsed() < deadline,
            "after {deadline:?} still waiting for: {what}"
        );
        tokio::time::sleep(INTERVAL).await;
    }
}
