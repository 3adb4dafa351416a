//! Carries out the plan for a sandbox, and returns the objects that exist afterwards.

use std::sync::Arc;

use api::Sandbox;
use api::freezing::is_asked_for;

use super::super::{
    DeletionCause, Effect, ObservedPod, Outcome, SandboxFacts, SandboxPlan, Stage, Trouble,
    is_reported_suspended,
};
use super::{Environment, Part};
use crate::pass::{Event, Failure, Objects, Precondition, Propagation, RequestError};

/// The outcome of a plan.
#[derive(Debug)]
pub(super) struct Applied<E> {
    pub outcome: Outcome,
    /// The sandbox in its latest version.
    pub sandbox: Arc<Sandbox>,
    pub sandbox_deleted: bool,
    /// The plan was made from outdated objects.
    pub is_outdated: bool,
    /// The last failure that is worth a retry.
    pub failure: Option<E>,
}

/// Carries out a plan, part by part.
pub(super) async fn apply<E: Environment>(
    env: &E,
    observed: &SandboxFacts,
    plan: &SandboxPlan,
) -> Applied<E::Error> {
    let mut applying = Applying {
        env,
        name: observed.name(),
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
    for part in [Part::VolumeClaims, Part::Pod, Part::Rest] {
        let work = applying.carry_out_part(part, plan);
        env.traced(part, plan.stage, work).await;
        if applying.applied.is_outdated {
            break;
        }
    }
    applying.applied
}

struct Applying<'a, E: Environment> {
    env: &'a E,
    /// The name of the sandbox.
    name: &'a str,
    applied: Applied<E::Error>,
    /// A pod that was created now would wait for volumes that may never exist.
    volumes_are_missing: bool,
}

