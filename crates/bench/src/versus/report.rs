//! The figures of each controller, as a table with ratios and budgets.

use std::time::{Duration, Instant};

use super::Arguments;
use crate::table::Table;

/// The figures of one controller. Those that it did not reach are `None`.
#[derive(Debug, Default)]
pub struct Figures {
    pub filled: Option<Duration>,
    pub filled_cpu: Option<Duration>,
    pub filled_resident: Option<u64>,
    pub burst: Option<Claims>,
    pub burst_cpu: Option<Duration>,
    /// Until the pool was full again, without the creation of the claims.
    pub burst_writes: Option<f64>,
    pub sustained: Option<Claims>,
    pub sustained_cpu: Option<Duration>,
    pub resident: Option<u64>,
    /// Why the job was not finished.
    pub stopped: Option<String>,
}

/// How long claims took.
#[derive(Debug, Default)]
pub struct Claims {
    sorted: Vec<Duration>,
    /// From when the first was due until the last was Ready.
    took: Duration,
}

impl Claims {
    /// The claims, each with its due time and its Ready time.
    pub fn of(claims: &[(Instant, Instant)]) -> Self {
        let mut sorted: Vec<Duration> = claims
            .iter()
            .map(|(due, met)| met.saturating_duration_since(*due))
            .collect();
        sorted.sort_unstable();
        let first = claims.iter().map(|(due, _)| *due).min();
        let last = claims.iter().map(|(_, met)| *met).max();
        let took = first.zip(last).map(|(first, last)| last - first);
        Self {
            sorted,
            took: took.unwrap_or_default(),
        }
    }

    fn rate(&self) -> f64 {
        number(self.sorted.len()) / self.took.as_secs_f64()
    }

    fn percentile_ms(&self, percent: usize) -> f64 {
        let index = (self.sorted.len() * percent)
            .div_ceil(100)
            .saturating_sub(1);
        let duration = self.sorted.get(index).copied().unwrap_or_default();
        duration.as_secs_f64() * 1_000.0
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "the counts are small enough to be exact as floats"
)]
pub fn number(count: usize) -> f64 {
    count as f64
}

fn mebibytes(bytes: u64) -> f64 {
    number(usize::try_from(bytes >> 10).unwrap_or_default()) / 1024.0
}

/// Whether a higher or a lower figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Better {
    More,
    Less,
}

impl Better {
    /// How many times better ours is.
    fn ratio(self, ours: f64, upstream: f64) -> f64 {
        match self {
            Self::More => ours / upstream,
            Self::Less => upstream / ours,
        }
    }
}

/// One line of the table.
struct Row {
    what: String,
    better: Better,
    budget: &'static str,
    reading: Reading,
}

/// Selects a figure.
type Reading = Box<dyn Fn(&Figures) -> Option<f64>>;

impl Row {
    fn new(
        what: impl Into<String>,
        better: Better,
        reading: impl Fn(&Figures) -> Option<f64> + 'static,
    ) -> Self {
        Self {
            what: what.into(),
            better,
            budget: "",
            reading: Box::new(reading),
        }
    }

    fn budget(mut self, budget: &'static str) -> Self {
        self.budget = budget;
        self
    }
}

fn latencies(claims: fn(&Figures) -> Option<&Claims>) -> [Row; 3] {
    [50, 90, 99].map(|percent| {
        let read = move |figures: &Figures| Some(claims(figures)?.percentile_ms(percent));
        let row = Row::new(format!("  p{percent}, ms"), Better::Less, read);
        if percent == 50 {
            row.budget("≥ 3×")
        } else {
            row
        }
    })
}

fn rows(arguments: &Arguments) -> Vec<Row> {
    let burst = number(arguments.burst);
    let seconds = |duration: Option<Duration>| duration.map(|duration| duration.as_secs_f64());
    let mut rows = vec![
        Row::new(
            format!("filling a pool of {}, s", arguments.pool),
            Better::Less,
            move |figures| seconds(figures.filled),
        ),
        Row::new(
            "  CPU time of the controller, s",
            Better::Less,
            move |figures| seconds(figures.filled_cpu),
        ),
        Row::new(
            "  memory of the controller, MiB",
            Better::Less,
            move |figures| figures.filled_resident.map(mebibytes),
        )
        .budget("≥ 4×"),
        Row::new(
            format!("{} claims at once, claims/s", arguments.burst),
            Better::More,
            |figures| figures.burst.as_ref().map(Claims::rate),
        )
        .budget("≥ 3×"),
    ];
    rows.extend(latencies(|figures| figures.burst.as_ref()));
    rows.extend([
        Row::new(
            "  CPU time of the controller, s",
            Better::Less,
            move |figures| seconds(figures.burst_cpu),
        ),
        Row::new(
            "  API writes per claim, its refill included",
            Better::Less,
            move |figures| Some(figures.burst_writes? / burst),
        ),
        Row::new(
            format!(
                "{} claims a second for {} s, claims/s",
                arguments.rate, arguments.seconds
            ),
            Better::More,
            |figures| figures.sustained.as_ref().map(Claims::rate),
        ),
    ]);
    rows.extend(latencies(|figures| figures.sustained.as_ref()));
    rows.extend([
        Row::new(
            "  CPU time of the controller, s",
            Better::Less,
            move |figures| seconds(figures.sustained_cpu),
        ),
        Row::new(
            "memory of the controller at the end, MiB",
            Better::Less,
            |figures| figures.resident.map(mebibytes),
        )
        .budget("≥ 4×"),
    ]);
    rows
}

/// One row per figure, one column per controller, and our ratio to upstream if both were measured.
pub fn table(arguments: &Arguments, measured: &[(&str, Figures)]) -> Table {
    let mut header = vec!["WHAT"];
    header.extend(measured.iter().map(|(name, _)| *name));
    if measured.len() == 2 {
        header.extend(["ours is better", "budget"]);
    }
    let mut table = Table::new(&header);
    for row in rows(arguments) {
        let values: Vec<Option<f64>> = measured
            .iter()
            .map(|(_, figures)| (row.reading)(figures))
            .collect();
        let mut cells = vec![row.what];
        cells.extend(
            values
                .iter()
                .map(|value| value.map_or("–".to_owned(), |value| format!("{value:.1}"))),
        );
        if let [Some(ours), Some(upstream)] = values[..] {
            cells.push(format!("{:.2}×", row.better.ratio(ours, upstream)));
            cells.push(row.budget.to_owned());
        }
        table.row(cells);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_described_by_their_rate_and_percentiles() {
        let begin = Instant::now();
        let claims: Vec<_> = (1..=100)
            .map(|number| (begin, begin + Duration::from_millis(number * 10)))
            .collect();
        let claims = Claims::of(&claims);
        assert!((claims.rate() - 100.0).abs() < 1e-6);
        assert!((claims.percentile_ms(50) - 500.0).abs() < 1e-6);
        assert!((claims.percentile_ms(99) - 990.0).abs() < 1e-6);
        assert!(Claims::of(&[]).percentile_ms(50).abs() < f64::EPSILON);
    }

    #[test]
    fn more_claims_and_less_memory_are_both_better() {
        assert!((Better::More.ratio(300.0, 100.0) - 3.0).abs() < f64::EPSILON);
        assert!((Better::Less.ratio(25.0, 100.0) - 4.0).abs() < f64::EPSILON);
    }
}
