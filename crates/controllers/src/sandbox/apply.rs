//! Carries out a plan for a sandbox, and says what is there afterwards.

use std::sync::Arc;

use api::Sandbox;
use planner::pass::RequestError;
use planner::sandbox::{
    DeletionCause, Effect, Observed, ObservedPod, Outcome, Plan, Stage, Trouble,
};
use telemetry::spans;
use tracing::{Instrument, Span, info_span};

use super::{CONTROLLER, FIELD_MANAGER, publish};
use crate::cache::Cache;
use crate::cached::Cached;
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::key::ObjectKey;
use crate::writes::{Deletion, Failure, Precondition, WriteError, Writer};

/// How a plan went.
#[derive(Debug)]
pub(super) struct Applied {
    pub outcome: Outcome,
    /// The sandbox in its latest version.
    pub sandbox: Arc<Sandbox>,
    pub sandbox_deleted: bool,
    /// What the plan was made upon turned out not to be so.
    pub is_outdated: bool,
    /// The last failure that a retry may mend.
    pub failure: Option<WriteError>,
}

pub(super) async fn apply(
    context: &Context,
    key: &ObjectKey,
    observed: &Observed,
    plan: &Plan,
) -> Applied {
    let mut applying = Applying {
        context,
        key,
        applied: Applied {
            outcome: Outcome::before(observed),
            sandbox: Arc::clone(&observed.sandbox),
            sandbox_deleted: false,
            is_outdated: false,
            failure: None,
        },
        volumes_are_missing: false,
    };
    let troubles = plan.problems.iter().map(Trouble::from);
    applying.applied.outcome.trouble.extend(troubles);
    // The order of the parts is that of the plan.
    for part in [Part::VolumeClaims, Part::Pod, Part::Rest] {
        let span = part.span(plan.stage);
        applying
            .carry_out_part(part, plan)
            .instrument(span.clone())
            .await;
        if part == Part::Pod {
            trace_pod_status(&span, applying.applied.outcome.pod.as_deref());
        }
        if applying.applied.is_outdated {
            break;
        }
    }
    applying.applied
}

/// What a trace shows as a step of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    VolumeClaims,
    Pod,
    Rest,
}

impl Part {
    fn of(effect: &Effect) -> Self {
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

    /// The child span that dashboards know, while spans are exported.
    fn span(self, stage: Stage) -> Span {
        if stage != Stage::Live || !spans::are_exported() {
            return Span::none();
        }
        match self {
            Self::VolumeClaims => info_span!("reconcilePVCs"),
            Self::Pod => info_span!("reconcilePod"),
            Self::Rest => Span::none(),
        }
    }
}

/// Adds to the trace which state the pod was seen in.
fn trace_pod_status(span: &Span, pod: Option<&ObservedPod>) {
    if !spans::are_exported() {
        return;
    }
    let Some(pod) = pod else {
        return;
    };
    let phase = pod.status.as_ref().and_then(|status| status.phase.clone());
    let attributes = [
        ("pod.Name", pod.metadata.name.clone().unwrap_or_default()),
        ("pod.Phase", phase.unwrap_or_default()),
    ];
    spans::add_event(span, "NewPodStatusObserved", attributes);
}

struct Applying<'a> {
    context: &'a Context,
    key: &'a ObjectKey,
    applied: Applied,
    /// A pod that was made now would wait for volumes that may never come.
    volumes_are_missing: bool,
}

impl<'a> Applying<'a> {
    async fn carry_out_part(&mut self, part: Part, plan: &Plan) {
        let effects = plan.effects.iter();
        for effect in effects.filter(|effect| Part::of(effect) == part) {
            if let Err(error) = self.carry_out(effect).await {
                self.fail(effect, error);
            }
            if self.applied.is_outdated {
                break;
            }
        }
    }

    async fn carry_out(&mut self, effect: &Effect) -> Result<(), WriteError> {
        match effect {
            Effect::CreateVolumeClaim(claim) => {
                let name = claim.metadata.name.as_deref().unwrap_or_default();
                let claims = self.writer(&self.context.caches.volume_claims);
                claims.create(&self.key.sibling(name), claim).await?;
            }
            Effect::AdoptVolumeClaim {
                name,
                version,
                patch,
            }
            | Effect::LabelVolumeClaim {
                name,
                version,
                patch,
            } => {
                let key = self.key.sibling(name);
                let claims = self.writer(&self.context.caches.volume_claims);
                claims.patch(&key, &version.into(), patch.clone()).await?;
                if matches!(effect, Effect::AdoptVolumeClaim { .. }) {
                    self.record_adoption("VolumeClaimAdopted", "volume claim", name);
                }
            }
            Effect::ClearPodName { version, patch } => {
                let sandboxes = self.writer(&self.context.caches.sandboxes);
                let version = Precondition::from(version);
                self.applied.sandbox = sandboxes.patch(self.key, &version, patch.clone()).await?;
            }
            Effect::DeleteSandbox { version } => {
                let sandboxes = self.writer(&self.context.caches.sandboxes);
                sandboxes.delete(self.key, Deletion::given(version)).await?;
                self.applied.sandbox_deleted = true;
            }
            Effect::CreatePod(_)
            | Effect::AdoptPod { .. }
            | Effect::UpdatePodMetadata { .. }
            | Effect::DeletePod { .. } => self.carry_out_on_pod(effect).await?,
            Effect::CreateService(_)
            | Effect::AdoptService { .. }
            | Effect::UpdateService { .. }
            | Effect::DeleteService { .. } => self.carry_out_on_service(effect).await?,
        }
        Ok(())
    }

