use std::collections::BTreeMap;

use api::conditions::{self, ConditionType};
use api::kruise::{SandboxClaimSpec, SandboxSet, SandboxSetSpec};
use api::labels;
use api::sandbox::PodTemplate;
use api::{Sandbox, SandboxStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};
use kube::ResourceExt;

use super::*;
use crate::owner::controller_reference;
use crate::patch::tests::patched;
use crate::sandbox_set::SetBlueprint;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(second).unwrap()
}

fn now() -> Timestamp {
    at(1_000)
}

fn claim(replicas: i32) -> SandboxClaim {
    let spec = SandboxClaimSpec {
        template_name: "python".into(),
        replicas: Some(replicas),
        ..SandboxClaimSpec::default()
    };
    let mut claim = SandboxClaim::new("batch", spec);
    claim.metadata.namespace = Some("ns".into());
    claim.metadata.uid = Some("claim-uid".into());
    claim.metadata.generation = Some(2);
    claim.metadata.creation_timestamp = Some(Time(at(990)));
    claim
}

fn begun(mut claim: SandboxClaim, claimed: i32, claiming: &[&str]) -> SandboxClaim {
    claim.status = Some(SandboxClaimStatus {
        phase: Some(ClaimPhase::Claiming),
        claimed_replicas: claimed,
        claiming: claiming.iter().map(|name| (*name).to_owned()).collect(),
        claim_start_time: Some(Time(at(995))),
        ..SandboxClaimStatus::default()
    });
    claim
}

fn with_timeout(mut claim: SandboxClaim, seconds: u64) -> SandboxClaim {
    claim.spec.claim_timeout = Some(Duration::from_secs(seconds).into());
    claim
}

fn with_env(mut claim: SandboxClaim) -> SandboxClaim {
    claim.spec.env_vars = Some(BTreeMap::from([("KEY".to_owned(), "value".to_owned())]));
    claim
}

fn set() -> SandboxSet {
    let spec = SandboxSetSpec {
        replicas: 3,
        template: Some(PodTemplate::default()),
        ..SandboxSetSpec::default()
    };
    let mut set = SandboxSet::new("python", spec);
    set.metadata.namespace = Some("ns".into());
    set.metadata.uid = Some("set-uid".into());
    set
}

fn free(name: &str) -> Sandbox {
    let mut sandbox = SetBlueprint::new(&set(), None).unwrap().sandbox(&set());
    sandbox.metadata.name = Some(name.into());
    sandbox.metadata.uid = Some(format!("uid-{name}"));
    sandbox.metadata.resource_version = Some("7".into());
    sandbox.metadata.owner_references = Some(vec![controller_reference(&set())]);
    sandbox
        .labels_mut()
        .insert(keys::SANDBOX_POOL.into(), "python".into());
    sandbox
        .labels_mut()
        .insert(keys::SANDBOX_CLAIMED.into(), "false".into());
    sandbox.status = Some(SandboxStatus {
        pod_ips: vec!["10.0.0.7".into()],
        conditions: vec![Condition {
            type_: "Ready".into(),
            status: "True".into(),
            reason: "X".into(),
            message: String::new(),
            observed_generation: None,
            last_transition_time: Time(at(900)),
        }],
        ..SandboxStatus::default()
    });
    sandbox
}

fn step(claim: &SandboxClaim, sandbox: Option<&Sandbox>, known: &Initialisation) -> Next {
    let entry = Entry {
        name: "a",
        origin: Origin::Taken,
        sandbox,
        initialisation: known,
        blueprint: None,
        token: "token",
    };
    next(claim, &entry, now())
}

/// The sandbox after the claim has taken it.
fn taken(claim: &SandboxClaim) -> Sandbox {
    let sandbox = free("a");
    let Next::Take {
        patch,
        sandbox: version,
    } = step(claim, Some(&sandbox), &Initialisation::Untried)
    else {
        panic!("a free sandbox is taken");
    };
    assert_eq!(version.resource_version, "7");
    patched(&sandbox, &patch)
}

fn surroundings() -> Surroundings {
    Surroundings {
        set_exists: true,
        paused_until: None,
        max_batch: 10,
        now: now(),
    }
}

fn having(held: usize) -> Progress {
    Progress {
        held,
        ..Progress::default()
    }
}

fn written(
    claim: &SandboxClaim,
    progress: &Progress,
    surroundings: &Surroundings,
) -> SandboxClaimStatus {
    let next_step = decide(claim, progress, surroundings);
    status(
        claim,
        progress,
        &next_step,
        &NextBatch::default(),
        surroundings.now,
    )
}

