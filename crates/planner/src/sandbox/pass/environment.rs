//! What a pass over a sandbox needs of the process that runs it.

use std::future::Future;
use std::time::Duration;

use api::Sandbox;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Service};
use k8s_openapi::jiff::Timestamp;

use super::super::{Effect, ObservedPod, Settings, Stage};
use crate::pass::{Event, Objects, RequestError};

/// The API server, the caches and the settings of a process, for a pass over one sandbox.
pub trait Environment: Send + Sync {
    type Error: RequestError;

    fn now(&self) -> Timestamp;

    fn settings(&self) -> Settings<'_>;

    fn sandboxes(&self) -> impl Objects<Sandbox, Error = Self::Error>;
    /// The sandboxes under the field manager that reports sandboxes about which nothing can be decided.
    fn sandboxes_as_reporter(&self) -> impl Objects<Sandbox, Error = Self::Error>;
    /// The cache holds only pods that carry a sandbox's label.
    fn pods(&self) -> impl Objects<ObservedPod, Error = Self::Error>;
    fn services(&self) -> impl Objects<Service, Error = Self::Error>;
    /// The cache holds only volume claims that carry a sandbox's label.
    fn volume_claims(&self) -> impl Objects<PersistentVolumeClaim, Error = Self::Error>;

    /// How long the first status of a sandbox that is starting is still delayed, if it is. The delay begins with the first call.
    fn delay_first_status(&self) -> Option<Duration>;

    /// Ends that delay: a status is published.
    fn end_status_delay(&self);

    /// Runs a part of the plan in a trace span of its own, while traces are exported.
    fn traced<F: Future>(
        &self,
        part: Part,
        stage: Stage,
        work: F,
    ) -> impl Future<Output = F::Output>;

    /// Adds the state of the sandbox's pod to the current span.
    fn trace_pod(&self, pod: &ObservedPod);

    fn emit(&self, sandbox: &Sandbox, event: Event);
}

/// A part of a plan, in the order of the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    VolumeClaims,
    Pod,
    Rest,
}

impl Part {
    pub(super) fn of(effect: &Effect) -> Self {
        match effect {
            Effect::CreateVolumeClaim(_)
            | Effect::AdoptVolumeClaim { .. }
            | Effect::LabelVolumeClaim { .. } => Self::VolumeClaims,
            Effect::CreatePod(_)
            | Effect::AdoptPod { .. }
            | Effect::UpdatePodMetadata { .. }
            | Effect::DeletePod { .. }
            | Effect::ClearPodName { .. } => Self::Pod,
            Effect::CreateService(_)
            | Effect::AdoptService { .. }
            | Effect::UpdateService { .. }
            | Effect::DeleteService { .. }
            | Effect::DeleteSandbox { .. } => Self::Rest,
        }
    }
}
