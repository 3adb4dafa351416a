//! Kubernetes events of the controllers.
//!
//! Recording never blocks and never fails: events go through a bounded queue to one task that writes them. If the API server cannot
//! keep up, they are dropped, so that events never delay reconciles. Repetitions become one event with a count (`series`), as in
//! `events.k8s.io`, and the rate of events per object is limited.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use api::events::fitting_note;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource};
pub use planner::pass::{Event as Occurrence, Severity};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::debug;

use crate::clock::{Clock, Random};

/// The length of the queue of events to write.
const LINE: usize = 1_024;
/// How many distinct events are remembered, to count their repetitions.
pub const REMEMBERED: usize = 4_096;
/// A repetition later than this is an event of its own.
const SERIES_WINDOW: Duration = Duration::from_secs(6 * 60);
/// The burst of events per object; after that, one for each [`ALLOWANCE_PERIOD`].
const ALLOWANCE: u32 = 25;
const ALLOWANCE_PERIOD: Duration = Duration::from_secs(5 * 60);

fn type_of(severity: Severity) -> &'static str {
    match severity {
        Severity::Normal => "Normal",
        Severity::Warning => "Warning",
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity {
    controller: &'static str,
    uid: String,
    occurrence: Occurrence,
}

struct Report {
    controller: &'static str,
    regarding: ObjectReference,
    occurrence: Occurrence,
}

/// A handle for recording events. Clones share one queue.
#[derive(Clone, Debug)]
pub struct Recorder {
    line: mpsc::Sender<Report>,
    remembered: Arc<AtomicUsize>,
}

impl Recorder {
    /// A recorder, and the task that writes what it records until every clone of the recorder is gone.
    pub fn new(
        client: Client,
        clock: Clock,
        random: Random,
        instance: Arc<str>,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (line, reports) = mpsc::channel(LINE);
        let writer = EventWriter {
            client,
            clock,
            random,
            instance,
            series: HashMap::new(),
            order: VecDeque::new(),
            allowances: HashMap::new(),
            remembered: Arc::default(),
        };
        let recorder = Self {
            line,
            remembered: Arc::clone(&writer.remembered),
        };
        (recorder, writer.write_all(reports))
    }

    /// How many distinct events are remembered; at most [`REMEMBERED`].
    pub fn remembered(&self) -> usize {
        self.remembered.load(Ordering::Relaxed)
    }

    /// Records an event: something that a controller did to an object, or could not do.
    pub fn record<K: Resource<DynamicType = ()>>(
        &self,
        controller: &'static str,
        regarding: &K,
        occurrence: Occurrence,
    ) {
        let report = Report {
            controller,
            regarding: ObjectReference {
                // The resource version is left out: it is outdated when the event is read, and the other fields identify the object.
                resource_version: None,
                ..regarding.object_ref(&())
            },
            occurrence,
        };
        if let Err(error) = self.line.try_send(report) {
            debug!(%error, "event dropped");
        }
    }
}

struct Series {
    name: String,
    namespace: String,
    count: i32,
    last: Instant,
}

struct EventWriter {
    client: Client,
    clock: Clock,
    random: Random,
    instance: Arc<str>,
    series: HashMap<Identity, Series>,
    order: VecDeque<Identity>,
    /// The number of series, for the gauge.
    remembered: Arc<AtomicUsize>,
    /// By controller and UID; cleared when there are too many.
    allowances: HashMap<(&'static str, String), Allowance>,
}

/// The token bucket that limits the events of one object.
#[derive(Debug)]
struct Allowance {
    left: u32,
    since: Instant,
}

impl Allowance {
    fn full(now: Instant) -> Self {
        Self {
            left: ALLOWANCE,
            since: now,
        }
    }

    /// Takes a token, if one is left.
    fn take(&mut self, now: Instant) -> bool {
        let periods = now.duration_since(self.since).as_secs() / ALLOWANCE_PERIOD.as_secs();
        let regained = u32::try_from(periods).unwrap_or(u32::MAX);
        if regained > 0 {
            self.left = self.left.saturating_add(regained).min(ALLOWANCE);
            self.since = now;
        }
        let allowed = self.left > 0;
        self.left = self.left.saturating_sub(1);
        allowed
    }
}

impl EventWriter {
    async fn write_all(mut self, mut reports: mpsc::Receiver<Report>) {
        while let Some(report) = reports.recv().await {
            if let Err(error) = self.write(report).await {
                debug!(
                    error = &error as &dyn std::error::Error,
                    "event not written"
                );
            }
        }
    }

    async fn write(&mut self, report: Report) -> Result<(), kube::Error> {
        let identity = Identity {
            controller: report.controller,
            uid: report.regarding.uid.clone().unwrap_or_default(),
            occurrence: report.occurrence.clone(),
        };
        let now = Instant::now();
        if self.allowances.len() > REMEMBERED {
            self.allowances.clear();
        }
        let allowance = self
            .allowances
            .entry((identity.controller, identity.uid.clone()))
            .or_insert_with(|| Allowance::full(now));
        if !allowance.take(now) {
            debug!(reason = report.occurrence.reason, "too many events");
            return Ok(());
        }
        if self.repeat(&identity).await? {
            return Ok(());
        }
        let event = self.event(report);
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let api = Api::<Event>::namespaced(self.client.clone(), &namespace);
        let written = api.create(&PostParams::default(), &event).await?;
        self.remember(
            identity,
            Series {
                name: written.metadata.name.unwrap_or_default(),
                namespace,
                count: 1,
                last: Instant::now(),
            },
        );
        Ok(())
    }

    /// Increments the count of the event that reported the same before. Returns false if there is no such event: events expire, and may
    /// be deleted.
    async fn repeat(&mut self, identity: &Identity) -> Result<bool, kube::Error> {
        let repeated = self
            .series
            .get_mut(identity)
            .filter(|series| series.last.elapsed() < SERIES_WINDOW);
        let Some(series) = repeated else {
            return Ok(false);
        };
        series.count += 1;
        series.last = Instant::now();
        let event = EventSeries {
            count: series.count,
            last_observed_time: self.clock.micro_time(),
        };
        let api = Api::<Event>::namespaced(self.client.clone(), &series.namespace);
        let patch = Patch::Merge(json!({ "series": event }));
        let params = PatchParams::default();
        match api.patch(&series.name, &params, &patch).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn remember(&mut self, identity: Identity, series: Series) {
        if self.series.insert(identity.clone(), series).is_none() {
            self.order.push_back(identity);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.series.remove(&oldest);
        }
        self.remembered.store(self.series.len(), Ordering::Relaxed);
    }

    fn event(&self, report: Report) -> Event {
        let Report {
            controller,
            regarding,
            occurrence,
        } = report;
        let subject = regarding.name.as_deref().unwrap_or_default();
        let namespace = regarding
            .namespace
            .clone()
            .filter(|namespace| !namespace.is_empty())
            .unwrap_or_else(|| "default".to_owned());
        Event {
            metadata: ObjectMeta {
                name: Some(format!("{subject}.{:016x}", self.random.number())),
                namespace: Some(namespace),
                ..ObjectMeta::default()
            },
            action: Some(occurrence.action.to_owned()),
            event_time: Some(self.clock.micro_time()),
            note: Some(fitting_note(occurrence.note)),
            reason: Some(occurrence.reason.to_owned()),
            regarding: Some(regarding),
            reporting_controller: Some(controller.to_owned()),
            reporting_instance: Some(self.instance.to_string()),
            type_: Some(type_of(occurrence.severity).to_owned()),
            ..Event::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_object_that_keeps_failing_tells_so_now_and_then() {
        let mut allowance = Allowance::full(Instant::now());
        let granted = (0..100).filter(|_| allowance.take(Instant::now())).count();
        assert_eq!(granted, 25);
        tokio::time::advance(ALLOWANCE_PERIOD).await;
        let granted = (0..100).filter(|_| allowance.take(Instant::now())).count();
        assert_eq!(granted, 1);
        tokio::time::advance(ALLOWANCE_PERIOD * 1_000).await;
        let granted = (0..100).filter(|_| allowance.take(Instant::now())).count();
        assert_eq!(granted, 25);
    }
}
