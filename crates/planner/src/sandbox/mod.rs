//! Decisions about a Sandbox: its pod, volumes, service, expiry and status.
//!
//! ```text
//!              shutdown time passed                  next pass
//!   live ──────────────────────────────► marked ──────────────────► cleaned up, retained or deleted
//!    ▲  pod, volumes, service follow      Ready=SandboxExpired        pod and service are gone
//!    │  the spec                                                      │
//!    └────────────────────────────────────────────────────────────────┘
//!                          shutdown time moved into the future
//! ```
//!
//! Expiry takes two passes so that the end of the pod (`Finished`) is in the status before the pod is gone from the API.
//! A decision does not depend on the order of events, only on the observed state.

mod freezing;
mod metadata;
mod observed_pod;
mod pass;
mod pod;
mod scheduling;
mod service;
mod start_failure;
mod status;
mod suspension;
mod volume_claims;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use api::conditions::{self, ConditionType, Reason};
use api::names::name_hash;
use api::sandbox::{PodMetadata, ShutdownPolicy};
use api::{Sandbox, SandboxSpec, labels};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use crate::expiry::{Deadlines, Expiry, expiry};
use crate::owner::{Ownership, controller_of, ownership, refers_to_predecessor};
use crate::version::Version;

pub use observed_pod::ObservedPod;
pub use pass::{Environment, Part, reconcile};
pub use pod::{Loss, current_pod, loss, pod_name};
pub use status::{Outcome, Trouble, is_first_start, status};
pub use suspension::{disagreement, is_reported_suspended};
pub use volume_claims::claim_name;

/// The shortest interval between two reconciles for the expiry of a sandbox.
const EXPIRY_REQUEUE_FLOOR: Duration = Duration::from_secs(2);

/// The settings that decisions depend on.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// The DNS suffix of services.
    pub cluster_domain: &'a str,
    pub adoption: Adoption,
}

/// Which unowned objects of the right name may be adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adoption {
    Any,
    /// Only those labelled `agents.x-k8s.io/adoptable: "true"`.
    Labelled,
}

impl Adoption {
    fn allows(self, metadata: &ObjectMeta) -> bool {
        let labelled = || {
            let labels = metadata.labels.as_ref();
            labels.and_then(|labels| labels.get(labels::ADOPTABLE)) == Some(&"true".to_owned())
        };
        self == Self::Any || labelled()
    }
}

/// Everything a decision about a sandbox depends on.
#[derive(Clone, Debug)]
pub struct SandboxFacts {
    pub sandbox: Arc<Sandbox>,
    /// Every pod that may be the sandbox's: the one its annotation names, the one of its own name, those it controls.
    pub pods: Vec<Arc<ObservedPod>>,
    /// The service of the sandbox's name.
    pub service: Option<Arc<Service>>,
    /// The volume claims of the names that the sandbox's templates give.
    pub volume_claims: Vec<Arc<PersistentVolumeClaim>>,
}

impl SandboxFacts {
    fn uid(&self) -> Option<&str> {
        self.sandbox.metadata.uid.as_deref()
    }

    fn name(&self) -> &str {
        self.sandbox.metadata.name.as_deref().unwrap_or_default()
    }

    fn name_hash(&self) -> String {
        name_hash(self.name())
    }

    fn owns(&self, metadata: &ObjectMeta) -> bool {
        ownership(metadata, self.uid()) == Ownership::Ours
    }

    /// Whether an object is being deleted, or belonged to an earlier Sandbox of this name and is not garbage-collected yet.
    /// Its name will be free soon, so the sandbox waits, whichever controller the object has.
    fn is_leaving(&self, metadata: &ObjectMeta) -> bool {
        metadata.deletion_timestamp.is_some()
            || controller_of(metadata).is_some_and(|owner| {
                refers_to_predecessor::<Sandbox>(owner, self.name(), self.uid())
            })
    }
}

/// A write, with its preconditions.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    CreateVolumeClaim(Box<PersistentVolumeClaim>),
    /// Make an unowned claim the sandbox's.
    AdoptVolumeClaim {
        name: String,
        version: Version,
        patch: Value,
    },
    /// Mark a claim of the sandbox's as such.
    LabelVolumeClaim {
        name: String,
        version: Version,
        patch: Value,
    },
    CreatePod(Box<Pod>),
    /// Make an unowned pod the sandbox's.
    AdoptPod {
        name: String,
        version: Version,
        patch: Value,
    },
    UpdatePodMetadata {
        name: String,
        version: Version,
        patch: Value,
    },
    DeletePod {
        name: String,
        uid: Option<String>,
        cause: DeletionCause,
    },
    /// Forget the pod that the sandbox's annotation names.
    ClearPodName {
        version: Version,
        patch: Value,
    },
    CreateService(Box<Service>),
    /// Make an unowned service the sandbox's.
    AdoptService {
        name: String,
        version: Version,
        patch: Value,
    },
    UpdateService {
        name: String,
        version: Version,
        patch: Value,
    },
    DeleteService {
        name: String,
        uid: Option<String>,
    },
    /// Delete the sandbox itself, of which exactly this version has expired.
    DeleteSandbox {
        version: Version,
    },
}

/// Why a pod is deleted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeletionCause {
    Suspended,
    Expired,
    /// It was lost and is replaced.
    Lost(Loss),
    /// It was lost while its sandbox was suspended, which starts anew when it is resumed.
    LostSuspended(Loss),
    /// The sandbox runs another pod.
    Stray,
}

