//! What `up` costs while nobody uses it: memory, and processor time.

use std::time::Duration;

use super::process;
use crate::output::bytes;
use crate::up::Up;

/// What follows the start, such as the first probes, is not idling yet.
const SETTLING: Duration = Duration::from_secs(5);

/// Waits until the system has come to rest, and measures for `duration`.
pub async fn measure(up: &Up, duration: Duration) -> anyhow::Result<String> {
    super::await_warm_pool(up).await?;
    tokio::time::sleep(SETTLING).await;
    let this = std::process::id();
    let before = process::processor_time(this)?;
    tokio::time::sleep(duration).await;
    let used = process::processor_time(this)?.saturating_sub(before);
    let resident = process::resident(this)?;
    let share = used.as_secs_f64() / duration.as_secs_f64() * 100.0;
    Ok(format!(
        "idle with a full pool: {} resident, {share:.2} % of a processor over {duration:?}",
        bytes(resident)
    ))
}
