//! The status of a batch claim.

use api::conditions::{self, ConditionType, Finding, Reason};
use api::kruise::{ClaimPhase, SandboxClaim, SandboxClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::{NextBatch, NextStep, Origin, Progress, validate};

/// The status of a claim with this progress, and with the next batch if one begins.
pub fn status(
    claim: &SandboxClaim,
    progress: &Progress,
    next_step: &NextStep,
    next: &NextBatch,
    now: Timestamp,
) -> SandboxClaimStatus {
    let before = claim.status.clone().unwrap_or_default();
    let moment = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
    let number = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let phase = match next_step {
        NextStep::Completed(_) => ClaimPhase::Completed,
        NextStep::Blocked(..) if before.claim_start_time.is_none() => ClaimPhase::Pending,
        _ => ClaimPhase::Claiming,
    };
    let finding = finding(claim, progress, next_step, next);
    let mut conditions = before.conditions;
    // This condition exists only while nothing can be decided about the claim.
    conditions::remove(&mut conditions, ConditionType::Ready);
    conditions::merge(
        &mut conditions,
        &finding,
        claim.metadata.generation,
        &moment,
    );
    let unsettled = |origin| {
        let picks = progress.unsettled.iter();
        picks
            .filter(move |pick| pick.origin == origin)
            .map(|pick| pick.name.clone())
    };
    let has_begun = phase != ClaimPhase::Pending;
    SandboxClaimStatus {
        observed_generation: claim.metadata.generation,
        phase: Some(phase),
        message: Some(finding.message),
        claimed_replicas: number(progress.held),
        failed_replicas: number(progress.failed),
        claiming: unsettled(Origin::Taken)
            .chain(next.claiming.iter().cloned())
            .collect(),
        creating: unsettled(Origin::Made)
            .chain(next.creating.iter().cloned())
            .collect(),
        claim_start_time: before
            .claim_start_time
            .or_else(|| has_begun.then(|| moment.clone())),
        completion_time: (phase == ClaimPhase::Completed).then_some(moment),
        conditions,
    }
}

fn finding(
    claim: &SandboxClaim,
    progress: &Progress,
    next_step: &NextStep,
    next: &NextBatch,
) -> Finding {
    let set = &claim.spec.template_name;
    let desired = claim.spec.desired_replicas();
    let mut message = format!("{} of {desired} sandboxes are claimed", progress.held);
    if progress.failed > 0 {
        let fate = if claim.spec.reserve_failed_sandbox.unwrap_or(false) {
            "set aside"
        } else {
            "released"
        };
        let failed = progress.failed;
        message = format!("{message}; {failed} could not be initialised and had to be {fate}");
    }
    let (is_completed, reason) = match next_step {
        NextStep::Completed(reason) => (true, *reason),
        NextStep::Blocked(reason, _) => (false, *reason),
        NextStep::Claim(_) if next.is_empty() => (false, Reason::OutOfStock),
        NextStep::Settling | NextStep::Paused(_) | NextStep::Claim(_) => (false, Reason::Claiming),
    };
    let detail = match (next_step, reason) {
        (NextStep::Blocked(_, why), _) => Some(why.clone()),
        (_, Reason::OutOfStock) => Some(format!("SandboxSet {set:?} has no other that is Ready")),
        (_, Reason::SandboxSetNotFound) => Some(format!("SandboxSet {set:?} does not exist")),
        (_, Reason::TimeoutReached) => {
            let invalid = validate(claim).err();
            let why = invalid.map_or(String::new(), |invalid| format!("; {invalid}"));
            Some(format!("the claim's timeout is reached{why}"))
        }
        _ => None,
    };
    if let Some(detail) = detail {
        message = format!("{message}; {detail}");
    }
    Finding::new(ConditionType::Completed, is_completed, reason, message)
}
