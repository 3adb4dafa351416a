//! What `up` costs while nobody uses it: memory, and processor time.

use std::time::Duration;

use anyhow::Context;

use crate::output::bytes;
use crate::up::Up;

/// What follows the start, such as the first probes, is not idling yet.
const SETTLING: Duration = Duration::from_secs(5);

/// Waits until the system has come to rest, and measures for `duration`.
pub async fn measure(up: &Up, duration: Duration) -> anyhow::Result<String> {
    super::await_warm_pool(up).await?;
    tokio::time::sleep(SETTLING).await;
    let before = processor_time()?;
    tokio::time::sleep(duration).await;
    let used = processor_time()?.saturating_sub(before);
    let resident = super::sandboxd::resident(std::process::id())?;
    let share = used.as_secs_f64() / duration.as_secs_f64() * 100.0;
    Ok(format!(
        "idle with a full pool: {} resident, {share:.2} % of a processor over {duration:?}",
        bytes(resident)
    ))
}

/// The processor time of this process so far.
fn processor_time() -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // The second field is a name in brackets, which may hold anything.
    let (_, fields) = stat
        .rsplit_once(')')
        .context("an unexpected /proc/self/stat")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |index: usize| {
        fields
            .get(index)
            .and_then(|field| field.parse::<u64>().ok())
    };
    let (user, system) = ticks(11)
        .zip(ticks(12))
        .context("an unexpected /proc/self/stat")?;
    let a_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_millis(
        (user + system) * 1000 / a_second.max(1),
    ))
}
