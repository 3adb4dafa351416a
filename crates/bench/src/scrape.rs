//! `bench scrape`: the cost of observability. A scrape with many sandboxes, a change of one of them, and a span without a subscriber.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::{Sandbox, SandboxSpec, labels};
use controllers::cache::Change;
use controllers::instrumentation::Instrumentation;
use controllers::metrics::Metrics;

use crate::fake_cluster;
use crate::table::Table;

const SCRAPES: usize = 200;
const NAMESPACES: usize = 50;
const TEMPLATES: usize = 4;
const CALLS: u32 = 10_000_000;

/// The budget of the median scrape.
const SLOWEST: Duration = Duration::from_millis(10);

/// Measures and prints. Returns the missed budgets.
pub fn measure(sandboxes: usize) -> Vec<String> {
    let metrics = fake_cluster::metrics();
    let before: Vec<Arc<Sandbox>> = (0..sandboxes)
        .map(|index| Arc::new(sandbox(index, false)))
        .collect();
    let after: Vec<Arc<Sandbox>> = (0..sandboxes)
        .map(|index| Arc::new(sandbox(index, true)))
        .collect();
    for sandbox in &before {
        change(&metrics, None, Some(sandbox));
    }
    let mut scrapes: Vec<Duration> = (0..SCRAPES)
        .map(|_| {
            let begin = Instant::now();
            black_box(metrics.exposition());
            begin.elapsed()
        })
        .collect();
    scrapes.sort_unstable();
    let series = metrics.exposition().matches("\nagent_sandboxes{").count();

    let begin = Instant::now();
    for (before, after) in before.iter().zip(&after) {
        change(&metrics, Some(before), Some(after));
    }
    let each_change = begin.elapsed() / u32::try_from(sandboxes.max(1)).unwrap_or(u32::MAX);
    let begin = Instant::now();
    for sandbox in &after {
        change(&metrics, Some(sandbox), Some(sandbox));
    }
    let unchanged = begin.elapsed() / u32::try_from(sandboxes.max(1)).unwrap_or(u32::MAX);

    let mut table = Table::new(&["WHAT", "MEDIAN", "HIGHEST"]);
    table.row(vec![
        format!("scrape of {sandboxes} sandboxes in {series} series"),
        format!("{:?}", scrapes[SCRAPES / 2]),
        format!("{:?}", scrapes[SCRAPES - 1]),
    ]);
    for (what, cost) in [
        ("a sandbox that becomes another sort", each_change),
        ("a sandbox that changes otherwise", unchanged),
        (
            "asking whether spans are exported",
            each(|| {
                black_box(telemetry::spans::are_exported());
            }),
        ),
        (
            "a span without a subscriber",
            each(|| {
                black_box(tracing::info_span!("reconcile", otel.name = "x"));
            }),
        ),
    ] {
        table.row(vec![what.to_owned(), format!("{cost:?}"), String::new()]);
    }
    print!("{}", table.render());
    missed(scrapes[SCRAPES / 2])
}

fn missed(scrape: Duration) -> Vec<String> {
    let is_slow = scrape > SLOWEST;
    let complaint =
        is_slow.then(|| format!("a scrape takes {scrape:?}, at most {SLOWEST:?} was asked"));
    complaint.into_iter().collect()
}

fn each(mut call: impl FnMut()) -> Duration {
    let begin = Instant::now();
    for _ in 0..CALLS {
        call();
    }
    begin.elapsed() / CALLS
}

fn change(metrics: &Metrics, before: Option<&Arc<Sandbox>>, after: Option<&Arc<Sandbox>>) {
    metrics.sandbox_changed(&Change { before, after });
}

fn sandbox(index: usize, is_warm: bool) -> Sandbox {
    let mut sandbox = Sandbox::new(&format!("sandbox-{index}"), SandboxSpec::default());
    sandbox.metadata.namespace = Some(format!("team-{}", index % NAMESPACES));
    let annotations = sandbox.metadata.annotations.get_or_insert_default();
    annotations.insert(
        labels::SANDBOX_TEMPLATE_REF.to_owned(),
        format!("template-{}", index % TEMPLATES),
    );
    if is_warm {
        annotations.insert(labels::POD_NAME.to_owned(), format!("sandbox-{index}"));
    }
    sandbox
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_slow_scrape_misses_the_budget() {
        assert_eq!(missed(SLOWEST), Vec::<String>::new());
        let missed = missed(SLOWEST + Duration::from_millis(1));
        assert_eq!(missed, ["a scrape takes 11ms, at most 10ms was asked"]);
    }
}
