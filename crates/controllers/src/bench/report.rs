//! The figures of a benchmark, and how they are told.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::Duration;

use crate::instrumentation::Verb;

/// How long each of many claims took.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<Duration>);

impl Extend<Duration> for Latencies {
    fn extend<I: IntoIterator<Item = Duration>>(&mut self, latencies: I) {
        self.0.extend(latencies);
    }
}

impl Latencies {
    /// The latency that this share of claims, in percent, did not exceed.
    pub fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
        sorted.get(index).copied().unwrap_or_default()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "p50 {:.2} ms, p90 {:.2} ms, p99 {:.2} ms, max {:.2} ms",
            milliseconds(self.percentile(50)),
            milliseconds(self.percentile(90)),
            milliseconds(self.percentile(99)),
            milliseconds(self.percentile(100)),
        )
    }
}

/// What was measured.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub pool: usize,
    pub filled_in: Duration,
    /// Claim to Ready, one claim at a time.
    pub sequential: Latencies,
    /// Claim to Ready, all at once.
    pub burst: Latencies,
    pub burst_claims: usize,
    /// From the first claim of the burst until the last was Ready.
    pub burst_took: Duration,
    /// What the whole process, API server included, computed meanwhile.
    pub burst_cpu: Duration,
    /// What the controllers wrote meanwhile, whatever for.
    pub burst_writes: u64,
    pub burst_writes_by_kind: BTreeMap<String, u64>,
    /// The whole process's memory, API server included, when the pool was full, and at the end.
    pub resident_when_full: Option<u64>,
    pub resident_at_end: Option<u64>,
}

impl Report {
    pub fn claims_per_second(&self) -> f64 {
        ratio(self.burst_claims, self.burst_took.as_secs_f64())
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mebibytes = |bytes: Option<u64>| {
            bytes.map_or("unknown".to_owned(), |bytes| format!("{} MiB", bytes >> 20))
        };
        writeln!(
            formatter,
            "pool        {} sandboxes warm after {:.1} s",
            self.pool,
            self.filled_in.as_secs_f64()
        )?;
        writeln!(
            formatter,
            "one by one  {} claims: {}",
            self.sequential.len(),
            self.sequential
        )?;
        writeln!(
            formatter,
            "at once     {} claims: {:.0} claims/s, {}",
            self.burst_claims,
            self.claims_per_second(),
            self.burst
        )?;
        writeln!(
            formatter,
            "            {:.2} s of CPU for the whole process",
            self.burst_cpu.as_secs_f64()
        )?;
        writeln!(
            formatter,
            "writes      {} while the burst was met:",
            self.burst_writes
        )?;
        for (kind, count) in &self.burst_writes_by_kind {
            writeln!(formatter, "              {kind}: {count}")?;
        }
        write!(
            formatter,
            "memory      {} with the pool full, {} at the end (whole process)",
            mebibytes(self.resident_when_full),
            mebibytes(self.resident_at_end)
        )
    }
}

/// What was requested between two counts.
pub(super) fn difference(
    before: &HashMap<(String, Verb), u64>,
    after: &HashMap<(String, Verb), u64>,
) -> BTreeMap<String, u64> {
    after
        .iter()
        .map(|(key, count)| {
            let earlier = before.get(key).copied().unwrap_or(0);
            (format!("{} {:?}", key.0, key.1), count - earlier)
        })
        .filter(|(_, count)| *count > 0)
        .collect()
}

/// The memory of this process that is resident, where the operating system tells.
pub(super) fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:"))?;
    let kibibytes: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kibibytes << 10)
}

/// What this process has computed so far, where the operating system tells. It counts in hundredths of a second.
pub(super) fn cpu_time() -> Duration {
    const TICK: Duration = Duration::from_millis(10);
    let read = || -> Option<Duration> {
        let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
        // The second field is a name in parentheses that may hold spaces.
        let (_, fields) = stat.rsplit_once(')')?;
        let mut fields = fields.split_whitespace().skip(11);
        let user: u32 = fields.next()?.parse().ok()?;
        let system: u32 = fields.next()?.parse().ok()?;
        Some(TICK * (user + system))
    };
    read().unwrap_or_default()
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a count of claims is far below what a double holds exactly"
)]
fn ratio(count: usize, seconds: f64) -> f64 {
    if seconds > 0.0 {
        count as f64 / seconds
    } else {
        0.0
    }
}
