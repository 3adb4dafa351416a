//! The figures of `bench claims`, and their text.

use std::fmt;
use std::time::Duration;

use testkit::writes::Writes;

/// The latencies of claims.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<Duration>);

impl Extend<Duration> for Latencies {
    fn extend<I: IntoIterator<Item = Duration>>(&mut self, latencies: I) {
        self.0.extend(latencies);
    }
}

impl Latencies {
    /// The latency that this percentage of claims did not exceed.
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

/// Resident memory, in bytes; `None` if it cannot be read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Resident {
    /// This process: the API server if it is embedded, the node and the clients, and the controllers if they run here.
    pub here: Option<u64>,
    /// The controllers, if they run in a process of their own.
    pub controllers: Option<u64>,
}

/// CPU time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Used {
    /// By this process, as in [`Resident`].
    pub here: Duration,
    /// By the controllers, if they run in a process of their own.
    pub controllers: Option<Duration>,
}

impl Used {
    pub(super) fn since(&self, earlier: &Self) -> Self {
        let controllers = self.controllers.zip(earlier.controllers);
        Self {
            here: self.here.saturating_sub(earlier.here),
            controllers: controllers.map(|(now, before)| now.saturating_sub(before)),
        }
    }
}

/// The figures of one way to create claims.
#[derive(Clone, Debug)]
pub struct Phase {
    /// The way in which claims were created.
    pub name: String,
    pub claims: usize,
    /// Claim to Ready.
    pub latencies: Latencies,
    /// From the first claim until the last was Ready.
    pub took: Duration,
    /// The CPU time of the phase.
    pub cpu: Used,
    /// Sandboxes that the pool created during the phase.
    pub refills: u64,
    /// Writes from the first claim until the API server was quiet again, refills included.
    pub writes: Writes,
}

impl Phase {
    pub fn claims_per_second(&self) -> f64 {
        ratio(self.claims, self.took)
    }

    fn milliseconds_per_claim(&self, time: Duration) -> f64 {
        milliseconds(time) / ratio(self.claims, Duration::from_secs(1)).max(1.0)
    }
}

/// All figures.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub pool: usize,
    pub filled_in: Duration,
    /// The time to list all sandboxes of the full pool, and to decode the list.
    pub list: (Duration, Duration),
    pub phases: Vec<Phase>,
    pub resident_when_full: Resident,
    pub resident_at_end: Resident,
}

impl Report {
    /// Where claims caused more writes than allowed.
    pub fn excess_writes(&self) -> Vec<String> {
        self.phases
            .iter()
            .flat_map(|phase| {
                let claims = u64::try_from(phase.claims).unwrap_or(u64::MAX);
                let excess = phase.writes.excess(claims).into_iter();
                excess.map(|excess| format!("{}: {excess}", phase.name))
            })
            .collect()
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "{}: {} claims, {:.0} claims/s, {}",
            self.name,
            self.claims,
            self.claims_per_second(),
            self.latencies
        )?;
        write!(
            formatter,
            "    {:.2} ms of CPU a claim, API server, node and clients included",
            self.milliseconds_per_claim(self.cpu.here + self.cpu.controllers.unwrap_or_default())
        )?;
        if let Some(controllers) = self.cpu.controllers {
            let controllers = self.milliseconds_per_claim(controllers);
            write!(formatter, " ({controllers:.2} ms the controllers)")?;
        }
        writeln!(formatter, "; {} refills meanwhile", self.refills)?;
        write!(formatter, "    writes until all was quiet:")?;
        for (name, count) in self.writes.iter() {
            write!(formatter, " {name} {count};")?;
        }
        writeln!(formatter)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "pool: {} sandboxes warm after {:.1} s; all listed in {:.0} ms, decoded in {:.0} ms",
            self.pool,
            self.filled_in.as_secs_f64(),
            milliseconds(self.list.0),
            milliseconds(self.list.1)
        )?;
        for phase in &self.phases {
            write!(formatter, "{phase}")?;
        }
        write!(
            formatter,
            "memory: {} with the pool full, {} at the end",
            mebibytes(self.resident_when_full.here),
            mebibytes(self.resident_at_end.here)
        )?;
        match (
            self.resident_when_full.controllers,
            self.resident_at_end.controllers,
        ) {
            (None, None) => write!(formatter, " (everything in one process)"),
            (full, end) => write!(
                formatter,
                " (API server, node and clients); controllers: {} with the pool full, {} at the end",
                mebibytes(full),
                mebibytes(end)
            ),
        }
    }
}

fn mebibytes(bytes: Option<u64>) -> String {
    bytes.map_or("unknown".to_owned(), |bytes| format!("{} MiB", bytes >> 20))
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}

#[expect(
    clippy::cast_precision_loss,
    reason = "the counts are small enough to be exact as floats"
)]
fn ratio(count: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        count as f64 / time.as_secs_f64()
    }
}
