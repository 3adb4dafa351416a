//! `agent_sandbox_controller_entries`: the number of entries of the controllers' in-memory structures, counted at each scrape.
//!
//! Every structure shrinks when its objects are deleted. A structure that only grows is a leak, which this metric shows.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{IntGaugeVec, Opts};

use super::WELL_FORMED;
use crate::instrumentation::Count;

struct Structure {
    name: &'static str,
    of: String,
    count: Count,
}

/// The structures that are counted, and the collector that counts them.
#[derive(Clone)]
pub(super) struct EntryCounts {
    structures: Arc<Mutex<Vec<Structure>>>,
    entries: IntGaugeVec,
}

impl EntryCounts {
    pub fn new() -> Self {
        let options = Opts::new(
            "agent_sandbox_controller_entries",
            "Entries that the controllers keep in memory, by structure and by what it is of.",
        );
        Self {
            structures: Arc::default(),
            entries: IntGaugeVec::new(options, &["structure", "of"]).expect(WELL_FORMED),
        }
    }

    pub fn add(&self, name: &'static str, of: &str, count: Count) {
        let of = of.to_owned();
        let mut structures = self
            .structures
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        structures.push(Structure { name, of, count });
    }
}

impl Collector for EntryCounts {
    fn desc(&self) -> Vec<&Desc> {
        self.entries.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let structures = self
            .structures
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Two structures may have the same labels: their counts are added.
        let mut sums: BTreeMap<[&str; 2], usize> = BTreeMap::new();
        for Structure { name, of, count } in structures.iter() {
            let sum = sums.entry([*name, of.as_str()]).or_default();
            *sum = sum.saturating_add(count());
        }
        for (labels, sum) in sums {
            let sum = i64::try_from(sum).unwrap_or(i64::MAX);
            self.entries.with_label_values(&labels).set(sum);
        }
        self.entries.collect()
    }
}

impl fmt::Debug for EntryCounts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("EntryCounts")
            .finish_non_exhaustive()
    }
}
