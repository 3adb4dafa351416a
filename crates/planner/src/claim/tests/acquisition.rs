//! How a claim gets its sandbox: warm or cold, from what its source allows.

use api::claim::EnvVar;
use api::labels;
use api::names::name_hash;
use api::sandbox::{OperatingMode, PersistentVolumeClaimTemplate, PodMetadata};
use api::template::{EnvVarsInjectionPolicy, VolumeClaimTemplatesPolicy};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::super::*;
use super::world::{
    World, at, bound, bound_to, claim, claim_by_pool, finished_condition, owned, pairs, pool, warm,
};
use crate::owner::controller_of;

#[test]
fn a_warm_claim_is_bound_first_and_transferred_second() {
    let world = World {
        candidate: Some(warm("w")),
        ..World::of(claim())
    };
    let plan = world.decide();
    let [
        Effect::Bind { sandbox, patch },
        Effect::Transfer {
            sandbox: version,
            patch: transfer,
        },
    ] = plan.effects.as_slice()
    else {
        panic!("{:?}", plan.effects);
    };
    assert_eq!(sandbox, "w");
    let metadata = &patch["metadata"];
    assert_eq!(metadata["labels"][labels::ASSIGNED_SANDBOX_NAME], "w");
    assert_eq!(metadata["annotations"][labels::ASSIGNED_SANDBOX_NAME], "w");
    assert_eq!(
        metadata["annotations"][labels::CONTROLLER_FIRST_OBSERVED_AT],
        "1970-01-01T00:16:30Z"
    );
    assert_eq!(
        (version.uid.as_str(), version.resource_version.as_str()),
        ("uid-w", "5")
    );

    let metadata = &transfer["metadata"];
    assert_eq!(metadata["ownerReferences"][0]["uid"], "claim-uid");
    assert_eq!(metadata["ownerReferences"].as_array().unwrap().len(), 1);
    assert_eq!(metadata["annotations"][labels::POD_NAME], "w");
    assert_eq!(metadata["labels"][labels::CLAIM_UID], "claim-uid");
    for pool_label in [
        labels::WARM_POOL_SANDBOX,
        labels::SANDBOX_TEMPLATE_REF_HASH,
        labels::SANDBOX_POD_TEMPLATE_HASH,
    ] {
        assert!(metadata["labels"][pool_label].is_null(), "{pool_label}");
        assert!(
            metadata["labels"]
                .as_object()
                .unwrap()
                .contains_key(pool_label)
        );
    }
    let pod_labels = transfer["spec"]["podTemplate"]["metadata"]["labels"]
        .as_object()
        .unwrap();
    assert_eq!(pod_labels[labels::CLAIM_UID], "claim-uid");
    assert!(pod_labels[labels::WARM_POOL_SANDBOX].is_null());
    assert!(
        !pod_labels.contains_key(labels::SANDBOX_TEMPLATE_REF_HASH),
        "the label of the network policy stays as it is"
    );
    assert_eq!(plan.planned_status, PlannedStatus::Reflect);
}

#[test]
fn a_sandbox_that_its_pool_did_not_label_is_labelled_warm_when_it_is_claimed() {
    let mut candidate = warm("w");
    candidate.labels_mut().remove(labels::LAUNCH_TYPE);
    let world = World {
        candidate: Some(candidate),
        ..World::of(claim())
    };
    let effects = world.decide().effects;
    let Some(Effect::Transfer { patch, .. }) = effects.last() else {
        panic!("{effects:?}");
    };
    assert_eq!(patch["metadata"]["labels"][labels::LAUNCH_TYPE], "warm");
}

#[test]
fn a_promise_is_kept_and_a_broken_one_replaced() {
    let promised = World {
        sandboxes: vec![warm("w")],
        candidate: Some(warm("another")),
        ..World::of(bound_to("w"))
    };
    assert!(matches!(
        promised.decide().effects.as_slice(),
        [Effect::Transfer { sandbox, .. }] if sandbox.name == "w"
    ));

    let mut anothers = owned("w");
    anothers.metadata.owner_references.as_mut().unwrap()[0].uid = "another-claim".into();
    for sandboxes in [Vec::new(), vec![anothers]] {
        let world = World {
            sandboxes,
            candidate: Some(warm("x")),
            ..World::of(bound_to("w"))
        };
        assert!(matches!(
            world.decide().effects.as_slice(),
            [Effect::Bind { sandbox, .. }, Effect::Transfer { .. }] if sandbox == "x"
        ));
    }

    let without_template = World {
        template: None,
        ..World::of(bound_to("w"))
    };
    let plan = without_template.decide();
    assert!(matches!(plan.effects.as_slice(), [Effect::Unbind { .. }]));
}

