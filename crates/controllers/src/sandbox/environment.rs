//! The environment of a pass over a sandbox: the API server, the caches and the settings.

use std::time::Duration;

use api::Sandbox;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service};
use k8s_openapi::jiff::Timestamp;
use planner::pass::{Event, Objects};
use planner::sandbox::{Adoption, Environment, ObservedPod, Part, Settings, Stage};
use telemetry::spans;
use tracing::{Instrument, Span, info_span};

use super::{CONTROLLER, FIELD_MANAGER};
use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::key::ObjectKey;
use crate::objects::NamespacedObjects;
use crate::status_delay::StatusDelay;
use crate::writes::WriteError;

/// What a pass over one sandbox works with.
#[derive(Debug)]
pub(super) struct SandboxEnvironment<'a> {
    pub context: &'a Context,
    pub status_delay: &'a StatusDelay<Sandbox>,
    pub key: &'a ObjectKey,
}

impl<'a> SandboxEnvironment<'a> {
    fn objects<K: Cached>(&self, cache: &'a Cache<K>) -> NamespacedObjects<'a, K> {
        NamespacedObjects::new(self.context, cache, FIELD_MANAGER, self.key)
    }
}

impl Environment for SandboxEnvironment<'_> {
    type Error = WriteError;

    fn now(&self) -> Timestamp {
        self.context.clock.now()
    }

    fn settings(&self) -> Settings<'_> {
        let config = &self.context.config;
        Settings {
            cluster_domain: &config.cluster_domain,
            adoption: if config.require_adoptable_label {
                Adoption::Labelled
            } else {
                Adoption::Any
            },
        }
    }

    fn sandboxes(&self) -> impl Objects<Sandbox, Error = WriteError> {
        self.objects(&self.context.caches.sandboxes)
    }

    fn sandboxes_as_reporter(&self) -> impl Objects<Sandbox, Error = WriteError> {
        let cache = &self.context.caches.sandboxes;
        NamespacedObjects::new(self.context, cache, CONTROLLER, self.key)
    }

    fn pods(&self) -> impl Objects<ObservedPod, Error = WriteError> {
        self.objects(&self.context.caches.pods)
    }

    fn services(&self) -> impl Objects<Service, Error = WriteError> {
        self.objects(&self.context.caches.services)
    }

    fn volume_claims(&self) -> impl Objects<PersistentVolumeClaim, Error = WriteError> {
        self.objects(&self.context.caches.volume_claims)
    }

    fn delay_first_status(&self) -> Option<Duration> {
        self.status_delay.left(self.key)
    }

    fn end_status_delay(&self) {
        self.status_delay.forget(self.key);
    }

    fn traced<F: Future>(
        &self,
        part: Part,
        stage: Stage,
        work: F,
    ) -> impl Future<Output = F::Output> {
        work.instrument(span_of(part, stage))
    }

    fn trace_pod(&self, pod: &ObservedPod) {
        if !spans::are_exported() {
            return;
        }
        let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
        let attributes = [
            ("pod.Name", pod.metadata.name.clone().unwrap_or_default()),
            ("pod.Phase", phase.unwrap_or_default()),
        ];
        spans::add_event(&Span::current(), "NewPodStatusObserved", attributes);
    }

    fn emit(&self, sandbox: &Sandbox, event: Event) {
        self.context.events.record(CONTROLLER, sandbox, event);
    }
}

/// The child span of a part of the plan, under the name that dashboards use.
fn span_of(part: Part, stage: Stage) -> Span {
    if stage != Stage::Live || !spans::are_exported() {
        return Span::none();
    }
    match part {
        Part::VolumeClaims => info_span!("reconcilePVCs"),
        Part::Pod => info_span!("reconcilePod"),
        Part::Rest => Span::none(),
    }
}