fn completed_of(status: &SandboxClaimStatus) -> (&str, &str) {
    let condition = conditions::find(&status.conditions, ConditionType::Completed).unwrap();
    (&condition.status, &condition.reason)
}

#[test]
fn a_taken_sandbox_says_whose_it_is_and_no_longer_whose_it_was() {
    let mut claim = claim(1);
    claim.spec.labels = Some(BTreeMap::from([("project".to_owned(), "x".to_owned())]));
    claim.spec.annotations = Some(BTreeMap::from([(
        "purpose".to_owned(),
        "a test".to_owned(),
    )]));
    claim.spec.shutdown_time = Some(Time(at(5_000)));
    let sandbox = taken(&claim);
    let labels = sandbox.labels();
    assert_eq!(labels[keys::SANDBOX_CLAIMED], "true");
    assert_eq!(labels[keys::CLAIM_NAME], "batch");
    assert_eq!(labels[keys::SANDBOX_ID], "ns--a");
    assert_eq!(labels[keys::SANDBOX_TEMPLATE], "python");
    assert_eq!(labels[labels::CLAIM_UID], "claim-uid");
    assert_eq!(labels["project"], "x");
    assert!(!labels.contains_key(keys::SANDBOX_POOL));
    let annotations = sandbox.annotations();
    assert_eq!(annotations[keys::LOCK], "token");
    assert_eq!(annotations[keys::OWNER], "claim-uid");
    assert_eq!(annotations[keys::CLAIM_TIMESTAMP], "1970-01-01T00:16:40Z");
    assert_eq!(annotations["purpose"], "a test");
    let owners: Vec<&str> = sandbox
        .owner_references()
        .iter()
        .map(|it| it.uid.as_str())
        .collect();
    assert_eq!(owners, ["claim-uid"]);
    assert_eq!(sandbox.spec.shutdown_time, Some(Time(at(5_000))));
}

#[test]
fn what_is_not_free_any_more_is_lost() {
    let claim = claim(1);
    let mut locked = free("a");
    locked
        .annotations_mut()
        .insert(keys::LOCK.into(), "another".into());
    let mut anothers = free("a");
    anothers.metadata.owner_references = Some(vec![OwnerReference {
        kind: "SandboxClaim".into(),
        api_version: "agents.kruise.io/v1alpha1".into(),
        uid: "another".into(),
        controller: Some(true),
        ..OwnerReference::default()
    }]);
    let mut going = free("a");
    going.metadata.deletion_timestamp = Some(Time(now()));
    for sandbox in [Some(&locked), Some(&anothers), Some(&going), None] {
        let next = step(&claim, sandbox, &Initialisation::Untried);
        assert_eq!(next, Next::Settled(Outcome::Lost));
    }
}

#[test]
fn without_variables_a_taken_sandbox_is_held_at_once() {
    let mut skipping = with_env(claim(1));
    skipping.spec.skip_init_runtime = Some(true);
    for claim in [claim(1), skipping] {
        let next = step(&claim, Some(&taken(&claim)), &Initialisation::Untried);
        assert_eq!(next, Next::Settled(Outcome::Held));
    }
}

#[test]
fn variables_are_sent_with_the_token_of_the_lock() {
    let claim = with_env(claim(1));
    let sandbox = taken(&claim);
    let next = step(&claim, Some(&sandbox), &Initialisation::Untried);
    let Next::Initialise { address, token } = next else {
        panic!("{next:?}");
    };
    assert_eq!(
        (address.to_string().as_str(), token.as_str()),
        ("10.0.0.7", "token")
    );
    let next = step(&claim, Some(&sandbox), &Initialisation::Done);
    assert_eq!(next, Next::Settled(Outcome::Held));
}

