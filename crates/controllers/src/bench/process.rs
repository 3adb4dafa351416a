//! What this process has used, as the operating system tells it.

use std::time::Duration;

/// The memory of a process that is resident, in bytes. `None` where the operating system does not tell.
pub fn resident_bytes(process: &str) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes << 10)
}

/// What a process has computed so far, counted in hundredths of a second. Zero where the operating system does not tell.
pub fn cpu_time(process: &str) -> Duration {
    const TICK: Duration = Duration::from_millis(10);
    let read = || -> Option<Duration> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        // The second field is a name in parentheses that may hold spaces.
        let (_, fields) = stat.rsplit_once(')')?;
        let mut fields = fields.split_whitespace().skip(11);
        let user: u32 = fields.next()?.parse().ok()?;
        let system: u32 = fields.next()?.parse().ok()?;
        Some(TICK * (user + system))
    };
    read().unwrap_or_default()
}
