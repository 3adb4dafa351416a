//! The status of a claim.

use std::time::Duration;

use api::claim::ClaimedSandbox;
use api::conditions::{self, ConditionType, Finding, Reason};
use api::sandbox::SuspensionType;
use api::start_problem::StartProblem;
use api::{Sandbox, SandboxClaim, SandboxClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

use super::{Obstacle, deadlines};
use crate::expiry::{Expiry, expiry};

/// The result of a pass. An earlier variant takes precedence over a later one.
#[derive(Clone, Debug)]
pub enum Report<'a> {
    /// The claim's dependencies could not be looked up: what the status says about the sandbox stays.
    Unobserved { obstacle: &'a Obstacle },
    /// An obstacle.
    Blocked {
        obstacle: &'a Obstacle,
        sandbox: Option<&'a Sandbox>,
    },
    /// The claim has expired; its sandbox, if it still exists, is being cleaned up.
    Expired { sandbox: Option<&'a Sandbox> },
    /// The claim has this sandbox, or none.
    Reflects { sandbox: Option<&'a Sandbox> },
}

/// The status of a claim, given the one it has.
pub fn status(claim: &SandboxClaim, report: &Report<'_>, now: Timestamp) -> SandboxClaimStatus {
    let mut conditions = claim
        .status
        .as_ref()
        .map(|status| status.conditions.clone())
        .unwrap_or_default();
    let generation = claim.metadata.generation;
    let now = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    match ready(report) {
        Ready::Found(finding) => conditions::merge(&mut conditions, &finding, generation, &now),
        Ready::Forwarded(ready) => conditions::forward(&mut conditions, ready, generation),
    }
    let sandbox = match *report {
        Report::Unobserved { .. } => {
            return SandboxClaimStatus {
                conditions,
                sandbox: claim
                    .status
                    .as_ref()
                    .and_then(|before| before.sandbox.clone()),
            };
        }
        Report::Blocked { sandbox, .. }
        | Report::Expired { sandbox }
        | Report::Reflects { sandbox } => sandbox,
    };
    mirror_finished(&mut conditions, report, sandbox, generation);
    mirror_suspended(&mut conditions, sandbox, generation);
    SandboxClaimStatus {
        conditions,
        sandbox: sandbox.map(|sandbox| ClaimedSandbox {
            name: sandbox.name_any(),
            pod_ips: sandbox
                .status
                .as_ref()
                .map(|status| status.pod_ips.clone())
                .unwrap_or_default(),
        }),
    }
}

/// Whether a report is the first of the claim, and contains only that its sandbox is starting.
pub fn is_first_start(claim: &SandboxClaim, report: &Report<'_>) -> bool {
    let Report::Reflects {
        sandbox: Some(sandbox),
    } = report
    else {
        return false;
    };
    let is_waited_for = condition_of(sandbox, ConditionType::Ready).is_none_or(|ready| {
        ready.reason == Reason::DependenciesNotReady.as_str()
            && StartProblem::parse(&ready.message).is_none()
    });
    claim.status.is_none() && sandbox.metadata.deletion_timestamp.is_none() && is_waited_for
}

/// The time until the claim's next deadline.
pub fn next_look(
    claim: &SandboxClaim,
    status: &SandboxClaimStatus,
    now: Timestamp,
) -> Option<Duration> {
    match expiry(&deadlines(claim, &status.conditions), now) {
        Expiry::Never => None,
        Expiry::In(left) => Some(left),
        Expiry::Passed => {
            let is_marked = conditions::find(&status.conditions, ConditionType::Ready)
                .is_some_and(|ready| ready.reason == Reason::ClaimExpired.as_str());
            (!is_marked).then_some(Duration::ZERO)
        }
    }
}

enum Ready<'a> {
    Found(Finding),
    Forwarded(&'a Condition),
}

fn ready<'a>(report: &Report<'a>) -> Ready<'a> {
    let not_ready = |reason, message: &str| {
        Ready::Found(Finding::new(ConditionType::Ready, false, reason, message))
    };
    let sandbox = match report {
        Report::Blocked { obstacle, .. } | Report::Unobserved { obstacle } => {
            return not_ready(obstacle.reason, &obstacle.message);
        }
        Report::Expired { .. } => {
            return not_ready(
                Reason::ClaimExpired,
                "Claim expired. Sandbox cleanup initiated.",
            );
        }
        Report::Reflects { sandbox } => *sandbox,
    };
    let Some(sandbox) = sandbox else {
        return not_ready(Reason::SandboxMissing, "Sandbox does not exist");
    };
    if sandbox.metadata.deletion_timestamp.is_some() {
        return not_ready(Reason::SandboxNotReady, "Sandbox is being deleted");
    }
    match condition_of(sandbox, ConditionType::Ready) {
        None => not_ready(Reason::SandboxNotReady, "Sandbox is not ready"),
        Some(ready) if ready.reason == Reason::SandboxExpired.as_str() => not_ready(
            Reason::SandboxExpired,
            "Underlying Sandbox resource has expired independently of the Claim.",
        ),
        Some(ready) => Ready::Forwarded(ready),
    }
}

/// The claim's Finished is its sandbox's. It outlives the sandbox only on a claim that has expired, as the record of how the
/// sandbox ended.
fn mirror_finished(
    conditions: &mut Vec<Condition>,
    report: &Report<'_>,
    sandbox: Option<&Sandbox>,
    generation: Option<i64>,
) {
    let finished = sandbox.and_then(|sandbox| condition_of(sandbox, ConditionType::Finished));
    match finished {
        Some(finished) => conditions::forward(conditions, finished, generation),
        None if matches!(report, Report::Expired { .. }) => {}
        None => conditions::remove(conditions, ConditionType::Finished),
    }
}

/// A claim has its sandbox's Suspended while the sandbox is to be suspended without losing its pod: who may read claims alone learns that it
/// is frozen, or why it cannot be.
fn mirror_suspended(
    conditions: &mut Vec<Condition>,
    sandbox: Option<&Sandbox>,
    generation: Option<i64>,
) {
    let kept = sandbox.filter(|sandbox| {
        let spec = &sandbox.spec;
        spec.suspension().is_requested() && spec.suspension_type() != SuspensionType::Stop
    });
    match kept.and_then(|sandbox| condition_of(sandbox, ConditionType::Suspended)) {
        Some(suspended) => conditions::forward(conditions, suspended, generation),
        None => conditions::remove(conditions, ConditionType::Suspended),
    }
}

fn condition_of(sandbox: &Sandbox, kind: ConditionType) -> Option<&Condition> {
    conditions::find(&sandbox.status.as_ref()?.conditions, kind)
}