#[test]
fn a_ready_sandbox_that_serves_no_init_blocks_the_claim_soon_and_stays_with_it() {
    let claim = begun(with_env(claim(1)), 0, &["a"]);
    let unserved = Initialisation::Unserved("connection refused".into());
    let mut sandbox = taken(&claim);
    let step_at = |sandbox: &Sandbox, claim: &SandboxClaim, second| {
        let entry = Entry {
            name: "a",
            origin: Origin::Taken,
            sandbox: Some(sandbox),
            initialisation: &unserved,
            blueprint: None,
            token: "token",
        };
        next(claim, &entry, at(second))
    };
    let settled = |outcome| Next::Settled(outcome);
    let final_word = || settled(Outcome::Unserved("connection refused".into()));
    assert_eq!(
        step_at(&sandbox, &claim, 1_001),
        settled(Outcome::Unsettled)
    );
    assert_eq!(step_at(&sandbox, &claim, 1_002), final_word());
    assert_eq!(step_at(&sandbox, &claim, 9_000), final_word(), "it is kept");

    // Its runtime may still be starting.
    let conditions = &mut sandbox.status.as_mut().unwrap().conditions;
    conditions[0].last_transition_time = Time(at(999));
    assert_eq!(
        step_at(&sandbox, &claim, 1_003),
        settled(Outcome::Unsettled)
    );
    assert_eq!(step_at(&sandbox, &claim, 1_004), final_word());
    let overdue = with_timeout(claim.clone(), 5);
    assert!(matches!(
        step_at(&sandbox, &overdue, 1_040),
        Next::Release { .. }
    ));

    let pick = Pick {
        name: "a".into(),
        origin: Origin::Taken,
    };
    let progress = progress(&claim, 0, vec![(pick, Outcome::Unserved("404".into()))]);
    let next_step = decide(&claim, &progress, &surroundings());
    let NextStep::Blocked(Reason::EnvVarsInjectionRejected, why) = &next_step else {
        panic!("{next_step:?}");
    };
    for part in ["spec.envVars", "\"a\": 404", "49983", "skipInitRuntime"] {
        assert!(why.contains(part), "{why}");
    }
    let status = status(&claim, &progress, &next_step, &NextBatch::default(), now());
    assert_eq!(status.claiming, ["a"], "it stays in the batch");
    assert_eq!((status.failed_replicas, status.claimed_replicas), (0, 0));
    assert_eq!(
        next_look(&claim, &next_step, &NextBatch::default(), now()),
        Some(Duration::from_secs(60))
    );
}

#[test]
fn a_sandbox_that_does_not_answer_has_its_time_and_is_then_released() {
    let mut claim = with_env(claim(1));
    let silent = Initialisation::Unanswered("connection refused".into());
    let next = step(&claim, Some(&taken(&claim)), &silent);
    assert_eq!(next, Next::Settled(Outcome::Unsettled));
    let mut late = taken(&claim);
    late.annotations_mut()
        .insert(keys::CLAIM_TIMESTAMP.into(), at(970).to_string());
    let Next::Release { why, .. } = step(&claim, Some(&late), &silent) else {
        panic!("30 seconds have passed");
    };
    assert_eq!(why, "connection refused");
    claim.spec.wait_ready_timeout = Some(Duration::from_secs(60).into());
    assert_eq!(
        step(&claim, Some(&late), &silent),
        Next::Settled(Outcome::Unsettled)
    );
    let overdue = with_timeout(begun(claim, 0, &["a"]), 5);
    assert!(matches!(
        step(&overdue, Some(&late), &silent),
        Next::Release { .. }
    ));
}

#[test]
fn a_sandbox_that_refuses_is_given_up_at_once() {
    let mut claim = with_env(claim(1));
    let refused = Initialisation::Refused("401".into());
    let sandbox = taken(&claim);
    assert!(matches!(
        step(&claim, Some(&sandbox), &refused),
        Next::Release { .. }
    ));
    claim.spec.reserve_failed_sandbox = Some(true);
    let next = step(&claim, Some(&sandbox), &refused);
    let Next::SetAside { patch, .. } = next else {
        panic!("{next:?}");
    };
    let marked = patched(&sandbox, &patch);
    let next = step(&claim, Some(&marked), &Initialisation::Untried);
    assert_eq!(next, Next::Settled(Outcome::Failed));
    assert_eq!(
        held_besides(&claim, [&marked.metadata]),
        0,
        "it does not count"
    );
    assert_eq!(held_besides(&claim, [&sandbox.metadata]), 1);
}

#[test]
fn one_that_is_made_counts_once_it_is_ready() {
    let claim = claim(1);
    let (set, blueprint) = (set(), SetBlueprint::new(&set(), None).unwrap());
    let step = |claim: &SandboxClaim, sandbox: Option<&Sandbox>| {
        let entry = Entry {
            name: "made",
            origin: Origin::Made,
            sandbox,
            initialisation: &Initialisation::Untried,
            blueprint: Some((&set, &blueprint)),
            token: "token",
        };
        next(claim, &entry, now())
    };
    let Next::Make { sandbox } = step(&claim, None) else {
        panic!("it is made");
    };
    assert_eq!(sandbox.name_any(), "made");
    assert_eq!(sandbox.labels()[keys::SANDBOX_CLAIMED], "true");
    assert_eq!(sandbox.owner_references()[0].uid, "claim-uid");
    assert_eq!(
        step(&claim, Some(&sandbox)),
        Next::Settled(Outcome::Unsettled)
    );
    let mut ready = sandbox.clone();
    ready.status = free("x").status;
    assert_eq!(step(&claim, Some(&ready)), Next::Settled(Outcome::Held));
    assert_eq!(
        step(&claim, Some(&free("made"))),
        Next::Settled(Outcome::Lost),
        "another's name"
    );
    let overdue = with_timeout(begun(claim, 0, &[]), 5);
    assert!(matches!(
        step(&overdue, Some(&sandbox)),
        Next::Release { .. }
    ));
    assert_eq!(step(&overdue, None), Next::Settled(Outcome::Lost));
}

