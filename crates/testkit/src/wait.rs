//! Waiting for what other tasks bring about. A test never sleeps to let something happen: it says what it waits for.

use std::time::Duration;

use tokio::time::Instant;

/// How long a test waits unless it says otherwise. Generous, because it only costs time when the test fails, and a machine
/// that others use, too, may stand still for seconds at a time.
const DEADLINE: Duration = Duration::from_secs(120);
/// How often the condition is looked at.
const INTERVAL: Duration = Duration::from_millis(5);

/// Waits until `probe` answers with something and returns it. Panics with `what` when the deadline passes.
#[track_caller]
pub fn eventually<T, F>(what: &str, probe: F) -> impl Future<Output = T>
where
    F: AsyncFnMut() -> Option<T>,
{
    eventually_within(DEADLINE, what, probe)
}

/// Like [`eventually`], with a deadline of the test's own.
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
