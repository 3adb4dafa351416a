//! Durations, described by their percentiles.

use std::fmt;
use std::time::Duration;

#[derive(Debug, Default)]
pub struct Sample(Vec<Duration>);

impl Sample {
    pub fn add(&mut self, duration: Duration) {
        self.0.push(duration);
    }

    pub fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort();
        let index = sorted.len().saturating_sub(1) * percent / 100;
        sorted.get(index).copied().unwrap_or_default()
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p90, p99] = [50, 90, 99].map(|percent| milliseconds(self.percentile(percent)));
        write!(
            formatter,
            "p50 {p50}, p90 {p90}, p99 {p99} over {} rounds",
            self.0.len()
        )
    }
}

pub fn milliseconds(duration: Duration) -> String {
    format!("{:.2} ms", duration.as_secs_f64() * 1_000.0)
}
