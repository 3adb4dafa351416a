//! Emits the events, metrics and log lines that a pass over a claim announces.

use std::time::Duration;

use api::conditions::{self, ConditionType, Reason};
use api::{Sandbox, SandboxClaim, labels};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use planner::claim::{Announcement, Source};
use tracing::warn;

use super::CONTROLLER;
use crate::context::Context;
use crate::events::{Occurrence, Severity};
use crate::instrumentation::{ClaimReadiness, Launch, Provisioning};
use crate::writes::WriteError;

/// Emits what a pass over a claim announces.
pub(super) fn announce(
    context: &Context,
    claim: &SandboxClaim,
    announcement: &Announcement<'_, WriteError>,
) {
    let occurrence = match announcement {
        Announcement::Provisioned {
            sandbox,
            source,
            wanted_warm,
        } => {
            measure_provisioning(context, claim, sandbox, *source, *wanted_warm);
            provisioned(&sandbox.name_any(), *source)
        }
        Announcement::MetadataNotApplied(why) => Occurrence {
            severity: Severity::Warning,
            reason: "MetadataNotApplied",
            action: "Sync",
            note: (*why).to_owned(),
        },
        Announcement::Blocked(obstacle) => Occurrence {
            severity: Severity::Warning,
            reason: obstacle.reason.as_str(),
            action: "Provision",
            note: obstacle.message.clone(),
        },
        Announcement::Expired => Occurrence {
            severity: Severity::Normal,
            reason: Reason::ClaimExpired.as_str(),
            action: "Expire",
            note: format!(
                "Claim {:?} has expired; its shutdown policy is carried out",
                claim.name_any()
            ),
        },
        Announcement::FirstReady { sandbox } => {
            measure_readiness(context, claim, sandbox);
            return;
        }
        Announcement::LegacyPolicyNotDeleted(error) => {
            warn!(
                error = *error as &dyn std::error::Error,
                "cannot delete the claim's old network policy; it is tried again"
            );
            return;
        }
    };
    context.events.record(CONTROLLER, claim, occurrence);
}

fn provisioned(sandbox: &str, source: Source<'_>) -> Occurrence {
    match source {
        Source::Adopted { warm_pool, .. } => Occurrence {
            severity: Severity::Normal,
            reason: "SandboxAdopted",
            action: "Adopt",
            note: format!(
                "Adopted warm sandbox {sandbox:?} from pool {:?}",
                warm_pool.unwrap_or("none")
            ),
        },
        Source::Created => Occurrence {
            severity: Severity::Normal,
            reason: "SandboxProvisioned",
            action: "Create",
            note: format!("Created sandbox {sandbox:?}"),
        },
    }
}

fn measure_provisioning(
    context: &Context,
    claim: &SandboxClaim,
    sandbox: &Sandbox,
    source: Source<'_>,
    wanted_warm: bool,
) {
    let (launch, pool, was_ready) = match source {
        Source::Adopted {
            warm_pool,
            was_ready,
        } => (Launch::Warm, warm_pool, was_ready),
        Source::Created => (Launch::Cold, None, false),
    };
    context.instrumentation.claim_provisioned(&Provisioning {
        namespace: claim.metadata.namespace.as_deref().unwrap_or_default(),
        template: template_of(sandbox),
        launch,
        pool,
        was_ready,
        wanted_warm,
    });
}

fn measure_readiness(context: &Context, claim: &SandboxClaim, sandbox: &Sandbox) {
    let now = context.clock.now();
    // A start time that cannot be parsed, or is in the future, is ignored.
    let since = |annotation: &str| {
        let time: Timestamp = claim.annotations().get(annotation)?.parse().ok()?;
        Duration::try_from(now.duration_since(time)).ok()
    };
    let launch = if sandbox.annotations().contains_key(labels::POD_NAME) {
        Launch::Warm
    } else {
        Launch::Cold
    };
    let ready_at = sandbox
        .status
        .as_ref()
        .and_then(|status| conditions::find(&status.conditions, ConditionType::Ready))
        .map(|ready| ready.last_transition_time.0);
    let created_at = sandbox
        .metadata
        .creation_timestamp
        .as_ref()
        .map(|time| time.0);
    context.instrumentation.claim_ready(&ClaimReadiness {
        namespace: claim.metadata.namespace.as_deref().unwrap_or_default(),
        template: template_of(sandbox),
        launch,
        since_admission: since(labels::WEBHOOK_FIRST_OBSERVED_AT),
        since_request: since(labels::CLIENT_FIRST_REQUESTED_AT),
        since_first_observed: since(labels::CONTROLLER_FIRST_OBSERVED_AT),
        sandbox_creation: ready_at
            .zip(created_at)
            .and_then(|(ready, created)| Duration::try_from(ready.duration_since(created)).ok()),
    });
}

fn template_of(sandbox: &Sandbox) -> &str {
    sandbox
        .annotations()
        .get(labels::SANDBOX_TEMPLATE_REF)
        .map_or("", String::as_str)
}
