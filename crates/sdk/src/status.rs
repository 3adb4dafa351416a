//! A sandbox's status as one phase with its reason. Pure.

use api::conditions::{self, ConditionType, Reason};
use api::{Sandbox, SandboxClaim};

use crate::readiness::{self, Verdict};

/// The phase of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not ready yet, or temporarily not ready.
    Pending,
    Ready,
    /// Suspension was requested and is not complete.
    Suspending,
    Suspended,
    /// Suspended, with all processes of its pod frozen where they are.
    Frozen,
    /// The sandbox finished, or can never start.
    Ended,
    /// It is being deleted.
    Terminating,
}

impl Phase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Ready => "Ready",
            Self::Suspending => "Suspending",
            Self::Suspended => "Suspended",
            Self::Frozen => "Frozen",
            Self::Ended => "Ended",
            Self::Terminating => "Terminating",
        }
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// The status of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    pub phase: Phase,
    /// The reason of the claim's Ready condition.
    pub reason: Option<String>,
    /// Its message.
    pub message: Option<String>,
    /// The name of the Sandbox object, once there is one.
    pub sandbox: Option<String>,
    pub pod_ips: Vec<String>,
    pub node: Option<String>,
    /// The DNS name of its service, valid inside the cluster.
    pub service_fqdn: Option<String>,
}

pub(crate) fn of(claim: &SandboxClaim, sandbox: Option<&Sandbox>) -> Status {
    let status = claim.status.as_ref();
    let ready =
        status.and_then(|status| conditions::find(&status.conditions, ConditionType::Ready));
    let bound = readiness::bound(claim);
    let sandbox_status = sandbox.and_then(|sandbox| sandbox.status.as_ref());
    Status {
        phase: phase(claim, sandbox),
        reason: ready.map(|condition| condition.reason.clone()),
        message: ready.map(|condition| condition.message.clone()),
        sandbox: bound.as_ref().map(|bound| bound.sandbox.clone()),
        pod_ips: sandbox.map_or_else(
            || bound.map(|bound| bound.pod_ips).unwrap_or_default(),
            readiness::pod_ips,
        ),
        node: sandbox_status.and_then(|status| status.node_name.clone()),
        service_fqdn: sandbox_status.and_then(|status| status.service_fqdn.clone()),
    }
}

fn phase(claim: &SandboxClaim, sandbox: Option<&Sandbox>) -> Phase {
    if claim.metadata.deletion_timestamp.is_some() {
        return Phase::Terminating;
    }
    if let Some(sandbox) = sandbox
        && sandbox.spec.suspension().is_requested()
    {
        return match readiness::of_suspended(sandbox) {
            Verdict::Done(()) if readiness::is_frozen(sandbox) => Phase::Frozen,
            Verdict::Done(()) => Phase::Suspended,
            Verdict::Refused { reason, .. } if reason == Reason::SandboxExpired.as_str() => {
                Phase::Ended
            }
            // A sandbox that cannot be suspended runs on.
            Verdict::Wait | Verdict::Refused { .. } => Phase::Suspending,
        };
    }
    match readiness::of_claim(claim) {
        Verdict::Done(_) => Phase::Ready,
        Verdict::Wait => Phase::Pending,
        Verdict::Refused { .. } => Phase::Ended,
    }
}