#[test]
fn a_claim_that_planned_a_cold_start_never_takes_a_warm_sandbox_instead() {
    let world = World {
        candidate: Some(warm("w")),
        ..World::of(bound_to("mine"))
    };
    assert!(matches!(
        world.decide().effects.as_slice(),
        [Effect::Create { .. }]
    ));
}

#[test]
fn a_cold_sandbox_has_the_claims_name_and_identity() {
    let mut world = World::of(claim());
    world.claim.spec.additional_pod_metadata = Some(PodMetadata {
        labels: Some(pairs(&[("team", "ml")])),
        annotations: Some(pairs(&[("cost", "7")])),
    });
    world
        .claim
        .annotations_mut()
        .insert(labels::TRACE_CONTEXT.into(), "{}".into());
    let plan = world.decide();
    assert!(matches!(&plan.effects[0], Effect::Bind { sandbox, .. } if sandbox == "mine"));
    let sandbox = world.created();
    assert_eq!(sandbox.name_any(), "mine");
    assert_eq!(controller_of(&sandbox.metadata).unwrap().uid, "claim-uid");
    assert_eq!(
        controller_of(&sandbox.metadata)
            .unwrap()
            .block_owner_deletion,
        Some(true)
    );
    assert_eq!(sandbox.annotations()[labels::SANDBOX_TEMPLATE_REF], "py");
    assert_eq!(sandbox.annotations()[labels::TRACE_CONTEXT], "{}");
    assert!(
        !sandbox.annotations().contains_key(labels::POD_NAME),
        "that marks a warm start"
    );
    let pod = &sandbox.spec.pod_template;
    let pod_labels = pod.metadata.labels.as_ref().unwrap();
    assert_eq!(sandbox.labels()[labels::LAUNCH_TYPE], "cold");
    assert!(!pod_labels.contains_key(labels::LAUNCH_TYPE));
    assert_eq!(sandbox.spec.operating_mode, Some(OperatingMode::Running));
    for labels in [sandbox.labels(), pod_labels] {
        assert_eq!(labels[labels::CLAIM_UID], "claim-uid");
        assert_eq!(labels[labels::SANDBOX_TEMPLATE_REF_HASH], name_hash("py"));
    }
    assert_eq!(
        (pod_labels["app"].as_str(), pod_labels["team"].as_str()),
        ("demo", "ml")
    );
    assert_eq!(pod.metadata.annotations.as_ref().unwrap()["cost"], "7");
    assert_eq!(pod.spec.automount_service_account_token, Some(false));
    assert_eq!(sandbox.spec.replicas, Some(1));
}

#[test]
fn a_claim_whose_binding_was_taken_off_or_forged_keeps_its_sandbox_and_is_bound_to_it_again() {
    let mut half_bound = bound_to("w");
    half_bound.metadata.labels = None;
    for claim in [claim(), bound_to("x"), bound_to("mine"), half_bound] {
        let world = World {
            sandboxes: vec![owned("w"), warm("x")],
            candidate: Some(warm("x")),
            ..World::of(claim)
        };
        let plan = world.decide();
        let [Effect::Bind { sandbox, patch }] = plan.effects.as_slice() else {
            panic!("{:?}", plan.effects);
        };
        assert_eq!(sandbox, "w");
        assert_eq!(
            patch["metadata"]["labels"][labels::ASSIGNED_SANDBOX_NAME],
            "w"
        );
        assert_eq!(plan.planned_status, PlannedStatus::Reflect);
    }
    let mut leaving = owned("w");
    leaving.metadata.deletion_timestamp = Some(Time(at(1)));
    let world = World {
        sandboxes: vec![leaving],
        ..World::of(claim())
    };
    assert_eq!(world.decide().effects, []);
}