    async fn carry_out_on_pod(&mut self, effect: &Effect) -> Result<(), WriteError> {
        let pods = self.writer(&self.context.caches.pods);
        match effect {
            Effect::CreatePod(_) if self.volumes_are_missing => {}
            Effect::CreatePod(pod) => {
                self.applied.outcome.pod = Some(pods.create(self.key, pod).await?);
                let (reason, note) = if publish::was_suspended(&self.applied.sandbox) {
                    ("Resumed", format!("Resumed with new pod {}", self.key.name))
                } else {
                    ("PodCreated", format!("Created pod {}", self.key.name))
                };
                self.record(reason, "CreatePod", note);
            }
            Effect::AdoptPod {
                name,
                version,
                patch,
            }
            | Effect::UpdatePodMetadata {
                name,
                version,
                patch,
            } => {
                let key = self.key.sibling(name);
                let pod = pods.patch(&key, &version.into(), patch.clone()).await?;
                self.applied.outcome.pod = Some(pod);
                if matches!(effect, Effect::AdoptPod { .. }) {
                    self.record_adoption("PodAdopted", "pod", name);
                }
            }
            Effect::DeletePod { name, uid, cause } => {
                let deletion = Deletion::given(Precondition::uid(uid.clone()));
                pods.delete(&self.key.sibling(name), deletion).await?;
                self.record_deletion(name, cause);
            }
            _ => {}
        }
        Ok(())
    }

    async fn carry_out_on_service(&mut self, effect: &Effect) -> Result<(), WriteError> {
        let services = self.writer(&self.context.caches.services);
        match effect {
            Effect::CreateService(service) => {
                self.applied.outcome.service = Some(services.create(self.key, service).await?);
            }
            Effect::AdoptService {
                name,
                version,
                patch,
            }
            | Effect::UpdateService {
                name,
                version,
                patch,
            } => {
                let key = self.key.sibling(name);
                let service = services.patch(&key, &version.into(), patch.clone()).await?;
                self.applied.outcome.service = Some(service);
                if matches!(effect, Effect::AdoptService { .. }) {
                    self.record_adoption("ServiceAdopted", "service", name);
                }
            }
            Effect::DeleteService { name, uid } => {
                let deletion = Deletion::given(Precondition::uid(uid.clone()));
                services.delete(&self.key.sibling(name), deletion).await?;
                self.applied.outcome.service = None;
            }
            _ => {}
        }
        Ok(())
    }

    /// Sorts a failure by what it calls for.
    fn fail(&mut self, effect: &Effect, error: WriteError) {
        if matches!(
            effect,
            Effect::CreateVolumeClaim(_) | Effect::AdoptVolumeClaim { .. }
        ) {
            self.volumes_are_missing = true;
        }
        match &error.failure {
            Failure::NotFound | Failure::AlreadyExists | Failure::Conflict => {
                self.applied.is_outdated = true;
            }
            // The sandbox goes with its namespace.
            Failure::NamespaceTerminating => {}
            Failure::Invalid(message) => {
                let trouble = Trouble::Invalid(message.clone());
                self.applied.outcome.trouble.push(trouble);
            }
            Failure::Forbidden(_)
            | Failure::Transient(_)
            | Failure::Unreadable(_)
            | Failure::Impossible(_) => {
                let trouble = Trouble::Failed(error.message());
                self.applied.outcome.trouble.push(trouble);
                self.applied.failure = Some(error);
            }
        }
    }

    fn writer<K: Cached>(&self, cache: &'a Cache<K>) -> Writer<'a, K> {
        Writer::new(self.context, cache, FIELD_MANAGER)
    }

    fn record_adoption(&self, reason: &'static str, kind: &str, name: &str) {
        self.record(reason, "Adopt", format!("Adopted {kind} {name}"));
    }

    fn record(&self, reason: &'static str, action: &'static str, note: String) {
        self.tell(Severity::Normal, reason, action, note);
    }

    fn record_deletion(&self, pod: &str, cause: &DeletionCause) {
        let action = "DeletePod";
        match cause {
            DeletionCause::Suspended => {
                let note = format!("Deleted pod {pod} because the sandbox is suspended");
                self.tell(Severity::Normal, "Suspended", action, note);
            }
            DeletionCause::Expired => {
                let note = format!("Deleted pod {pod} because the sandbox has expired");
                self.tell(Severity::Normal, "Expired", action, note);
            }
            DeletionCause::Lost(loss) => {
                let note = format!("Pod {pod} was lost ({}) and is recreated", loss.reason);
                self.tell(Severity::Warning, "PodLost", action, note);
            }
            DeletionCause::Stray => {
                let note = format!("Deleted pod {pod}, since the sandbox runs another");
                self.tell(Severity::Warning, "StrayPod", action, note);
            }
        }
    }

    fn tell(&self, severity: Severity, reason: &'static str, action: &'static str, note: String) {
        let occurrence = Occurrence {
            severity,
            reason,
            action,
            note,
        };
        let sandbox = self.applied.sandbox.as_ref();
        self.context.events.record(CONTROLLER, sandbox, occurrence);
    }
}
