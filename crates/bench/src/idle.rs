//! `bench idle`: the memory and CPU time of an idle `up`.

use std::time::Duration;

use crate::agent_sandbox::Up;
use crate::process;
use crate::table::bytes;

/// The time between the start and the measurement, in which first probes and the like end.
const SETTLING: Duration = Duration::from_secs(5);

/// What an idle process costs.
pub struct Cost {
    /// Resident memory, in bytes.
    pub resident: u64,
    /// CPU time, in per cent of one CPU.
    pub share: f64,
}

/// Waits until the pool is full, and measures for `duration`.
pub async fn measure(up: &Up, duration: Duration) -> anyhow::Result<String> {
    up.await_warm_pool().await?;
    let cost = of_process(up.ready.pid, duration).await?;
    Ok(format!(
        "idle with a full pool: {} resident, {:.2} % of a CPU over {duration:?}",
        bytes(cost.resident),
        cost.share
    ))
}

/// Waits until a process has settled, and measures its cost for `duration`.
pub async fn of_process(pid: u32, duration: Duration) -> anyhow::Result<Cost> {
    tokio::time::sleep(SETTLING).await;
    let before = process::cpu_time(pid)?;
    tokio::time::sleep(duration).await;
    let used = process::cpu_time(pid)?.saturating_sub(before);
    Ok(Cost {
        resident: process::resident(pid)?,
        share: used.as_secs_f64() / duration.as_secs_f64() * 100.0,
    })
}