#[test]
fn a_batch_is_bounded_by_what_is_missing_and_by_the_limit() {
    for (replicas, held, expected) in [(3, 0, 3), (30, 0, 10), (30, 25, 5)] {
        let next_step = decide(&claim(replicas), &having(held), &surroundings());
        assert_eq!(next_step, NextStep::Claim(expected), "{replicas} {held}");
    }
}

#[test]
fn a_claim_is_completed_when_it_has_all_or_its_time_is_up_or_its_set_is_gone() {
    let gone = Surroundings {
        set_exists: false,
        ..surroundings()
    };
    let overdue = with_timeout(begun(claim(3), 1, &[]), 5);
    let in_time = with_timeout(begun(claim(3), 1, &[]), 6);
    for (claim, held, surroundings, expected) in [
        (&claim(3), 3, &surroundings(), Some("AllReplicasClaimed")),
        (&claim(3), 3, &gone, Some("AllReplicasClaimed")),
        (
            &begun(claim(3), 2, &[]),
            2,
            &gone,
            Some("SandboxSetNotFound"),
        ),
        (&overdue, 1, &surroundings(), Some("TimeoutReached")),
        (&in_time, 1, &surroundings(), None),
        (&claim(3), 1, &surroundings(), None),
    ] {
        let status = written(claim, &having(held), surroundings);
        let is_completed = status.phase == Some(ClaimPhase::Completed);
        assert_eq!(is_completed, expected.is_some(), "{status:?}");
        if let Some(reason) = expected {
            assert_eq!(completed_of(&status), ("True", reason));
            assert_eq!(status.completion_time, Some(Time(now())));
            assert_eq!(status.claimed_replicas, i32::try_from(held).unwrap());
            assert!(status.claiming.is_empty());
        }
    }
}

#[test]
fn a_claim_that_was_applied_before_its_set_waits_for_it() {
    let gone_at = |seconds| Surroundings {
        set_exists: false,
        now: at(seconds),
        ..surroundings()
    };
    // The claim was created at 990.
    let brief = with_timeout(claim(3), 5);
    for (claim, seconds, is_completed) in [
        (&claim(3), 990, false),
        (&claim(3), 1_049, false),
        (&claim(3), 1_050, true),
        (&brief, 994, false),
        (&brief, 995, true),
    ] {
        let surroundings = gone_at(seconds);
        let status = written(claim, &having(0), &surroundings);
        let completed = if is_completed { "True" } else { "False" };
        assert_eq!(
            completed_of(&status),
            (completed, "SandboxSetNotFound"),
            "at {seconds}"
        );
        if !is_completed {
            assert_eq!(status.phase, Some(ClaimPhase::Pending));
            assert_eq!(status.claim_start_time, None, "claiming has not begun");
            let next_step = decide(claim, &having(0), &surroundings);
            let look = next_look(claim, &next_step, &NextBatch::default(), at(seconds));
            assert!(look.is_some(), "the wait ends");
        }
    }
}

#[test]
fn a_batch_under_way_is_settled_before_anything_else_is_decided() {
    let overdue = with_timeout(begun(claim(3), 1, &["a"]), 5);
    let mut progress = having(1);
    progress.unsettled = batch(&overdue);
    assert_eq!(
        decide(&overdue, &progress, &surroundings()),
        NextStep::Settling
    );
    let status = written(&overdue, &progress, &surroundings());
    assert_eq!(
        (status.claimed_replicas, status.claiming),
        (1, vec!["a".to_owned()])
    );
}

#[test]
fn a_timeout_of_zero_takes_what_is_there() {
    let claim = with_timeout(claim(3), 0);
    assert_eq!(
        decide(&claim, &having(0), &surroundings()),
        NextStep::Claim(3)
    );
    let later = with_timeout(begun(claim, 2, &[]), 0);
    let next_step = decide(&later, &having(2), &surroundings());
    assert_eq!(next_step, NextStep::Completed(Reason::TimeoutReached));
}

