//! The status of a claim.

use api::SandboxClaimStatus;
use api::claim::Lifecycle;
use api::sandbox::{OperatingMode, SuspensionStrategy, SuspensionType};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::super::*;
use super::world::{NOW, at, claim, finished_condition, owned, ready_condition, with_conditions};

fn reported(report: &Report<'_>, claim: &SandboxClaim) -> (String, String) {
    let status = status(claim, report, at(NOW));
    let ready = conditions::find(&status.conditions, ConditionType::Ready).unwrap();
    (ready.status.clone(), ready.reason.clone())
}

#[test]
fn conditions_hide_one_another_in_a_fixed_order() {
    let claim = claim();
    let obstacle = Obstacle::new(Reason::TemplateNotFound, "x");
    let sandbox = owned("w");
    let expired = with_conditions(
        owned("w"),
        vec![ready_condition("False", "SandboxExpired", 900)],
    );
    let bare = with_conditions(owned("w"), Vec::new());
    let mut going = owned("w");
    going.metadata.deletion_timestamp = Some(Time(at(1)));
    let some = Some(&sandbox);
    let table = [
        (
            Report::Blocked {
                obstacle: &obstacle,
                sandbox: some,
            },
            "False",
            "TemplateNotFound",
        ),
        (Report::Expired { sandbox: some }, "False", "ClaimExpired"),
        (
            Report::Reflects { sandbox: None },
            "False",
            "SandboxMissing",
        ),
        (
            Report::Reflects {
                sandbox: Some(&expired),
            },
            "False",
            "SandboxExpired",
        ),
        (
            Report::Reflects {
                sandbox: Some(&bare),
            },
            "False",
            "SandboxNotReady",
        ),
        (
            Report::Reflects {
                sandbox: Some(&going),
            },
            "False",
            "SandboxNotReady",
        ),
        (
            Report::Reflects { sandbox: some },
            "True",
            "DependenciesReady",
        ),
    ];
    for (report, expected_status, expected_reason) in table {
        let (status, reason) = reported(&report, &claim);
        assert_eq!(
            (status.as_str(), reason.as_str()),
            (expected_status, expected_reason)
        );
    }
}

#[test]
fn a_forwarded_condition_is_the_sandboxes_under_the_claims_generation() {
    let sandbox = owned("w");
    let report = Report::Reflects {
        sandbox: Some(&sandbox),
    };
    let status = status(&claim(), &report, at(NOW));
    let ready = conditions::find(&status.conditions, ConditionType::Ready).unwrap();
    assert_eq!(ready.last_transition_time, Time(at(900)));
    assert_eq!(ready.message, "from the sandbox");
    assert_eq!(ready.observed_generation, Some(4));
    let held = status.sandbox.unwrap();
    assert_eq!(
        (held.name.as_str(), held.pod_ips.as_slice()),
        ("w", ["10.0.0.9".to_owned()].as_slice())
    );
}

#[test]
fn finished_is_mirrored_and_outlives_the_sandbox_only_on_an_expired_claim() {
    let finished = with_conditions(
        owned("w"),
        vec![
            ready_condition("False", "PodSucceeded", 900),
            finished_condition(900),
        ],
    );
    let mut claim = claim();
    let mirrored = status(
        &claim,
        &Report::Reflects {
            sandbox: Some(&finished),
        },
        at(NOW),
    );
    assert!(conditions::is_true(
        &mirrored.conditions,
        ConditionType::Finished
    ));
    claim.status = Some(mirrored);
    let has_finished = |report: &Report<'_>| {
        conditions::is_true(
            &status(&claim, report, at(NOW)).conditions,
            ConditionType::Finished,
        )
    };
    assert!(has_finished(&Report::Expired { sandbox: None }));
    assert!(!has_finished(&Report::Reflects { sandbox: None }));
}

#[test]
fn a_finish_that_is_seen_now_starts_the_countdown_now() {
    let finished = with_conditions(owned("w"), vec![finished_condition(NOW - 30)]);
    let mut claim = claim();
    let ttl = |seconds| {
        Some(Lifecycle {
            ttl_seconds_after_finished: Some(seconds),
            ..Lifecycle::default()
        })
    };
    claim.spec.lifecycle = ttl(120);
    let mirrored = status(
        &claim,
        &Report::Reflects {
            sandbox: Some(&finished),
        },
        at(NOW),
    );
    assert_eq!(
        next_look(&claim, &mirrored, at(NOW)),
        Some(Duration::from_secs(90))
    );
    claim.spec.lifecycle = ttl(10);
    assert_eq!(next_look(&claim, &mirrored, at(NOW)), Some(Duration::ZERO));
    let expired = status(&claim, &Report::Expired { sandbox: None }, at(NOW));
    assert_eq!(next_look(&claim, &expired, at(NOW)), None);
}

#[test]
fn a_claim_reports_a_suspension_that_keeps_the_pod() {
    let suspended = Condition {
        type_: "Suspended".into(),
        ..ready_condition("True", "Frozen", 950)
    };
    let ready = ready_condition("False", "SandboxSuspended", 950);
    let mut sandbox = with_conditions(owned("w"), vec![ready, suspended]);
    sandbox.spec.operating_mode = Some(OperatingMode::Suspended);
    let observed = |sandbox: &Sandbox, before: &SandboxClaim| {
        let report = Report::Reflects {
            sandbox: Some(sandbox),
        };
        let mut claim = before.clone();
        claim.status = Some(status(before, &report, at(NOW)));
        claim
    };
    let reason = |claim: &SandboxClaim| {
        let conditions = &claim.status.as_ref().unwrap().conditions;
        conditions::find(conditions, ConditionType::Suspended)
            .map(|suspended| suspended.reason.clone())
    };
    // A sandbox that is stopped leaves the claim as it always was.
    assert_eq!(reason(&observed(&sandbox, &claim())), None);
    sandbox.spec.suspension_strategy = Some(SuspensionStrategy {
        kind: SuspensionType::Freeze,
    });
    let frozen = observed(&sandbox, &claim());
    assert_eq!(reason(&frozen).as_deref(), Some("Frozen"));
    sandbox.spec.operating_mode = Some(OperatingMode::Running);
    assert_eq!(reason(&observed(&sandbox, &frozen)), None);
}

#[test]
fn only_the_status_of_a_first_sandbox_that_is_starting_may_be_delayed() {
    let with = |reason: &str, status: &str| {
        with_conditions(owned("w"), vec![ready_condition(status, reason, 900)])
    };
    let mut going = with("DependenciesNotReady", "False");
    going.metadata.deletion_timestamp = Some(Time(at(1)));
    let mut reported = claim();
    reported.status = Some(SandboxClaimStatus::default());
    for (sandbox, is_delayed) in [
        (with_conditions(owned("w"), Vec::new()), true),
        (with("DependenciesNotReady", "False"), true),
        (with("DependenciesReady", "True"), false),
        (with("PodFailed", "False"), false),
        (with("SandboxSuspended", "False"), false),
        (going, false),
    ] {
        let report = Report::Reflects {
            sandbox: Some(&sandbox),
        };
        assert_eq!(is_first_start(&claim(), &report), is_delayed, "{sandbox:?}");
        assert!(!is_first_start(&reported, &report));
    }
    let obstacle = Obstacle::new(Reason::TemplateNotFound, "x");
    let blocked = Report::Blocked {
        obstacle: &obstacle,
        sandbox: None,
    };
    assert!(!is_first_start(&claim(), &blocked));
    assert!(!is_first_start(
        &claim(),
        &Report::Reflects { sandbox: None }
    ));
}