/// A problem that keeps the sandbox from its spec.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("refusing to use {kind} {name:?}: it is controlled by {controller}")]
    OwnedByOther {
        kind: &'static str,
        name: String,
        controller: String,
    },
    #[error(
        "refusing to adopt {kind} {name:?}: it lacks the label {}: \"true\"",
        labels::ADOPTABLE
    )]
    NotAdoptable { kind: &'static str, name: String },
    #[error(
        "refusing to adopt service {name:?}: its clusterIP is {cluster_ip}, and only a headless service can be adopted"
    )]
    NotHeadless { name: String, cluster_ip: String },
    #[error("{kind} {name:?} is being deleted; a new one is made once it is gone")]
    Leaving { kind: &'static str, name: String },
    #[error(
        "spec.volumeClaimTemplates[{index}].metadata.name: {name:?} is taken by an earlier entry; give each volume claim template a name of its own"
    )]
    DuplicateVolumeClaim { index: usize, name: String },
    #[error("volumeClaimTemplates[{index}] needs a name")]
    UnnamedVolumeClaim { index: usize },
    #[error(
        "volume claim name {name:?} has {length} characters and may have at most 253; shorten the sandbox's or the template's name"
    )]
    VolumeClaimNameTooLong { name: String, length: usize },
}

impl Problem {
    /// Whether only a change of the spec can solve it.
    pub fn is_invalid_spec(&self) -> bool {
        matches!(
            self,
            Self::UnnamedVolumeClaim { .. }
                | Self::DuplicateVolumeClaim { .. }
                | Self::VolumeClaimNameTooLong { .. }
        )
    }
}

/// The stage of a sandbox's lifecycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its pod, volumes and service follow its spec.
    Live,
    /// It has just expired: its status reports this before anything is removed.
    Expiring,
    /// It has expired, and what it ran is removed.
    Expired,
    /// It is being deleted; garbage collection removes what it owns.
    Deleting,
}

/// What to do about a sandbox.
#[derive(Clone, Debug, PartialEq)]
pub struct SandboxPlan {
    pub stage: Stage,
    /// In the order they are to be carried out.
    pub effects: Vec<Effect>,
    pub problems: Vec<Problem>,
    /// When to reconcile again without a change.
    pub requeue: Option<Duration>,
}

impl SandboxPlan {
    fn new(stage: Stage) -> Self {
        Self {
            stage,
            effects: Vec::new(),
            problems: Vec::new(),
            requeue: None,
        }
    }

    fn look_again_after(&mut self, delay: Duration) {
        self.requeue = Some(self.requeue.map_or(delay, |other| other.min(delay)));
    }
}

/// Whether a sandbox is Ready, and its controller is the only change.
pub fn is_handed_over(before: &Sandbox, after: &Sandbox) -> bool {
    let controller =
        |sandbox: &Sandbox| controller_of(&sandbox.metadata).map(|owner| owner.uid.clone());
    let is_ready = |sandbox: &Sandbox| {
        let status = sandbox.status.as_ref();
        status.is_some_and(|status| conditions::is_true(&status.conditions, ConditionType::Ready))
    };
    let is_another = match (controller(before), controller(after)) {
        (Some(before), Some(after)) => before != after,
        _ => false,
    };
    is_another
        && is_ready(after)
        && after.metadata.uid == before.metadata.uid
        && after.metadata.deletion_timestamp.is_none()
        && without_metadata(&after.spec) == without_metadata(&before.spec)
}

/// A spec without the labels and annotations of its pod.
fn without_metadata(spec: &SandboxSpec) -> SandboxSpec {
    let mut spec = spec.clone();
    spec.pod_template.metadata = PodMetadata::default();
    spec
}

/// Decides what to do about a sandbox.
pub fn decide(observed: &SandboxFacts, settings: &Settings<'_>, now: Timestamp) -> SandboxPlan {
    let sandbox = &observed.sandbox;
    if sandbox.metadata.deletion_timestamp.is_some() {
        return SandboxPlan::new(Stage::Deleting);
    }
    let expiry = sandbox_expiry(sandbox, now);
    if expiry.has_passed() {
        return if is_marked_expired(sandbox) {
            clean_up(observed)
        } else {
            SandboxPlan::new(Stage::Expiring)
        };
    }
    let mut plan = SandboxPlan::new(Stage::Live);
    volume_claims::plan(observed, settings, &mut plan);
    pod::plan(observed, settings, now, &mut plan);
    service::plan(observed, settings, &mut plan);
    if let Some(delay) = expiry.requeue_after(EXPIRY_REQUEUE_FLOOR) {
        plan.look_again_after(delay);
    }
    plan
}

fn sandbox_expiry(sandbox: &Sandbox, now: Timestamp) -> Expiry {
    let deadlines = Deadlines {
        shutdown_time: sandbox.spec.shutdown_time.as_ref(),
        ..Deadlines::default()
    };
    expiry(&deadlines, now)
}

/// Whether an earlier pass has put the expiry in the status.
fn is_marked_expired(sandbox: &Sandbox) -> bool {
    sandbox
        .status
        .as_ref()
        .and_then(|status| conditions::find(&status.conditions, ConditionType::Ready))
        .is_some_and(|ready| ready.reason == Reason::SandboxExpired.as_str())
}

/// Deletes the pod and service of an expired sandbox, and by its shutdown policy the sandbox itself. Volumes stay with the sandbox.
fn clean_up(observed: &SandboxFacts) -> SandboxPlan {
    let mut plan = SandboxPlan::new(Stage::Expired);
    pod::delete_owned(observed, &DeletionCause::Expired, &mut plan);
    service::delete_owned(observed, &mut plan);
    let policy = observed.sandbox.spec.shutdown_policy.unwrap_or_default();
    if policy == ShutdownPolicy::Delete {
        plan.effects.push(Effect::DeleteSandbox {
            version: Version::of_metadata(&observed.sandbox.metadata),
        });
    }
    plan
}
