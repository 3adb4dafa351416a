//! What `up` costs while nobody uses it: memory, and processor time.

use std::time::Duration;

use super::process;
use crate::output::bytes;
use crate::up::Up;

/// What follows the start, such as the first probes, is not idling yet.
const SETTLING: Duration = Duration::from_secs(5);

/// What a process costs that does nothing.
pub struct Cost {
    /// Memory, in bytes.
    pub resident: u64,
    /// Processor time, in per cent of one processor.
    pub share: f64,
}

/// Waits until the system has come to rest, and measures for `duration`.
pub async fn measure(up: &Up, duration: Duration) -> anyhow::Result<String> {
    super::await_warm_pool(&up.client()).await?;
    let cost = of_process(std::process::id(), duration).await?;
    Ok(format!(
        "idle with a full pool: {} resident, {:.2} % of a processor over {duration:?}",
        bytes(cost.resident),
        cost.share
    ))
}

/// Lets a process settle, and measures what it costs for `duration`.
pub async fn of_process(pid: u32, duration: Duration) -> anyhow::Result<Cost> {
    tokio::time::sleep(SETTLING).await;
    let before = process::processor_time(pid)?;
    tokio::time::sleep(duration).await;
    let used = process::processor_time(pid)?.saturating_sub(before);
    Ok(Cost {
        resident: process::resident(pid)?,
        share: used.as_secs_f64() / duration.as_secs_f64() * 100.0,
    })
}
