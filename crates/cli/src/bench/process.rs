//! What a process costs, as the operating system tells it.

use std::time::Duration;

use anyhow::Context;

/// Memory that a process holds, in bytes.
pub fn resident(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kibibytes.with_context(|| format!("an unexpected {path}"))? << 10)
}

/// What a process has computed so far.
pub fn processor_time(pid: u32) -> anyhow::Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // The second field is a name in brackets, which may hold anything.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let (user, system) = ticks(11)
        .zip(ticks(12))
        .with_context(|| format!("an unexpected {path}"))?;
    let a_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_millis(
        (user + system) * 1000 / a_second.max(1),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_costs_something_and_none_costs_nothing() {
        assert!(resident(std::process::id()).unwrap() > 1 << 20);
        assert!(processor_time(std::process::id()).is_ok());
        assert!(resident(u32::MAX).is_err());
    }
}
