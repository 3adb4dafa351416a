//! `agent_sandboxes`: the number of sandboxes for each set of labels.
//!
//! The counts are updated when sandboxes change, so the cost of a scrape depends on the number of series, not of sandboxes. A change
//! decrements the series of the old labels and increments that of the new ones; changes may therefore arrive in any order. A series
//! without sandboxes is removed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::conditions::{self, ConditionType, Reason};
use api::{Sandbox, labels};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use planner::owner::controller_of;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{Gauge, LabelPair, Metric, MetricFamily, MetricType};

use super::WELL_FORMED;
use crate::instrumentation::Launch;

const NAME: &str = "agent_sandboxes";
const HELP: &str = "Monitor the point-in-time number of sandboxes in the cluster.";
const UNKNOWN_TEMPLATE: &str = "unknown";

/// The labels of a sandbox's series. Borrowed, so that comparing them before and after a change does not allocate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Series<'a> {
    namespace: &'a str,
    is_ready: bool,
    has_expired: bool,
    launch: Launch,
    template: &'a str,
    owner: &'static str,
}

/// The same, owned.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct OwnedSeries {
    namespace: Box<str>,
    is_ready: bool,
    has_expired: bool,
    launch: Launch,
    template: Box<str>,
    owner: &'static str,
}

impl<'a> Series<'a> {
    fn of(sandbox: &'a Sandbox) -> Self {
        let status = sandbox.status.as_ref();
        let ready =
            status.and_then(|status| conditions::find(&status.conditions, ConditionType::Ready));
        let annotation = |key: &str| {
            let value = sandbox.metadata.annotations.as_ref()?.get(key)?;
            (!value.is_empty()).then_some(value.as_str())
        };
        Self {
            namespace: sandbox.metadata.namespace.as_deref().unwrap_or_default(),
            is_ready: ready.is_some_and(|ready| ready.status == "True"),
            has_expired: ready.is_some_and(|ready| ready.reason == Reason::SandboxExpired.as_str()),
            launch: if annotation(labels::POD_NAME).is_some() {
                Launch::Warm
            } else {
                Launch::Cold
            },
            template: annotation(labels::SANDBOX_TEMPLATE_REF).unwrap_or(UNKNOWN_TEMPLATE),
            owner: controller_of(&sandbox.metadata).map_or("None", owner_name),
        }
    }

    fn into_owned(self) -> OwnedSeries {
        OwnedSeries {
            namespace: self.namespace.into(),
            is_ready: self.is_ready,
            has_expired: self.has_expired,
            launch: self.launch,
            template: self.template.into(),
            owner: self.owner,
        }
    }
}

/// The group and kind of the owner. Its API version does not matter.
fn owner_name(owner: &OwnerReference) -> &'static str {
    let group = owner.api_version.split_once('/').map(|(group, _)| group);
    match (group, owner.kind.as_str()) {
        (Some(api::EXTENSIONS_GROUP), "SandboxClaim") => "SandboxClaim",
        (Some(api::EXTENSIONS_GROUP), "SandboxWarmPool") => "SandboxWarmPool",
        _ => "None",
    }
}

/// The counts, and the collector that exports them.
#[derive(Clone, Debug)]
pub(super) struct Sandboxes {
    counts: Arc<Mutex<HashMap<OwnedSeries, i64>>>,
    description: Desc,
}

impl Sandboxes {
    pub fn new() -> Self {
        let labels = [
            "namespace",
            "ready_condition",
            "expired",
            "launch_type",
            "sandbox_template",
            "owned_by",
        ];
        let description = Desc::new(
            NAME.to_owned(),
            HELP.to_owned(),
            labels.map(str::to_owned).to_vec(),
            HashMap::new(),
        );
        Self {
            counts: Arc::default(),
            description: description.expect(WELL_FORMED),
        }
    }

    /// Records a change of a sandbox.
    pub fn count(&self, before: Option<&Sandbox>, after: Option<&Sandbox>) {
        let (before, after) = (before.map(Series::of), after.map(Series::of));
        if before == after {
            return;
        }
        let mut counts = self.counts();
        for (series, step) in [(before, -1), (after, 1)] {
            let Some(series) = series.map(Series::into_owned) else {
                continue;
            };
            let count = counts.entry(series.clone()).or_default();
            *count += step;
            if *count == 0 {
                counts.remove(&series);
            }
        }
    }

    /// The number of series.
    #[cfg(test)]
    pub fn series(&self) -> usize {
        self.counts().len()
    }

    fn counts(&self) -> MutexGuard<'_, HashMap<OwnedSeries, i64>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collector for Sandboxes {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.description]
    }

    #[expect(
        clippy::cast_precision_loss,
        reason = "sandboxes are far fewer than a double counts exactly"
    )]
    fn collect(&self) -> Vec<MetricFamily> {
        let counts = self.counts().clone();
        let metrics = counts.into_iter().filter(|(_, count)| *count > 0);
        let metrics: Vec<Metric> = metrics
            .map(|(series, count)| {
                let mut gauge = Gauge::default();
                gauge.set_value(count as f64);
                let mut metric = Metric::from_gauge(gauge);
                metric.set_label(series.labels());
                metric
            })
            .collect();
        if metrics.is_empty() {
            return Vec::new();
        }
        let mut family = MetricFamily::default();
        family.set_name(NAME.to_owned());
        family.set_help(HELP.to_owned());
        family.set_field_type(MetricType::GAUGE);
        family.set_metric(metrics);
        vec![family]
    }
}

impl OwnedSeries {
    /// Sorted by name, as every label of an exposition is.
    fn labels(&self) -> Vec<LabelPair> {
        [
            ("expired", truth(self.has_expired)),
            ("launch_type", self.launch.as_str()),
            ("namespace", &self.namespace),
            ("owned_by", self.owner),
            ("ready_condition", truth(self.is_ready)),
            ("sandbox_template", &self.template),
        ]
        .into_iter()
        .map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.to_owned());
            pair.set_value(value.to_owned());
            pair
        })
        .collect()
    }
}

fn truth(value: bool) -> &'static str {
    if value { "true" } else { "false" }
}