#[test]
fn an_invalid_claim_is_reported_and_ends_with_its_timeout() {
    let labelled = |key: &str, value: &str| {
        let mut claim = claim(1);
        claim.spec.labels = Some(BTreeMap::from([(key.to_owned(), value.to_owned())]));
        claim
    };
    let mut annotated = claim(1);
    annotated.spec.annotations = Some(BTreeMap::from([("bad key".to_owned(), String::new())]));
    let mut variable = claim(1);
    variable.spec.env_vars = Some(BTreeMap::from([("A=B".to_owned(), String::new())]));
    for (claim, reason, field) in [
        (
            labelled("team", "not valid"),
            "InvalidMetadata",
            "spec.labels",
        ),
        (labelled("bad key", "x"), "InvalidMetadata", "spec.labels"),
        (
            labelled("agents.kruise.io/lock", "x"),
            "InvalidMetadata",
            "spec.labels",
        ),
        (
            labelled("agents.x-k8s.io/warm-pool-sandbox", "x"),
            "InvalidMetadata",
            "spec.labels",
        ),
        (annotated, "InvalidMetadata", "spec.annotations"),
        (variable, "InvalidConfiguration", "spec.envVars"),
    ] {
        let status = written(&claim, &having(0), &surroundings());
        assert_eq!(completed_of(&status), ("False", reason));
        assert_eq!(status.phase, Some(ClaimPhase::Pending));
        let message = status.message.unwrap();
        assert!(message.contains(field), "{message}");
        let status = written(&with_timeout(claim, 10), &having(0), &surroundings());
        assert_eq!(completed_of(&status), ("True", "TimeoutReached"));
        assert!(status.message.unwrap().contains(field));
    }
    assert_eq!(validate(&labelled("app.kubernetes.io/name", "x")), Ok(()));
}

#[test]
fn failures_make_a_claim_slow_and_careful() {
    let mut progress = having(0);
    for (failed, batch, pause) in [
        (0, 10, 1),
        (1, 5, 1),
        (2, 2, 2),
        (3, 1, 4),
        (9, 1, 60),
        (500, 1, 60),
    ] {
        progress.failed = failed;
        assert_eq!(
            decide(&claim(20), &progress, &surroundings()),
            NextStep::Claim(batch)
        );
        assert_eq!(pause_after(failed), Duration::from_secs(pause), "{failed}");
    }
    let paused = Surroundings {
        paused_until: Some(at(1_003)),
        ..surroundings()
    };
    let next_step = decide(&claim(20), &progress, &paused);
    assert_eq!(next_step, NextStep::Paused(Duration::from_secs(3)));
    let message = written(&claim(20), &progress, &paused).message.unwrap();
    assert!(
        message.contains("500 could not be initialised"),
        "{message}"
    );
}

#[test]
fn waiting_for_free_sandboxes_is_reported_and_checked_again() {
    let claim = with_timeout(begun(claim(3), 1, &[]), 6);
    let status = written(&claim, &having(1), &surroundings());
    assert_eq!(completed_of(&status), ("False", "OutOfStock"));
    let next_step = NextStep::Claim(2);
    let look = next_look(&claim, &next_step, &NextBatch::default(), now());
    assert_eq!(
        look,
        Some(Duration::from_secs(1)),
        "the timeout comes before the next look"
    );
}

#[test]
fn a_completed_claim_goes_when_its_time_to_live_is_over() {
    let mut claim = begun(claim(1), 1, &[]);
    let status = claim.status.as_mut().unwrap();
    status.phase = Some(ClaimPhase::Completed);
    status.completion_time = Some(Time(at(990)));
    assert_eq!(life(&claim, now()), Life::Completed(None));
    claim.spec.ttl_after_completed = Some(Duration::from_secs(15).into());
    assert_eq!(
        life(&claim, now()),
        Life::Completed(Some(Duration::from_secs(5)))
    );
    assert_eq!(life(&claim, at(1_005)), Life::Outlived);
    claim.metadata.deletion_timestamp = Some(Time(now()));
    assert_eq!(life(&claim, at(1_005)), Life::Going);
}

#[test]
fn a_cache_that_shows_another_number_than_the_status_is_not_believed() {
    let claim = begun(claim(3), 2, &["c"]);
    assert!(agrees_with_status(&claim, 2));
    assert!(!agrees_with_status(&claim, 1));
    assert!(!agrees_with_status(&claim, 3));
}