impl<E: Environment> Applying<'_, E> {
    async fn carry_out_part(&mut self, part: Part, plan: &SandboxPlan) {
        let effects = plan.effects.iter();
        for effect in effects.filter(|effect| Part::of(effect) == part) {
            if let Err(error) = self.carry_out(effect).await {
                self.fail(effect, error);
            }
            if self.applied.is_outdated {
                break;
            }
        }
        if let (Part::Pod, Stage::Live, Some(pod)) = (part, plan.stage, &self.applied.outcome.pod) {
            self.env.trace_pod(pod);
        }
    }

    async fn carry_out(&mut self, effect: &Effect) -> Result<(), E::Error> {
        match effect {
            Effect::CreateVolumeClaim(claim) => {
                let name = claim.metadata.name.as_deref().unwrap_or_default();
                self.env.volume_claims().create(name, claim).await?;
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
                let claims = self.env.volume_claims();
                claims.patch(name, &version.into(), patch.clone()).await?;
                if matches!(effect, Effect::AdoptVolumeClaim { .. }) {
                    self.emit(adopted("VolumeClaimAdopted", "volume claim", name));
                }
            }
            Effect::ClearPodName { version, patch } => {
                let sandboxes = self.env.sandboxes();
                let precondition = version.into();
                let patched = sandboxes.patch(self.name, &precondition, patch.clone());
                self.applied.sandbox = patched.await?;
            }
            Effect::DeleteSandbox { version } => {
                let sandboxes = self.env.sandboxes();
                sandboxes
                    .delete(self.name, version.into(), Propagation::Default)
                    .await?;
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

    async fn carry_out_on_pod(&mut self, effect: &Effect) -> Result<(), E::Error> {
        let pods = self.env.pods();
        match effect {
            Effect::CreatePod(_) if self.volumes_are_missing => {}
            Effect::CreatePod(pod) => {
                self.applied.outcome.pod = Some(pods.create(self.name, pod).await?);
                self.emit(created(self.name, &self.applied.sandbox));
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
                let pod = pods.patch(name, &version.into(), patch.clone()).await?;
                let before = self.applied.outcome.pod.replace(Arc::clone(&pod));
                if let Some(event) = before.and_then(|before| freezer_moved(name, &before, &pod)) {
                    self.emit(event);
                }
                if matches!(effect, Effect::AdoptPod { .. }) {
                    self.emit(adopted("PodAdopted", "pod", name));
                }
            }
            Effect::DeletePod { name, uid, cause } => {
                let precondition = Precondition::uid(uid.clone());
                pods.delete(name, precondition, Propagation::Default)
                    .await?;
                self.emit(deleted(name, cause));
            }
            _ => {}
        }
        Ok(())
    }

    async fn carry_out_on_service(&mut self, effect: &Effect) -> Result<(), E::Error> {
        let services = self.env.services();
        match effect {
            Effect::CreateService(service) => {
                self.applied.outcome.service = Some(services.create(self.name, service).await?);
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
                let service = services.patch(name, &version.into(), patch.clone()).await?;
                self.applied.outcome.service = Some(service);
                if matches!(effect, Effect::AdoptService { .. }) {
                    self.emit(adopted("ServiceAdopted", "service", name));
                }
            }
            Effect::DeleteService { name, uid } => {
                let precondition = Precondition::uid(uid.clone());
                services
                    .delete(name, precondition, Propagation::Default)
                    .await?;
                self.applied.outcome.service = None;
            }
            _ => {}
        }
        Ok(())
    }

    /// Classifies a failure.
    fn fail(&mut self, effect: &Effect, error: E::Error) {
        if matches!(
            effect,
            Effect::CreateVolumeClaim(_) | Effect::AdoptVolumeClaim { .. }
        ) {
            self.volumes_are_missing = true;
        }
        let trouble = &mut self.applied.outcome.trouble;
        match error.failure() {
            Failure::NotFound | Failure::AlreadyExists | Failure::Conflict => {
                self.applied.is_outdated = true;
            }
            // The sandbox goes with its namespace.
            Failure::NamespaceTerminating => {}
            Failure::Invalid(message) => trouble.push(Trouble::Invalid(message.clone())),
            Failure::Forbidden(_)
            | Failure::Transient(_)
            | Failure::Unreadable(_)
            | Failure::Impossible(_) => {
                trouble.push(Trouble::Failed(error.message()));
                self.applied.failure = Some(error);
            }
        }
    }

    fn emit(&self, event: Event) {
        self.env.emit(&self.applied.sandbox, event);
    }
}

fn created(pod: &str, sandbox: &Sandbox) -> Event {
    let was_suspended = sandbox.status.as_ref().is_some_and(is_reported_suspended);
    let (reason, note) = if was_suspended {
        ("Resumed", format!("Resumed with new pod {pod}"))
    } else {
        ("PodCreated", format!("Created pod {pod}"))
    };
    Event::normal(reason, "CreatePod", note)
}

/// The event about a node that was asked to freeze a pod, or to thaw it.
fn freezer_moved(pod: &str, before: &ObservedPod, after: &ObservedPod) -> Option<Event> {
    let is_asked = |pod: &ObservedPod| is_asked_for(pod.metadata.annotations.as_ref());
    match (is_asked(before), is_asked(after)) {
        (false, true) => {
            let note = format!("Freezing pod {pod} because the sandbox is suspended");
            Some(Event::normal("Suspended", "FreezePod", note))
        }
        (true, false) => {
            let note = format!("Resumed pod {pod} where it was frozen");
            Some(Event::normal("Resumed", "ThawPod", note))
        }
        _ => None,
    }
}

fn adopted(reason: &'static str, kind: &str, name: &str) -> Event {
    Event::normal(reason, "Adopt", format!("Adopted {kind} {name}"))
}

fn deleted(pod: &str, cause: &DeletionCause) -> Event {
    let action = "DeletePod";
    match cause {
        DeletionCause::Suspended => {
            let note = format!("Deleted pod {pod} because the sandbox is suspended");
            Event::normal("Suspended", action, note)
        }
        DeletionCause::Expired => {
            let note = format!("Deleted pod {pod} because the sandbox has expired");
            Event::normal("Expired", action, note)
        }
        DeletionCause::Lost(loss) => {
            let note = format!("Pod {pod} was lost ({}) and is recreated", loss.reason);
            Event::warning("PodLost", action, note)
        }
        DeletionCause::LostSuspended(loss) => {
            let note = format!(
                "Suspended pod {pod} was lost ({}); the sandbox starts anew when it is resumed",
                loss.reason
            );
            Event::warning("PodLost", action, note)
        }
        DeletionCause::Stray => {
            let note = format!("Deleted pod {pod}, since the sandbox runs another");
            Event::warning("StrayPod", action, note)
        }
    }
}
