//! The outcome of a load: latencies, their percentiles, and the comparison with limits. Pure.

use std::time::Duration;

use serde::Serialize;

use super::histograms::Latencies;
use super::recipe::{Limits, Makes, Recipe};

/// One claim.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Sample {
    pub round: usize,
    /// When the claim was due, since the start of the load.
    pub due_s: f64,
    /// From when it was due until it was seen Ready; `None` if it never was.
    pub latency_ms: Option<f64>,
}

/// The latencies of many claims.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    pub claims: usize,
    pub not_ready: usize,
    pub p50_ms: f64,
    pub p90_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    /// From when the first claim was due until the last was Ready.
    pub took_s: f64,
    pub claims_per_second: f64,
}

impl Summary {
    pub fn of<'a>(samples: impl IntoIterator<Item = &'a Sample>) -> Self {
        let samples: Vec<&Sample> = samples.into_iter().collect();
        let mut latencies: Vec<f64> = samples
            .iter()
            .filter_map(|sample| sample.latency_ms)
            .collect();
        latencies.sort_by(f64::total_cmp);
        let begin = samples
            .iter()
            .map(|sample| sample.due_s)
            .fold(f64::INFINITY, f64::min);
        let end = samples
            .iter()
            .filter_map(|sample| Some(sample.due_s + sample.latency_ms? / 1_000.0))
            .fold(begin, f64::max);
        let took_s = if samples.is_empty() { 0.0 } else { end - begin };
        Self {
            claims: samples.len(),
            not_ready: samples.len() - latencies.len(),
            p50_ms: percentile(&latencies, 50),
            p90_ms: percentile(&latencies, 90),
            p99_ms: percentile(&latencies, 99),
            max_ms: percentile(&latencies, 100),
            took_s,
            claims_per_second: if took_s > 0.0 {
                number(latencies.len()) / took_s
            } else {
                0.0
            },
        }
    }
}

/// The value that this percentage of the sorted values does not exceed.
pub fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or_default()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a count of claims is far below what a double holds exactly"
)]
pub fn number(count: usize) -> f64 {
    count as f64
}

/// One comparison of a figure with its limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Check {
    pub what: String,
    pub measured: f64,
    pub limit: f64,
    pub unit: &'static str,
    pub met: bool,
}

/// Which checks fail the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judged {
    /// A missed bound, or a claim that does not become Ready.
    ByBounds,
    /// Also a missed budget.
    ByBudgetToo,
}

/// Everything that the reports show of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    pub recipe: Recipe,
    /// The target, as text.
    pub target: String,
    pub machine: Machine,
    /// When the run began, as RFC 3339.
    pub began: String,
    pub filled_pool_in_s: f64,
    /// The desired sandboxes of all autoscaled pools at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool_at_end: Option<usize>,
    /// Of a growing load: the claims of the last round within the bounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<usize>,
    /// Of the judged rounds.
    pub total: Summary,
    pub rounds: Vec<Summary>,
    pub bounds: Vec<Check>,
    pub budget: Vec<Check>,
    /// The latencies that the controller measured, if its metrics could be read.
    pub controller: Vec<Latencies>,
    /// Their comparison with the bounds.
    pub controller_bounds: Vec<Check>,
    pub samples: Vec<Sample>,
}

/// The machine of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    pub processors: usize,
    pub kernel: String,
    pub version: String,
}

/// The number of rounds before the first that misses a bound.
pub fn sustained_rounds(rounds: &[Summary], makes: Makes, bounds: &Limits) -> usize {
    let is_within = |round: &&Summary| all_met(&checks(round, makes, bounds));
    rounds.iter().take_while(is_within).count()
}

impl Outcome {
    pub fn passed(&self, judged: Judged) -> bool {
        let within_budget = judged == Judged::ByBounds || all_met(&self.budget);
        all_met(&self.bounds) && all_met(&self.controller_bounds) && within_budget
    }

    /// The checks that fail the run.
    pub fn missed(&self, judged: Judged) -> impl Iterator<Item = &Check> {
        let budget = self
            .budget
            .iter()
            .filter(move |_| judged == Judged::ByBudgetToo);
        let bounds = self.bounds.iter().chain(&self.controller_bounds);
        bounds.chain(budget).filter(|check| !check.met)
    }
}

pub fn all_met(checks: &[Check]) -> bool {
    checks.iter().all(|check| check.met)
}

/// Compares a summary with limits. Claims that did not become Ready miss every limit.
pub fn checks(summary: &Summary, makes: Makes, limits: &Limits) -> Vec<Check> {
    let latency = |name: &str, measured: f64, limit: f64| Check {
        what: format!("{name} of {} to Ready", makes.noun()),
        measured,
        limit,
        unit: "ms",
        met: measured <= limit && summary.claims > summary.not_ready,
    };
    vec![
        Check {
            what: format!("{} that were not Ready in time", makes.plural()),
            measured: number(summary.not_ready),
            limit: 0.0,
            unit: makes.plural(),
            met: summary.not_ready == 0,
        },
        latency("p50", summary.p50_ms, limits.p50_ms),
        latency("p90", summary.p90_ms, limits.p90_ms),
        latency("p99", summary.p99_ms, limits.p99_ms),
    ]
}

pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}

#[cfg(test)]
mod tests {
    use super::super::recipe::BOUNDS;
    use super::*;

    fn samples(latencies: &[Option<f64>]) -> Vec<Sample> {
        let sample = |(index, latency_ms): (usize, &Option<f64>)| Sample {
            round: 0,
            due_s: number(index),
            latency_ms: *latency_ms,
        };
        latencies.iter().enumerate().map(sample).collect()
    }

    #[test]
    fn percentiles_are_of_the_claims_that_were_met() {
        let latencies: Vec<Option<f64>> = (1..=100).map(|value| Some(f64::from(value))).collect();
        let summary = Summary::of(&samples(&latencies));
        assert_eq!(
            (
                summary.p50_ms,
                summary.p90_ms,
                summary.p99_ms,
                summary.max_ms
            ),
            (50.0, 90.0, 99.0, 100.0)
        );
        assert!((summary.took_s - 99.1).abs() < 1e-9, "{}", summary.took_s);
        assert_eq!(Summary::of(&samples(&[])).claims, 0);
    }

    #[test]
    fn a_claim_that_is_never_met_fails_the_bounds_however_fast_the_others_are() {
        let summary = Summary::of(&samples(&[Some(1.0), None]));
        assert_eq!((summary.claims, summary.not_ready), (2, 1));
        let checks = checks(&summary, Makes::Claims, &BOUNDS);
        assert_eq!(
            checks.iter().map(|check| check.met).collect::<Vec<_>>(),
            [false, true, true, true]
        );
    }

    #[test]
    fn slow_claims_miss_their_bounds() {
        let summary = Summary::of(&samples(&[Some(1_001.0); 10]));
        let met: Vec<bool> = checks(&summary, Makes::Claims, &BOUNDS)
            .iter()
            .map(|check| check.met)
            .collect();
        assert_eq!(met, [true, false, false, true]);
    }
}