#[test]
fn a_forged_binding_gets_a_claim_no_sandbox_that_its_spec_does_not_allow() {
    let of_spec = |edit: fn(&mut SandboxClaim)| {
        let mut claim = bound_to("w");
        edit(&mut claim);
        claim
    };
    let env = || {
        Some(vec![EnvVar {
            name: "A".into(),
            value: "1".into(),
            container_name: None,
        }])
    };
    let mut with_env = bound_to("w");
    with_env.spec.env = env();
    with_env.spec.warmpool = Some("none".into());
    for claim in [
        of_spec(|claim| claim.spec.sandbox_template_ref.as_mut().unwrap().name = "js".into()),
        of_spec(|claim| claim.spec.warmpool = Some("none".into())),
        of_spec(|claim| claim.spec.warmpool = Some("another-pool".into())),
        with_env,
    ] {
        let mut world = World {
            sandboxes: vec![warm("w")],
            ..World::of(claim)
        };
        let template = world.template.as_mut().unwrap();
        template.spec.env_vars_injection_policy = Some(EnvVarsInjectionPolicy::Allowed);
        let plan = world.decide();
        assert!(
            matches!(
                plan.effects.as_slice(),
                [Effect::Bind { sandbox, .. }, Effect::Create { .. }] if sandbox == "mine"
            ),
            "{plan:?}"
        );
    }
    let mut by_pool = bound(claim_by_pool(), "w");
    by_pool.spec.warm_pool_ref.as_mut().unwrap().name = "another-pool".into();
    let world = World {
        sandboxes: vec![warm("w")],
        template: None,
        ..World::of(by_pool)
    };
    assert_eq!(world.blocked().reason, Reason::WarmPoolNotFound);
    assert!(matches!(
        world.decide().effects.as_slice(),
        [Effect::Unbind { .. }]
    ));
}

#[test]
fn a_sandbox_found_by_status_binding_or_name_is_recognised_if_it_is_the_claims() {
    let mut by_status = claim();
    by_status.status = Some(api::SandboxClaimStatus {
        sandbox: Some(api::claim::ClaimedSandbox {
            name: "w".into(),
            pod_ips: Vec::new(),
        }),
        ..api::SandboxClaimStatus::default()
    });
    let mut by_label = claim();
    by_label.metadata.labels = Some(pairs(&[(labels::ASSIGNED_SANDBOX_NAME, "w")]));
    for (claim, name) in [
        (by_status, "w"),
        (bound_to("w"), "w"),
        (by_label, "w"),
        (claim(), "mine"),
    ] {
        let world = World {
            sandboxes: vec![owned(name)],
            candidate: Some(warm("x")),
            ..World::of(claim)
        };
        let plan = world.decide();
        assert!(
            plan.effects
                .iter()
                .all(|effect| matches!(effect, Effect::Bind { sandbox, .. } if sandbox == name)),
            "{plan:?}"
        );
        assert_eq!(plan.planned_status, PlannedStatus::Reflect);
    }
}

#[test]
fn a_foreign_sandbox_of_the_claims_name_is_left_alone() {
    let mut foreign = owned("mine");
    foreign.metadata.owner_references = None;
    foreign.metadata.labels = None;
    let mut world = World {
        sandboxes: vec![foreign],
        ..World::of(claim())
    };
    let obstacle = world.blocked();
    assert_eq!(obstacle.reason, Reason::ReconcilerError);
    assert!(
        obstacle.message.contains("\"mine\" already exists"),
        "{}",
        obstacle.message
    );
    world.candidate = Some(warm("w"));
    assert!(matches!(
        world.decide().effects.as_slice(),
        [Effect::Bind { .. }, Effect::Transfer { .. }]
    ));
}

#[test]
fn a_sandbox_of_the_claims_name_that_is_going_is_waited_for_and_no_error() {
    let mut going = warm("mine");
    going.metadata.deletion_timestamp = Some(Time(at(1)));
    let mut predecessors = owned("mine");
    predecessors.metadata.owner_references.as_mut().unwrap()[0].uid = "earlier-uid".into();
    for left in [going, predecessors] {
        let world = World {
            sandboxes: vec![left],
            ..World::of(claim())
        };
        let obstacle = world.blocked();
        assert_eq!(obstacle.reason, Reason::SandboxNotReady);
        assert!(obstacle.message.contains("is being deleted"));
    }
}

