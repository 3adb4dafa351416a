//! The memory and CPU time of a process, from `/proc`.

use std::time::Duration;

use anyhow::Context;

/// The resident memory of a process, in bytes.
pub fn resident(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kibibytes.with_context(|| format!("an unexpected {path}"))? << 10)
}

/// The CPU time that a process has used so far.
pub fn cpu_time(pid: u32) -> anyhow::Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    // The second field is a name in parentheses, which may contain any character.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let (user, system) = ticks(11)
        .zip(ticks(12))
        .with_context(|| format!("an unexpected {path}"))?;
    let ticks_per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_millis(
        (user + system) * 1000 / ticks_per_second.max(1),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_measured_and_a_missing_one_is_an_error() {
        assert!(resident(std::process::id()).unwrap() > 1 << 20);
        assert!(cpu_time(std::process::id()).is_ok());
        assert!(resident(u32::MAX).is_err());
    }
}