#[test]
fn env_and_volumes_of_its_own_mean_a_cold_start_from_the_pools_template() {
    let mut world = World {
        pool: Some(pool()),
        ..World::of(claim_by_pool())
    };
    let template = world.template.as_mut().unwrap();
    template.spec.env_vars_injection_policy = Some(EnvVarsInjectionPolicy::Allowed);
    template.spec.volume_claim_templates_policy = Some(VolumeClaimTemplatesPolicy::Allowed);
    world.claim.spec.env = Some(vec![EnvVar {
        name: "A".into(),
        value: "1".into(),
        container_name: None,
    }]);
    let mut volume = PersistentVolumeClaimTemplate::default();
    volume.metadata.name = Some("data".into());
    world.claim.spec.volume_claim_templates = Some(vec![volume]);
    let asked = warm_request(
        &world.claim,
        Lookup::Found(world.pool.as_ref().unwrap()),
        Holding::Free,
    );
    assert_eq!(asked, None);
    let sandbox = world.created();
    let env = sandbox.spec.pod_template.spec.containers[0]
        .env
        .as_ref()
        .unwrap();
    assert_eq!(env[0].name, "A");
    assert_eq!(sandbox.spec.volume_claim_templates.unwrap().len(), 1);
}

#[test]
fn a_claim_asks_the_queue_for_what_its_source_allows() {
    let with_policy = |warmpool: Option<&str>| {
        let mut claim = claim();
        claim.spec.warmpool = warmpool.map(Into::into);
        claim
    };
    let pool = pool();
    let found = Lookup::Found(&pool);
    let asked = |claim: &SandboxClaim, pool| {
        warm_request(claim, pool, Holding::Free).map(|request| request.pool_hash)
    };
    assert_eq!(asked(&with_policy(None), Lookup::NotAsked), Some(None));
    assert_eq!(asked(&with_policy(Some("none")), Lookup::NotAsked), None);
    assert_eq!(
        asked(&with_policy(Some("fast")), Lookup::NotAsked),
        Some(Some(name_hash("fast")))
    );
    assert_eq!(
        asked(&claim_by_pool(), found),
        Some(Some(name_hash("pool")))
    );
    assert_eq!(asked(&claim_by_pool(), Lookup::Missing), None);
    let sandbox = owned("w");
    assert_eq!(
        warm_request(&claim(), found, Holding::Owned(&sandbox)),
        None
    );
    assert_eq!(warm_request(&claim(), found, Holding::Planned), None);
}

#[test]
fn only_an_unclaimed_sandbox_of_a_pool_is_adoptable() {
    assert!(is_adoptable(&warm("w")));
    let change = |edit: fn(&mut Sandbox)| {
        let mut sandbox = warm("w");
        edit(&mut sandbox);
        is_adoptable(&sandbox)
    };
    assert!(change(|sandbox| sandbox.metadata.owner_references = None));
    assert!(!change(
        |sandbox| sandbox.metadata.deletion_timestamp = Some(Time(at(1)))
    ));
    assert!(!change(|sandbox| {
        sandbox.labels_mut().remove(labels::WARM_POOL_SANDBOX);
    }));
    assert!(!change(|sandbox| {
        sandbox
            .labels_mut()
            .remove(labels::SANDBOX_TEMPLATE_REF_HASH);
    }));
    assert!(!change(|sandbox| {
        sandbox.metadata.owner_references.as_mut().unwrap()[0].kind = "SandboxClaim".into();
    }));
    assert!(!change(|sandbox| sandbox.spec.replicas = Some(0)));
    assert!(!change(|sandbox| {
        let status = sandbox.status.as_mut().unwrap();
        status.conditions.push(finished_condition(1));
    }));
}

#[test]
fn an_orphan_is_only_taken_if_it_runs_what_the_template_says() {
    let mut orphan = warm("w");
    orphan.metadata.owner_references = None;
    let mut world = World {
        candidate: Some(orphan.clone()),
        ..World::of(claim())
    };
    assert!(matches!(world.decide().effects[1], Effect::Transfer { .. }));
    orphan.spec.pod_template.spec_mut().containers[0].image = Some("evil".into());
    world.candidate = Some(orphan.clone());
    assert!(matches!(world.decide().effects[1], Effect::Create { .. }));
    let forged = World {
        sandboxes: vec![orphan],
        ..World::of(bound_to("w"))
    };
    assert!(matches!(forged.decide().effects[1], Effect::Create { .. }));
}
